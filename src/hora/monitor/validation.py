"""Sound: whether a report's numbers can be what they are called. What comes from a run is not trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .messages import BINS, MAX_COMPUTES, MAX_ROWS, HistogramReport, MetricsRow, Notice, ServerReport, WorkerReport

MOST = 1 << 53  # of anything that is counted: more is not exact everywhere that it is shown
LONGEST_S = 1e9
MOST_RANKS = 1 << 20
MOST_PEERS = 1024
MOST_LAGS = 256
NOTICES = ("checkpoint", "restore", "skipped", "stop")


def is_sound(report: WorkerReport | ServerReport) -> bool:
    """Whether nothing that is summed up would spoil the sums."""
    if not math.isfinite(report.sent_at) or not _durations((report.seconds,)):
        return False
    if isinstance(report, ServerReport):
        lags = report.lags
        return (
            0 <= report.server < MOST_RANKS
            and _durations((report.busy_s,))
            and _counts((report.updates, report.bytes_in, report.bytes_out, report.queue, report.load_bytes))
            and _counts(lags)
            and _counts(lags.values())
        )
    optional = [each for each in (report.epoch, report.epochs, report.rounds) if each is not None]
    return (
        _counts((report.step, report.steps, report.sent_bytes, report.samples, report.local_steps, *optional))
        and _durations((report.exposed_s, report.comm_s))
        and len(report.computes) <= MAX_COMPUTES
        and _durations(report.computes)
        and len(report.peers) <= MOST_PEERS
        and all(0 <= rank < MOST_RANKS for rank in report.peers)
        and _counts(report.peers.values())
        and len(report.rows) <= MAX_ROWS
    )


def is_sound_row(row: MetricsRow) -> bool:
    return 0 <= row.step <= MOST and 1 <= row.count <= MOST and math.isfinite(row.at)


def is_sound_histogram(histogram: HistogramReport) -> bool:
    return (
        0 <= histogram.step <= MOST
        and all(math.isfinite(each) for each in (histogram.at, histogram.low, histogram.high))
        and histogram.low <= histogram.high
        and 1 <= len(histogram.counts) <= BINS
        and _counts(histogram.counts)
    )


def is_sound_notice(notice: Notice) -> bool:
    return notice.kind in NOTICES and 0 <= notice.step <= MOST and math.isfinite(notice.at)


def share(value: float | None) -> float | None:
    """A number from 0 to 1, or None."""
    return value if value is not None and 0.0 <= value <= 1.0 else None


def plain(value: str, most: int) -> str:
    """As it can be stored: cut at `most` characters, and without what UTF-8 cannot say."""
    cut = value if len(value) <= most else value[: most - 1] + "…"
    return cut.encode("utf-8", "replace").decode("utf-8")


def _counts(numbers: Iterable[int]) -> bool:
    return all(0 <= number <= MOST for number in numbers)


def _durations(numbers: Iterable[float]) -> bool:
    return all(0.0 <= number <= LONGEST_S for number in numbers)  # NaN is none either
