"""Shared memory all-reduce on one host: every rank reduces its own 1/n straight out of its peers' memory.

Three shapes of the same idea, each a number of *turns* at registered memory (see Registered); `reduce` and `broadcast`
go through the same slots, to rank 0 and from it:

- *registered* data (`reduce_registered`): raise the flag, wait for all; reduce my share of all parts into my own
  part; raise the flag again, wait for all. The result is the memory's `whole`: one contiguous view, read-only by
  contract, valid until it is released. Each rank writes its own part only.
- ordinary tensors, large (`_shares`): the same per chunk, through a staging slot of each rank: copy in what the others
  reduce, reduce my share, copy out what they reduced.
- ordinary tensors, small (`_whole`): copy in, raise the flag once, and everybody reduces everything: more reading,
  but one
  meeting instead of two.

Two slots are used in turn, across calls too. A slot is written again two turns later; by then its rank has finished
the turn between, for which every peer had to raise its flag, and a peer does so only after it has read everything of
the turn before. Read per rank: (n−1)/n of the data twice (staged), all parts' shares once (registered), n parts
(small).

The order of summation is that of the ranks in every element, so the bits are the same every time and with any cut into
chunks. Half precision is summed in float32 and rounded once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..transport import RegisteredBuffer, Transport
from ..transport.base import REDUCED
from .reduction import Operation
from .schedule import bounds

if TYPE_CHECKING:
    from .group import Group

SLOT_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10  # what is reduced in one go when there are more than two parts: it stays in the cache
WHOLE_BYTES = 512 << 10  # all parts together, up to which everybody reduces everything

Parts = list[torch.Tensor]


class StagingSlots:
    """The two slots of every rank, with the views into them that calls of one size use again and again."""

    def __init__(self, registered: RegisteredBuffer) -> None:
        self.registered = registered
        self._wholes: dict[tuple[torch.dtype, int], tuple[Parts, Parts]] = {}
        self._shares: dict[tuple[torch.dtype, int], tuple[list[Parts], list[Parts]]] = {}
        self._chunks: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    @classmethod
    def open(cls, transport: Transport) -> StagingSlots:
        """Collective."""
        return cls(transport.buffer("staging", 2 * SLOT_BYTES, torch.uint8))

    def wholes(self, dtype: torch.dtype, numel: int) -> tuple[Parts, Parts]:
        """For each of the two slots, every rank's first `numel` elements."""
        found = self._wholes.get((dtype, numel))
        if found is None:
            if len(self._wholes) > 256:
                self._wholes.clear()
            num_bytes = numel * dtype.itemsize
            with torch.inference_mode(False):  # views that are kept must serve calls of either kind
                first = [part[:num_bytes].view(dtype) for part in self.registered.peers]
                second = [part[SLOT_BYTES : SLOT_BYTES + num_bytes].view(dtype) for part in self.registered.peers]
            found = self._wholes[dtype, numel] = (first, second)
        return found

    def shares(self, dtype: torch.dtype, numel: int) -> tuple[list[Parts], list[Parts]]:
        """The same, cut: [slot][rank][share]."""
        found = self._shares.get((dtype, numel))
        if found is None:
            if len(self._shares) > 64:
                self._shares.clear()
            sizes = share_sizes(numel, len(self.registered.peers))
            first, second = self.wholes(dtype, numel)
            with torch.inference_mode(False):
                found = ([list(p.split(sizes)) for p in first], [list(p.split(sizes)) for p in second])
            self._shares[dtype, numel] = found
        return found

    def chunks(self, numel: int, element_size: int) -> tuple[list[int], list[int]]:
        """How a vector passes through the slots: the chunks' lengths, and those of all shares of all chunks."""
        found = self._chunks.get((numel, element_size))
        if found is None:
            if len(self._chunks) > 64:
                self._chunks.clear()
            step = SLOT_BYTES // element_size
            counts = [min(step, numel - start) for start in range(0, numel, step)]
            cut = [length for count in counts for length in share_sizes(count, len(self.registered.peers))]
            found = self._chunks[numel, element_size] = (counts, cut)
        return found


def share_sizes(numel: int, parts: int) -> list[int]:
    return [stop - start for start, stop in bounds(numel, parts)]


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    staging = group.staging
    numel, size = flat.numel(), flat.element_size()
    if numel * size * group.size <= WHOLE_BYTES:
        _whole(group, staging, flat, operation)
        return
    counts, cut = staging.chunks(numel, size)
    views = flat.split(cut)  # all at once: a view costs as much as reducing 32 KB
    for index, count in enumerate(counts):
        _shares(group, staging, count, views[index * group.size : (index + 1) * group.size], operation)


