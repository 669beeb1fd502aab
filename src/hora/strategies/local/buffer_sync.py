"""BufferSync: averages buffers at the end of a round, and the optimizers' state where the strategy says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...collectives import objects
from ...parameters.registry import ParameterRegistry
from ..common.nonfinite import is_finite
from .averager import pack, unpack
from .counted_all_reduce import CountedAllReduce

NONFINITE = 2.0

StateKey = tuple[int, int, str]  # optimizer, parameter, name in its state


class BufferSync:
    """Floating-point buffers are averaged, and so are optimizer states; of other buffers rank 0's are shared."""

    def __init__(self, registry: ParameterRegistry, all_reduce: CountedAllReduce) -> None:
        self._registry = registry
        self._group = all_reduce.group
        self._all_reduce = all_reduce
        self._versions: list[tuple[int, int]] = []
        self.mark_shared()
        self._nonfinite_at_start = self._nonfinite()  # a mask of -inf perhaps

    def mark_shared(self) -> None:
        """All workers have the same buffers now."""
        self._registry.refresh_buffers()
        self._versions = self._registry.signature()

    @property
    def status(self) -> float:
        """1 if buffers have changed since all workers had the same, NONFINITE if one has become NaN or infinite."""
        self._registry.refresh_buffers()
        if self._registry.signature() == self._versions:
            return 0.0
        return NONFINITE if self._nonfinite() - self._nonfinite_at_start else 1.0

    def _nonfinite(self) -> set[str]:
        named = self._registry.buffers.items()
        return {name for name, buffer in named if buffer.is_floating_point() and not is_finite(buffer.detach())}

    def _buffers(self, floating: bool = True) -> list[torch.Tensor]:
        return [buffer.detach() for buffer in self._registry.buffers.values() if buffer.is_floating_point() is floating]

    def pack(self) -> torch.Tensor:
        return pack(self._buffers())

    def reduce(self, vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        """Collective, on any thread: the mean of all workers' buffers by their shares."""
        result = vector.clone()
        self._all_reduce.weighted_sum(result, shares, "buffers of a round")
        return result

    def apply(self, vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        """Writes the result; `late`: changes since `pack` are kept."""
        buffers = self._buffers()
        if late:
            now = pack(buffers)
            result = torch.where(result == vector, now, now + (result - vector))  # equal ones may be infinite
        unpack(result, buffers)
        if not late:
            self.mark_shared()

    def broadcast_integers(self) -> None:
        """Collective: buffers of integers, which have no mean, become those of rank 0."""
        ParameterRegistry.broadcast(self._buffers(floating=False), self._group)
        self.mark_shared()

    def average_states(self, shares: Sequence[float]) -> None:
        """Collective: state tensors become the mean over the workers that have them. Other state stays as it is."""
        states = self._states()
        mine = [[*key, list(tensor.shape)] for key, tensor in states.items()]
        gathered = objects.all_gather_objects(self._group, mine, "optimizer state")
        shapes: dict[StateKey, list[int]] = {}
        totals: dict[StateKey, float] = {}  # shares of the workers that have it
        for share, theirs in zip(shares, gathered, strict=True):
            for number, index, name, shape in theirs:
                shapes.setdefault((number, index, name), shape)
                totals[number, index, name] = totals.get((number, index, name), 0.0) + share
        keys = [key for key in sorted(shapes) if totals[key]]
        if not keys:
            return
        had = set(states)
        for key in keys:
            if key not in had:
                states[key] = self._make_state(key, shapes[key])
        tensors = [states[key] for key in keys]
        vector, share = pack(tensors), shares[self._group.rank]
        for key, piece in zip(keys, vector.split([tensor.numel() for tensor in tensors]), strict=True):
            piece.mul_(share / totals[key] if key in had else 0.0)
        self._all_reduce.sum(vector, "optimizer state of a round")
        unpack(vector, tensors)

    def reset_states(self) -> None:
        for optimizer in self._registry.optimizers:
            optimizer.state.clear()

    def _states(self) -> dict[StateKey, torch.Tensor]:
        index = self._registry.index
        return {
            (number, index[id(parameter)], name): value.detach()
            for number, optimizer in enumerate(self._registry.optimizers)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided
        }

    def _make_state(self, key: StateKey, shape: list[int]) -> torch.Tensor:
        """For a parameter that has had a gradient on another worker, but none on this one."""
        number, index, name = key
        parameter = self._registry.parameters[index]
        state: dict[str, Any] = self._registry.optimizers[number].state[parameter]
        if tuple(shape) == tuple(parameter.shape):
            state[name] = torch.zeros_like(parameter, requires_grad=False)
        else:
            on_device = any(
                group.get("fused") or group.get("capturable")
                for group in self._registry.optimizers[number].param_groups
                if any(each is parameter for each in group["params"])
            )  # these count their steps where the parameter is
            state[name] = torch.zeros(shape, dtype=torch.float32, device=parameter.device if on_device else None)
        return state[name]
