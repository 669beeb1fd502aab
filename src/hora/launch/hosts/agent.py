"""Agent: `python -m hora.launch.hosts.agent`, the launcher's hand on one host, told by frames on its stdin.

It starts the processes that it is told to, passes on what they write and how they end, and is their launcher in all
that a launcher promises: each leads a group, a guardian ends them if the agent is killed, and nothing that carries this
run's mark is left when it goes. It goes when it is told to, when stdin ends, on SIGTERM and SIGHUP, and when nothing
has been heard of the launcher for `SILENCE_S`: a cut link must leave nobody behind.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.metadata
import os
import pathlib
import platform
import select
import selectors
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
from hora.net.interface import kernel

from ...net.machine import num_cores
from ...rendezvous.environment import NAMES
from ..config import check_module
from ..forkserver.client import ForkedProcess, ForkServer
from ..process_set import OF_INTERPRETER, TRACE
from ..reaper import Reaper, sweep
from ..signal_pipe import STOPPING, SignalPipe
from .messages import (
    FILE_BYTES,
    OUTPUT_BYTES,
    PROTOCOL,
    AgentBye,
    AgentHello,
    EndAgent,
    FrameReader,
    FromAgent,
    FromLauncher,
    Heartbeat,
    HoldOutput,
    HostFacts,
    ProbeReply,
    ProbeRequest,
    ProcessEnded,
    ProcessOutput,
    ProcessStarted,
    RouteReply,
    RouteRequest,
    SignalProcess,
    StartProcess,
    TraceFilePiece,
    decode_launcher,
    frame,
)

BEAT_S = 1.0
SILENCE_S = 20.0
"""Longer than the launcher's own patience with us, so that its word on what is lost comes first, and longer than a
launcher stands still that was suspended by mistake."""

PROBE_S = 3.0
PROBE = "probe"
FULL_BYTES = 4 << 20
"""Of what the launcher has not taken yet: then the processes' pipes are not read."""

DRAIN_S = 0.4
TERM_S = 1.0
FLUSH_S = 5.0

TOLD = "told to"

Seat = tuple[str, int]


class AgentOutput:
    """What one stream of a process writes, on its way to the launcher."""

    def __init__(self, agent: Agent, seat: Seat, stream: int) -> None:
        self._agent = agent
        self._seat = seat
        self._stream = stream

    def feed(self, data: bytes, now: float) -> None:
        role, rank = self._seat
        for start in range(0, len(data), OUTPUT_BYTES):
            self._agent.send(ProcessOutput(role, rank, self._stream, data[start : start + OUTPUT_BYTES]))

    def close(self) -> None:
        pass


