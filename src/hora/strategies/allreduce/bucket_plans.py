"""BucketPlans: how gradients are cut into buckets and which reducer averages them, for each set of trained parameters.

All workers agree on a plan in the first backward over a set: rank 0's order of gradients becomes the order of buckets.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...collectives.device import DeviceComm
from ...collectives.group import Group
from ...compression.compressed_sum import CompressionSavings
from ...compression.compressor import Compressor
from ...errors import Mismatch, OutOfMemory
from ...net.machine import num_cores
from ...parameters.buckets import BackwardHooks, plan
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import ParameterShard, is_dense, whole_shards
from ..common import compression
from ..common.sync import CommStats
from .device_reducer import DeviceReducer
from .reducers import CollectiveReducer, Reducer, SharedMemoryReducer

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)

Shards = Callable[[int], Sequence[ParameterShard]]


MAX_PLANS = 4  # models that take turns freeze each other, so several sets of trained parameters come again


@dataclasses.dataclass(frozen=True)
class _Plan:
    reducer: Reducer
    eager: bool
    sparse: list[int]
    late: set[int]


class BucketPlans:
    """`reducer` is None until a plan is made for the parameters that are trained now. `eager`: buckets leave while
    backward goes on. `sparse`: parameters whose gradients are sparse on any worker."""

    def __init__(
        self,
        registry: ParameterRegistry,
        backward: BackwardHooks,
        strategy: AllReduce,
        keep: bool,
        traffic: CommStats,
    ) -> None:
        self.reducer: Reducer | None = None
        self.eager = strategy.overlap
        self.sparse: list[int] = []
        self.savings = CompressionSavings()
        self.comm: DeviceComm | None = None  # where the parameters lie on a GPU
        self._registry, self._backward, self._strategy = registry, backward, strategy
        self._keep, self._traffic = keep, traffic
        self._plans: dict[tuple[int, ...], _Plan] = {}  # by the trained parameters, the newest last
        self._read: dict[int, int] = {}  # by peer: bytes that it read of reducers that are gone

    def make(self, group: Group, shards: Shards) -> Reducer:
        """Collective: a plan for the parameters that are trained now."""
        watched = self._backward.watched
        order, late, self.sparse = agree(group, self._registry, self._backward)
        dense = [index for index in order if index not in self.sparse]
        self._backward.late = late
        reducer, self.eager = make_reducer(
            group, self._registry, self._strategy, dense, shards, self._keep, self._traffic, self.comm
        )
        wire = Compressor(self._strategy.wire, self._strategy.topk, self._strategy.rank, self.savings)
        reducer.compress(wire, lambda bucket: compression.matrices(bucket, self._registry.parameters))
        self._backward.set_buckets(list(reducer.buckets))
        self.reducer = reducer
        self._plans[tuple(watched)] = _Plan(reducer, self.eager, self.sparse, late)
        if len(self._plans) > MAX_PLANS:
            oldest = self._plans.pop(next(iter(self._plans)))
            for peer in group.others:
                self._read[peer] = self._read.get(peer, 0) + oldest.reducer.shown(peer)
            oldest.reducer.close()
        return reducer

    def switch(self) -> None:
        """The set of trained parameters has changed: takes the plan that it had before, if any."""
        self._backward.clear_buckets()
        self.reducer = None
        known = self._plans.pop(tuple(self._backward.watched), None)
        if known is not None:
            self._plans[tuple(self._backward.watched)] = known  # the newest again
            self.reducer, self.eager, self.sparse = known.reducer, known.eager, known.sparse
            self._backward.late = set(known.late)
            self._backward.set_buckets(list(known.reducer.buckets))

    def read_by(self, peer: int) -> int:
        """How many bytes a peer has read of this worker's shared memory. Thread-safe."""
        return self._read.get(peer, 0) + sum(known.reducer.shown(peer) for known in list(self._plans.values()))

    def forget(self) -> None:
        """Rounding errors that compression still owes are given up."""
        for known in self._plans.values():
            known.reducer.forget()

    def close(self) -> None:
        self._backward.clear_buckets()
        self.reducer = None
        for known in self._plans.values():
            known.reducer.close()
        self._plans.clear()


