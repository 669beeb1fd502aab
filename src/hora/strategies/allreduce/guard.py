"""Guard: detects what a script may not do under `update=sharded`, where a worker holds the mean of its shard alone.

Parameters lie in memory that all workers see, so only the optimizer may write them; and a gradient may not change
between backward and step, nor hold two means. Torch's version counters show it. Every check raises HoraError with the
way out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ...errors import HoraError
from ...parameters.buckets import BackwardHooks
from ...parameters.registry import ParameterRegistry


class Guard:
    """`name` names this worker in the errors."""

    def __init__(self, registry: ParameterRegistry, backward: BackwardHooks) -> None:
        self.name = ""
        self._registry = registry
        self._backward = backward
        self._versions: list[int] = []
        self._places: list[int] = []
        self._mixed: set[int] = set()  # gradients that hold a mean and, besides, what came after it
        # The gradients as the exchange left them: which, at what version, and how often one had been added to by then.
        self._marks: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    # -- parameters --------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """The parameters are as the optimizer left them."""
        self._versions = [p._version for p in self._registry.parameters]
        self._places = [p.data_ptr() for p in self._registry.parameters]

    def check_parameters(self) -> None:
        for index, parameter in enumerate(self._registry.parameters):
            if parameter._version != self._versions[index] or parameter.data_ptr() != self._places[index]:
                raise HoraError(
                    f"{self.name}: {self._registry.names[index]} was written by the script; under update=sharded its "
                    "memory is shared by all workers and only the optimizer may write it. Use update=replicated"
                )

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An exchange begins: which gradients still hold the mean of the last one?"""
        self._mixed = {index for index, mark in self._marks.items() if self._is_left(index, *mark)}
        self._marks.clear()

    def settle(self, indices: Iterable[int] | None = None) -> None:
        """These gradients are what they will be; without `indices` all that were."""
        for index in list(self._marks) if indices is None else indices:
            grad = self._registry.parameters[index].grad
            if grad is not None:
                self._marks[index] = (weakref.ref(grad), grad._version, self._backward.num_fires[index])

    def check_gradients(self, indices: set[int]) -> None:
        for index, (left, version, _) in self._marks.items():
            grad = self._registry.parameters[index].grad
            if index in indices and grad is not None and (left() is not grad or grad._version != version):
                raise HoraError(
                    f"{self.name}: the gradient of {self._registry.names[index]} was changed between backward() and "
                    "step(); under update=sharded a worker holds the mean of its shard alone. Clip with "
                    "hora.clip_grad_norm_, or use update=replicated"
                )

    def check_mixed(self, indices: set[int]) -> None:
        for index in sorted(indices & self._mixed):
            if self._registry.parameters[index].grad is not None:
                raise HoraError(
                    f"{self.name}: a second backward() that synchronises was added to the gradient of "
                    f"{self._registry.names[index]}, which held a mean already: under update=sharded only the last "
                    "backward() before a step may synchronise. Put the others into `with job.accumulate():`, or clear "
                    "the gradients between"
                )

    def _is_left(self, index: int, left: weakref.ref[torch.Tensor], version: int, fires: int) -> bool:
        """Whether this gradient was not cleared since the last exchange, only added to."""
        grad = self._registry.parameters[index].grad
        return (
            grad is not None and left() is grad and grad._version - version == self._backward.num_fires[index] - fires
        )
