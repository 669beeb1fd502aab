"""Uneven: runs with workers of different speed, through the real launcher, for the claims about stragglers.

How slow a worker is in each of its steps is fixed beforehand, as factors of the pace, the same for every strategy.
What would be possible if no worker waited for another is then known exactly: the sum of the workers' own speeds.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

Factors = Sequence[Sequence[float]]  # of each worker: those of its steps, again and again

WORKER = ("-m", "hora_benchmarks.claims.uneven_rank")
SLOWNESS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """What one worker did in one loop over the data; times in seconds since the first of them began it.

    `steps` are (began, had computed, over); `views` are (time, done, leased, pending, batches held)."""

    steps: list[tuple[float, float, float]]
    samples: list[list[int]]
    views: list[tuple[float, int, int, int, list[int]]]
    dropped: int
    end_s: float

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.samples))

    @property
    def busy_s(self) -> float:
        return sum(computed - began for began, computed, _ in self.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop over the data: it takes until the last worker has left it."""

    workers: list[Worker]

    @property
    def seconds(self) -> float:
        return max(worker.end_s for worker in self.workers)

    @property
    def dropped(self) -> int:
        return sum(worker.dropped for worker in self.workers)

    @property
    def num_samples(self) -> int:
        return sum(worker.num_samples for worker in self.workers)

    @property
    def exactly_once(self) -> bool:
        """Whether every sample, from the first to the last, was computed once."""
        seen = [number for worker in self.workers for batch in worker.samples for number in batch]
        return sorted(seen) == list(range(len(seen)))


def run(
    strategy: str,
    loops: Sequence[Factors],
    *,
    num_samples: int,
    batch: int,
    pace_s: float,
    readers: int = 0,
    views: bool = False,
) -> list[Loop]:
    """Trains under `strategy`, with a loop over the data for each of the factors. RuntimeError if the run fails.

    Samples come in the order of their numbers. With `readers`, processes of its own read ahead for each worker."""
    from hora.launch.launched import launched

    plan = {"factors": loops, "num_samples": num_samples, "batch": batch, "pace_s": pace_s, "readers": readers,
            "views": views}  # fmt: skip
    workers = launched(WORKER, json.dumps(plan), size=len(loops[0]), strategy=strategy)
    return [Loop(workers=_since_first(notes)) for notes in zip(*workers, strict=True)]


def _since_first(notes: Sequence[dict[str, Any]]) -> list[Worker]:
    zero = min(each["began"] for each in notes)
    return [
        Worker(
            steps=[(a - zero, b - zero, c - zero) for a, b, c in each["steps"]],
            samples=each["samples"],
            views=[(moment - zero, *view) for moment, *view in each["views"]],
            dropped=each["dropped"],
            end_s=each["ended"] - zero,
        )
        for each in notes
    ]


def lasting(size: int) -> Factors:
    """The last worker is slow all the time."""
    return [[1.0]] * (size - 1) + [[SLOWNESS]]


def ideal_samples_per_s(factors: Factors, batch: int, pace_s: float) -> float:
    """What all workers together do if no worker waits for another."""
    return sum(batch / (pace_s * statistics.mean(of_one)) for of_one in factors)
