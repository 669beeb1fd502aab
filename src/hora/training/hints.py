"""Hints: warnings about what a script does that is allowed and rarely intended. Rank 0 logs each once, with the
remedy."""

from __future__ import annotations

import logging
import threading
from typing import Any

import msgspec
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ..coordinator import CoordinatorConnection, CoordinatorEvent

log = logging.getLogger(__name__)

TOPIC = "batches"
NUM_BATCHES = 2  # that are compared


class Hints:
    """`hear` is called on the coordinator connection's thread, the rest on the training thread."""

    def __init__(self, control: CoordinatorConnection, rank: int, size: int) -> None:
        self._control = control
        self._rank = rank
        self._size = size
        self._first: list[str] = []  # what this worker's first batches look like
        self._wrapped = False
        self._lock = threading.Lock()
        self._batches: dict[int, list[str]] = {}  # the same by rank
        if rank == 0 and size > 1:
            control.subscribe(self.hear)

    def before_forward(self, inputs: Any, sharded: bool) -> None:
        """A prepared model is called to be trained; `sharded`: inside of a loop over `job.shard`."""
        if DistributedDataParallel._active_ddp_module is not None:
            self.wrapped()
        if not sharded and len(self._first) < NUM_BATCHES and self._size > 1:
            self._first.append(_digest(inputs))
            if len(self._first) < NUM_BATCHES:
                return  # rank 0 may not listen before it has taken a step
            if self._rank:
                self._control.send(TOPIC, msgspec.msgpack.encode(self._first), (0,))
            else:
                self._note(0, self._first)

    def wrapped(self) -> None:
        if not self._wrapped and self._rank == 0:
            log.warning(
                "DistributedDataParallel is wrapped around a model that job.prepare() has prepared, so gradients are "
                "averaged twice: leave the wrapper out"
            )
        self._wrapped = True

    def nothing_left(self, done: int, count: int) -> None:
        """A run was restored in which `done` epochs of `count` are behind it."""
        if self._rank == 0:
            log.warning(
                "nothing is left to train: the restored run has done %d epochs, and job.epochs(%d) asks for no more; "
                "give a larger number to go on, or another folder to begin anew", done, count
            )  # fmt: skip

    def hear(self, event: CoordinatorEvent) -> None:
        if event.kind == "message" and event.topic == TOPIC and event.member is not None:
            self._note(event.member.rank, msgspec.msgpack.decode(event.body, type=list[str]))

    def _note(self, rank: int, batches: list[str]) -> None:
        with self._lock:
            self._batches[rank] = batches
            seen = list(self._batches.values())
        telling = len(set(batches)) == NUM_BATCHES and "" not in batches  # unlike a benchmark's, always the same
        if len(seen) == self._size and telling and all(each == batches for each in seen):
            log.warning(
                "all %d workers train on the same batches, so together they do the work of one: let job.shard(loader) "
                "deal the samples", self._size
            )  # fmt: skip


def _digest(inputs: Any) -> str:
    """A batch in a few characters: the same for equal ones. Empty where there is no tensor."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.numel()]
    if not tensors or tensors[0].is_complex():
        return ""
    first = tensors[0].detach()
    return f"{tuple(first.shape)} {float(first.double().sum())!r} {float(first.double().square().sum())!r}"
