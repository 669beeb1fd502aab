"""Restores: when a run goes back to an earlier step, as its workers tell it, each in its own time."""

from __future__ import annotations

from collections.abc import Sequence

from .messages import MetricsRow, WorkerReport

ALL_S = 10.0  # within which all workers go back, if one does


class RestoreTracker:
    """The first worker that goes back takes the run with it. The others follow; what they told meanwhile is stale."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._step = 0
        self._followed: set[int] = set()

    def begins(self, rank: int, step: int, now: float) -> bool:
        """This worker has gone back to `step`: whether it is the first to do so."""
        if now - self._at < ALL_S and rank not in self._followed:
            self._followed.add(rank)
            return False
        self._at, self._step, self._followed = now, step, {rank}
        return True

    def stale_after(self, rank: int, report: WorkerReport, now: float) -> int | None:
        """The step that others have gone back to, if this worker tells of later ones and has not followed."""
        waiting = now - self._at < ALL_S and rank not in self._followed
        return self._step if waiting and report.step > self._step else None


def steps_back(before: int, rows: Sequence[MetricsRow]) -> int | None:
    """The row with which the steps begin again, the last such one; None if they only grow from `before` on."""
    steps = [before, *(row.step for row in rows)]
    return max((index for index in range(len(rows)) if steps[index + 1] < steps[index]), default=None)
