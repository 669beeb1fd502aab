"""SignalPipe and `poll`: signals and descriptors waited for in one place, each with its handler."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import select
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Watched = dict[int, tuple[int, Callable[[], object]]]  # by descriptor: poll's events to wait for, and their handler


def poll(watched: Watched, timeout_s: float | None) -> None:
    """Waits until a descriptor is ready or the time is over, and calls the handlers of those that are ready. A handler
    must expect that another one has closed its descriptor in the same call."""
    poller = select.poll()  # unlike epoll it takes regular files, which our stdout may be
    for fd, (events, _) in watched.items():
        poller.register(fd, events)
    for fd, _ in poller.poll(None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)):
        watched[fd][1]()


class SignalPipe:
    """While entered, SIGINT, SIGTERM and SIGHUP only make `fd` readable. Enter it on the main thread.

    SIGHUP stays ignored where it was (nohup). SIGCHLD makes `fd` readable too, for systems without pidfds.
    """

    def __init__(self) -> None:
        self.fd = -1
        self._write_fd = -1
        self._handlers_before: dict[int, Any] = {}
        self._fd_before = -1
        self._posted: collections.deque[str] = collections.deque(maxlen=1000)

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers_before[number] = signal.signal(number, _ignore)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def post(self, text: str) -> None:
        """Thread-safe: makes `fd` readable; `posted` returns the text."""
        self._posted.append(text)
        with contextlib.suppress(OSError):  # a full pipe is readable already
            os.write(self._write_fd, b"\0")

    def posted(self) -> list[str]:
        """The texts posted since the last call."""
        return [self._posted.popleft() for _ in range(len(self._posted))]

    def stop_signals(self) -> list[int]:
        """The numbers of the stopping signals since the last call, in order. Never blocks."""
        try:
            return [number for number in os.read(self.fd, 4096) if number in STOPPING]
        except BlockingIOError:
            return []


def _ignore(number: int, frame: FrameType | None) -> None:
    """A Python handler must exist for the wake-up byte to be written."""
