"""Journal: what happened in a run, numbered and bounded."""

from __future__ import annotations

import collections

from .messages import Notice
from .status import RunEvent
from .validation import plain

KINDS = ("joined", "left", "died", "slow", "even", "checkpoint", "restore", "skipped", "stop", "serving", "end")
MAX_EVENTS = 500
MAX_TEXT_CHARS = 500


class EventLog:
    """The newest MAX_EVENTS events, and how many checkpoints and skipped steps there ever were."""

    def __init__(self) -> None:
        self.events: collections.deque[RunEvent] = collections.deque(maxlen=MAX_EVENTS)
        self.checkpoints = self.skipped = 0
        self._number = 0
        self._new: collections.deque[RunEvent] = collections.deque(maxlen=MAX_EVENTS)
        self._noticed: dict[tuple[str, int, int | None], str] = {}  # who told it first

    def add(self, kind: str, who: str, text: str, at: float, step: int) -> None:
        self._number += 1
        who, text = plain(who, MAX_TEXT_CHARS), plain(text, MAX_TEXT_CHARS)
        heard = RunEvent(number=self._number, at=at, step=step, kind=kind, who=who, text=text)
        self.events.append(heard)
        self._new.append(heard)

    def note(self, notice: Notice, who: str, at: float, rank: int | None) -> None:
        """What all workers do at one step is one event, though each of them tells; `rank` if it did so by itself."""
        seen = (notice.kind, notice.step, rank)
        if self._noticed.setdefault(seen, who) != who:  # one worker may do it twice at one step
            return
        if len(self._noticed) > MAX_EVENTS:
            del self._noticed[next(iter(self._noticed))]
        self.checkpoints += notice.kind == "checkpoint"
        self.skipped += notice.kind == "skipped"
        self.add(notice.kind, who, notice.text, at, notice.step)

    def go_back(self) -> None:
        """Steps come again, and what happens at them does."""
        self._noticed.clear()

    def take(self) -> list[RunEvent]:
        """Those since this was last asked, MAX_EVENTS at most."""
        taken, self._new = self._new, collections.deque(maxlen=MAX_EVENTS)
        return list(taken)
