"""A server's statistics: reports to the run's monitor while it works (StatsReporter), and its one-line summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from ..errors import HoraError
from ..monitor.messages import EVERY_S, ServerReport, encode
from .state import ServerState
from .store import ServerCounts

IDLE_S = 2.0  # between two reports of an idle server


class StatsReporter:
    """`send` must not block. A report that cannot be sent is lost."""

    def __init__(self, number: int, load_bytes: int, send: Callable[[bytes], None]) -> None:
        self._number = number
        self._load_bytes = load_bytes
        self._send = send
        self._sent_at = time.monotonic()
        self._sent = (0, 0, 0, 0.0)  # totals as last reported: updates, bytes in, bytes out, busy seconds

    def report(self, server: ServerState, busy_s: float, last: bool = False) -> None:
        """Called after every iteration of the server's loop; reports if it is time to."""
        now = time.monotonic()
        seconds = now - self._sent_at
        if seconds < EVERY_S and not last:
            return
        counts = server.counts
        totals = (counts.updates, counts.bytes_in, counts.bytes_out, busy_s)
        if totals[:3] == self._sent[:3] and seconds < IDLE_S and not last:
            return
        before, self._sent, self._sent_at = self._sent, totals, now
        report = ServerReport(
            sent_at=now,
            server=self._number,
            seconds=seconds,
            updates=totals[0] - before[0],
            busy_s=totals[3] - before[3],
            bytes_in=totals[1] - before[1],
            bytes_out=totals[2] - before[2],
            queue=server.queue,
            load_bytes=self._load_bytes,
            lags=dict(counts.lags),
        )
        with contextlib.suppress(HoraError):
            self._send(encode(report))


def collect(counts: ServerCounts, server: int, load_bytes: int, busy_s: float, started: float) -> dict[str, Any]:
    """A server's totals as plain values; `started` is of time.monotonic(). Called on the server's thread."""
    return {
        "server": server,
        "updates": counts.updates,
        "bytes_in": counts.bytes_in,
        "bytes_out": counts.bytes_out,
        "dropped": counts.dropped,
        "skipped": counts.skipped,
        "lags": {str(lag): count for lag, count in sorted(counts.lags.items())},
        "busy_s": round(busy_s, 4),
        "seconds": round(time.monotonic() - started, 4),
        "load_bytes": load_bytes,
        "cpu_s": round(time.thread_time(), 4),
    }


def summary(stats: dict[str, Any]) -> str:
    """One line about what a server has done, from what `collect` gave."""
    seconds = max(stats["seconds"], 1e-9)
    total = sum(stats["lags"].values())
    text = (f"server {stats['server']} ({stats['load_bytes'] / 1e6:.1f} MB): {stats['updates']} updates, "
            f"{stats['updates'] / seconds:.1f}/s, {stats['bytes_in'] / 1e6:.0f} MB in, "
            f"{stats['bytes_out'] / 1e6:.0f} MB out, busy {100 * stats['busy_s'] / seconds:.0f} %")  # fmt: skip
    if total and set(stats["lags"]) != {"0"}:
        shares = [f"{lag}: {100 * count / total:.0f} %" for lag, count in list(stats["lags"].items())[:8]]
        text += f", lag {', '.join(shares)}{', …' if len(stats['lags']) > 8 else ''}"
    for word in ("dropped", "skipped"):
        if stats[word]:
            text += f", {stats[word]} {word}"
    return text