def _whole(group: Group, staging: StagingSlots, flat: torch.Tensor, operation: Operation) -> None:
    registered = staging.registered
    turn = registered.turn
    registered.turn = turn + 1
    parts = staging.wholes(flat.dtype, flat.numel())[turn & 1]
    parts[group.rank].copy_(flat)
    group.meet(registered, turn)
    operation.reduce(parts, flat)


def _shares(
    group: Group, staging: StagingSlots, count: int, chunk: Sequence[torch.Tensor], operation: Operation
) -> None:
    """`chunk` is the chunk's shares, in order of rank."""
    registered, me = staging.registered, group.rank
    turn = registered.turn
    registered.turn = turn + 1
    slots = staging.shares(chunk[0].dtype, count)[turn & 1]
    mine = slots[me]
    # copy in what the others reduce
    for peer in group.others:
        mine[peer].copy_(chunk[peer])
    group.meet(registered, turn)
    # reduce my share
    parts = [slot[me] for slot in slots]
    parts[me] = chunk[me]
    operation.reduce(parts, mine[me])
    registered.signal(4 * turn + REDUCED)
    chunk[me].copy_(mine[me])
    # copy out what they reduced
    for peer in group.others:
        registered.await_signal(peer, 4 * turn + REDUCED)
        chunk[peer].copy_(slots[peer][peer])


def reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    """Rank 0's `flat` becomes the reduction of all, the others' stay as they are: they copy in, rank 0 adds up."""
    staging, registered = group.staging, group.staging.registered
    for chunk in _through_slots(staging, flat):
        turn = registered.turn
        registered.turn = turn + 1
        parts = staging.wholes(flat.dtype, chunk.numel())[turn & 1]
        if group.rank:
            parts[group.rank].copy_(chunk)
            group.meet(registered, turn)
        else:
            group.meet(registered, turn)
            operation.reduce([chunk, *parts[1:]], chunk)


def broadcast(group: Group, flat: torch.Tensor) -> None:
    """Everybody's `flat` becomes rank 0's, which copies it in once for all."""
    staging, registered = group.staging, group.staging.registered
    for chunk in _through_slots(staging, flat):
        turn = registered.turn
        registered.turn = turn + 1
        source = staging.wholes(flat.dtype, chunk.numel())[turn & 1][0]
        if group.rank:
            group.meet(registered, turn)
            chunk.copy_(source)
        else:
            source.copy_(chunk)
            group.meet(registered, turn)


def _through_slots(staging: StagingSlots, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """The chunks that fit into a slot; an empty vector is one empty chunk, so that its ranks meet too."""
    counts, _ = staging.chunks(flat.numel(), flat.element_size())
    return flat.split(counts) if counts else (flat,)


@dataclasses.dataclass
class _Views:
    """The blocks of my share, once per registered memory: cutting views costs more than a small reduction."""

    numel: int
    result: torch.Tensor
    blocks: list[tuple[Parts, torch.Tensor]]


def reduce_registered(group: Group, registered: RegisteredBuffer, operation: Operation, numel: int) -> torch.Tensor:
    """Reduces the first `numel` elements of everybody's part, each rank its share in its own; returns the whole."""
    views = getattr(registered, "views", None)
    if views is None or views.numel != numel:
        with torch.inference_mode(False):
            views = registered.views = _cut(group, registered, numel)  # type: ignore[attr-defined]
    turn = registered.turn
    registered.turn = turn + 1
    group.meet(registered, turn)
    for parts, out in views.blocks:
        operation.reduce(parts, out)
    registered.signal(4 * turn + REDUCED)
    registered.await_all(4 * turn + REDUCED)
    return views.result


def _cut(group: Group, registered: RegisteredBuffer, numel: int) -> _Views:
    start, stop = (min(numel, edge) for edge in registered.shares[group.rank])
    # Two parts are read once each, so one pass over them is best; with more, the running sum must stay in the cache.
    step = BLOCK_BYTES // registered.mine.element_size() if group.size > 2 else max(1, stop - start)
    blocks = []
    for at in range(start, stop, step):
        parts = [part[at : min(stop, at + step)] for part in registered.peers]
        blocks.append((parts, parts[group.rank]))
    return _Views(numel, registered.whole[:numel], blocks)
