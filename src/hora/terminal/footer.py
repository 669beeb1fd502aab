"""Footer: lines that stay at the bottom of a terminal, below the place where the next text goes.

    [0] epoch 1
    [1] epoch 1
    █                  the cursor: here the next text goes; what is below is lifted for it, and laid again below it
     mnist-3  ring
     step 1,284  ━━━━━━━━╸          43 %

The cursor always stands above the footer, never in it or behind it. So lifting it is "clear from here to the end",
which can take nothing else away, and holds whatever a resize has done to the lines below: a terminal may have wrapped
them anew, cut them, or pushed them out of its window.
"""

from __future__ import annotations

from collections.abc import Sequence

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_DOWN = "\x1bD"  # as "\n", but the column stays
_CLEAR_LINE, _CLEAR_BELOW = "\x1b[2K", "\x1b[J"


class Footer:
    """The footer of one terminal; gives the text that lays or lifts it and remembers which it was."""

    def __init__(self) -> None:
        self.lines: tuple[str, ...] = ()
        """As they were laid last; empty when there is none."""
        self._width = 0
        self._below_text = False

    def lay(self, lines: Sequence[str], width: int, *, below_text: bool) -> str:
        """Text that lays these lines, over those that are there; the cursor ends where it was: in an unfinished line
        if `below_text`, else in an empty one. They may have colours, and nothing else that moves a terminal; they are
        fewer than the terminal has."""
        whole = len(lines) < len(self.lines) or width != self._width
        self.lines, self._width, self._below_text = tuple(lines), width, below_text
        if not lines:
            return ""
        room = f"{_CLEAR_BELOW if whole else ''}{_DOWN * len(lines)}\x1b[{len(lines)}A"
        body = "".join(f"\r\n{_CLEAR_LINE}{line}" for line in lines)
        return f"{room}{_SAVE}{_WRAP_OFF}{body}{_RESTORE}{_WRAP_ON}"

    def lift(self) -> str:
        """Text that takes it away, if there is one; with it goes what the terminal itself has echoed, as ^C."""
        there, self.lines = bool(self.lines), ()
        return f"{'' if self._below_text else chr(13)}{_CLEAR_BELOW}" if there else ""


def fitting(lines: Sequence[str], height: int) -> list[str]:
    """What half of a terminal of that height holds, with the cursor's line; the rest is counted."""
    room = max(1, height // 2 - 1)
    return list(lines) if len(lines) <= room else [*lines[: room - 1], f" … {len(lines) - room + 1} lines hidden"]
