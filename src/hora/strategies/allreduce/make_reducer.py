"""Dispatch: in which order gradients go, and who carries them. All workers decide it together at the first backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...collectives.group import Group
from ...errors import Mismatch, OutOfMemory
from ...net.machine import num_cores
from ...parameters.buckets import BackwardHooks, plan
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import ParameterShard, whole_shards
from ..common.sync import CommStats
from .reducers import CollectiveReducer, Reducer, SharedMemoryReducer

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)


def agree(group: Group, roster: ParameterRegistry, backward: BackwardHooks) -> tuple[list[int], set[int], list[int]]:
    """Collective: rank 0's order of gradients, those that come in parts, and those that are sparse on any worker.

    Mismatch, on every worker, if they do not train the same parameters.
    """
    watched, late = backward.watched, backward.late
    grads = [roster.parameters[index].grad for index in watched]
    word = torch.tensor([len(watched), *backward.order, len(late), *sorted(late)], dtype=torch.int64)
    words = [part.tolist() for part in group.all_gather(word, name="order of gradients")]
    for rank, theirs in enumerate(words):
        differing = set(words[0][1 : 1 + words[0][0]]) ^ set(theirs[1 : 1 + theirs[0]])
        if differing:
            index = min(differing)
            does = "trains" if index in theirs[1 : 1 + theirs[0]] else "does not train"
            raise Mismatch(
                f"{group.transport.name_of(rank)} {does} {roster.names[index]}, other than "
                f"{group.transport.name_of(0)}: requires_grad must be the same on every worker"
            )
    kinds = torch.tensor([float(grad is not None and grad.layout is not torch.strided) for grad in grads])
    group.all_reduce(kinds, "max", name="sparse gradients")
    sparse = [index for index, kind in zip(watched, kinds.tolist(), strict=True) if kind]
    return words[0][1 : 1 + words[0][0]], set(words[0][2 + words[0][0] :]), sparse


def make_reducer(
    group: Group,
    roster: ParameterRegistry,
    strategy: AllReduce,
    dense: Sequence[int],
    lanes: Callable[[int], Sequence[ParameterShard]],
    keep: bool,
    traffic: CommStats,
) -> tuple[Reducer, bool]:
    """Who carries these gradients, and whether they leave while backward goes on. Collective.

    On one host without a core to spare a thread that communicates takes its time from the backward it should hide
    behind, so `Calls` then come after it.
    """
    parameters = roster.parameters
    shares_memory = group.transport.shares_memory and group.num_hosts == 1
    spare = num_cores() >= 2 * group.hosts.count(group.hosts[group.rank])
    if strategy.algorithm in ("shared", "auto") and shares_memory and all(parameters[i].is_cpu for i in dense):
        try:
            buckets = plan(dense, parameters, lanes, strategy.bucket_bytes, group.size)
            return SharedMemoryReducer(
                group, buckets, keep, traffic, errand=spare and strategy.overlap
            ), strategy.overlap
        except OutOfMemory as problem:
            if group.rank == 0:
                log.warning("too little shared memory for the gradients, which then take longer: %s", problem)
    elif strategy.algorithm == "shared" and group.num_hosts == 1 and not shares_memory:
        _ = group.staging  # says why not, and the way out
    lanes, owners = (whole_shards(parameters), 1) if keep else (lanes, group.size)
    buckets = plan(dense, parameters, lanes, strategy.bucket_bytes, owners)
    eager = strategy.overlap and (spare or group.transport.overlaps_without_spare_core)
    return CollectiveReducer(group, buckets, keep, traffic, strategy.algorithm, eager), eager
