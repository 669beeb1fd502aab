"""Logbook: what the workers gave to `job.log`, as rows, newest values, curves and histograms."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

import msgspec

from .curve import Curve
from .messages import MAX_NAME_CHARS, MAX_NAMES, HistogramReport, MetricsRow
from .validation import plain
from .worker_stats import WorkerStats

MAX_WAITING = 20_000  # rows that nobody has taken yet
MAX_HISTOGRAMS = 50  # of one name


class LoggedRow(msgspec.Struct, frozen=True):
    """A row of one worker's, on the run's clock, with the samples of the run at that time."""

    rank: int
    step: int
    count: int
    at: float
    samples: int
    epoch: int | None
    values: dict[str, float]


class MetricsLog:
    """MAX_NAMES names at most, long ones cut; what is logged under others is not kept.

    Workers' values of one step are one point of a curve. Of histograms, and where one worker's values stand for all,
    those of the leader count: the lowest live rank of those that log the name.
    """

    def __init__(self, curves: dict[str, Curve]) -> None:
        self._curves = curves
        self._leaders: dict[str, int] = {}
        self._names: dict[str, str] = {}  # as logged, and as kept
        self._rows: collections.deque[LoggedRow] = collections.deque(maxlen=MAX_WAITING)
        self._histograms: dict[str, collections.deque[tuple[int, HistogramReport]]] = {}
        self._number = 0

    def add(self, track: WorkerStats, row: MetricsRow, at: float, samples: int, live: Collection[int]) -> None:
        kept: dict[str, float] = {}
        for given, value in row.values.items():
            if (name := self._name(given)) is None:
                continue
            kept[name] = value
            self._lead(name, track.rank, live)
            curve = self._curves.get(f"value/{name}")
            if curve is None:
                curve = self._curves[f"value/{name}"] = Curve()
            curve.add(row.step, at, samples, value, row.count)
        if kept:
            track.newest.update(kept)
            self._rows.append(LoggedRow(track.rank, row.step, row.count, at, samples, track.epoch, kept))

    def add_histogram(self, rank: int, histogram: HistogramReport, at: float, live: Collection[int]) -> None:
        """`at` is on the run's clock, unlike the histogram's own."""
        if (name := self._name(histogram.name)) is None:
            return
        self._lead(f"histogram/{name}", rank, live)
        if not self.leads(f"histogram/{name}", rank):
            return
        self._number += 1
        kept = HistogramReport(name, histogram.step, at, histogram.low, histogram.high, histogram.counts)
        self._histograms.setdefault(name, collections.deque(maxlen=MAX_HISTOGRAMS)).append((self._number, kept))

    def leads(self, name: str, rank: int) -> bool:
        return self._leaders.get(name) == rank

    def newest(self, live: Iterable[WorkerStats], everyone: Iterable[WorkerStats]) -> dict[str, float]:
        """Of each name, the mean over the live workers that log it; of those gone, if no other does."""
        found: dict[str, list[float]] = {}
        for tracks in (live, everyone):
            these: dict[str, list[float]] = {}
            for track in tracks:
                for name, value in track.newest.items():
                    if name not in found:
                        these.setdefault(name, []).append(value)
            found.update(these)
        return {name: _mean(found[name]) for name in self._names.values() if name in found}

    @property
    def crowded(self) -> bool:
        return len(self._rows) > MAX_WAITING // 2

    def take_rows(self) -> list[LoggedRow]:
        """What was logged since this was last asked, MAX_WAITING at most."""
        taken, self._rows = self._rows, collections.deque(maxlen=MAX_WAITING)
        return list(taken)

    def histograms(self, after: int = 0) -> tuple[int, list[HistogramReport]]:
        """How many ever came, and those after the first `after`, the newest MAX_HISTOGRAMS of each name."""
        kept = self._histograms.values()
        return self._number, [each for newest in kept for number, each in newest if number > after]

    def _name(self, given: str) -> str | None:
        """The name under which it is kept; None for one too many, and for an empty one."""
        if given not in self._names:
            if not given or len(self._names) >= MAX_NAMES:
                return None
            self._names[given] = plain(given, MAX_NAME_CHARS)
        return self._names[given]

    def _lead(self, name: str, rank: int, live: Collection[int]) -> None:
        leader = self._leaders.get(name)
        if leader is None or rank < leader or leader not in live:
            self._leaders[name] = rank


def _mean(values: list[float]) -> float:
    return sum(value / len(values) for value in values)
