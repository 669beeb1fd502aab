"""MetricsLog: what the workers passed to `job.log`, as rows, newest values, curves and histograms."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

import msgspec

from .curve import Curve
from .members import WorkerStats
from .messages import MAX_NAME_CHARS, MAX_NAMES, HistogramReport, MetricsRow, storable

MAX_PENDING = 20_000  # rows that were not taken yet
MAX_HISTOGRAMS = 50  # of one name


class LoggedRow(msgspec.Struct, frozen=True):
    """A row of one worker on the run's clock, with the samples of the run at that time."""

    rank: int
    step: int
    count: int
    at: float
    samples: int
    epoch: int | None
    values: dict[str, float]


class MetricsLog:
    """At most MAX_NAMES names, long ones cut; values under further names are dropped.

    The values of all workers at one step are one point of a curve. Where one worker's values stand for all, and for
    histograms, those of the leader count: the lowest live rank that logs the name.
    """

    def __init__(self, curves: dict[str, Curve]) -> None:
        self._curves = curves
        self._leaders: dict[str, int] = {}
        self._names: dict[str, str] = {}  # as logged -> as stored
        self._rows: collections.deque[LoggedRow] = collections.deque(maxlen=MAX_PENDING)
        self._histograms: dict[str, collections.deque[tuple[int, HistogramReport]]] = {}
        self._num_histograms = 0

    def add(self, worker: WorkerStats, row: MetricsRow, at: float, samples: int, live: Collection[int]) -> None:
        values: dict[str, float] = {}
        for given, value in row.values.items():
            if (name := self._name(given)) is None:
                continue
            values[name] = value
            self._elect(name, worker.rank, live)
            curve = self._curves.get(f"value/{name}")
            if curve is None:
                curve = self._curves[f"value/{name}"] = Curve()
            curve.add(row.step, at, samples, value, row.count)
        if values:
            worker.newest.update(values)
            self._rows.append(LoggedRow(worker.rank, row.step, row.count, at, samples, worker.last.epoch, values))

    def add_histogram(self, rank: int, histogram: HistogramReport, at: float, live: Collection[int]) -> None:
        """`at` is on the run's clock."""
        if (name := self._name(histogram.name)) is None:
            return
        self._elect(f"histogram/{name}", rank, live)
        if self.is_leader(f"histogram/{name}", rank):
            self._num_histograms += 1
            stored = msgspec.structs.replace(histogram, name=name, at=at)
            newest = self._histograms.setdefault(name, collections.deque(maxlen=MAX_HISTOGRAMS))
            newest.append((self._num_histograms, stored))

    def is_leader(self, name: str, rank: int) -> bool:
        return self._leaders.get(name) == rank

    def newest(self, live: Iterable[WorkerStats], workers: Iterable[WorkerStats]) -> dict[str, float]:
        """Of each name, the mean over the live workers that log it; over all workers, if no live one does."""
        found: dict[str, list[float]] = {}
        for group in (live, workers):
            of_group: dict[str, list[float]] = {}
            for worker in group:
                for name, value in worker.newest.items():
                    if name not in found:
                        of_group.setdefault(name, []).append(value)
            found.update(of_group)
        means = {name: sum(value / len(values) for value in values) for name, values in found.items()}
        return {name: means[name] for name in self._names.values() if name in means}

    @property
    def rows_half_full(self) -> bool:
        return len(self._rows) > MAX_PENDING // 2

    def take_rows(self) -> list[LoggedRow]:
        """The rows since the last call, MAX_PENDING at most."""
        taken, self._rows = self._rows, collections.deque(maxlen=MAX_PENDING)
        return list(taken)

    def histograms(self, after: int = 0) -> tuple[int, list[HistogramReport]]:
        """How many were ever added, and those after the first `after`, the newest MAX_HISTOGRAMS of each name."""
        new = [each for newest in self._histograms.values() for number, each in newest if number > after]
        return self._num_histograms, new

    def _name(self, given: str) -> str | None:
        """The name under which it is stored; None for an empty name, and above MAX_NAMES."""
        if given not in self._names:
            if not given or len(self._names) >= MAX_NAMES:
                return None
            self._names[given] = storable(given, MAX_NAME_CHARS)
        return self._names[given]

    def _elect(self, name: str, rank: int, live: Collection[int]) -> None:
        leader = self._leaders.get(name)
        if leader is None or rank < leader or leader not in live:
            self._leaders[name] = rank
