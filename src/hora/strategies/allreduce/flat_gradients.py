"""FlatGradients: the gradients of one exchange as vectors that a reducer may write."""

from __future__ import annotations

import collections

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flatten, is_sole_owner


class FlatGradients:
    """`missing`: gradients that this worker lacks; zeros stand in for them."""

    def __init__(self, registry: ParameterRegistry) -> None:
        self.missing: set[int] = set()
        self._registry = registry
        self._flat: dict[int, torch.Tensor] = {}
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # gradients that autograd still reads

    def clear(self) -> None:
        self._flat.clear()
        self._copied.clear()

    def __getitem__(self, index: int) -> torch.Tensor:
        """The gradient of parameter `index`, in the order in which the parameter lies in memory."""
        flat = self._flat.get(index)
        if flat is None:
            parameter = self._registry.parameters[index]
            grad = parameter.grad
            if grad is None:
                self.missing.add(index)
                grad = parameter.grad = torch.zeros_like(parameter)
            elif grad.layout is not torch.strided:
                raise HoraError(
                    f"the gradient of {self._registry.names[index]} is sparse now and was dense in the first "
                    "backward(): it must be the same on every worker and in every step"
                )
            elif grad.stride() != parameter.stride():
                with torch.no_grad():
                    grad = parameter.grad = torch.empty_like(parameter).copy_(grad)
            elif not is_sole_owner(grad):
                copy = torch.empty_like(grad).copy_(grad.detach())
                self._copied[index] = (grad, copy)
                grad = copy
            flat = self._flat[index] = flatten(grad.detach())
        return flat

    def write_back(self) -> None:
        """After backward: means of copied gradients go back. Gradients that shared memory are separated for good."""
        places = collections.Counter(grad.data_ptr() for grad, _ in self._copied.values())
        with torch.no_grad():
            for index, (grad, copy) in self._copied.items():
                if places[grad.data_ptr()] == 1:
                    grad.copy_(copy)
                else:
                    self._registry.parameters[index].grad = copy
        self._copied.clear()

    def drop_missing(self, index: int) -> None:
        """No worker has a gradient of this parameter."""
        if index in self.missing:
            self._registry.parameters[index].grad = None


def broadcast_gradients(registry: ParameterRegistry, group: Group) -> None:
    """Collective: all workers get rank 0's gradients, those that are None included."""
    trained = [p for p in registry.parameters if p.requires_grad]
    there = torch.tensor([float(p.grad is not None) for p in trained])
    group.broadcast(there, name="gradients there")
    for parameter, has in zip(trained, there.tolist(), strict=True):
        if not has:
            parameter.grad = None
        elif parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [p.grad for p in trained if p.grad is not None]
    ParameterRegistry.broadcast([grad.detach() for grad in grads if grad.layout is torch.strided], group)
