"""RemoteHost: the launcher's connection to the agent of one host, and the processes that the agent has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...terminal.format import sanitize
from .. import messages
from ..channel import MessageChannel
from ..process import OutputSink, RunProcess, Slot
from ..signal_pipe import Watched

SILENCE_S = 3.5
"""An agent sends a heartbeat once a second; after this long without any message its host counts as lost."""

HEARTBEAT_S = 1.0
ENDED = "the connection to it ended"
MAX_REPLIES = 16
MAX_HELD_BYTES = 64 << 20  # the agent's own queue, and what pipes and sockets on the way hold
ERROR_LINES = 30  # ssh's warning of a changed host key has a dozen

Reply = TypeVar("Reply", bound=messages.HostReply)


class RemoteHost:
    """`read_fd` and `write_fd` lead to the agent; `err_fd`, if there is one, carries error output of ssh and agent.

    `end_connection(timeout_s)` waits for the end of the connection itself (the ssh process) after `hang_up`; nothing
    else here blocks. `lost` says why the host is lost. Not thread-safe.
    """

    def __init__(
        self, name: str, read_fd: int, write_fd: int, err_fd: int, end_connection: Callable[[float], None]
    ) -> None:
        self.name = name
        self.machine = name  # equal for agents of one machine
        self.run_id = ""  # HORA_RUN of the agent's processes
        self.facts: messages.HostFacts
        self.launcher_address = ""  # by which this host should reach the launcher; empty where any will do
        self.coordinator_address = ("", 0)  # as this host reaches it
        self.address = ""  # by which the other hosts reach it
        self.interface = ""
        self.port = 0  # where the other hosts can probe it
        self.processes: dict[Slot, RunProcess] = {}
        self.lost = ""
        self.ended = False  # the agent has said goodbye
        self.keep_file: Callable[[str, bytes], None] = lambda name, data: None  # takes pieces of trace files
        self.error_lines: list[str] = []
        self.log: Callable[[str], None] = lambda line: None  # for error output once ranks run
        self._channel = MessageChannel(read_fd, write_fd, messages.decode_from_agent)
        self._err_fd = err_fd
        self._replies: list[messages.HostReply] = []
        self._received_at = time.monotonic()
        self._heartbeat_at = 0.0
        self._hold = False
        self._hold_from_bytes = 0
        self._told_to_end = False
        self._end_connection = end_connection
        if err_fd >= 0:
            os.set_blocking(err_fd, False)

    def descriptors(self) -> Watched:
        if self.lost or self.ended:
            return {}
        watched: Watched = {self._channel.read_fd: (select.POLLIN, self._on_message)}
        if self._channel.pending_bytes:
            watched[self._channel.write_fd] = (select.POLLOUT, self._channel.flush)
        if self._err_fd >= 0:
            watched[self._err_fd] = (select.POLLIN, self._on_error_output)
        return watched

    @property
    def received_bytes(self) -> int:
        return self._channel.received_bytes

    def send(self, message: messages.ToAgent) -> None:
        if not self.lost and not self.ended:
            self._channel.send(message)

    def _on_message(self) -> None:
        try:
            received = self._channel.receive()
        except (ValueError, msgspec.MsgspecError):
            self.lose("it sent bytes that are not Hora's messages; does its shell print something before commands?")
            return
        self._received_at = now = time.monotonic()
        if received is None:
            self.lose(ENDED)
        elif self._hold and self._channel.received_bytes - self._hold_from_bytes > MAX_HELD_BYTES:
            self.lose("its agent goes on sending output that it was told to hold")
        for message in received or ():
            if not self.lost:
                self._handle(message, now)

    def _on_error_output(self) -> None:
        for line in self.read_error_output():
            self.log(f"host {self.name}: {line}")

    def read_error_output(self) -> list[str]:
        """New lines of error output, of ssh or the agent itself."""
        try:
            data = os.read(self._err_fd, 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            os.close(self._err_fd)
            self._err_fd = -1
        lines = [sanitize(line.strip()) for line in data.decode(errors="replace").splitlines() if line.strip()]
        self.error_lines = (self.error_lines + lines)[-ERROR_LINES:]
        return lines

    def await_error_output(self, timeout_s: float) -> None:
        """Blocks: error output at times arrives a little later than the end of the connection."""
        deadline = time.monotonic() + timeout_s
        while self._err_fd >= 0 and time.monotonic() < deadline:
            if not self.read_error_output():
                time.sleep(0.01)

    def take_reply(self, kind: type[Reply]) -> Reply | None:
        """The next reply, if it has arrived and is of this kind."""
        if self._replies and isinstance(self._replies[0], kind):
            reply = self._replies.pop(0)
            assert isinstance(reply, kind)
            return reply
        return None

    def start(self, start: messages.StartProcess, out: OutputSink, err: OutputSink) -> RunProcess:
        """OSError if the host is lost already."""
        if self.lost:
            raise OSError(f"host {self.name} is lost: {self.lost}")
        slot = (start.role, start.rank)

        def send_signal(number: int, group: bool) -> None:
            self.send(messages.SignalProcess(*slot, number, group))

        process = self.processes[slot] = RunProcess(slot, self.name, out, err, send_signal)
        self.send(start)
        return process

    def tick(self, now: float, *, reading: bool = True) -> None:
        """Sends heartbeats. While messages are read regularly (`reading`), a host that is silent too long is lost."""
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + HEARTBEAT_S
            self.send(messages.Heartbeat())
        if not reading:
            self._received_at = now
        elif now - self._received_at > SILENCE_S and not self.ended:
            self.lose(f"no message for {SILENCE_S:g} s")

    def next_deadline(self) -> float:
        return min(self._heartbeat_at, self._received_at + SILENCE_S)

    def lose(self, why: str) -> None:
        if self.lost or self.ended:
            return
        self.lost = why
        for process in self.processes.values():
            process.exited(-signal.SIGKILL, lost=f"lost with its host: {why}")

    def tell_to_end(self) -> None:
        self._told_to_end = True
        self.send(messages.EndAgent())

    def hold_output(self, hold: bool) -> None:
        """While our own output has no space, the agent reads none of its processes' output. Other messages come."""
        if hold != self._hold:
            self._hold = hold
            self._hold_from_bytes = self._channel.received_bytes
            self.send(messages.HoldOutput(hold))

    def hang_up(self) -> None:
        """Closes our sending end: an agent that still lives ends its processes and exits."""
        with contextlib.suppress(OSError):
            os.close(self._channel.write_fd)

    def close(self, timeout_s: float) -> None:
        """After `hang_up`. Blocks for at most `timeout_s`."""
        self._end_connection(timeout_s)
        for fd in (self._channel.read_fd, self._err_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _handle(self, message: messages.FromAgent, now: float) -> None:
        if isinstance(message, messages.ProcessEvent):
            process = self.processes.get((message.role, message.rank))
            if process is not None:
                _apply(message, process, now)
        elif isinstance(message, messages.TraceFilePiece):
            self.keep_file(message.name, message.data)
        elif isinstance(message, messages.AgentBye):
            if not self._told_to_end:
                self.lose("its agent exited without being told to")
            self.ended = True
        elif not isinstance(message, messages.Heartbeat):
            self._replies.append(message)
            if len(self._replies) > MAX_REPLIES:
                self.lose("its agent sends replies to no request")


def _apply(message: messages.ProcessEvent, process: RunProcess, now: float) -> None:
    if isinstance(message, messages.ProcessOutput):
        (process.out if message.stream == 1 else process.err).feed(message.data, now)
    elif isinstance(message, messages.ProcessStarted):
        process.pid = message.pid
        if message.problem:
            process.exited(1, lost=f"{message.problem!r}, before it was started")
    else:
        process.exited(message.code, message.peak_bytes)
