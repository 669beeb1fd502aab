"""Small helpers for training loops: learning rates for larger batches, stopping early, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .job import current


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clips the norm of the mean gradient, as torch.nn.utils.clip_grad_norm_ does, under every strategy.

    A collective call: every worker makes it, between backward() and step(). Returns the norm before clipping.
    """
    return current().training.clip(parameters, max_norm, float(norm_type))


def scale_lr(
    optimizer: torch.optim.Optimizer, *, factor: float | None = None, warmup_steps: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """The linear rule: a batch `factor` times larger takes `factor` times the learning rate, reached over a warm-up.

    `factor` is the number of workers unless you say otherwise. Over `warmup_steps` calls of its `step()` the rate
    climbs from the optimizer's own to `factor` times that, and stays there. Returns a scheduler: step it once per
    optimizer step, and give it to `job.prepare(scheduler=…)` so that it is saved and stepped along.
    """
    times = float(current().size) if factor is None else float(factor)
    if not 0 < times < math.inf:
        raise ValueError(f"scale_lr: factor takes a number above 0, not {factor}")
    if warmup_steps < 0:
        raise ValueError(f"scale_lr: warmup_steps takes 0 or more, not {warmup_steps}")

    def rate(step: int) -> float:
        return times if step >= warmup_steps else 1.0 + (times - 1.0) * step / warmup_steps

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


class EarlyStopping:
    """Stops all workers once a value has reached `target`, or has not improved for `patience` calls.

        stopping = hora.EarlyStopping(patience=3)           # a loss: less is better
        stopping = hora.EarlyStopping(target=0.97, mode="max")
        …
        stopping(accuracy)                                  # once per evaluation; True once it has asked to stop

    Any worker's call counts: the first that asks stops all of them after the same step.
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

    def __call__(self, value: float | torch.Tensor) -> bool:
        number = float(value)
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
            if self.reason:
                current().stop(self.reason)
        return bool(self.reason)
