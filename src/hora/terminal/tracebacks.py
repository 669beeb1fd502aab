"""Tracebacks in a rank's stderr: finding the last one, and folding those that only echo another rank's failure."""

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
    """What becomes of a traceback on the screen (a log file always keeps all of it)."""

    SHOW = "show"
    LAST_LINE = "last line"
    DROP = "drop"


class TracebackFold:
    """Holds a traceback back until it is complete, then shows, shortens or drops it as `verdict` says.

    `verdict` is given the line that names the exception, as late as possible: when another traceback begins, or when
    whoever feeds the stream asks with `release`. Lines before a traceback pass at once; those after it wait with it,
    since they may be the rest of its message, and are never dropped. Order is kept.
    """

    def __init__(self, verdict: Callable[[str], TracebackAction]) -> None:
        self.held: list[str] = []
        self._verdict = verdict
        self._stage = ""
        self._exception_at: int | None = None

    def push(self, line: str) -> list[str]:
        """Takes the next line; returns the lines to show now."""
        if HEADER in line:
            begins = self._stage in ("", "intro") or self._linked()
            before = [] if begins else self.release()
            self._hold(line, "frames")
            return before
        if len(self.held) >= _HELD_MAX:
            return [*self.release(), line]
        if self._stage == "frames" and line and not line[0].isspace():
            self._exception_at = len(self.held)
            self._hold(line, "after")
        elif self._stage in ("frames", "after", "fatal"):
            self._hold(line, self._stage)
        elif self._stage == "intro":
            return [*self.release(), *self.push(line)]
        elif line.startswith(FATAL):
            self._hold(line, "fatal")
        elif _INTRO.fullmatch(line):
            self._hold(line, "intro")
        else:
            return [line]
        return []

    def release(self) -> list[str]:
        """Decides about what is held, complete or not, and returns what of it is to be shown."""
        at = self._exception_at
        held = self.take()
        if at is None:
            return held
        verdict = self._verdict(held[at])
        if verdict is TracebackAction.SHOW:
            return held
        return held[at:] if verdict is TracebackAction.LAST_LINE else held[at + 1 :]

    def take(self) -> list[str]:
        """Returns what is held and forgets it: for the one traceback that is printed elsewhere."""
        held, self.held = self.held, []
        self._stage, self._exception_at = "", None
        return held

    def _linked(self) -> bool:
        """Whether the traceback that begins now was caused by, or came up while handling, the one held."""
        return self._stage == "after" and len(self.held) > 1 and self.held[-2].startswith(_LINKS)

    def _hold(self, line: str, stage: str) -> None:
        self.held.append(line)
        self._stage = stage


def last_traceback(lines: Sequence[str]) -> list[str]:
    """The last traceback (or fatal error) and all after it, with the tracebacks that led to it; empty without one."""
    starts = [at for at, line in enumerate(lines) if HEADER in line or line.startswith(FATAL)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(_LINKS):
        starts.pop()
    return list(lines[starts[-1] :]) if starts else []


def exception_of(traceback: Sequence[str]) -> str:
    """The line that names the exception of the last traceback, as `ValueError: boom`; empty when there is none."""
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
    """At most `limit` lines: the first third, where the user's own code is, a mark for what is left out, the end."""
    if len(lines) <= limit:
        return list(lines)
    head = limit // 3
    tail = limit - head - 1
    return [*lines[:head], f"  … {len(lines) - head - tail} lines …", *lines[len(lines) - tail :]]
