"""Sink: non-blocking output to stdout or stderr, with a footer that stays below the text on a terminal.

    [0] epoch 1
    [1] epoch 1
    █                  the cursor: the next text goes here, after the footer was cleared; then it is drawn again below
     mnist-3  ring
     step 1,284  ━━━━━━━━╸          43 %

The cursor always stands above the footer. So "clear from here to the end" removes it and nothing else, whatever a
resize has done to the lines below: a terminal may have re-wrapped them, cut them, or scrolled them out.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .screen import RankStream

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_DOWN = "\x1bD"  # as "\n", but the column stays
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[2K", "\x1b[J"


class Sink:
    """An output descriptor. `put` queues and never blocks; `write_some` is called when poll reports it writable.

    `gone` becomes true when the reader has closed it (EPIPE). Any other error, such as a closed terminal or a full
    disk, only makes it `silent`: training continues without output.
    """

    def __init__(self, fd: int, *, color: str) -> None:
        self.fd = fd
        self.color = color == "always" or (
            color == "auto" and os.isatty(fd) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self.gone = False
        self.silent = False
        self.open_by: RankStream | None = None  # whose unfinished line the cursor stands in
        self.footer: tuple[str, ...] = ()
        self._footer_width = 0
        self._footer_below_text = False
        self._queue = bytearray()
        self._held = bytearray()
        # A pipe that poll calls writable takes PIPE_BUF bytes without blocking, and no more is promised.
        self._chunk = 1 << 20 if stat.S_ISREG(os.fstat(fd).st_mode) else select.PIPE_BUF

    @property
    def pending(self) -> int:
        return len(self._queue)

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def put(self, text: str) -> None:
        """Queues a text. Above a footer it is held until the next `release`, so that the footer does not flicker."""
        if self.silent:
            return
        target = self._held if self.footer else self._queue
        target += text.encode("utf-8", "replace")
        if len(self._held) > select.PIPE_BUF:
            self.release()

    def release(self) -> None:
        """Queues the held text in place of the footer."""
        if self._held:
            self.lift()
            self._queue += self._held
            self._held = bytearray()

    def lay(self, lines: Sequence[str], width: int) -> None:
        """Queues a footer, over the one that is there; the cursor stays where it was. The lines may contain colours but
        nothing that moves the cursor, and must be fewer than the terminal has."""
        if self.silent:
            return
        self.release()
        clear = _CLEAR_BELOW if len(lines) < len(self.footer) or width != self._footer_width else ""
        self.footer, self._footer_width = tuple(lines), width
        self._footer_below_text = self.open_by is not None
        if lines:
            room = f"{clear}{_DOWN * len(lines)}\x1b[{len(lines)}A"
            body = "".join(f"\r\n{_CLEAR_LINE}{line}" for line in lines)
            self._queue += f"{room}{_SAVE}{_WRAP_OFF}{body}{_RESTORE}{_WRAP_ON}".encode("utf-8", "replace")

    def lift(self) -> None:
        """Removes the footer, if there is one, and with it what the terminal itself has echoed, as ^C."""
        if self.footer:
            self._queue += f"{'' if self._footer_below_text else chr(13)}{_CLEAR_BELOW}".encode()
        self.footer = ()

    def end_line(self) -> None:
        """Ends the unfinished line that the cursor stands in, if there is one."""
        if self.open_by is not None:
            self.put("\n")
            self.open_by = None

    def write_some(self) -> None:
        try:
            written = os.write(self.fd, memoryview(self._queue)[: self._chunk])
        except BlockingIOError:
            return
        except OSError as error:
            self.gone = error.errno == errno.EPIPE
            self.silent = True
            self._queue, self._held, self.footer = bytearray(), bytearray(), ()
            return
        del self._queue[:written]
