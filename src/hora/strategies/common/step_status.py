"""Census: the small sum at the end of an exchange, from which every worker draws the same conclusions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...collectives.group import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepStatus:
    """One worker's word, or the sum of all; `holders` says of each gradient how many workers had it."""

    weight: float  # what the backwards of this exchange weigh, and what an even deal would make of it
    expected: float
    loop: float  # which loop, and after how many steps: the same on every worker
    steps: float
    stop: float  # how many want to stop
    nonfinite: float  # how many gradients were found not finite
    buffers: float  # whether buffers have to be shared
    holders: Sequence[float]

    def sum(self, group: Group, name: str) -> StepStatus:
        """Collective: everybody's added up."""
        fields = [getattr(self, field.name) for field in dataclasses.fields(self)[:-1]]
        total = torch.tensor([*fields, *self.holders], dtype=torch.float64)
        group.all_reduce(total, name=name)
        names = [field.name for field in dataclasses.fields(self)[:-1]]
        numbers = total.tolist()
        return StepStatus(**dict(zip(names, numbers, strict=False)), holders=numbers[len(names) :])
