"""Progress of a run: Forecast estimates the time left, RestoreTracker follows the workers back to an earlier step."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from .messages import MetricsRow, WorkerReport

APART_S = 0.5  # between two points of a forecast
NUM_POINTS = 60
RESTORE_S = 10.0  # within which all workers go back, if one does


class Forecast:
    """Seconds left, from the recent rate of progress, a number from 0 to 1."""

    def __init__(self) -> None:
        self.progress: float | None = None
        self._points: collections.deque[tuple[float, float]] = collections.deque(maxlen=NUM_POINTS)

    def add(self, at: float, progress: float) -> None:
        if self.progress is not None and progress < self.progress:
            self._points.clear()  # the run has gone back
        if not self._points or (progress > self._points[-1][1] and at - self._points[-1][0] >= APART_S):
            self._points.append((at, progress))
        self.progress = progress

    def clear(self) -> None:
        self.progress = None
        self._points.clear()

    def eta_s(self, at: float) -> float | None:
        """Seconds left at time `at`; None while the rate is unknown. Between two points it counts down; when the next
        one is overdue, the rate falls with every second."""
        if self.progress is None:
            return None
        if self.progress >= 1.0:
            return 0.0
        if len(self._points) < 2:
            return None
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        usual_s = max(APART_S, (last_at - first_at) / (len(self._points) - 1))
        since_s = max(0.0, at - last_at)
        rate = (last - first) / (last_at - first_at + max(0.0, since_s - usual_s))
        return max(0.0, (1.0 - last) / rate - min(since_s, usual_s))


class RestoreTracker:
    """The first worker that goes back takes the run with it. The others follow; their reports until then are stale."""

    def __init__(self) -> None:
        self._at = -math.inf
        self._step = 0
        self._followed: set[int] = set()

    def is_first(self, rank: int, step: int, now: float) -> bool:
        """This worker has gone back to `step`: whether it is the first to do so."""
        if now - self._at < RESTORE_S and rank not in self._followed:
            self._followed.add(rank)
            return False
        self._at, self._step, self._followed = now, step, {rank}
        return True

    def stale_after(self, rank: int, report: WorkerReport, now: float) -> int | None:
        """The step that others have gone back to, if this worker reports later ones and has not followed."""
        waiting = now - self._at < RESTORE_S and rank not in self._followed
        return self._step if waiting and report.step > self._step else None


def restart_index(step: int, rows: Sequence[MetricsRow]) -> int | None:
    """Index of the last row whose step is below that of the row before; None if steps only grow from `step` on."""
    steps = [step, *(row.step for row in rows)]
    return max((index for index in range(len(rows)) if steps[index + 1] < steps[index]), default=None)
