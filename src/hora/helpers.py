"""Helpers for training loops: gradient clipping, and a learning rate schedule for larger batches."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .job import current


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """As torch.nn.utils.clip_grad_norm_, also under update=sharded, where no worker holds the whole mean gradient.

    In the all-reduce family it clips the mean gradient. Under ps, local and diloco it clips the worker's own gradient;
    `ps:clip_norm=` clips the mean on the servers (sync). Call it on every worker, between backward() and step(): under
    update=sharded it is collective. Returns the norm before clipping.
    """
    return current().training.clip(parameters, max_norm, float(norm_type))


def scale_lr(
    optimizer: torch.optim.Optimizer, *, factor: float | None = None, warmup_steps: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """The linear scaling rule: a batch `factor` times larger takes `factor` times the learning rate, after a warm-up.

    `factor` is the number of workers by default. Over `warmup_steps` calls of its `step()` the rate grows from the
    optimizer's own to `factor` times that. Returns a scheduler: step it once per optimizer step, and give it to
    `job.prepare(scheduler=…)` so that it is saved.
    """
    times = float(current().size) if factor is None else float(factor)
    if not 0 < times < math.inf:
        raise ValueError(f"scale_lr: factor takes a number above 0, not {factor}")
    if warmup_steps < 0:
        raise ValueError(f"scale_lr: warmup_steps takes 0 or more, not {warmup_steps}")

    def rate(step: int) -> float:
        return times if step >= warmup_steps else 1.0 + (times - 1.0) * step / warmup_steps

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