def agree(group: Group, registry: ParameterRegistry, backward: BackwardHooks) -> tuple[list[int], set[int], list[int]]:
    """Collective: rank 0's order of gradients, those that come in parts, and those that are sparse on any worker.

    Mismatch, on every worker, if they do not train the same parameters.
    """
    watched, late = backward.watched, backward.late
    grads = [registry.parameters[index].grad for index in watched]
    mine = torch.tensor([len(watched), *backward.order, len(late), *sorted(late)], dtype=torch.int64)
    orders = [part.tolist() for part in group.all_gather(mine, name="order of gradients")]
    for rank, theirs in enumerate(orders):
        differing = set(orders[0][1 : 1 + orders[0][0]]) ^ set(theirs[1 : 1 + theirs[0]])
        if differing:
            index = min(differing)
            does = "trains" if index in theirs[1 : 1 + theirs[0]] else "does not train"
            raise Mismatch(
                f"{group.transport.name_of(rank)} {does} {registry.names[index]}, other than "
                f"{group.transport.name_of(0)}: requires_grad must be the same on every worker"
            )
    kinds = torch.tensor([float(grad is not None and grad.layout is not torch.strided) for grad in grads])
    group.all_reduce(kinds, "max", name="sparse gradients")
    sparse = [index for index, kind in zip(watched, kinds.tolist(), strict=True) if kind]
    return orders[0][1 : 1 + orders[0][0]], set(orders[0][2 + orders[0][0] :]), sparse


def make_reducer(
    group: Group,
    registry: ParameterRegistry,
    strategy: AllReduce,
    dense: Sequence[int],
    shards: Shards,
    keep: bool,
    traffic: CommStats,
    comm: DeviceComm | None = None,
) -> tuple[Reducer, bool]:
    """Collective: the reducer of these gradients, and whether buckets leave while backward goes on.

    On one host without a core to spare, a communicating thread takes its time from the backward that it should overlap
    with, so collectives then run after backward.
    """
    parameters = registry.parameters
    if comm is not None and keep and all(is_dense(parameters[i]) for i in dense):
        chosen = strategy.bucket_bytes
        limit = comm.bucket_bytes if chosen == type(strategy).bucket_bytes else chosen  # the default is for CPUs
        buckets = plan(dense, parameters, whole_shards(parameters), limit, cut=False)
        return DeviceReducer(group, buckets, keep, traffic, comm, parameters), strategy.overlap
    shares_memory = group.transport.shares_memory and group.num_hosts == 1
    spare = num_cores() >= 2 * group.hosts.count(group.hosts[group.rank])
    if strategy.algorithm in ("shared", "auto") and shares_memory and all(parameters[i].is_cpu for i in dense):
        try:
            buckets = plan(dense, parameters, shards, strategy.bucket_bytes, group.size)
            return SharedMemoryReducer(
                group, buckets, keep, traffic, use_thread=spare and strategy.overlap
            ), strategy.overlap
        except OutOfMemory as problem:
            if group.rank == 0:
                log.warning("too little shared memory for the gradients, which then take longer: %s", problem)
    elif strategy.algorithm == "shared" and group.num_hosts == 1 and not shares_memory:
        _ = group.staging  # says why not, and the way out
    shards, owners = (whole_shards(parameters), 1) if keep else (shards, group.size)
    buckets = plan(dense, parameters, shards, strategy.bucket_bytes, owners)
    eager = strategy.overlap and (spare or group.transport.overlaps_without_spare_core)
    return CollectiveReducer(group, buckets, keep, traffic, strategy.algorithm, eager), eager
