"""LocalGradients: the part of a Sync whose gradients stay with their worker until the step (ps, local, diloco).

After backward `p.grad` is this worker's own, to be clipped or inspected.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import HoraError
from ...parameters.buckets import Bucket
from ...parameters.registry import ParameterRegistry
from . import nonfinite
from .accumulation import scale_gradients
from .hooks import TrainingHooks
from .sync import Sync


class LocalGradients(Sync):
    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks) -> None:
        super().__init__(registry, hooks)
        self._accumulation = hooks.accumulation
        self._factor = 1.0  # of the accumulation at an optimizer's step; for the steps of the other optimizers
        self._shadow = False  # this worker has no samples in the step under way

    def before_forward(self) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # the last: an activation checkpoint recomputes inside a backward
        if self._backward.running:
            self._backward.forget()  # the last one was broken off by an exception that the user caught
        self._accumulation.forget_cleared()
        if not self._accumulation:
            self._factor = 1.0
        self.registry.check_unchanged()
        self._backward.hook(keep=bool(self._accumulation))

    def bucket_ready(self, bucket: Bucket) -> None:
        """Nothing is sent before the step: until then the gradient is the user's to change."""

    def after_backward(self, shadow: bool = False) -> None:
        if not shadow:
            self._accumulation.add()
            self._accumulation.mark(self.registry.parameters)
            return
        if not self._accumulation:  # else what was accumulated in earlier batches counts
            for parameter in self.registry.parameters:
                parameter.grad = None
        self._shadow = True

    def _drop(self) -> None:
        for parameter in self.registry.parameters:
            parameter.grad = None
        self._accumulation.clear()
        self._backward.running = False
        self.hooks.exchanging = False

    def _average_accumulated(self, parameters: Iterable[torch.Tensor]) -> None:
        """Backward passes that were accumulated with different weights count by these."""
        accumulated = self._accumulation
        if accumulated:
            total = accumulated.total
            self._factor = accumulated.weight * accumulated.count / total if total else 1.0
        scale_gradients(parameters, self._factor)

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The optimizer's parameters. HoraError if none has a gradient and this worker has samples."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._shadow and not self._accumulation and all(p.grad is None for p in held):
            raise HoraError(
                f"{type(optimizer).__name__}.step() without a backward() since the last one: there is no gradient to "
                "apply. Call loss.backward() first, or leave the step out on every worker"
            )
        return held

    def _nonfinite(self, parameters: Iterable[torch.Tensor], worker: str) -> str:
        """Names this worker's gradients that are NaN or infinite, before any is sent; empty if all are finite."""
        names = [
            self.registry.names[self.registry.index[id(parameter)]]
            for parameter in parameters
            if parameter.grad is not None and not nonfinite.is_finite(parameter.grad.detach())
        ]
        return f"the gradient of {nonfinite.listed(names)} on {worker} is not finite" if names else ""