class Agent:
    """One loop waits for everything: the launcher, the processes' ends and pipes, room on stdout, the next beat."""

    def __init__(self, wake: SignalPipe, stdin: int, stdout: int) -> None:
        self._wake = wake
        self._stdin = stdin
        self._stdout = stdout
        self._frames = FrameReader()
        self._out = bytearray()
        self._hello: AgentHello | None = None
        self._address = ""
        self._listener: handshake.AuthenticatedListener | None = None
        self._guardian: Reaper | None = None
        self._scratch = ""
        self._forks: ForkServer | None = None
        self._waiting: list[StartProcess] = []  # for the fork server
        self._processes: dict[Seat, ForkedProcess] = {}
        self._ended_at: dict[Seat, float] = {}
        self._heard_at = time.monotonic()
        self._beat_at = 0.0
        self._why_end = ""
        self._held = False  # the launcher has no room for output
        self._selector = selectors.PollSelector()
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)

    def live(self) -> None:
        """Returns when there is nothing left to do here, and nobody."""
        try:
            while not self._why_end:
                self._turn()
        finally:
            self._end()

    def send(self, message: FromAgent) -> None:
        self._out += frame(message)

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._register()
        now = time.monotonic()
        ready = self._selector.select(max(0.0, min(self._beat_at - now, 0.05 if self._ended_at else BEAT_S)))
        now = time.monotonic()
        for key, events in ready:
            if key.fd == self._wake.fd:
                if set(self._wake.read()) & set(STOPPING):
                    self._why_end = "signal"
            elif key.fd == self._stdin:
                self._read(now)
            elif key.fd == self._stdout and events & selectors.EVENT_WRITE:
                self._write()
            elif isinstance(key.data, ForkServer):
                self._heed_forks(key.data, key.fd)
            elif isinstance(key.data, tuple):
                self._listen_to(key.data, key.fd, now)
        while self._waiting and self._forks is not None and (self._forks.ready or self._forks.lost):
            self._start(self._forks, self._waiting.pop(0))
        self._judge(now)
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            if not self._out:  # what waits to be taken would say the same
                self.send(Heartbeat())
        if self._hello is not None and now - self._heard_at > SILENCE_S:
            self._why_end = "silence"

    def _listen_to(self, seat: Seat, fd: int, now: float) -> None:
        process = self._processes.get(seat)
        if process is not None and fd in process.pipes and process.read(fd, now) is False:
            process.close_pipe(fd)

    def _register(self) -> None:
        wanted: dict[int, tuple[int, object]] = {
            self._wake.fd: (selectors.EVENT_READ, None),
            self._stdin: (selectors.EVENT_READ, None),
        }
        if self._out:
            wanted[self._stdout] = (wanted.get(self._stdout, (0, None))[0] | selectors.EVENT_WRITE, None)
        if self._forks is not None and not self._forks.lost:
            wanted |= dict.fromkeys(self._forks.descriptors(), (selectors.EVENT_READ, self._forks))
        for seat, process in self._processes.items():
            if len(self._out) < FULL_BYTES and not self._held:
                wanted |= dict.fromkeys(process.pipes, (selectors.EVENT_READ, seat))
        there = self._selector.get_map()
        for key in list(there.values()):
            if wanted.get(key.fd) != (key.events, key.data):
                self._selector.unregister(key.fd)
        for fd, (events, data) in wanted.items():
            if fd not in there:
                self._selector.register(fd, events, data)

    def _read(self, now: float) -> None:
        try:
            data = os.read(self._stdin, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._why_end = "the launcher is gone"
            return
        self._heard_at = now
        for body in self._frames.feed(data):
            self._obey(decode_launcher(body))

    def _write(self) -> None:
        try:
            sent = os.write(self._stdout, memoryview(self._out)[: 1 << 16])
        except BlockingIOError:
            return
        except OSError:
            self._why_end = "the launcher is gone"
            return
        del self._out[:sent]

    # -- what it is told ---------------------------------------------------------------------------------------------

    def _obey(self, message: FromLauncher) -> None:
        if isinstance(message, AgentHello):
            self._hello = message
            facts = self._facts(message)
            self.send(facts)
            if not facts.problem:
                self._open_forks(message)
        elif self._hello is None:
            raise HoraError("the first word was no greeting")
        elif isinstance(message, RouteRequest):
            self.send(self._route(message))
        elif isinstance(message, ProbeRequest):
            self.send(self._probe(message))
        elif isinstance(message, StartProcess):
            self._waiting.append(message)
        elif isinstance(message, SignalProcess):
            self._signal(message)
        elif isinstance(message, HoldOutput):
            self._held = message.on
        elif isinstance(message, EndAgent):
            self._why_end = TOLD

    def _facts(self, hello: AgentHello) -> HostFacts:
        os.environ.update(hello.env)
        client, _, server, _ = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[:4]
        return HostFacts(
            hostname=socket.gethostname(),
            python=platform.python_version(),
            torch=_version("torch"),
            hora=hora.__version__,
            executable=sys.executable,
            cores=num_cores(),
            time_ns=time.time_ns(),
            machine=kernel("net"),
            client=client,
            server=server,
            problem=self._obstacle(hello),
        )

    @staticmethod
    def _obstacle(hello: AgentHello) -> str:
        if hello.protocol != PROTOCOL:
            return f"its Hora speaks protocol {PROTOCOL}, the launcher's {hello.protocol}; install the same version"
        try:
            os.chdir(hello.cwd)
        except OSError as problem:
            return f"the folder {hello.cwd} cannot be entered there: {problem.strerror}; a run needs it on every host"
        if hello.module:
            try:
                check_module(hello.command)
            except ValueError as problem:
                return str(problem)
        elif not os.path.exists(hello.command):
            return f"there is no script {hello.command} in {hello.cwd} there; copy it, or share the folder"
        return ""

    def _route(self, route: RouteRequest) -> RouteReply:
        """The coordinator is reached, by a handshake, and a port is opened at which others can try to reach us."""
        assert self._hello is not None
        address = ""
        try:
            address = interface.named(route.interface) if route.interface else interface.route_to(route.host)
            connect((route.host, route.port), self._hello.token, CONTROL, PROBE_S).close()
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listening = socket.create_server((address, 0), family=family, backlog=128)
        except (OSError, HoraError, ValueError) as problem:
            why = str(problem)
            if not isinstance(problem, ValueError) and f"{route.host}:" not in why:
                why = f"no way to {route.host}:{route.port}: {why}"
            return RouteReply(address, problem=why)
        self._address = address
        self._listener = handshake.AuthenticatedListener(listening, self._hello.token, PROBE, lambda sock: sock.close())
        return RouteReply(address, interface.name_of(address), listening.getsockname()[1])

    def _probe(self, probe: ProbeRequest) -> ProbeReply:
        assert self._hello is not None
        token = self._hello.token

        def reach(peer: tuple[str, int]) -> tuple[str, float]:
            began = time.monotonic()
            try:
                connect(peer, token, PROBE, PROBE_S).close()
            except (OSError, HoraError) as problem:
                return str(problem), time.monotonic() - began
            return "", time.monotonic() - began

        with concurrent.futures.ThreadPoolExecutor(max(1, min(32, len(probe.peers)))) as crew:
            found = list(crew.map(reach, [(peer.host, peer.port) for peer in probe.peers]))
        return ProbeReply([problem for problem, _ in found], [seconds for _, seconds in found])

    # -- processes ---------------------------------------------------------------------------------------------------

    def _open_forks(self, hello: AgentHello) -> None:
        """What all processes here have in common; torch is imported while the hosts still look for each other."""
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // hello.processes)))
        os.environ.update({**OF_INTERPRETER, "HORA_HOST": hello.host})
        self._guardian = Reaper(hello.mark)
        self._scratch = self._guardian.folder("hora-")
        self._forks = ForkServer(
            {**os.environ, "HORA_RUN": hello.mark}, tuple(hello.modules) if hello.processes > 1 else ()
        )

    def _heed_forks(self, forks: ForkServer, fd: int) -> None:
        if fd == forks.fileno():
            forks.read()
            if forks.problem and self._hello is not None and self._hello.processes > 1 and self._hello.modules:
                print(f"each rank is started as a new interpreter, since {forks.problem}", file=sys.stderr, flush=True)
        else:
            for line in forks.complaints():
                print(line, file=sys.stderr, flush=True)

    def _signal(self, message: SignalProcess) -> None:
        seat = (message.role, message.rank)
        process = self._processes.get(seat)
        if process is not None:
            process.signal(message.number, group=message.group)
        elif waiting := [start for start in self._waiting if (start.role, start.rank) == seat]:
            self._waiting.remove(waiting[0])
            self.send(ProcessEnded(*seat, -message.number))

    def _start(self, forks: ForkServer, start: StartProcess) -> None:
        assert self._hello is not None and self._guardian is not None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        seat = (start.role, start.rank)
        env = {**os.environ, **start.env, "HORA_RUN": self._hello.mark, "HORA_SCRATCH": self._scratch}
        if not interface.is_loopback(self._address):
            env["HORA_BIND"] = self._address
        if start.trace:
            env["HORA_TRACE"] = os.path.join(self._scratch, TRACE)
        try:
            outlets = AgentOutput(self, seat, 1), AgentOutput(self, seat, 2)
            process = forks.start([sys.executable, *start.argv], env, self._hello.token, *outlets)
        except OSError as problem:
            self.send(ProcessStarted(*seat, 0, problem.strerror or str(problem)))
            return
        self._guardian.group(process.pid)
        self._processes[seat] = process
        self.send(ProcessStarted(*seat, process.pid))
        self._write()  # many starts may take long, and silence would be misunderstood

    def _judge(self, now: float) -> None:
        """Says of those that have ended how, after all that they wrote; someone outside may hold a pipe of theirs."""
        for seat, process in self._processes.items():
            if process.has_ended():
                process.read_rest(now)
                process.reap()
                assert self._guardian is not None
                self._guardian.forget(process.pid)
                self._ended_at[seat] = now
        for seat, at in list(self._ended_at.items()):
            process = self._processes[seat]
            if not process.pipes or now - at >= DRAIN_S:
                assert process.returncode is not None
                for fd in list(process.pipes):
                    process.close_pipe(fd)
                self.send(ProcessEnded(*seat, process.returncode, process.peak_bytes))
                del self._ended_at[seat], self._processes[seat]

    def _end(self) -> None:
        """Leaves nobody behind, and says what was kept if there is still somebody to hear it."""
        for number, patience_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            running = [process for process in self._processes.values() if process.running]
            for process in running:
                process.signal(number, group=True)
            deadline = time.monotonic() + (patience_s if running else 0.0)
            while any(p.running and not p.has_ended() for p in running) and time.monotonic() < deadline:
                assert self._forks is not None
                self._forks.read()
                time.sleep(0.01)
        self._judge(time.monotonic() + DRAIN_S)
        if self._hello is not None and self._forks is not None:
            sweep(self._hello.mark, spare=self._forks.pid)
            self._forks.close()
        if self._why_end == TOLD:
            self._give_files()
            self.send(AgentBye())
            self._flush()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if self._guardian is not None:
            self._guardian.done()

    def _give_files(self) -> None:
        folder = pathlib.Path(self._scratch, TRACE)
        if self._scratch and folder.is_dir():
            for path in sorted(folder.iterdir()):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    while self._why_end == TOLD and (data := file.read(FILE_BYTES)):
                        self.send(TraceFilePiece(path.name, data))
                        self._flush()

    def _flush(self) -> None:
        """Writes all that is queued, unless the launcher takes nothing for `FLUSH_S`."""
        poller = select.poll()
        poller.register(self._stdout, select.POLLOUT)
        while self._out and self._why_end == TOLD:
            if not poller.poll(FLUSH_S * 1000):
                self._why_end = "the launcher takes nothing"
            self._write()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """What a process that it starts inherits as stdin and stdout must not be the launcher's line; and whatever run this
    shell may be a part of, it is not theirs."""
    for name in NAMES:
        os.environ.pop(name, None)
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    with SignalPipe() as wake:
        Agent(wake, stdin, stdout).live()


if __name__ == "__main__":
    main()
