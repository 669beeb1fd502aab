"""Means: how the workers' parameters become one in a round.

    pack        on the training thread: what this worker gives, a vector of these parameters
    travel      on any thread, collective: what comes of everybody's, each counting by its share
    settle      on the training thread: the parameters become what was agreed; `late`: steps were taken meanwhile

`Plain` averages the parameters themselves. `Outer` averages their drift from the last common point, which it keeps,
and takes the outer step from there; so does local SGD where drifts travel in fewer bytes. `Kept` lets servers keep that
point and take the mean.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...compression.compressor import Compressor
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flat_view
from .counted_all_reduce import CountedAllReduce

if TYPE_CHECKING:
    from .config import RoundStrategy


class Averager(abc.ABC):
    """Sums are taken in float32 at least, and rounded once to a parameter's own type."""

    def __init__(self, registry: ParameterRegistry, bulk: CountedAllReduce) -> None:
        self._registry = registry
        self._bulk = bulk

    @abc.abstractmethod
    def pack(self, indices: Sequence[int]) -> torch.Tensor: ...

    @abc.abstractmethod
    def travel(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor: ...

    @abc.abstractmethod
    def settle(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None: ...

    def begin(self, indices: Sequence[int]) -> None:
        """The workers' parameters are all the same now: a common point. Collective."""

    def extend(self, indices: Sequence[int]) -> None:
        """These are trained from now on; they are the same on all workers."""

    def common(self, index: int) -> torch.Tensor:
        """A parameter as it was agreed upon last."""
        return self._registry.parameters[index].detach()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs besides the parameters; the same on every worker."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """After `begin`."""

    def saved(self, rounds: int) -> str:
        """What a wire saved in so many rounds, in words."""
        return ""

    def close(self) -> None:
        """No round will come any more."""

    def stay(self) -> None:
        """After this worker has left the run: it stays as long as others need something of it."""

    def _parameters(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [self._registry.parameters[index].detach() for index in indices]


def vector_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements, in float32 or, where one of them is, in float64."""
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    vector = torch.empty(sum(t.numel() for t in tensors), dtype=wide, device=tensors[0].device if tensors else "cpu")
    for tensor, place in pieces(tensors, vector):
        place.copy_(flat_view(tensor))
    return vector


def pieces(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor, and the stretch of the vector that stands for it."""
    return list(zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True))


def pseudo_gradient(points: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far these points are from where the tensors are now, as a vector."""
    vector = vector_of(points)
    for tensor, place in pieces(tensors, vector):
        place.sub_(flat_view(tensor))
    return vector


def put(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
    """The inverse of `vector_of`."""
    for tensor, place in pieces(tensors, vector):
        flat = flat_view(tensor)
        flat.copy_(place)
        if flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            tensor.copy_(flat.view(tensor.shape))


class PlainAverager(Averager):
    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return vector_of(self._parameters(indices))

    def travel(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        self._bulk.weighted_sum(vector, shares, "parameters of a round")
        return vector

    def settle(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        put(self._parameters(indices), result)


class OuterAverager(Averager):
    """`outer_lr` and `outer_momentum` are those of torch's own SGD with Nesterov momentum, over the common point. For
    local SGD they are 1 and 0: then the point becomes the mean of the workers' parameters."""

    def __init__(self, registry: ParameterRegistry, bulk: CountedAllReduce, strategy: RoundStrategy) -> None:
        super().__init__(registry, bulk)
        self._lr, self._momentum, self._overlap = strategy.outer_lr, strategy.outer_momentum, strategy.overlap
        self._wire = Compressor(strategy.wire, strategy.topk)
        self._points: dict[int, torch.Tensor] = {}
        self._optimizer: torch.optim.SGD

    def begin(self, indices: Sequence[int]) -> None:
        """What was a common point before goes on from here with its momentum."""
        known = [index for index in self._points if index not in indices]
        self.extend([*known, *indices])
        self._wire.reset()

    def extend(self, indices: Sequence[int]) -> None:
        old = {index: self._optimizer.state[point] for index, point in self._points.items()} if self._points else {}
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            # The point moves by less than the drift: in half precision it might not move at all.
            self._points[index] = parameter.clone() if parameter.element_size() >= 4 else parameter.float()
        self._optimizer = torch.optim.SGD(
            list(self._points.values()) or [torch.zeros(0)],
            lr=self._lr,
            momentum=self._momentum,
            nesterov=self._momentum > 0,
        )
        for index, point in self._points.items():
            if index in old:
                self._optimizer.state[point] = old[index]

    def common(self, index: int) -> torch.Tensor:
        return self._points[index] if index in self._points else super().common(index)

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return pseudo_gradient([self._points[index] for index in indices], self._parameters(indices))

    def travel(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        result = vector.clone() if self._overlap else vector
        between = self._wire.sum_for(tuple(indices), vector.numel())
        self._bulk.weighted_sum(result, shares, "drift of a round", between)
        if between is not None:
            between.settle(applied=True)  # every round counts
        return result

    def settle(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        """Steps that were taken while the drift travelled are kept: they are part of the next one."""
        points, parameters = [self._points[index] for index in indices], self._parameters(indices)
        if late:
            for (point, drift), parameter in zip(pieces(points, vector), parameters, strict=True):
                _add(parameter, drift.view(-1) - flat_view(point))  # as far as it has come since it was sent
        for point, gradient in pieces(points, result):
            if bool(gradient.any()):  # else nobody trains it, and its momentum is not to carry it on
                point.grad = torch.empty_like(point)
                flat_view(point.grad).copy_(gradient)
        self._optimizer.step()
        for point, parameter in zip(points, parameters, strict=True):
            point.grad = None
            if late:
                _add(parameter, flat_view(point))
            else:
                parameter.copy_(point)

    def saved(self, rounds: int) -> str:
        return self._wire.savings.describe(self._wire.name, rounds, "round")

    def state(self) -> dict[str, torch.Tensor]:
        """Rounding errors that are still to be fed back are forgotten, here as by whoever goes on from the checkpoint;
        not what topk owes, which is most of what was learnt in many rounds."""
        if self._wire.name != "topk":
            self._wire.reset()
        names, known = self._registry.names, self._optimizer.state
        points = {f"point:{names[index]}": point for index, point in self._points.items()}
        momentum = {
            f"momentum:{names[index]}": buffer
            for index, point in self._points.items()
            if (buffer := known[point].get("momentum_buffer")) is not None
        }
        return {**points, **momentum}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for index, point in self._points.items():
            name = self._registry.names[index]
            if (saved := state.get(f"point:{name}")) is not None:
                point.copy_(saved)
            momentum = state.get(f"momentum:{name}")
            kept: dict[str, Any] = {"momentum_buffer": momentum.to(point)} if momentum is not None else {}
            self._optimizer.state[point] = kept


def _add(parameter: torch.Tensor, flat: torch.Tensor) -> None:
    """Elements in the order of `laid`."""
    mine = flat_view(parameter)
    mine.add_(flat)
    if mine.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        parameter.copy_(mine.view(parameter.shape))
