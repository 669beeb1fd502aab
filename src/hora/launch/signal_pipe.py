"""Wake: signals as bytes on a pipe, so that one poll waits for them together with everything else; and words of other
threads for the one that polls."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """While entered, SIGINT, SIGTERM and SIGHUP do nothing but make `fd` readable; main thread only.

    SIGHUP stays ignored where it was (nohup). SIGCHLD wakes too: it is how a child's end is seen without pidfds.
    """

    def __init__(self) -> None:
        self.fd = -1
        self._write_fd = -1
        self._before: dict[int, Any] = {}
        self._fd_before = -1
        self._posted: collections.deque[str] = collections.deque(maxlen=1000)

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._fd_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*STOPPING, signal.SIGCHLD):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        os.close(self.fd)
        os.close(self._write_fd)

    def post(self, text: str) -> None:
        """From any thread: `fd` becomes readable, and `posted` gives the text."""
        self._posted.append(text)
        with contextlib.suppress(OSError):  # a full pipe wakes too
            os.write(self._write_fd, b"\0")

    def posted(self) -> list[str]:
        """What was posted since the last call."""
        texts = []
        with contextlib.suppress(IndexError):
            while True:
                texts.append(self._posted.popleft())
        return texts

    def read(self) -> list[int]:
        """The numbers of the signals that came since the last call, in order. Never blocks."""
        try:
            return list(os.read(self.fd, 4096))
        except BlockingIOError:
            return []


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wake-up byte to be written."""
