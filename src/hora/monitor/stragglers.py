"""Stragglers: workers whose compute per step is longer than that of the others.

A worker becomes slow when the median of its newest steps is above 1.5 times the median of the other workers' medians,
and longer by more than a millisecond, and so are four of its five newest steps; below twice the others', also the
median of its newest 11. It keeps up again below 1.25 times. Where workers step together, the same steps are compared:
when all of them slow down at once, the first to report is no straggler. Either must hold for HOLD_S, counting the time
that the steps took: four slow long steps suffice, and a short hiccup does not.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterable
from statistics import median

NEWEST = 7  # steps of which the median is taken,
MIN_NEWEST = 5  # and how many there must be
WIDE = 11  # the same for a worker below SURE times,
MIN_WIDE = 6
SLOW = 1.5
SURE = 2.0
EVEN = 1.25
MIN_EXCESS_S = 1e-3
HOLD_S = 0.2  # less than between two reports
MAX_STEPS = 48
MAX_UNDECIDED = 8  # workers that are judged again when another one reports


@dataclasses.dataclass(frozen=True)
class StragglerChange:
    """A worker has become slow, or keeps up again: its median seconds of compute per step, and the others'."""

    rank: int
    slow: bool
    own_s: float
    others_s: float

    def describe(self, name: str) -> str:
        what = "is slow" if self.slow else "keeps up again"
        return f"{name} {what}: {_format_s(self.own_s)} of compute per step, the others {_format_s(self.others_s)}"


class _Worker:
    def __init__(self) -> None:
        self.computes: collections.deque[float] = collections.deque(maxlen=MAX_STEPS)
        self.step = 0  # of the newest
        self.reported_at = 0.0
        self.median: float | None = None
        self.factor = 0.0
        self.changing_since: float | None = None

    def until(self, step: int | None, count: int) -> list[float]:
        """Its newest `count` steps until `step`; with None, its newest."""
        end = len(self.computes) - (max(0, self.step - step) if step is not None else 0)
        return list(itertools.islice(self.computes, max(0, end - count), max(0, end)))


class Stragglers:
    """Decides from each worker's reports when it becomes slow, or keeps up again."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._undecided: set[int] = set()  # the next report of another worker may decide

    def factor(self, rank: int) -> float:
        """Compute of a slow worker relative to the others'; 0 for one that is not slow."""
        worker = self._workers.get(rank)
        return worker.factor if worker is not None else 0.0

    def forget(self, rank: int) -> None:
        self._workers.pop(rank, None)
        self._undecided.discard(rank)

    def on_report(
        self, rank: int, computes: Iterable[float], live: Collection[int], now: float, step: int | None = None
    ) -> list[StragglerChange]:
        """The seconds of this worker's newest steps, until `step` if workers step together; `live` are the ranks to
        compare with. The changes may be of other workers too."""
        worker = self._workers.setdefault(rank, _Worker())
        newest = list(computes)[-MAX_STEPS:]
        if not newest:
            return []
        worker.computes.extend(newest)
        worker.step, worker.reported_at = step or 0, now
        if len(worker.computes) >= MIN_NEWEST:
            worker.median = median(worker.until(None, NEWEST))
        again = sorted(self._undecided - {rank}) if len(self._undecided) <= MAX_UNDECIDED else []
        changes = [self._judge(each, live, together=step is not None) for each in (rank, *again)]
        return [change for change in changes if change is not None]

    def _judge(self, rank: int, live: Collection[int], together: bool) -> StragglerChange | None:
        worker = self._workers[rank]
        if worker.median is None:
            return None
        others = [each for other, each in self._workers.items() if other != rank and other in live]
        medians = [each.median for each in others if each.median is not None]
        if not medians:
            self._undecided.add(rank)
            return None
        was_slow, others_s = worker.factor > 0, median(medians)
        if _is_slow(worker.median, others_s, was_slow) == was_slow:
            worker.changing_since = None
            self._undecided.discard(rank)
            if was_slow:
                worker.factor = _factor(worker.median, others_s)
            return None
        self._undecided.add(rank)
        found = _compare(worker, [each for each in others if each.median is not None], together, was_slow)
        if found is None:
            worker.changing_since = None
            return None
        if worker.changing_since is None:
            worker.changing_since = worker.reported_at
        if worker.reported_at - worker.changing_since + sum(worker.until(None, NEWEST)) < HOLD_S:
            return None
        worker.changing_since = None
        self._undecided.discard(rank)
        worker.factor = 0.0 if was_slow else _factor(*found)
        return StragglerChange(rank, not was_slow, *found)


def _compare(worker: _Worker, others: list[_Worker], together: bool, was_slow: bool) -> tuple[float, float] | None:
    """The worker's median and the others', if the closer comparison finds too that it has changed."""
    until = min(worker.step, *(other.step for other in others)) if together else None
    own, theirs = worker.until(until, NEWEST), [other.until(until, NEWEST) for other in others]
    if until is not None and min(len(own), *map(len, theirs)) < MIN_NEWEST:
        if len(worker.computes) < MAX_STEPS:
            return None  # the others will report these steps soon
        until, own, theirs = None, worker.until(None, NEWEST), [other.until(None, NEWEST) for other in others]
    own_s, others_s = median(own), median(map(median, theirs))
    if _is_slow(own_s, others_s, was_slow) == was_slow:
        return None
    if not was_slow:
        if sorted(own[-MIN_NEWEST:])[1] <= SLOW * others_s:
            return None
        if own_s <= SURE * others_s:
            wide = worker.until(until, WIDE)
            if len(wide) < MIN_WIDE:
                return None
            if median(wide) <= SLOW * median(median(other.until(until, WIDE)) for other in others):
                return None
    return own_s, others_s


def _is_slow(own_s: float, others_s: float, was_slow: bool) -> bool:
    return own_s > (EVEN if was_slow else SLOW) * others_s and own_s - others_s > MIN_EXCESS_S


def _factor(own_s: float, others_s: float) -> float:
    return min(1e6, own_s / max(others_s, 1e-9))


def _format_s(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"
