"""Values that `job.log` takes. Nothing here waits for a device."""

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
    """Logs a tensor as the distribution of its elements: `job.log(weights=hora.Histogram(layer.weight))`."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor) or self.tensor.is_complex():
            raise ValueError(f"hora.Histogram takes a tensor of real numbers, not {type(self.tensor).__name__}")
        if not self.tensor.numel():
            raise ValueError("hora.Histogram takes a tensor with elements; this one is empty")

    def count(self) -> torch.Tensor:
        """The lowest and highest finite element, and the count of each bin between; on the tensor's device."""
        flat = self.tensor.detach().reshape(-1).float()
        finite = flat.isfinite()
        low = torch.where(finite, flat, math.inf).amin()
        high = torch.where(finite, flat, -math.inf).amax()
        width = torch.clamp((high - low) / BINS, min=torch.finfo(torch.float32).tiny)
        bins = torch.where(finite, (flat - low) / width, 0.0).clamp(0, BINS - 1).to(torch.int64)
        counts = torch.zeros(BINS, dtype=torch.float64, device=flat.device).index_add_(0, bins, finite.double())
        return torch.cat([torch.stack([low, high]).double(), counts])


def check_values(values: Mapping[str, Any]) -> tuple[dict[str, Scalar], dict[str, Histogram]]:
    """Scalars and histograms by name; ValueError for anything else. CPU tensors are read now; tensors on other devices
    are copied there, so that user code may overwrite them."""
    scalars: dict[str, Scalar] = {}
    histograms: dict[str, Histogram] = {}
    for name, value in values.items():
        if not name.isprintable() and any("\ud800" <= char <= "\udfff" for char in name):
            raise ValueError(f"job.log: the name {name!r} cannot be encoded as UTF-8")
        if len(name) > MAX_NAME_CHARS:
            raise ValueError(
                f"job.log: the name {name[:20]}… has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed"
            )
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"job.log: {name} has {value.numel()} elements; log one, e.g. its mean(), or hora.Histogram(…)"
                )
            scalar = value.detach()
            scalars[name] = float(scalar) if scalar.device.type == "cpu" else scalar.reshape(()).clone()
        elif isinstance(value, numbers.Real):
            try:
                scalars[name] = float(value)
            except OverflowError:
                raise ValueError(f"job.log: {name} is too large for a float") from None
        elif isinstance(value, Histogram):
            histograms[name] = value
        else:
            kind = type(value).__name__
            raise ValueError(f"job.log: {name} is a {kind}; log a number, a one-element tensor, or hora.Histogram(…)")
    return scalars, histograms


def read_values(rows: Sequence[dict[str, Scalar]]) -> list[dict[str, float]]:
    """The rows with tensors replaced by floats; one copy per device."""
    pending: dict[torch.device, list[tuple[int, str, torch.Tensor]]] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            if isinstance(value, torch.Tensor):
                pending.setdefault(value.device, []).append((index, name, value))
    found: dict[tuple[int, str], float] = {}
    for tensors in pending.values():
        with torch.no_grad():
            floats = torch.stack([value.double() for _, _, value in tensors]).tolist()
        found |= {(index, name): number for (index, name, _), number in zip(tensors, floats, strict=True)}
    return [
        {name: found[index, name] if isinstance(value, torch.Tensor) else value for name, value in row.items()}
        for index, row in enumerate(rows)
    ]
