"""RateLimiter: a token bucket that limits what one rank sends, to emulate slower links."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PIECE_BYTES = 64 << 10  # nothing smaller is sent of something larger: each piece costs a call
BURST_S = 0.02  # what a rank may send at once after it was silent, in seconds of its rate


class RateLimiter:
    """Over any stretch of time at most `bytes_per_s` for its length, and one burst. Thread-safe; never blocks.

    A sender takes, sends, and gives back what the socket did not accept.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst = max(PIECE_BYTES, bytes_per_s * BURST_S)
        self._clock = clock
        self._left = self._burst
        self._when = clock()
        self._order = threading.Lock()

    def take(self, wanted_bytes: int) -> int:
        """How many of these may be sent now: all, at least a piece, or none."""
        with self._order:
            self._refill()
            if self._left < min(wanted_bytes, PIECE_BYTES):
                return 0
            granted = min(wanted_bytes, int(self._left))
            self._left -= granted
            return granted

    def give_back(self, num_bytes: int) -> None:
        with self._order:
            self._left += num_bytes

    def due_s(self, wanted_bytes: int) -> float:
        """When `take` will grant some of these, in seconds from now, if no other thread takes."""
        with self._order:
            self._refill()
            return max(0.0, (min(wanted_bytes, PIECE_BYTES) - self._left) / self._bytes_per_s)

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._when) * self._bytes_per_s)
        self._when = now
