"""Gradient accumulation: the weights of the backward passes since the last exchange.

A worker's gradient is the mean over its own samples; in the mean over all workers it counts by their number. Weight 1
is an average worker's share, so an even deal scales nothing. Accumulated gradients are kept in units of the newest
weight, so that each backward pass counts by its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Accumulation:
    """`weight` and `expected` belong to the next backward pass; `total`, `total_expected` and `count` to those since
    the last exchange. `expected` is what the deal of samples promised, `weight` what `job.weight` may have changed."""

    def __init__(self) -> None:
        self.weight = self.expected = 1.0
        self.total = self.total_expected = 0.0
        self.count = 0
        self._mark: tuple[torch.Tensor, weakref.ref[torch.Tensor], int] | None = None  # one gradient as it was left

    def __bool__(self) -> bool:
        return bool(self.total_expected)

    def weigh(self, weight: float, expected: float, parameters: Iterable[torch.Tensor]) -> None:
        """Sets the weight of the next backward pass; gradients accumulated so far are rescaled to its units."""
        self.forget_cleared()
        if weight != self.weight and self:
            if not weight:
                raise ValueError("job.weight(0) in the middle of an accumulation: leave that backward() out instead")
            scale_gradients(parameters, self.weight / weight)
        self.weight, self.expected = weight, expected

    def add(self) -> None:
        """Counts one backward pass."""
        self.total += self.weight
        self.total_expected += self.expected
        self.count += 1

    def mark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remembers one accumulated gradient, so that `forget_cleared` notices if the user clears it."""
        self._mark = None
        for parameter in parameters:
            if parameter.grad is not None:
                self._mark = (parameter, weakref.ref(parameter.grad), parameter.grad._version)
                if parameter.grad.layout is torch.strided:
                    return  # rather than a sparse one

    def forget_cleared(self) -> None:
        """An accumulation whose gradients the user has cleared counts no more."""
        if self and self._mark is not None:
            parameter, left, version = self._mark
            grad = parameter.grad
            if grad is None or ((left() is not grad or grad._version != version) and not bool(_values(grad).any())):
                self.clear()

    def clear(self) -> None:
        self.total = self.total_expected = 0.0
        self.count = 0
        self._mark = None


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies the gradients of these parameters, dense or sparse, in place."""
    if factor == 1.0:
        return
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    dense = [grad for grad in grads if grad.layout is torch.strided]
    with torch.no_grad():
        if dense:
            torch._foreach_mul_(dense, factor)
        for grad in grads:
            if grad.layout is not torch.strided:
                grad.mul_(factor)


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach()._values() if grad.layout is torch.sparse_coo else grad.detach()
