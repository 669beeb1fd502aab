"""The agent of one host: `python -m hora.launch.hosts.agent`, controlled by messages on stdin, answering on stdout.

It starts processes, forwards their output and exit codes, and gives the guarantees of a launcher: each process leads a
group, a reaper ends them if the agent is killed, and no process with this run's HORA_RUN is left when it exits. That is
on EndAgent, at the end of stdin, on SIGTERM and SIGHUP, and `SILENCE_S` after the launcher's last message: a cut
connection must leave no process behind.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import select
import shutil
import signal
import socket
import sys
import time

import hora
from hora.coordinator.client import PURPOSE as CONTROL
from hora.errors import HoraError
from hora.net import handshake, interface
from hora.net.handshake import connect
from hora.net.machine import namespace_id

from ...net.machine import num_cores
from ...rendezvous.environment import NAMES
from .. import messages
from ..channel import MessageChannel
from ..config import check_module
from ..forkserver.client import ForkServer
from ..process import RunProcess, Slot
from ..process_set import INTERPRETER_ENV, TRACE
from ..reaper import Reaper, sweep
from ..signal_pipe import SignalPipe, Watched, poll

HEARTBEAT_S = 1.0
SILENCE_S = 20.0
"""Longer than the launcher waits for a silent agent, so that its report of the lost host comes first, and longer than
an accidental suspension of the launcher."""

PROBE_S = 3.0
PROBE = "probe"
MAX_PENDING_BYTES = 4 << 20
"""While the launcher has not taken this much, the processes' pipes are not read."""

DRAIN_S = 0.4
TERM_S = 1.0
FLUSH_S = 5.0


