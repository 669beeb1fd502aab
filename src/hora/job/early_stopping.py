"""EarlyStopping: stops all workers once a value, averaged over them, is good enough or does not improve."""

from __future__ import annotations

import math

import torch

from .job import Job, current
from .worker_means import WorkerMeans


class EarlyStopping:
    """Stops all workers once a value has reached `target`, or has not improved for `patience` calls.

        stopping = hora.EarlyStopping(patience=3)           # a loss: less is better
        stopping = hora.EarlyStopping(target=0.97, mode="max")
        …
        stopping(accuracy)                                  # once per evaluation; True once it has asked to stop

    The mean over the workers that call it counts. It stops all of them after the same step.
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
        """Takes this worker's value, a number or a tensor of one element; returns whether the training is to stop."""
        job = current()
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        if job.size == 1:
            self._judge(job, number)
            return bool(self.reason)
        if self._means is None:
            sync = job.training.sync
            self._means = job._means.make(job.rank, job.size, together=sync is not None and sync.lockstep)
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
