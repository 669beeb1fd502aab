"""Pile: what the backwards since the last exchange weigh. Each counts by its own weight, however many pile up."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class Accumulation:
    """`weight` is that of the newest backward, in whose units the gradients are kept; see replicated.py on weights."""

    def __init__(self) -> None:
        self.weight = self.expected = 1.0  # of the next backward
        self.total = self.total_expected = 0.0  # of those since the last exchange
        self.count = 0  # how many they are
        self._mark: tuple[torch.Tensor, weakref.ref[torch.Tensor], int] | None = None  # a gradient, as it was left

    def __bool__(self) -> bool:
        return bool(self.total_expected)

    def weigh(self, weight: float, expected: float) -> float:
        """The next backwards count so much. What the gradients of the pile are to be multiplied by, to be kept in units
        of that."""
        self.forget_cleared()
        factor = 1.0
        if weight != self.weight and self:
            if not weight:
                raise ValueError("job.weight(0) in the middle of an accumulation: leave that backward() out instead")
            factor = self.weight / weight
        self.weight, self.expected = weight, expected
        return factor

    def add(self) -> None:
        """A backward has come on top."""
        self.total += self.weight
        self.total_expected += self.expected
        self.count += 1

    def mark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remembers one gradient of the pile, so that it is noticed if the user clears it."""
        self._mark = None
        for parameter in parameters:
            if parameter.grad is not None:
                self._mark = (parameter, weakref.ref(parameter.grad), parameter.grad._version)
                if parameter.grad.layout is torch.strided:
                    return  # rather than a sparse one

    def forget_cleared(self) -> None:
        """An accumulation that was given up, its gradients cleared, counts no more."""
        if self and self._mark is not None:
            parameter, left, version = self._mark
            grad = parameter.grad
            if grad is None or ((left() is not grad or grad._version != version) and not bool(_values(grad).any())):
                self.clear()

    def clear(self) -> None:
        self.total = self.total_expected = 0.0
        self.count = 0
        self._mark = None


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach()._values() if grad.layout is torch.sparse_coo else grad.detach()