class AgentOutput:
    """Forwards one output stream of a process to the launcher."""

    def __init__(self, channel: MessageChannel[messages.ToAgent], slot: Slot, stream: int) -> None:
        self._channel = channel
        self._slot = slot
        self._stream = stream

    def feed(self, data: bytes, now: float) -> None:
        size = messages.OUTPUT_BYTES
        for start in range(0, len(data), size):
            self._channel.send(messages.ProcessOutput(*self._slot, self._stream, data[start : start + size]))

    def last_lines(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Agent:
    """One loop waits for the launcher, the processes' ends and output, and the next heartbeat."""

    def __init__(self, signals: SignalPipe, stdin: int, stdout: int) -> None:
        self._signals = signals
        self._channel = MessageChannel(stdin, stdout, messages.decode_to_agent)
        self._hello: messages.AgentHello | None = None
        self._address = ""
        self._listener: handshake.AuthenticatedListener | None = None
        self._reaper: Reaper | None = None
        self._scratch = ""
        self._forks: ForkServer | None = None
        self._to_start: list[messages.StartProcess] = []  # until the fork server is ready
        self._processes: dict[Slot, RunProcess] = {}
        self._ended_at: dict[Slot, float] = {}
        self._received_at = time.monotonic()
        self._heartbeat_at = 0.0
        self._ending = False
        self._told_to_end = False
        self._hold = False  # the launcher has no space for output

    def run(self) -> None:
        """Returns when the agent has ended and no process is left."""
        try:
            while not self._ending:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        channel = self._channel
        watched: Watched = {
            self._signals.fd: (select.POLLIN, self._on_signal),
            channel.read_fd: (select.POLLIN, self._on_message),
        }
        if channel.pending_bytes:
            watched[channel.write_fd] = (select.POLLOUT, channel.flush)
        if self._forks is not None:
            self._forks.pause_output(self._hold or channel.pending_bytes >= MAX_PENDING_BYTES)
            watched |= self._forks.descriptors()
        poll(watched, min(self._heartbeat_at - time.monotonic(), 0.05 if self._ended_at else HEARTBEAT_S))
        now = time.monotonic()
        while self._to_start and self._forks is not None and self._forks.ready:
            self._start(self._forks, self._to_start.pop(0))
        self._report_ended(now)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            if not channel.pending_bytes:  # else the queued messages prove the same
                channel.send(messages.Heartbeat())
        if channel.broken or (self._hello is not None and now - self._received_at > SILENCE_S):
            self._ending = True

    def _on_signal(self) -> None:
        if self._signals.stop_signals():
            self._ending = True

    def _on_message(self) -> None:
        received = self._channel.receive()
        if received is None:  # the launcher is gone
            self._ending = True
        self._received_at = time.monotonic()
        for message in received or ():
            self._handle(message)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _handle(self, message: messages.ToAgent) -> None:
        if isinstance(message, messages.AgentHello):
            self._hello = message
            facts = self._facts(message)
            self._channel.send(facts)
            if not facts.problem:
                self._open_fork_server(message)
            return
        if self._hello is None:
            raise HoraError(f"the first message must be AgentHello, not {type(message).__name__}")
        match message:
            case messages.RouteRequest():
                self._channel.send(self._route(message, self._hello.token))
            case messages.ProbeRequest():
                self._channel.send(self._probe(message, self._hello.token))
            case messages.StartProcess():
                self._to_start.append(message)
            case messages.SignalProcess():
                self._signal(message)
            case messages.HoldOutput():
                self._hold = message.on
            case messages.EndAgent():
                self._ending = self._told_to_end = True

    def _facts(self, hello: messages.AgentHello) -> messages.HostFacts:
        os.environ.update(hello.env)
        client, _, server, _ = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
        return messages.HostFacts(
            hostname=socket.gethostname(),
            python=platform.python_version(),
            torch=_version("torch"),
            hora=hora.__version__,
            executable=sys.executable,
            cores=num_cores(),
            time_ns=time.time_ns(),
            machine=namespace_id("net"),
            client=client,
            server=server,
            problem=self._obstacle(hello),
        )

    @staticmethod
    def _obstacle(hello: messages.AgentHello) -> str:
        if hello.protocol != messages.PROTOCOL:
            ours, theirs = messages.PROTOCOL, hello.protocol
            return f"its Hora has agent protocol {ours}, the launcher's {theirs}; install the same version"
        try:
            os.chdir(hello.cwd)
        except OSError as problem:
            return f"cannot enter the folder {hello.cwd}: {problem.strerror}; a run needs this folder on every host"
        if hello.module:
            try:
                check_module(hello.command)
            except ValueError as problem:
                return str(problem)
        elif not os.path.exists(hello.command):
            return f"script {hello.command} does not exist in {hello.cwd}; copy it there, or share the folder"
        return ""

    def _route(self, route: messages.RouteRequest, token: bytes) -> messages.RouteReply:
        """Does a handshake with the coordinator, and opens a port that other hosts can probe."""
        address = ""
        try:
            address = interface.address_on(route.interface) if route.interface else interface.route_to(route.host)
            connect((route.host, route.port), token, CONTROL, PROBE_S).close()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, 0), family=family, backlog=128)
        except (OSError, HoraError, ValueError) as problem:
            why = str(problem)
            if not isinstance(problem, ValueError) and f"{route.host}:" not in why:
                why = f"no route to {route.host}:{route.port}: {why}"
            return messages.RouteReply(address, problem=why)
        self._address = address
        self._listener = handshake.AuthenticatedListener(listening, token, PROBE, lambda sock: sock.close())
        return messages.RouteReply(address, interface.name_of(address), listening.getsockname()[1])

    @staticmethod
    def _probe(probe: messages.ProbeRequest, token: bytes) -> messages.ProbeReply:
        def reach(peer: tuple[str, int]) -> tuple[str, float]:
            began = time.monotonic()
            try:
                connect(peer, token, PROBE, PROBE_S).close()
            except (OSError, HoraError) as problem:
                return str(problem), time.monotonic() - began
            return "", time.monotonic() - began

        with concurrent.futures.ThreadPoolExecutor(max(1, min(32, len(probe.peers)))) as threads:
            found = list(threads.map(reach, [(peer.host, peer.port) for peer in probe.peers]))
        return messages.ProbeReply([problem for problem, _ in found], [seconds for _, seconds in found])

    # -- processes ---------------------------------------------------------------------------------------------------

    def _open_fork_server(self, hello: messages.AgentHello) -> None:
        """It imports torch while the hosts still probe each other."""
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // hello.processes)))
        os.environ.update({**INTERPRETER_ENV, "HORA_HOST": hello.host})
        self._reaper = Reaper(hello.run_id)
        self._scratch = self._reaper.folder("hora-")
        modules = tuple(hello.modules) if hello.processes > 1 else ()
        self._forks = ForkServer({**os.environ, "HORA_RUN": hello.run_id}, modules, self._reaper, _log)

    def _signal(self, message: messages.SignalProcess) -> None:
        slot = (message.role, message.rank)
        process = self._processes.get(slot)
        if process is not None:
            process.signal(message.number, group=message.group)
        elif waiting := [start for start in self._to_start if (start.role, start.rank) == slot]:
            self._to_start.remove(waiting[0])
            self._channel.send(messages.ProcessEnded(*slot, -message.number))

    def _start(self, forks: ForkServer, start: messages.StartProcess) -> None:
        assert self._hello is not None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        slot = (start.role, start.rank)
        env = {**os.environ, **start.env, "HORA_RUN": self._hello.run_id, "HORA_SCRATCH": self._scratch}
        if not interface.is_loopback(self._address):
            env["HORA_BIND"] = self._address
        if start.trace:
            env["HORA_TRACE"] = os.path.join(self._scratch, TRACE)
        out, err = (AgentOutput(self._channel, slot, stream) for stream in (1, 2))
        try:
            process = forks.start(slot, [sys.executable, *start.argv], env, self._hello.token, out, err)
        except OSError as problem:
            self._channel.send(messages.ProcessStarted(*slot, 0, problem.strerror or str(problem)))
            return
        self._processes[slot] = process
        self._channel.send(messages.ProcessStarted(*slot, process.pid))

    def _report_ended(self, now: float) -> None:
        """Sends the exit codes, each after all output. Another process may hold a pipe open: then after DRAIN_S."""
        for process in self._forks.take_ended() if self._forks is not None else ():
            self._ended_at[process.slot] = now
        for slot, ended_at in list(self._ended_at.items()):
            process = self._processes[slot]
            if not process.pipes or now - ended_at >= DRAIN_S:
                assert process.returncode is not None
                process.close_pipes()
                self._channel.send(messages.ProcessEnded(*slot, process.returncode, process.peak_bytes))
                del self._ended_at[slot], self._processes[slot]

    def _end(self) -> None:
        """Ends all processes, and sends the trace files if the launcher has asked for the end."""
        if self._forks is not None:
            self._forks.pause_output(True)  # what is in the pipes is read when a process is reaped
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._processes.values() if process.running]
            for process in running:
                process.signal(number, group=True)
            deadline = time.monotonic() + TERM_S
            while any(process.running and not process.has_ended() for process in running):
                if time.monotonic() >= deadline:
                    break
                assert self._forks is not None
                poll(self._forks.descriptors(), 0.01)
        self._report_ended(time.monotonic())
        self._report_ended(time.monotonic() + DRAIN_S)
        if self._hello is not None and self._forks is not None:
            sweep(self._hello.run_id, spare=self._forks.pid)
            self._forks.close()
        if self._told_to_end:
            self._send_trace_files()
            self._channel.send(messages.AgentBye())
            self._flush()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._reaper is not None:
            self._reaper.done()

    def _send_trace_files(self) -> None:
        folder = pathlib.Path(self._scratch, TRACE)
        if self._scratch and folder.is_dir():
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    while not self._channel.broken and (data := file.read(messages.FILE_BYTES)):
                        self._channel.send(messages.TraceFilePiece(path.name, data))
                        self._flush()

    def _flush(self) -> None:
        """Writes all that is queued. If the launcher takes nothing for FLUSH_S, the channel counts as broken."""
        channel = self._channel
        while pending := channel.pending_bytes:
            poll({channel.write_fd: (select.POLLOUT, channel.flush)}, FLUSH_S)
            if channel.pending_bytes == pending:
                channel.break_off()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Processes started here must inherit neither the launcher's connection as stdin and stdout, nor the identity of a
    run that this shell may be a part of."""
    for name in NAMES:
        os.environ.pop(name, None)
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    with SignalPipe() as signals:
        Agent(signals, stdin, stdout).run()


if __name__ == "__main__":
    main()
