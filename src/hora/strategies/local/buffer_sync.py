"""Extras: what a round averages besides the parameters: buffers, and the optimizers' state if it is so chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...collectives import objects
from ...parameters.registry import ParameterRegistry
from ..common.nonfinite import is_finite
from .averager import put, vector_of
from .counted_all_reduce import CountedAllReduce

BROKEN = 2.0

Place = tuple[int, int, str]  # optimizer, parameter, key


class BufferSync:
    def __init__(self, registry: ParameterRegistry, bulk: CountedAllReduce) -> None:
        self._registry = registry
        self._group = bulk.group
        self._bulk = bulk
        self._versions: list[tuple[int, int]] = []
        self.remember()
        self._endless = self._infinite()  # from the start, a mask of -inf perhaps

    # -- buffers -----------------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """The buffers are now what all have."""
        self._registry.refresh_buffers()
        self._versions = self._registry.signature()

    @property
    def news(self) -> float:
        """Whether the buffers have changed since all had the same: 0, 1, or BROKEN if one is NaN or infinite now."""
        self._registry.refresh_buffers()
        if self._registry.signature() == self._versions:
            return 0.0
        return BROKEN if self._infinite() - self._endless else 1.0

    def _infinite(self) -> set[str]:
        named = self._registry.buffers.items()
        return {name for name, buffer in named if buffer.is_floating_point() and not is_finite(buffer.detach())}

    def floats(self) -> list[torch.Tensor]:
        return [buffer.detach() for buffer in self._registry.buffers.values() if buffer.is_floating_point()]

    def counts(self) -> list[torch.Tensor]:
        """Buffers of whole numbers, of which there is no mean: rank 0's count."""
        return [buffer.detach() for buffer in self._registry.buffers.values() if not buffer.is_floating_point()]

    def pack(self) -> torch.Tensor:
        return vector_of(self.floats())

    def travel(self, vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        """Collective: the mean of everybody's buffers."""
        result = vector.clone()
        self._bulk.weighted_sum(result, shares, "buffers of a round")
        return result

    def settle(self, vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        """What happened to them while they travelled is kept."""
        floats = self.floats()
        if late:
            now = vector_of(floats)
            result = torch.where(result == vector, now, now + (result - vector))  # the first: it may be infinite
        put(floats, result)
        if not late:
            self.remember()

    def share_counts(self) -> None:
        """Collective."""
        ParameterRegistry.broadcast(self.counts(), self._group)
        self.remember()

    # -- optimizer state ---------------------------------------------------------------------------------------------

    def average_states(self, shares: Sequence[float]) -> None:
        """Collective: every worker's state becomes the mean over those that have it. What is no tensor stays."""
        kept = self._states()
        mine = [[*place, list(tensor.shape)] for place, tensor in kept.items()]
        everybody = objects.all_gather_objects(self._group, mine, "optimizer state")
        places: dict[Place, tuple[list[int], float]] = {}
        for share, theirs in zip(shares, everybody, strict=True):
            for number, index, key, shape in theirs:
                _, total = places.get((number, index, key), (shape, 0.0))
                places[number, index, key] = (shape, total + share)
        order = [place for place in sorted(places) if places[place][1]]
        if not order:
            return
        for place in order:
            if place not in kept:
                kept[place] = self._make_room(place, places[place][0])
        have = {(number, index, key) for number, index, key, _ in everybody[self._group.rank]}
        vector = vector_of([kept[place] for place in order])
        share = shares[self._group.rank]
        for place, stretch in zip(order, vector.split([kept[place].numel() for place in order]), strict=True):
            stretch.mul_(share / places[place][1] if place in have else 0.0)
        self._bulk.sum(vector, "optimizer state of a round")
        put([kept[place] for place in order], vector)

    def reset_states(self) -> None:
        for optimizer in self._registry.optimizers:
            optimizer.state.clear()

    def _states(self) -> dict[Place, torch.Tensor]:
        index = self._registry.index
        return {
            (number, index[id(parameter)], key): value.detach()
            for number, optimizer in enumerate(self._registry.optimizers)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided
        }

    def _make_room(self, place: Place, shape: list[int]) -> torch.Tensor:
        """Another worker has state here, this one has none yet: it has had no gradient for that parameter."""
        number, index, key = place
        parameter = self._registry.parameters[index]
        state: dict[str, Any] = self._registry.optimizers[number].state[parameter]
        if tuple(shape) == tuple(parameter.shape):
            state[key] = torch.zeros_like(parameter, requires_grad=False)
        else:
            fused = any(
                group.get("fused") or group.get("capturable")
                for group in self._registry.optimizers[number].param_groups
                if any(each is parameter for each in group["params"])
            )  # these count their steps where the parameter is
            state[key] = torch.zeros(shape, dtype=torch.float32, device=parameter.device if fused else None)
        return state[key]
