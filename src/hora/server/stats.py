"""Herald: a server's reports of itself to whoever watches the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from ..errors import HoraError
from ..monitor.messages import EVERY_S, ServerReport, encode
from .state import ServerState

IDLE_S = 2.0  # between two reports of a server that has nothing to do


class StatsReporter:
    """`send` puts a report on its way and waits for nothing. One that the line does not take is lost, and no matter."""

    def __init__(self, number: int, load_bytes: int, send: Callable[[bytes], None]) -> None:
        self._number = number
        self._load_bytes = load_bytes
        self._send = send
        self._told_at = time.monotonic()
        self._told = (0, 0, 0, 0.0)  # updates, bytes in, bytes out, busy seconds, up to the last report

    def tell(self, server: ServerState, busy_s: float, last: bool = False) -> None:
        """Called after every turn of the server's loop; reports if it is time to."""
        now = time.monotonic()
        seconds = now - self._told_at
        if seconds < EVERY_S and not last:
            return
        counts = server.counts
        totals = (counts.updates, counts.bytes_in, counts.bytes_out, busy_s)
        if totals[:3] == self._told[:3] and seconds < IDLE_S and not last:
            return
        before, self._told, self._told_at = self._told, totals, now
        keeping = ServerReport(
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
            self._send(encode(keeping))
