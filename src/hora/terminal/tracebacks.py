"""Tracebacks in a rank's stderr: finds the last one, and folds those of secondary failures."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence

HEADER = "Traceback (most recent call last):"
FATAL = "Fatal Python error: "
_INTRO = re.compile(r"Exception ignored in.*|(Exception in thread |Process ).*:")
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
_HELD_MAX = 400


class TracebackAction(enum.Enum):
    """What the screen shows of a traceback; a log file always keeps all of it."""

    SHOW = "show"
    LAST_LINE = "last line"
    DROP = "drop"


class TracebackFold:
    """Holds a traceback until it is complete, then shows, shortens or drops it as `decide` says.

    `decide` gets the line that names the exception, as late as possible: when another traceback begins or `release` is
    called. Lines before a traceback pass at once. Lines after it are held with it, since they may be the rest of its
    message, and are never dropped. Order is kept.
    """

    def __init__(self, decide: Callable[[str], TracebackAction]) -> None:
        self.held: list[str] = []
        self._decide = decide
        self._state = ""  # intro, frames, after (its exception) or fatal; empty: nothing is held
        self._exception_at: int | None = None

    def push(self, line: str) -> list[str]:
        """Takes the next line; returns the lines to show now."""
        if HEADER in line:
            begins = self._state in ("", "intro") or self._linked()
            before = [] if begins else self.release()
            self._hold(line, "frames")
            return before
        if len(self.held) >= _HELD_MAX:
            return [*self.release(), line]
        if self._state == "frames" and line and not line[0].isspace():
            self._exception_at = len(self.held)
            self._hold(line, "after")
        elif self._state in ("frames", "after", "fatal"):
            self._hold(line, self._state)
        elif self._state == "intro":
            return [*self.release(), *self.push(line)]
        elif line.startswith(FATAL):
            self._hold(line, "fatal")
        elif _INTRO.fullmatch(line):
            self._hold(line, "intro")
        else:
            return [line]
        return []

    def release(self) -> list[str]:
        """Decides about the held traceback, complete or not, and returns the lines to show."""
        at = self._exception_at
        held = self.take()
        action = TracebackAction.SHOW if at is None else self._decide(held[at])
        if at is None or action is TracebackAction.SHOW:
            return held
        return held[at if action is TracebackAction.LAST_LINE else at + 1 :]

    def take(self) -> list[str]:
        """Returns the held lines and forgets them, for the traceback that is printed elsewhere."""
        held, self.held = self.held, []
        self._state, self._exception_at = "", None
        return held

    def _linked(self) -> bool:
        """Whether the traceback that begins now is chained to the held one."""
        return self._state == "after" and len(self.held) > 1 and self.held[-2].startswith(_LINKS)

    def _hold(self, line: str, state: str) -> None:
        self.held.append(line)
        self._state = state


def last_traceback(lines: Sequence[str]) -> list[str]:
    """The last traceback (or fatal error) with those chained to it, and all lines after it; empty if there is none."""
    starts = [at for at, line in enumerate(lines) if HEADER in line or line.startswith(FATAL)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(_LINKS):
        starts.pop()
    return list(lines[starts[-1] :]) if starts else []


def exception_of(traceback: Sequence[str]) -> str:
    """The line that names the exception of the last traceback, as `ValueError: boom`; empty if there is none."""
    if traceback and traceback[0].startswith(FATAL):
        return traceback[0]
    named = ""
    inside = False
    for line in traceback:
        if HEADER in line:
            inside = True
        elif inside and line and not line[0].isspace():
            named, inside = line, False
    return named


def shorten(lines: Sequence[str], limit: int) -> list[str]:
    """At most `limit` lines: the first third, where the user's code is, a count of omitted lines, and the end."""
    if len(lines) <= limit:
        return list(lines)
    head, tail = limit // 3, limit - limit // 3 - 1
    return [*lines[:head], f"  … {len(lines) - head - tail} lines …", *lines[len(lines) - tail :]]
