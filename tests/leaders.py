"""Leaders: ranks that add up vectors as the leaders of hosts do."""

from __future__ import annotations

import torch

from hora.collectives import Group
from hora.compression.compressed_sum import SUM, CompressedSum


def numbers(numel: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * spread


def add_up(leaders: Group, exchange: CompressedSum | None, vector: torch.Tensor) -> torch.Tensor:
    """One call, as the group's all-reduce makes it."""
    assert exchange is not None
    flat = vector.clone()
    leaders.begin_call("exchange")
    with leaders.part_of_call():
        exchange(leaders, flat, SUM)
    return flat
