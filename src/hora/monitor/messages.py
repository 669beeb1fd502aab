"""Reports of workers and servers to the launcher, a few times a second and without an answer.

All `…_s` and counts are of the time since the last report of that process. `at` and `sent_at` are seconds on the
sender's monotonic clock: only their difference has a meaning elsewhere. What arrives is not trusted: `is_valid` says
whether every number is in range, so that it cannot corrupt a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

EVERY_S = 0.25  # between two reports of one process
MAX_ROWS = 50  # in one report: rows that are logged more often are merged in pairs
MAX_COMPUTES = 32
MAX_NAME_CHARS = 64
MAX_NAMES = 64  # of logged values in one run
BINS = 32  # of a histogram
MAX_COUNT = 1 << 53  # larger integers are not exact in JSON and JavaScript
MAX_SECONDS = 1e9
MAX_RANKS = 1 << 20
MAX_PEERS = 1024
MAX_LAGS = 256
NOTICES = ("checkpoint", "restore", "skipped", "stop")


class MetricsRow(msgspec.Struct, frozen=True, array_like=True):
    """What `job.log` was given: the means over `count` calls, the last of them at `step`."""

    step: int
    at: float
    count: int
    values: dict[str, float]

    def is_valid(self) -> bool:
        return 0 <= self.step <= MAX_COUNT and 1 <= self.count <= MAX_COUNT and math.isfinite(self.at)


class HistogramReport(msgspec.Struct, frozen=True, array_like=True):
    """Of one logged tensor: how many elements are in each of equal bins from `low` to `high`."""

    name: str
    step: int
    at: float
    low: float
    high: float
    counts: list[int]

    def is_valid(self) -> bool:
        return (
            _are_counts((self.step, *self.counts))
            and all(math.isfinite(each) for each in (self.at, self.low, self.high))
            and self.low <= self.high
            and 1 <= len(self.counts) <= BINS
        )


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """An event on a worker; `kind` is one of NOTICES."""

    step: int
    at: float
    kind: str
    text: str

    def is_valid(self) -> bool:
        return self.kind in NOTICES and 0 <= self.step <= MAX_COUNT and math.isfinite(self.at)


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag="worker"):
    sent_at: float
    step: int  # job.step
    steps: int  # of its own, since the last report
    seconds: float  # that these took
    exposed_s: float  # of them: communication that the training thread itself did or waited for
    comm_s: float  # communication, on any thread
    sent_bytes: int
    samples: int  # its own
    computes: list[float]  # seconds of the newest steps without exposed communication, MAX_COMPUTES at most
    epoch: int | None = None
    epochs: int | None = None
    progress: float | None = None  # 0 to 1: how much of the training is done, where that is known
    rounds: int | None = None  # closed rounds, for strategies with rounds
    local_steps: int = 0  # since the last of them
    peers: dict[int, int] = {}  # bytes sent to each rank, where they went to ranks
    notes: dict[str, float] = {}  # further numbers of the strategy: lag, dropped
    rows: list[MetricsRow] = []
    histograms: list[HistogramReport] = []
    notices: list[Notice] = []

    def is_valid(self) -> bool:
        """Rows, histograms and notices are validated one by one."""
        optional = [each for each in (self.epoch, self.epochs, self.rounds) if each is not None]
        return (
            math.isfinite(self.sent_at)
            and _are_counts((self.step, self.steps, self.sent_bytes, self.samples, self.local_steps, *optional))
            and _are_durations((self.seconds, self.exposed_s, self.comm_s, *self.computes))
            and len(self.computes) <= MAX_COMPUTES
            and len(self.peers) <= MAX_PEERS
            and all(0 <= rank < MAX_RANKS for rank in self.peers)
            and _are_counts(self.peers.values())
            and len(self.rows) <= MAX_ROWS
        )


class ServerReport(msgspec.Struct, frozen=True, kw_only=True, tag="server"):
    sent_at: float
    server: int
    seconds: float
    updates: int
    busy_s: float
    bytes_in: int
    bytes_out: int
    queue: int  # gradients that wait for those of other workers
    load_bytes: int  # of parameters on this server
    lags: dict[int, int] = {}  # block updates by lag, since the run began

    def is_valid(self) -> bool:
        counts = (self.updates, self.bytes_in, self.bytes_out, self.queue, self.load_bytes)
        return (
            math.isfinite(self.sent_at)
            and 0 <= self.server < MAX_RANKS
            and _are_durations((self.seconds, self.busy_s))
            and _are_counts((*counts, *self.lags, *self.lags.values()))
        )


Report = WorkerReport | ServerReport

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Report).decode


def storable(text: str, max_chars: int) -> str:
    """`text` cut to `max_chars` characters, with what UTF-8 cannot encode replaced."""
    cut = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return cut.encode("utf-8", "replace").decode("utf-8")


def _are_counts(numbers: Iterable[int]) -> bool:
    return all(0 <= number <= MAX_COUNT for number in numbers)


def _are_durations(numbers: Iterable[float]) -> bool:
    return all(0.0 <= number <= MAX_SECONDS for number in numbers)  # false for NaN
