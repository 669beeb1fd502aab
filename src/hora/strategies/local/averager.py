"""Averagers: how the workers' parameters become the same in a round.

    pack        on the training thread: this worker's contribution, a vector of these parameters
    reduce      collective, on any thread: the result of all contributions, each weighted by its share
    apply       on the training thread: writes the result into the parameters; `late`: steps were taken since `pack`

Averager averages the parameters. OuterAverager averages pseudo-gradients, the differences between the anchor
parameters and a worker's own, and takes the outer step of DiLoCo with their mean; Local SGD uses it where a compressed
wire sends pseudo-gradients. ServerAverager (server_averager.py) leaves anchors and mean to the parameter servers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...compression.compressor import Compressor
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flat_view
from ..common import sparse
from .counted_all_reduce import CountedAllReduce

if TYPE_CHECKING:
    from .config import RoundStrategy


class Averager:
    """Averages the parameters. Sums are taken in float32 at least, and rounded once to a parameter's own dtype."""

    def __init__(self, registry: ParameterRegistry, all_reduce: CountedAllReduce) -> None:
        self._registry = registry
        self._all_reduce = all_reduce

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return pack(self._parameters(indices))

    def reduce(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        self._all_reduce.weighted_sum(vector, shares, "parameters of a round")
        return vector

    def apply(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        unpack(result, self._parameters(indices))

    def set_anchors(self, indices: Sequence[int]) -> None:
        """Collective: all workers have the same parameters now, which become the anchors."""

    def add_anchors(self, indices: Sequence[int]) -> None:
        """These parameters are trained from now on; they are the same on all workers."""

    def agreed(self, index: int) -> torch.Tensor:
        """A parameter as the workers agreed on it last."""
        return self._registry.parameters[index].detach()

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint needs besides the parameters; the same on every worker."""
        return {}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Loads `state`, after `set_anchors`."""

    def describe_savings(self, rounds: int) -> str:
        """What a compressed wire saved in so many rounds."""
        return ""

    def enter_group(self) -> None:
        """Collective over the all-reduce's group, in which the next rounds are."""

    def leave_group(self) -> None:
        """Between two rounds. What earlier ones have led to, such as outer momentum, stays."""

    def stay(self) -> None:
        """Blocks, after this worker has left the run, while others need its server."""

    def _parameters(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [self._registry.parameters[index].detach() for index in indices]


class OuterAverager(Averager):
    """The outer step is torch.optim.SGD's with Nesterov momentum, over the anchors. Local SGD has `outer_lr` 1 and
    `outer_momentum` 0: the anchors become the mean of the workers' parameters."""

    def __init__(self, registry: ParameterRegistry, all_reduce: CountedAllReduce, strategy: RoundStrategy) -> None:
        super().__init__(registry, all_reduce)
        self._overlap = strategy.overlap
        self._compressor = Compressor(strategy.wire, strategy.topk)
        self._anchors: dict[int, torch.Tensor] = {}
        momentum = strategy.outer_momentum
        self._optimizer = torch.optim.SGD(
            [torch.zeros(0)], lr=strategy.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def set_anchors(self, indices: Sequence[int]) -> None:
        """Anchors that there were before keep their momentum."""
        self.add_anchors([*(index for index in self._anchors if index not in indices), *indices])
        self._compressor.reset()

    def add_anchors(self, indices: Sequence[int]) -> None:
        added = []
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            if index in self._anchors:
                self._anchors[index].copy_(parameter)
            else:
                # An anchor moves by less than the pseudo-gradient: in half precision it might not move at all.
                self._anchors[index] = parameter.clone() if parameter.element_size() >= 4 else parameter.float()
                added.append(self._anchors[index])
        if added:
            self._optimizer.add_param_group({"params": added})

    def agreed(self, index: int) -> torch.Tensor:
        return self._anchors[index] if index in self._anchors else super().agreed(index)

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return pseudo_gradient([self._anchors[index] for index in indices], self._parameters(indices))

    def reduce(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        result = vector.clone() if self._overlap else vector
        between = self._compressor.sum_for(tuple(indices), vector.numel())
        self._all_reduce.weighted_sum(result, shares, "pseudo-gradient of a round", between)
        if between is not None:
            between.settle(applied=True)  # every round counts
        return result

    def apply(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        """Steps that were taken since `pack` are kept: they are part of the next pseudo-gradient."""
        anchors, parameters = [self._anchors[index] for index in indices], self._parameters(indices)
        if late:  # the steps since `pack`: the parameter, less what it was then (anchor - pseudo-gradient)
            for (anchor, packed), parameter in zip(pieces(anchors, vector), parameters, strict=True):
                unpack(flat_view(parameter) + (packed - flat_view(anchor)), [parameter])
        for anchor, gradient in pieces(anchors, result):
            if bool(gradient.any()):  # else no worker trains it, and momentum must not move it
                anchor.grad = torch.empty_like(anchor)
                flat_view(anchor.grad).copy_(gradient)
        self._optimizer.step()
        for anchor, parameter in zip(anchors, parameters, strict=True):
            anchor.grad = None
            if late:
                unpack(flat_view(parameter) + flat_view(anchor), [parameter])
            else:
                parameter.copy_(anchor)

    def describe_savings(self, rounds: int) -> str:
        return self._compressor.savings.describe(self._compressor.name, rounds, "round")

    def state(self) -> dict[str, torch.Tensor]:
        """Rounding errors that were to be fed back are dropped, as by a run that goes on from the checkpoint; not
        topk's residuals, which are most of what was learnt in many rounds."""
        if self._compressor.name != "topk":
            self._compressor.reset()
        names, known = self._registry.names, self._optimizer.state
        points = {f"point:{names[index]}": anchor for index, anchor in self._anchors.items()}
        momentum = {
            f"momentum:{names[index]}": buffer
            for index, anchor in self._anchors.items()
            if (buffer := known[anchor].get("momentum_buffer")) is not None
        }
        return {**points, **momentum}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for index, anchor in self._anchors.items():
            name = self._registry.names[index]
            if (saved := state.get(f"point:{name}")) is not None:
                anchor.copy_(saved)
            momentum = state.get(f"momentum:{name}")
            kept: dict[str, Any] = {"momentum_buffer": momentum.to(anchor)} if momentum is not None else {}
            self._optimizer.state[anchor] = kept


def average_gradients(
    all_reduce: CountedAllReduce,
    registry: ParameterRegistry,
    optimizer: torch.optim.Optimizer,
    shares: Sequence[float] | None,
    leaving: bool,
) -> None:
    """Collective, in the warm-up: every gradient of this optimizer becomes the mean over all workers, by their shares.

    It is None only where it is None on every worker. A worker that is `leaving` takes part and keeps its own."""
    group = all_reduce.group
    mine = [p for each in optimizer.param_groups for p in each["params"]]
    kept = [parameter.grad for parameter in mine]
    counts = shares is not None and not leaving and bool(shares[group.rank])
    flags = torch.zeros(2, len(mine))
    for number, parameter in enumerate(mine):
        if counts and parameter.grad is not None:
            flags[0, number] = 1
            flags[1, number] = parameter.grad.layout is torch.sparse_coo
    group.all_reduce(flags, name="holders of gradients")
    dense = []
    for parameter, num_holders, num_sparse in zip(mine, *flags.tolist(), strict=True):
        if not counts:
            parameter.grad = None
        if num_sparse:
            assert shares is not None
            name = registry.names[registry.index[id(parameter)]]
            parameter.grad = sparse.mean(group, parameter, name, shares[group.rank] * group.size)
        elif num_holders:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(parameter.grad.detach())
    if dense and shares is not None:
        vector = pack(dense)
        all_reduce.weighted_sum(vector, shares, "gradients of the warm-up")
        unpack(vector, dense)
    if leaving:
        for parameter, grad in zip(mine, kept, strict=True):
            parameter.grad = grad


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of all elements as a vector, in float32 or, where one of the tensors is, in float64."""
    wide = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    vector = torch.empty(sum(t.numel() for t in tensors), dtype=wide, device=tensors[0].device if tensors else "cpu")
    for tensor, piece in pieces(tensors, vector):
        piece.copy_(flat_view(tensor))
    return vector


def unpack(vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of `pack`: writes the vector into the tensors."""
    for tensor, piece in pieces(tensors, vector):
        flat = flat_view(tensor)
        flat.copy_(piece)
        if flat.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def pieces(tensors: Sequence[torch.Tensor], vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor with its piece of the vector."""
    return list(zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True))


def pseudo_gradient(anchors: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """The anchors minus the parameters, as a vector."""
    vector = pack(anchors)
    for parameter, piece in pieces(parameters, vector):
        piece.sub_(flat_view(parameter))
    return vector
