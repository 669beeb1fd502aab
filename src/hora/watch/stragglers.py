"""Stragglers: which workers compute longer for a step than the others do.

A worker is slow when the median of its newest steps is above 1.5 times the median of the other workers' medians, and by
more than a millisecond; it keeps up again below 1.25 times. Either must hold for HOLD_S, counting the time that the
steps themselves took: of long steps four slow ones are enough, and of short ones a moment's hiccup is not.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable

NEWEST = 7  # steps of which the median is taken,
FEWEST = 5  # and how many there must be
SLOW = 1.5
EVEN = 1.25
LEAST_S = 1e-3
HOLD_S = 0.3


@dataclasses.dataclass(frozen=True)
class Change:
    """A worker has become slow, or keeps up again: its median seconds of compute per step, and the others'."""

    rank: int
    slow: bool
    own_s: float
    others_s: float

    def words(self, name: str) -> str:
        what = "is slow" if self.slow else "keeps up again"
        return f"{name} {what}: {_spell(self.own_s)} of compute per step, the others {_spell(self.others_s)}"


class _Worker:
    def __init__(self) -> None:
        self.newest: collections.deque[float] = collections.deque(maxlen=NEWEST)
        self.median: float | None = None
        self.factor = 0.0
        self.changing_since: float | None = None


class Stragglers:
    """Hears each worker's steps and says when it becomes slow or even."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}

    def factor(self, rank: int) -> float:
        """How many times the others' compute a slow worker's is; 0 for one that is not slow."""
        worker = self._workers.get(rank)
        return worker.factor if worker is not None else 0.0

    def forget(self, rank: int) -> None:
        self._workers.pop(rank, None)

    def hear(self, rank: int, computes: Iterable[float], live: Collection[int], now: float) -> Change | None:
        """The seconds of this worker's newest steps; `live` are the ranks to compare it with."""
        worker = self._workers.setdefault(rank, _Worker())
        heard = list(computes)[-NEWEST:]
        if not heard:
            return None
        worker.newest.extend(heard)
        if len(worker.newest) >= FEWEST:
            worker.median = median(worker.newest)
        others = [other.median for one, other in self._workers.items() if one != rank and one in live]
        known = [seconds for seconds in others if seconds is not None]
        if worker.median is None or not known:
            return None
        return self._judge(rank, worker, worker.median, median(known), now)

    def _judge(self, rank: int, worker: _Worker, own_s: float, others_s: float, now: float) -> Change | None:
        was_slow = worker.factor > 0
        if was_slow:
            slow = not (own_s < EVEN * others_s or own_s - others_s <= LEAST_S)
        else:
            slow = own_s > SLOW * others_s and own_s - others_s > LEAST_S
        if slow == was_slow:
            worker.changing_since = None
            if was_slow:
                worker.factor = _factor(own_s, others_s)
            return None
        if worker.changing_since is None:
            worker.changing_since = now
        if now - worker.changing_since + sum(worker.newest) < HOLD_S:
            return None
        worker.changing_since = None
        worker.factor = _factor(own_s, others_s) if slow else 0.0
        return Change(rank, slow, own_s, others_s)


def _factor(own_s: float, others_s: float) -> float:
    return min(1e6, own_s / max(others_s, 1e-9))


def _spell(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def median(values: Iterable[float]) -> float:
    """Of at least one value."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
