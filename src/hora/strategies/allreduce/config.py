"""The all-reduce family: every worker updates; they differ in how the sum travels."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from ...compression.names import ALL_NAMES, check
from ..base import Strategy

if TYPE_CHECKING:
    from ...parameters.registry import ParameterRegistry
    from ..common.hooks import TrainingHooks
    from ..common.sync import Sync

BUCKET_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """What the family has in common.

    `update`: replicated (every worker updates all parameters) or sharded (each its share, with optimizer state only for
    that). `overlap`: gradients travel in buckets of `bucket_bytes` while backward goes on. `sync_buffers`: whose
    buffers (BatchNorm's statistics) count after a step: rank0's, or the mean.

    `wire`: as what gradients travel between hosts: fp32 (as they are), fp16, bf16, int8, topk (the share `topk` that is
    largest, 0.01 if nothing is said) or powersgd (matrices as products of two of `rank`, 4 if nothing is said). What
    that takes away is added to the next gradient. Inside a host they travel as they are.
    """

    update: str = "replicated"
    overlap: bool = True
    bucket_bytes: int = BUCKET_BYTES
    sync_buffers: str = "rank0"
    wire: str = "fp32"
    topk: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.update not in ("replicated", "sharded"):
            raise ValueError(f"update={self.update!r} is unknown; there are: replicated, sharded")
        if self.sync_buffers not in ("rank0", "mean"):
            raise ValueError(f"sync_buffers={self.sync_buffers!r} is unknown; there are: rank0, mean")
        if self.bucket_bytes < 1024:
            raise ValueError(f"bucket_bytes takes a number of bytes of at least 1024, not {self.bucket_bytes}")
        check(self.wire, self.topk, self.rank, ALL_NAMES)
        if self.wire != "fp32" and self.update == "sharded":
            raise ValueError(
                f"wire={self.wire} is for sums that all workers get, and update=sharded gives each its share: "
                "use update=replicated"
            )

    def sync(self, registry: ParameterRegistry, hooks: TrainingHooks) -> Sync:
        if self.update == "sharded":
            from .sharded import ShardedSync

            return ShardedSync(registry, hooks, self)
        devices = {parameter.device for parameter in registry.parameters}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            from .device_sync import DeviceSync

            return DeviceSync(registry, hooks, self)
        from .replicated import ReplicatedSync

        return ReplicatedSync(registry, hooks, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(AllReduce):
    """Rank 0 picks the algorithm by size, place and measurement; `deterministic` uses fixed thresholds instead."""

    name: ClassVar[str] = "auto"
    deterministic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(AllReduce):
    """Scatter-reduce, then all-gather, between neighbours: the least data per rank, for large tensors."""

    name: ClassVar[str] = "ring"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree(AllReduce):
    """Up a binary tree and down again: few steps of the whole vector, for small tensors."""

    name: ClassVar[str] = "tree"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Halving(AllReduce):
    """Recursive halving, then doubling: as few steps as the tree, as little data as the ring."""

    name: ClassVar[str] = "halving"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Star(AllReduce):
    """Everyone to rank 0 and back: the baseline whose root grows with the number of ranks."""

    name: ClassVar[str] = "star"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared(AllReduce):
    """On one host: each rank reduces its share straight out of its peers' memory."""

    name: ClassVar[str] = "shared"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine(AllReduce):
    """The engine's own all-reduce: `backend` is gloo, nccl or mpi; auto takes nccl for CUDA tensors, else gloo."""

    name: ClassVar[str] = "engine"
    backend: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire != "fp32":
            raise ValueError(f"wire={self.wire} has no effect on the engine's own all-reduce: use auto or ring")
        if self.backend not in ("auto", "gloo", "nccl", "mpi"):
            raise ValueError(f"engine backend {self.backend!r} is unknown; there are: auto, gloo, nccl, mpi")
