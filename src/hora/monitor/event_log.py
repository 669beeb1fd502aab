"""EventLog: the events of a run, numbered and bounded."""

from __future__ import annotations

import collections

from .messages import Notice, storable
from .status import RunEvent

KINDS = ("joined", "left", "died", "slow", "even", "checkpoint", "restore", "skipped", "stop", "serving", "end")
MAX_EVENTS = 500
MAX_TEXT_CHARS = 500


class EventLog:
    """The newest MAX_EVENTS events, and the total number of checkpoints and skipped steps."""

    def __init__(self) -> None:
        self.events: collections.deque[RunEvent] = collections.deque(maxlen=MAX_EVENTS)
        self.checkpoints = self.skipped = 0
        self._number = self._num_taken = 0
        self._reporters: dict[tuple[str, int, int | None], str] = {}  # who reported a notice first

    def add(self, kind: str, who: str, text: str, at: float, step: int) -> None:
        self._number += 1
        who, text = storable(who, MAX_TEXT_CHARS), storable(text, MAX_TEXT_CHARS)
        self.events.append(RunEvent(number=self._number, at=at, step=step, kind=kind, who=who, text=text))

    def add_notice(self, notice: Notice, who: str, at: float, rank: int | None) -> None:
        """What all workers do at one step is one event, though each reports it; `rank` if it did so independently."""
        key = (notice.kind, notice.step, rank)
        if self._reporters.setdefault(key, who) != who:  # the same worker may do it twice at one step
            return
        if len(self._reporters) > MAX_EVENTS:
            del self._reporters[next(iter(self._reporters))]
        self.checkpoints += notice.kind == "checkpoint"
        self.skipped += notice.kind == "skipped"
        self.add(notice.kind, who, notice.text, at, notice.step)

    def rewind(self) -> None:
        """Steps are repeated, and so are their notices."""
        self._reporters.clear()

    def take(self) -> list[RunEvent]:
        """The events since the last call, MAX_EVENTS at most."""
        new = [event for event in self.events if event.number > self._num_taken]
        self._num_taken = self._number
        return new
