"""Values: what `job.log` takes. Nothing here makes a device finish its work."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .messages import BINS, MAX_NAME_CHARS

Scalar = float | torch.Tensor


@dataclasses.dataclass(frozen=True)
class Histogram:
    """A tensor to be logged as the distribution of its elements: `job.log(weights=hora.Histogram(layer.weight))`."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or self.tensor.is_complex():
            raise ValueError(f"hora.Histogram takes a tensor of numbers, not {_kind(self.tensor)}")
        if not self.tensor.numel():
            raise ValueError("hora.Histogram takes a tensor with elements, and this one has none")

    def count(self) -> torch.Tensor:
        """The lowest and highest finite element, and how many lie in each bin between; on the tensor's device."""
        flat = self.tensor.detach().reshape(-1).float()
        finite = flat.isfinite()
        low = torch.where(finite, flat, math.inf).amin()
        high = torch.where(finite, flat, -math.inf).amax()
        width = torch.clamp((high - low) / BINS, min=torch.finfo(torch.float32).tiny)
        bins = torch.where(finite, (flat - low) / width, 0.0).clamp(0, BINS - 1).to(torch.int64)
        counts = torch.zeros(BINS, dtype=torch.float64, device=flat.device).index_add_(0, bins, finite.double())
        return torch.cat([torch.stack([low, high]).double(), counts])


def check_values(values: Mapping[str, Any]) -> tuple[dict[str, Scalar], dict[str, Histogram]]:
    """Numbers and tensors of one element, and histograms; ValueError names what is none of these. A tensor on another
    device is copied there, so that the user's code may write on; one of the CPU is read."""
    scalars: dict[str, Scalar] = {}
    histograms: dict[str, Histogram] = {}
    for name, value in values.items():
        if not name.isprintable() and any("\ud800" <= sign <= "\udfff" for sign in name):
            raise ValueError(f"job.log: the name {name!r} is no text that can be written")
        if len(name) > MAX_NAME_CHARS:
            raise ValueError(f"job.log: {name[:20]}… has {len(name)} characters; {MAX_NAME_CHARS} are taken")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"job.log: {name} has {value.numel()} elements; give one, its mean() perhaps, or hora.Histogram(…)"
                )
            held = value.detach()
            scalars[name] = float(held) if held.device.type == "cpu" else held.reshape(()).clone()
        elif isinstance(value, numbers.Real):
            try:
                scalars[name] = float(value)
            except OverflowError:
                raise ValueError(f"job.log: {name} is too large for a float") from None
        elif isinstance(value, Histogram):
            histograms[name] = value
        else:
            raise ValueError(
                f"job.log: {name} is a {_kind(value)}; give a number, a tensor with one, or hora.Histogram(…)"
            )
    return scalars, histograms


def read_values(rows: Sequence[dict[str, Scalar]]) -> list[dict[str, float]]:
    """All of them as numbers, with one copy from each device."""
    waiting: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append((index, name, value))
    found = [{name: value for name, value in row.items() if not isinstance(value, torch.Tensor)} for row in rows]
    for those in waiting.values():
        with torch.no_grad():
            numbers = torch.stack([value.double() for _, _, value in those]).tolist()
        for (index, name, _), number in zip(those, numbers, strict=True):
            found[index][name] = number
    return [{name: found[index][name] for name in row} for index, row in enumerate(rows)]


def _kind(value: object) -> str:
    return type(value).__name__
