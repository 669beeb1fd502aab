"""EarlyStopping: ends a training for all workers once a value, averaged over them, is good enough or gets no better."""

from __future__ import annotations

import math
import threading

import msgspec
import torch

from .coordinator import CoordinatorConnection, CoordinatorEvent
from .job import Job, current

FIRST_S = 1.0
"""At the first call: how long the other workers may take to come to theirs, before those that came are all."""

WAIT_S = 0.25
"""At later calls: how long one waits for the others' values, where all step together."""


class WorkerMeans:
    """The mean over the workers of a value that each of them gives from time to time.

    Where they step together (`together`) the k-th values of all make the k-th mean, so that all workers see the same
    means. Otherwise a worker gets the mean of everybody's newest. A worker that has ended, or never gives a value, is
    not waited for.
    """

    def __init__(self, control: CoordinatorConnection, rank: int, size: int, topic: str, together: bool) -> None:
        self._control = control
        self._rank = rank
        self._size = size
        self._topic = topic
        self._together = together
        self._values: dict[int, list[float]] = {rank: []}
        self._behind: dict[int, int] = {}  # by how many calls a worker that was waited for in vain is behind
        self._ended: set[int] = set()
        self._num_means = 0
        self.num_workers = 1
        """In the last mean."""
        self._news = threading.Condition()

    def add(self, value: float) -> list[float]:
        """This worker's next value. The means that are known now and were not before, oldest first."""
        self._control.send(self._topic, msgspec.msgpack.encode(value))
        with self._news:
            mine = self._values[self._rank]
            mine.append(value)
            if not self._together:
                newest = [values[-1] for rank, values in self._values.items() if rank not in self._ended]
                self.num_workers = len(newest)
                return [math.fsum(newest) / len(newest)]
            first = len(mine) == 1
            self._news.wait_for(lambda: self._has_all(first), FIRST_S if first else WAIT_S)
            self._behind = {rank: len(mine) - len(values) for rank, values in self._values.items()}
            known = min(len(values) for rank, values in self._values.items() if rank not in self._ended)
            every = self._values.values()
            rows = [[values[k] for values in every if len(values) > k] for k in range(self._num_means, known)]
            self._num_means = max(known, self._num_means)
        self.num_workers = len(rows[-1]) if rows else self.num_workers
        return [math.fsum(row) / len(row) for row in rows]

    def _has_all(self, first: bool) -> bool:
        if first and len(self._values) < self._size:
            return False
        wanted = len(self._values[self._rank])
        return all(
            len(values) >= wanted - self._behind.get(rank, 0)
            for rank, values in self._values.items()
            if rank not in self._ended
        )

    def hear(self, event: CoordinatorEvent) -> None:
        """On the line's thread: another worker has told a value, or has ended."""
        if event.member is None or event.member.role != "worker":
            return
        rank = event.member.rank
        with self._news:
            if event.kind == "message" and event.topic == self._topic:
                self._values.setdefault(rank, []).append(msgspec.msgpack.decode(event.body, type=float))
            elif event.kind in ("left", "died") and rank != self._rank:
                self._ended.add(rank)
            self._news.notify_all()


class EarlyStopping:
    """Stops all workers once a value has reached `target`, or has not improved for `patience` calls.

        stopping = hora.EarlyStopping(patience=3)           # a loss: less is better
        stopping = hora.EarlyStopping(target=0.97, mode="max")
        …
        stopping(accuracy)                                  # once per evaluation; True once it has asked to stop

    What counts is the mean over the workers that call it. It stops all of them after the same step.
    """

    def __init__(
        self,
        *,
        patience: int | None = None,
        target: float | None = None,
        mode: str = "min",
        min_delta: float = 0.0,
    ) -> None:
        if patience is None and target is None:
            raise ValueError("EarlyStopping needs patience= or target=, or both")
        if patience is not None and patience < 1:
            raise ValueError(f"EarlyStopping: patience takes 1 or more, not {patience}")
        if mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping: mode {mode!r} is unknown; there are: min, max")
        if not min_delta >= 0:
            raise ValueError(f"EarlyStopping: min_delta takes 0 or more, not {min_delta}")
        self.patience = patience
        self.target = target
        self.mode = mode
        self.min_delta = min_delta
        self.best: float | None = None
        self.num_bad = 0
        self.reason = ""
        self._means: WorkerMeans | None = None

    def __call__(self, value: float | torch.Tensor) -> bool:
        """This worker's value, a number or a tensor of one element; whether the training is to stop."""
        job = current()
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        if job.size == 1:
            self._judge(job, number)
            return bool(self.reason)
        if self._means is None:
            self._means = job._worker_means(WorkerMeans)
        for mean in self._means.add(number):
            self._judge(job, mean)
        return bool(self.reason)

    def _judge(self, job: Job, number: float) -> None:
        sign = 1.0 if self.mode == "min" else -1.0
        better = self.best is None or sign * number < sign * self.best - self.min_delta
        if better and not math.isnan(number):
            self.best, self.num_bad = number, 0
        else:
            self.num_bad += 1
        if not self.reason:
            if self.target is not None and sign * number <= sign * self.target:
                self.reason = f"{number:.6g} has reached the target {self.target:.6g}"
            elif self.patience is not None and self.num_bad >= self.patience:
                best = "nan" if self.best is None else f"{self.best:.6g}"
                self.reason = f"no better than {best} for {self.num_bad} calls"
            if self.reason and self._means is not None and self._means.num_workers > 1:
                self.reason += f" (mean of {self._means.num_workers} workers)"
            if self.reason:
                job.stop(self.reason)
