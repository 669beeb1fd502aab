"""Report: what a process of the run tells of itself, a few times a second. It waits for no answer.

All `…_s` and counts are of the time since the last report of that process. `at` and `sent_at` are seconds on the
sender's own monotonic clock: only their difference means anything to others.
"""

from __future__ import annotations

import msgspec

EVERY_S = 0.25  # between two reports of one process
MAX_ROWS = 50  # in one report: what was logged more often is merged in pairs
MAX_COMPUTES = 32
MAX_NAME_CHARS = 64
MAX_NAMES = 64  # of logged values in one run
BINS = 32  # of a histogram


class MetricsRow(msgspec.Struct, frozen=True, array_like=True):
    """What `job.log` was given: the means over `count` calls, the last of them at `step`."""

    step: int
    at: float
    count: int
    values: dict[str, float]


class HistogramReport(msgspec.Struct, frozen=True, array_like=True):
    """Of one logged tensor: how many elements in each of equal bins from `low` to `high`."""

    name: str
    step: int
    at: float
    low: float
    high: float
    counts: list[int]


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened: a checkpoint, a restore, a skipped step, a stop (these are the kinds)."""

    step: int
    at: float
    kind: str
    text: str


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True, tag="work"):
    """From a worker."""

    sent_at: float
    step: int  # as job.step has it
    steps: int  # of its own
    seconds: float  # that these took
    exposed_s: float  # of them: communication that the training thread itself did or waited for
    comm_s: float  # communication, whoever did it
    sent_bytes: int
    samples: int  # its own
    computes: list[float]  # seconds of the newest steps without exposed communication, MAX_COMPUTES at most
    epoch: int | None = None
    epochs: int | None = None
    progress: float | None = None  # 0 to 1: how much of the training is done, where that is known
    rounds: int | None = None  # where there are any: how many were closed,
    local_steps: int = 0  # and steps since the last of them
    peers: dict[int, int] = {}  # bytes sent to each rank, where they went to ranks
    notes: dict[str, float] = {}  # what else the strategy tells: lag, dropped
    rows: list[MetricsRow] = []
    histograms: list[HistogramReport] = []
    notices: list[Notice] = []


class ServerReport(msgspec.Struct, frozen=True, kw_only=True, tag="keeping"):
    """From a parameter server."""

    sent_at: float
    server: int
    seconds: float
    updates: int
    busy_s: float
    bytes_in: int
    bytes_out: int
    queue: int  # gradients that wait for others' before they count
    load_bytes: int  # of parameters that it keeps
    lags: dict[int, int] = {}  # how many updates had this lag, since the run began


Report = WorkerReport | ServerReport

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Report).decode
