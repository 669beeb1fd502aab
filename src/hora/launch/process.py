"""Process: one process that we start and see to its end, with its group and its two pipes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Protocol

_READ_BYTES = 1 << 16
_PIPE_BYTES_MAX = 1 << 20


class Outlet(Protocol):
    """Where what a process writes goes."""

    def feed(self, data: bytes, now: float) -> None: ...

    def close(self) -> None: ...


class Process:
    """A started process, leader of a session and a process group of its own. Nothing here blocks.

    The leader is not reaped before what is left of its group has been killed: until then its number cannot be
    given to anyone else, so no signal can hit a stranger.
    """

    def __init__(self, argv: list[str], env: dict[str, str], token_fd: int, out: Outlet, err: Outlet) -> None:
        self.returncode: int | None = None
        self._process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(token_fd,),
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self.pipes: dict[int, Outlet] = {self._process.stdout.fileno(): out, self._process.stderr.fileno(): err}
        for fd in self.pipes:
            os.set_blocking(fd, False)
        self.pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            self.pidfd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self.returncode is None

    def has_ended(self) -> bool:
        """Whether the process itself has ended; it stays unreaped."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.returncode is None and os.waitid(os.P_PID, self.pid, flags) is not None

    def reap(self) -> None:
        """After `has_ended`: kills what it left in its group, then takes its exit code."""
        self.signal_group(signal.SIGKILL)
        self.returncode = self._process.wait()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def signal_main(self, number: int) -> None:
        if self.running:
            os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        if self.running:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # PermissionError is what some kernels say when only the zombie of the leader is left
                os.killpg(self.pid, number)

    def read(self, fd: int, now: float) -> bool | None:
        """Feeds what one read finds in the pipe to its outlet: True for something, None for nothing, False at its end.

        One read and no more: a process that writes without end must not keep us from our other duties.
        """
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self.pipes[fd].feed(data, now)
        return bool(data)

    def read_rest(self, now: float) -> None:
        """Feeds everything that an ended process left in its pipes, at most what pipes can hold."""
        for fd in self.pipes:
            for _ in range(_PIPE_BYTES_MAX // _READ_BYTES):
                if not self.read(fd, now):
                    break

    def close_pipe(self, fd: int) -> None:
        self.pipes.pop(fd).close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == fd:
                pipe.close()
