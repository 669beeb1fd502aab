"""Apart: what a Sync does whose gradients stay with their worker until its step.

After backward `p.grad` is this worker's own, to be clipped or looked at. Several backwards may pile up before a step,
each with its own weight: the pile is kept in units of the newest weight, so that each counts by its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import HoraError
from ...parameters.buckets import BackwardHooks, Bucket
from ...parameters.registry import ParameterRegistry
from . import nonfinite
from .accumulation import Accumulation
from .backward_hooks import WatchesBackward
from .sync import StepOutcome, Sync


class LocalGradients(WatchesBackward, Sync):
    def __init__(self, roster: ParameterRegistry) -> None:
        Sync.__init__(self, roster)
        self._backward = BackwardHooks(roster.parameters, roster.names, self)
        self._pile = Accumulation()
        self._factor = 1.0  # what evened the pile out at an optimizer's step; for those of others, which come later
        self._absent = False
        self._verdict = StepOutcome()

    @property
    def verdict(self) -> StepOutcome:
        return self._verdict

    def weigh(self, weight: float, expected: float) -> None:
        factor = self._pile.weigh(weight, expected)
        if factor != 1.0:
            self._multiply(factor, self.roster.parameters)

    @staticmethod
    def _multiply(factor: float, parameters: Iterable[torch.Tensor]) -> None:
        """These parameters' gradients times `factor`."""
        if factor != 1.0:
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def before_forward(self) -> None:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # the last: a checkpoint computes again, inside of a backward
        if self._backward.running:
            self._backward.forget()  # the last one was broken off by an exception that the user caught
        self._pile.forget_cleared()
        if not self._pile:
            self._factor = 1.0
        self.roster.check_unchanged()
        self._backward.hook(keep=bool(self._pile))

    def bucket_ready(self, bucket: Bucket) -> None:
        """Nothing leaves before the step: until then the gradient is the user's to change."""

    def after_backward(self) -> None:
        self._pile.add()
        self._pile.mark(self.roster.parameters)

    def absent_step(self) -> None:
        """What piled up in batches before this one counts."""
        if not self._pile:
            for parameter in self.roster.parameters:
                parameter.grad = None
        self._absent = True

    def share_gradients(self) -> None:
        """Nothing to do: an absent worker's gradient is none."""

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """This worker's own gradient."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def drop(self) -> None:
        for parameter in self.roster.parameters:
            parameter.grad = None
        self._pile.clear()
        self._backward.running = False
        self.exchanging = False

    def _even_out(self, parameters: Iterable[torch.Tensor]) -> None:
        """Backwards that piled up with different weights count by these, and together as often as they are."""
        pile = self._pile
        if pile:
            self._factor = pile.weight * pile.count / pile.total if pile.total else 1.0
        self._multiply(self._factor, parameters)

    def _own(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The optimizer's parameters, of which one must have a gradient, unless this worker has no samples."""
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._absent and not self._pile and all(p.grad is None for p in mine):
            raise HoraError(
                f"{type(optimizer).__name__}.step() without a backward() since the last one: there is no gradient to "
                "apply. Call loss.backward() first, or leave the step out on every worker"
            )
        return mine

    def _nonfinite(self, parameters: Iterable[torch.Tensor], name: str) -> str:
        """Which of this worker's gradients is not finite, in words, with the worker's name; before any has left."""
        named = [
            self.roster.names[self.roster.index[id(parameter)]]
            for parameter in parameters
            if parameter.grad is not None and not nonfinite.is_finite(parameter.grad.detach())
        ]
        if not named:
            return ""
        more = " and others" if len(named) > nonfinite.MOST_NAMED else ""
        return f"the gradient of {', '.join(named[: nonfinite.MOST_NAMED])}{more} on {name} is not finite"
