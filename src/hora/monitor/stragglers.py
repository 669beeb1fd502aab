"""Stragglers: which workers compute longer for a step than the others do.

A worker is slow when the median of its newest steps is above 1.5 times the median of the other workers' medians, and by
more than a millisecond, and so are four of its five newest steps; below twice the others', the median of its newest 11
too. It keeps up again below 1.25 times. Where workers step together, the same steps are compared: when all of them slow
down at once, the first to tell is no straggler. Either must hold for HOLD_S, counting the time that the steps took: of
long steps four slow ones are enough, and of short ones a moment's hiccup is not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable

NEWEST = 7  # steps of which the median is taken,
FEWEST = 5  # and how many there must be
WIDE = 11  # the same for a worker that is not SURE times as slow,
FEWEST_WIDE = 6
SLOW = 1.5
SURE = 2.0
EVEN = 1.25
LEAST_S = 1e-3
HOLD_S = 0.2  # less than between two reports
KEPT = 48
MAX_DOUBTFUL = 8  # workers that are looked at again when another one is heard


@dataclasses.dataclass(frozen=True)
class StragglerChange:
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
        self.newest: collections.deque[float] = collections.deque(maxlen=KEPT)
        self.step = 0  # of the newest
        self.heard_at = 0.0
        self.median: float | None = None
        self.factor = 0.0
        self.changing_since: float | None = None

    def until(self, step: int | None, count: int) -> list[float]:
        """Its newest steps until that one; with None, simply its newest."""
        skip = max(0, self.step - step) if step is not None else 0
        end = len(self.newest) - skip
        return list(itertools.islice(self.newest, max(0, end - count), max(0, end)))


class Stragglers:
    """Hears each worker's steps and says when it becomes slow or even."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._doubtful: set[int] = set()  # what was heard of others since may decide

    def factor(self, rank: int) -> float:
        """How many times the others' compute a slow worker's is; 0 for one that is not slow."""
        worker = self._workers.get(rank)
        return worker.factor if worker is not None else 0.0

    def forget(self, rank: int) -> None:
        self._workers.pop(rank, None)
        self._doubtful.discard(rank)

    def hear(
        self, rank: int, computes: Iterable[float], live: Collection[int], now: float, step: int | None = None
    ) -> list[StragglerChange]:
        """The seconds of this worker's newest steps, until `step` if workers step together; `live` are the ranks to
        compare it with. Also another worker's change may show by this."""
        worker = self._workers.setdefault(rank, _Worker())
        heard = list(computes)[-KEPT:]
        if not heard:
            return []
        worker.newest.extend(heard)
        worker.step, worker.heard_at = step or 0, now
        if len(worker.newest) >= FEWEST:
            worker.median = median(worker.until(None, NEWEST))
        again = self._doubtful - {rank} if len(self._doubtful) <= MAX_DOUBTFUL else ()
        ranks = [rank, *sorted(again)]
        changes = [self._judge(each, live, together=step is not None) for each in ranks]
        return [change for change in changes if change is not None]

    def _judge(self, rank: int, live: Collection[int], together: bool) -> StragglerChange | None:
        worker = self._workers[rank]
        others = [
            other for one, other in self._workers.items() if one != rank and one in live and other.median is not None
        ]
        if worker.median is None or not others:
            if worker.median is not None:
                self._doubtful.add(rank)
            return None
        was_slow = worker.factor > 0
        own_s, others_s = worker.median, median(other.median for other in others if other.median is not None)
        if _is_slow(own_s, others_s, was_slow) == was_slow:
            worker.changing_since = None
            self._doubtful.discard(rank)
            if was_slow:
                worker.factor = _factor(own_s, others_s)
            return None
        self._doubtful.add(rank)
        found = self._compare(worker, others, together, was_slow)
        if found is None:
            worker.changing_since = None
            return None
        if worker.changing_since is None:
            worker.changing_since = worker.heard_at
        if worker.heard_at - worker.changing_since + sum(worker.until(None, NEWEST)) < HOLD_S:
            return None
        own_s, others_s = found
        worker.changing_since = None
        self._doubtful.discard(rank)
        worker.factor = 0.0 if was_slow else _factor(own_s, others_s)
        return StragglerChange(rank, not was_slow, own_s, others_s)

    def _compare(
        self, worker: _Worker, others: list[_Worker], together: bool, was_slow: bool
    ) -> tuple[float, float] | None:
        """Its median and the others', if a closer look finds too that it has changed."""
        until = min(worker.step, *(other.step for other in others)) if together else None
        own, theirs = worker.until(until, NEWEST), [other.until(until, NEWEST) for other in others]
        if until is not None and min(len(own), *map(len, theirs)) < FEWEST:
            if len(worker.newest) < KEPT:
                return None  # it will be told soon
            until, own, theirs = None, worker.until(None, NEWEST), [other.until(None, NEWEST) for other in others]
        own_s, others_s = median(own), median(map(median, theirs))
        if _is_slow(own_s, others_s, was_slow) == was_slow:
            return None
        if not was_slow:
            if sorted(own[-FEWEST:])[1] <= SLOW * others_s:
                return None
            if own_s <= SURE * others_s:
                wide = worker.until(until, WIDE)
                if len(wide) < FEWEST_WIDE:
                    return None
                if median(wide) <= SLOW * median(median(other.until(until, WIDE)) for other in others):
                    return None
        return own_s, others_s


def _is_slow(own_s: float, others_s: float, was_slow: bool) -> bool:
    return own_s > (EVEN if was_slow else SLOW) * others_s and own_s - others_s > LEAST_S


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
