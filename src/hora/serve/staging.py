"""Staging: a second set of a model's tensors, where parameters are looked at before the model gets them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..parameters.registry import ParameterRegistry
from ..parameters.shards import flatten, is_dense
from ..strategies.common.nonfinite import is_finite


class StagedParameters:
    """What is read goes into `parameters` and `buffers`, and from there into the model, if it is finite. Buffers that
    were infinite from the start, a mask of -inf perhaps, may be so."""

    def __init__(self, roster: ParameterRegistry) -> None:
        self._roster = roster
        self.parameters = [_like(parameter) for parameter in roster.parameters]
        self.buffers = {
            name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu") for name, buffer in roster.buffers.items()
        }
        self._infinite = {name for name, buffer in roster.buffers.items() if not is_finite(buffer.detach())}

    def vector(self, index: int) -> torch.Tensor:
        """A parameter's elements: in the order of its memory if they fill it, else in its own."""
        return flatten(self.parameters[index])

    def is_finite(self, indices: Collection[int] | None = None, buffers: bool = True) -> bool:
        """Whether these parameters (None: all), and the buffers, may be answered with."""
        chosen = range(len(self.parameters)) if indices is None else indices
        return all(is_finite(self.parameters[index]) for index in chosen) and not (
            buffers and any(not is_finite(b) for name, b in self.buffers.items() if name not in self._infinite)
        )

    def load(self, indices: Collection[int] | None = None, buffers: bool = True) -> None:
        """The model has these now."""
        with torch.no_grad():
            for index in range(len(self.parameters)) if indices is None else indices:
                self._roster.parameters[index].copy_(self.parameters[index])
            if buffers:
                self._roster.refresh_buffers()
                for name, buffer in self._roster.buffers.items():
                    if name in self.buffers:
                        buffer.copy_(self.buffers[name])


def _like(parameter: torch.Tensor) -> torch.Tensor:
    stride = parameter.stride() if is_dense(parameter) else None
    if stride is None:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
    return torch.empty_strided(parameter.shape, stride, dtype=parameter.dtype, device="cpu")
