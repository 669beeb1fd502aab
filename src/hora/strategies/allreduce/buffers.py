"""Buffers of replicated models (BatchNorm's statistics): rank 0's, or their mean, after every step that changed
them."""

from __future__ import annotations

import torch

from ...collectives.group import Group
from ...parameters.registry import ParameterRegistry


class BufferBroadcast:
    """`mode`: `broadcast` gives all workers rank 0's buffers, `mean` averages those of floating point."""

    def __init__(self, registry: ParameterRegistry, mode: str) -> None:
        self._registry = registry
        self._average = mode == "mean"
        self._versions: list[tuple[int, int]] = []

    def remember(self) -> None:
        """The buffers are the same on all workers now."""
        self._versions = self._registry.signature()

    def must_share(self, rank: int) -> bool:
        """Whether this worker's buffers have changed and count."""
        self._registry.refresh_buffers()
        return (self._average or rank == 0) and self._registry.signature() != self._versions

    def share(self, group: Group) -> None:
        """Collective."""
        buffers = list(self._registry.buffers.values())
        if self._average:
            floats = [buffer for buffer in buffers if buffer.is_floating_point()]
            if floats:
                flat = torch.cat([buffer.reshape(-1).double() for buffer in floats])
                group.all_reduce(flat, "mean", name="buffers")
                for buffer, part in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
                    buffer.copy_(part.view(buffer.shape))
            buffers = [buffer for buffer in buffers if not buffer.is_floating_point()]
        ParameterRegistry.broadcast(buffers, group)
        self.remember()
