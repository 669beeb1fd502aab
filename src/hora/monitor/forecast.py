"""Forecast: how long a run will still take, from the recent rate of its progress."""

from __future__ import annotations

import collections

APART_S = 0.5  # between two notes
NOTES = 60


class Forecast:
    """Notes progress, a number from 0 to 1, as it changes."""

    def __init__(self) -> None:
        self.progress: float | None = None
        self._notes: collections.deque[tuple[float, float]] = collections.deque(maxlen=NOTES)

    def add(self, at: float, progress: float) -> None:
        if self.progress is not None and progress < self.progress:
            self._notes.clear()  # the run has gone back
        if not self._notes or (progress > self._notes[-1][1] and at - self._notes[-1][0] >= APART_S):
            self._notes.append((at, progress))
        self.progress = progress

    def clear(self) -> None:
        """The run goes on from elsewhere."""
        self.progress = None
        self._notes.clear()

    def eta_s(self, at: float) -> float | None:
        """Seconds from `at` on; None while there is no rate. Between two notes it counts down; when the next one is
        overdue, the rate falls with every second."""
        if self.progress is None:
            return None
        if self.progress >= 1.0:
            return 0.0
        if len(self._notes) < 2:
            return None
        (first_at, first), (last_at, last) = self._notes[0], self._notes[-1]
        usual_s = max(APART_S, (last_at - first_at) / (len(self._notes) - 1))
        since_s = max(0.0, at - last_at)
        rate = (last - first) / (last_at - first_at + max(0.0, since_s - usual_s))
        return max(0.0, (1.0 - last) / rate - min(since_s, usual_s))
