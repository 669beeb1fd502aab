"""RunProcess: one worker, server or predictor of a run, on this machine or on another host."""

from __future__ import annotations

import functools
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ..terminal.screen import process_name
from ..terminal.tracebacks import exception_of, last_traceback
from .signal_pipe import Watched

READ_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20

Slot = tuple[str, int]  # role and rank: which process of the run


class OutputSink(Protocol):
    """Takes what a process writes to stdout or stderr."""

    def feed(self, data: bytes, now: float) -> None: ...

    def last_lines(self) -> Sequence[str]: ...

    def close(self) -> None: ...


class RunProcess:
    """A process of the run. Nothing here blocks.

    `pipes` are the open read ends of its stdout and stderr; empty for a process of another host, whose agent sends its
    output. `send_signal(number, group)` goes by way of the fork server or agent that has started it and has not reaped
    it, so a signal never reaches another process with the same pid. `exited` is called with the exit code when that is
    known; `running` stays true until the owner has called `reap`.
    """

    def __init__(
        self,
        slot: Slot,
        host: str,
        out: OutputSink,
        err: OutputSink,
        send_signal: Callable[[int, bool], None],
        pipes: Sequence[int] = (),
    ) -> None:
        self.slot = self.role, self.rank = slot
        self.host = host
        self.out = out
        self.err = err
        self.pid = 0  # on its host; 0 until the start was confirmed
        self.returncode: int | None = None  # as in subprocess, after `reap`
        self.peak_bytes = 0  # of memory; known when it has ended
        self.lost = ""  # why its exit code is unknown
        self.pipes = dict(zip(pipes, (out, err), strict=True)) if pipes else {}
        self._code: int | None = None
        self._send_signal = send_signal
        for fd in pipes:
            os.set_blocking(fd, False)

    @property
    def name(self) -> str:
        return process_name(self.role, self.rank)

    @property
    def running(self) -> bool:
        return self.returncode is None

    def exited(self, code: int, peak_bytes: int = 0, lost: str = "") -> None:
        if self._code is None:
            self._code, self.peak_bytes, self.lost = code, peak_bytes, lost

    def has_ended(self) -> bool:
        """Whether it has ended and `reap` was not called yet."""
        return self.returncode is None and self._code is not None

    def reap(self) -> None:
        """After `has_ended`: reads what is left in its pipes and sets `returncode`."""
        self.read_rest()
        self.returncode = self._code

    def signal(self, number: int, *, group: bool) -> None:
        """To the process alone, or to its group."""
        if self._code is None:
            self._send_signal(int(number), group)

    def descriptors(self) -> Watched:
        return {fd: (select.POLLIN, functools.partial(self.read, fd)) for fd in self.pipes}

    def read(self, fd: int) -> bool:
        """One read of a pipe, so that a process that writes without end does not hold up the caller. True if there was
        something. At the end of the stream the pipe is closed."""
        try:
            data = os.read(fd, READ_BYTES) if fd in self.pipes else None
        except BlockingIOError:
            return False
        if data:
            self.pipes[fd].feed(data, time.monotonic())
        elif data is not None:
            del self.pipes[fd]
            os.close(fd)
        return bool(data)

    def read_rest(self) -> None:
        """Reads the pipes until they are empty, at most what pipes can hold."""
        for fd in list(self.pipes):
            for _ in range(MAX_PIPE_BYTES // READ_BYTES):
                if not self.read(fd):
                    break

    def close_pipes(self) -> None:
        for fd in self.pipes:
            os.close(fd)
        self.pipes = {}

    def close_finished_streams(self) -> None:
        """Closes the sinks for which no more output can come."""
        for sink in (self.out, self.err):
            if sink not in self.pipes.values():
                sink.close()

    @property
    def how(self) -> str:
        """How it ended, as `exit code 1` or `killed by SIGKILL`."""
        code = self.returncode
        if self.lost or code is None:
            return self.lost or "has not ended"
        return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"

    def traceback(self) -> list[str]:
        """The last traceback on its stderr; empty when there is none."""
        return last_traceback(self.err.last_lines())

    @property
    def exception(self) -> str:
        return exception_of(self.traceback())


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
