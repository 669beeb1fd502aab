"""Shared memory all-reduce on one host: every rank reduces its own 1/n straight out of its peers' memory.

Three shapes of the same idea, each a number of *turns* at registered memory (see Registered):

- *registered* data (`reduce_registered`): raise the flag, wait for all; reduce my share of all parts into the common part;
  raise the flag again, wait for all. The result is one contiguous view of the common part, read-only by contract and
  valid until the next call on that memory.
- ordinary tensors, large (`_shares`): the same per chunk, through a staging slot of each rank: copy in what the others
  reduce, reduce my share, copy out what they reduced.
- ordinary tensors, small (`_whole`): copy in, raise the flag once, and everybody reduces everything: more reading, but one
  meeting instead of two.

Two slots are used in turn, across calls too. A slot is written again two turns later; by then its rank has finished the
turn between, for which every peer had to raise its flag, and a peer does so only after it has read everything of the turn
before. Read per rank: (n−1)/n of the data twice (staged), all parts' shares once (registered), n parts (small).

The order of summation is that of the ranks in every element, so the bits are the same every time and with any cut into
chunks. Half precision is summed in float32 and rounded once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from ..transport import Registered, Transport
from .reduction import Operation
from .schedule import bounds

if TYPE_CHECKING:
    from .base import Group

SLOT_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10  # what is reduced in one go when there are more than two parts: it stays in the cache
WHOLE_BYTES = 128 << 10  # up to here everybody reduces everything, divided by the number of ranks beyond two


class Staging:
    """The two slots of every rank, with the views into them that calls of one size use again and again."""

    def __init__(self, registered: Registered) -> None:
        self.registered = registered
        self._views: dict[tuple[torch.dtype, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    @classmethod
    def open(cls, transport: Transport) -> Staging:
        """Collective."""
        return cls(transport.buffer("staging", 2 * SLOT_BYTES, torch.uint8))

    def slots(self, dtype: torch.dtype, numel: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For each of the two slots, every rank's first `numel` elements."""
        found = self._views.get((dtype, numel))
        if found is None:
            if len(self._views) > 256:
                self._views.clear()
            num_bytes = numel * dtype.itemsize
            first = [part[:num_bytes].view(dtype) for part in self.registered.peers]
            second = [part[SLOT_BYTES : SLOT_BYTES + num_bytes].view(dtype) for part in self.registered.peers]
            found = self._views[dtype, numel] = (first, second)
        return found


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    staging = group.staging
    num_bytes = flat.numel() * flat.element_size()
    if num_bytes * max(2, group.size) <= 2 * WHOLE_BYTES:
        _whole(group, staging, flat, operation)
        return
    step = SLOT_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        _shares(group, staging, flat[start : start + step], operation)


def _whole(group: Group, staging: Staging, flat: torch.Tensor, operation: Operation) -> None:
    registered = staging.registered
    turn = registered.turn
    registered.turn = turn + 1
    parts = staging.slots(flat.dtype, flat.numel())[turn & 1]
    parts[group.rank].copy_(flat)
    group.meet(registered, 2 * turn + 1)
    operation.reduce(parts, flat)


def _shares(group: Group, staging: Staging, chunk: torch.Tensor, operation: Operation) -> None:
    registered = staging.registered
    turn = registered.turn
    registered.turn = turn + 1
    slots = staging.slots(chunk.dtype, chunk.numel())[turn & 1]
    cut = bounds(chunk.numel(), group.size)
    start, stop = cut[group.rank]
    mine = slots[group.rank]
    # copy in what the others reduce
    if start:
        mine[:start].copy_(chunk[:start])
    if stop < chunk.numel():
        mine[stop:].copy_(chunk[stop:])
    group.meet(registered, 2 * turn + 1)
    # reduce my share
    share, own = mine[start:stop], chunk[start:stop]
    operation.reduce([own if r == group.rank else slots[r][start:stop] for r in range(group.size)], share)
    registered.signal(2 * turn + 2)
    own.copy_(share)
    # copy out what they reduced
    for peer in group.others:
        registered.await_signal(peer, 2 * turn + 2)
        begin, end = cut[peer]
        chunk[begin:end].copy_(slots[peer][begin:end])


@dataclasses.dataclass
class _Views:
    """The blocks of my share, once per registered memory: cutting views costs more than a small reduction."""

    numel: int
    result: torch.Tensor
    blocks: list[tuple[list[torch.Tensor], torch.Tensor]]


def reduce_registered(group: Group, registered: Registered, operation: Operation, numel: int) -> torch.Tensor:
    """Reduces the first `numel` elements of everybody's part; returns the result, a view of the common part."""
    views = getattr(registered, "views", None)
    if views is None or views.numel != numel:
        views = registered.views = _cut(group, registered, numel)  # type: ignore[attr-defined]
    turn = registered.turn
    registered.turn = turn + 1
    group.meet(registered, 2 * turn + 1)
    for parts, out in views.blocks:
        operation.reduce(parts, out)
    registered.signal(2 * turn + 2)
    registered.await_all(2 * turn + 2)
    return views.result


def _cut(group: Group, registered: Registered, numel: int) -> _Views:
    start, stop = bounds(numel, group.size)[group.rank]
    # Two parts are read once each, so one pass over them is best; with more, the running sum must stay in the cache.
    step = BLOCK_BYTES // registered.mine.element_size() if group.size > 2 else max(1, stop - start)
    blocks = [
        ([part[at : min(stop, at + step)] for part in registered.peers], registered.common[at : min(stop, at + step)])
        for at in range(start, stop, step)
    ]
    return _Views(numel, registered.common[:numel], blocks)
