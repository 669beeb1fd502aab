"""The all-reduce family: every worker updates; they differ in how the sum travels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from .base import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Strategy):
    """Rank 0 picks the algorithm by size, place and measurement; `deterministic` uses fixed thresholds instead."""

    name: ClassVar[str] = "auto"
    deterministic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Strategy):
    """Scatter-reduce, then all-gather, between neighbours: the least data per rank, for large tensors."""

    name: ClassVar[str] = "ring"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(Strategy):
    """Up a binary tree and down again: few steps of the whole vector, for small tensors."""

    name: ClassVar[str] = "tree"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(Strategy):
    """Recursive halving, then doubling: as few steps as the tree, as little data as the ring."""

    name: ClassVar[str] = "halving"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Star(Strategy):
    """Everyone to rank 0 and back: the baseline whose root grows with the number of ranks."""

    name: ClassVar[str] = "star"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(Strategy):
    """On one host: each rank reduces its share straight out of its peers' memory."""

    name: ClassVar[str] = "shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(Strategy):
    """The engine's own all-reduce: `backend` is gloo, nccl or mpi; auto takes nccl for CUDA tensors, else gloo."""

    name: ClassVar[str] = "engine"
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "gloo", "nccl", "mpi"):
            raise ValueError(f"engine backend {self.backend!r} is unknown; there are: auto, gloo, nccl, mpi")
