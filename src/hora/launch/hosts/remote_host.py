"""Site: the launcher's end of one host: an agent there, reached over two descriptors, and the children it started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ...terminal.format import harmless
from ...terminal.screen import RankStream
from ..process import RunProcess
from .messages import (
    AgentBye,
    EndAgent,
    FrameReader,
    FromAgent,
    FromLauncher,
    Heartbeat,
    HoldOutput,
    HostFacts,
    ProcessEnded,
    ProcessOutput,
    ProcessStarted,
    SignalProcess,
    StartProcess,
    TraceFilePiece,
    decode_agent,
    frame,
)

SILENCE_S = 3.5
"""How long an agent may say nothing, though it beats once a second, before its host counts as lost."""

BEAT_S = 1.0
ENDED = "the connection to it ended"
MAX_ANSWERS = 16
MAX_HELD_BYTES = 64 << 20  # the agent's own queue, and what pipes and sockets on the way there hold
COMPLAINT_LINES = 30  # ssh's warning of a host key that has changed has a dozen

Answer = TypeVar("Answer", bound=FromAgent)


class RemoteProcess(RunProcess):
    """A process on another host, as its agent tells of it."""

    def __init__(self, site: RemoteHost, role: str, rank: int, out: RankStream, err: RankStream) -> None:
        self.role = role
        self.rank = rank
        self.host = site.name
        self.out = out
        self.err = err
        self.told_pid = 0
        self.peak_bytes = 0
        self.lost = ""  # why nothing is known of its end
        self._site = site
        self._code: int | None = None
        self._reaped = False

    @property
    def pid(self) -> int:
        """On its own host; 0 until the agent has told it."""
        return self.told_pid

    @property
    def returncode(self) -> int | None:
        return self._code if self._reaped else None

    @property
    def running(self) -> bool:
        return not self._reaped

    def end(self, code: int, lost: str = "") -> None:
        """It has ended, as the agent says; or its host is lost."""
        if self._code is None:
            self._code, self.lost = code, lost

    def has_ended(self) -> bool:
        return not self._reaped and self._code is not None

    def reap(self) -> None:
        self._reaped = True

    @property
    def how(self) -> str:
        return self.lost or super().how

    def signal_main(self, number: int) -> None:
        self._signal(number, group=False)

    def signal_group(self, number: int) -> None:
        self._signal(number, group=True)

    def _signal(self, number: int, group: bool) -> None:
        if self.running:
            self._site.send(SignalProcess(self.role, self.rank, int(number), group))


class RemoteHost:
    """`read_fd` and `write_fd` lead to the agent, `err_fd`, if there is one, gives what is said about the way to it.

    `end(patience_s)` sees the way itself to its end, once nothing more is written there. Main thread only; but for that
    nothing blocks. `lost` says why nobody is there any more.
    """

    def __init__(self, name: str, read_fd: int, write_fd: int, err_fd: int, end: Callable[[float], None]) -> None:
        self.name = name
        self.machine = name  # sites of one machine have the same
        self.mark = ""  # what all processes of its agent carry
        self.facts: HostFacts
        self.road = ""  # our address as this host calls it; empty where any will do
        self.desk = ("", 0)  # the coordinator, seen from there
        self.address = ""  # its own, as the other hosts call it
        self.interface = ""
        self.port = 0  # at which the others try whether they reach it
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.err_fd = err_fd
        self.children: dict[tuple[str, int], RemoteProcess] = {}
        self.lost = ""
        self.over = False  # it has said goodbye
        self.keep: Callable[[str, bytes], None] = lambda name, data: None  # takes the files that it sends
        self.complaints: list[str] = []
        self._answers: list[FromAgent] = []
        self._frames = FrameReader()
        self._out = bytearray()
        self._heard_at = time.monotonic()
        self._beat_at = 0.0
        self._held = False
        self._held_bytes = 0  # what has come since
        self._asked_to_end = False
        self._end = end
        for fd in (read_fd, write_fd, err_fd):
            if fd >= 0:
                os.set_blocking(fd, False)

    @property
    def pending(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._out)

    def send(self, message: FromLauncher) -> None:
        if not self.lost and not self.over:
            self._out += frame(message)
            self.write()

    def write(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self.write_fd, memoryview(self._out)[: 1 << 16])]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the reading side finds out why

    def read(self, now: float) -> None:
        """Takes what has come from there; an end that nobody announced loses the host."""
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._heard_at = now
        if not data:
            self.lose(ENDED)
            return
        self._held_bytes += len(data) if self._held else 0
        if self._held_bytes > MAX_HELD_BYTES:
            self.lose("its agent goes on sending what it was asked to hold")
            return
        try:
            for body in self._frames.feed(data):
                self._take(decode_agent(body), now)
        except (ValueError, msgspec.MsgspecError):
            self.lose("what came from there makes no sense; does its shell print something before commands?")

    def read_complaints(self) -> list[str]:
        """Whole lines of what was said on the way there, by ssh or the agent itself."""
        try:
            data = os.read(self.err_fd, 1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            os.close(self.err_fd)
            self.err_fd = -1
        lines = [harmless(line.strip()) for line in data.decode(errors="replace").splitlines() if line.strip()]
        self.complaints = (self.complaints + lines)[-COMPLAINT_LINES:]
        return lines

    def take(self, kind: type[Answer]) -> Answer | None:
        """The next answer, if it has come and is of this kind."""
        if self._answers and isinstance(self._answers[0], kind):
            answer = self._answers.pop(0)
            assert isinstance(answer, kind)
            return answer
        return None

    def start(self, start: StartProcess, out: RankStream, err: RankStream) -> RemoteProcess:
        """OSError if the host is lost already."""
        if self.lost:
            raise OSError(f"host {self.name} is lost: {self.lost}")
        child = RemoteProcess(self, start.role, start.rank, out, err)
        self.children[start.role, start.rank] = child
        self.send(start)
        return child

    def tick(self, now: float, watching: bool = True) -> None:
        """Beats; and, while what comes is read (`watching`), loses a host that has been silent for too long."""
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.send(Heartbeat())
        if not watching:
            self._heard_at = now
        elif now - self._heard_at > SILENCE_S and not self.over:
            self.lose(f"nothing heard for {SILENCE_S:g} s")

    def due(self) -> float:
        return min(self._beat_at, self._heard_at + SILENCE_S)

    def lose(self, why: str) -> None:
        if self.lost or self.over:
            return
        self.lost = why
        for child in self.children.values():
            child.end(-signal.SIGKILL, f"lost with its host: {why}")

    def ask_to_end(self) -> None:
        self._asked_to_end = True
        self.send(EndAgent())

    def hold(self, wanted: bool) -> None:
        """While our own output has no room the agent reads none of its processes; what else there is still comes."""
        if wanted != self._held:
            self._held = wanted
            self._held_bytes = 0
            self.send(HoldOutput(wanted))

    def hang_up(self) -> None:
        """Nothing more is said: an agent that still lives ends what it has started, and goes."""
        with contextlib.suppress(OSError):
            os.close(self.write_fd)

    def close(self, patience_s: float) -> None:
        """After `hang_up`: the way there is closed."""
        self._end(patience_s)
        for fd in (self.read_fd, self.err_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _take(self, message: FromAgent, now: float) -> None:
        if isinstance(message, ProcessOutput):
            child = self.children.get((message.role, message.rank))
            if child is not None:
                (child.out if message.stream == 1 else child.err).feed(message.data, now)
        elif isinstance(message, ProcessStarted):
            child = self.children.get((message.role, message.rank))
            if child is not None:
                child.told_pid = message.pid
                if message.problem:
                    child.end(1, f"{message.problem!r}, before it was started")
        elif isinstance(message, ProcessEnded):
            child = self.children.get((message.role, message.rank))
            if child is not None:
                child.end(message.code)
                child.peak_bytes = message.peak_bytes
        elif isinstance(message, TraceFilePiece):
            self.keep(message.name, message.data)
        elif isinstance(message, AgentBye):
            if not self._asked_to_end:
                self.lose("its agent left without being asked to")
            self.over = True
        elif not isinstance(message, Heartbeat):
            self._answers.append(message)
            if len(self._answers) > MAX_ANSWERS:
                self.lose("its agent answers what nobody asked")
