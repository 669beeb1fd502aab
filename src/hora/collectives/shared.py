"""All-reduce through shared memory on one host: every rank reduces its own 1/n straight out of its peers' memory.

Tensors pass through a staging slot of each rank, one *epoch* of registered memory per chunk (RegisteredBuffer):

- large tensors (`_by_shares`): copy in what the others reduce, reduce my share, copy out what they reduced;
- small tensors (`_whole`): copy in, signal once, and every rank reduces everything: more reading, but one
  synchronisation instead of two.

`reduce` and `broadcast` use the same slots, to rank 0 and from it.

There are two slots per rank, used alternately, across calls too. A slot is written again two epochs later; by then its
rank has finished the epoch between, for which every peer had to signal, and a peer does so only after it has read
everything of the epoch before. Read per rank: (n−1)/n of the data twice, or n vectors (small).

The order of summation is that of the ranks in every element, so the bits are the same every time and for any cut into
chunks. Half precision is summed in float32 and rounded once.
"""

from __future__ import annotations

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
WHOLE_BYTES = 512 << 10  # of all ranks together, up to which every rank reduces everything
MAX_CACHED = 256

Parts = list[torch.Tensor]


class StagingSlots:
    """The two slots of every rank, with the views into them that calls of one size use again and again."""

    def __init__(self, buffer: RegisteredBuffer) -> None:
        self.buffer = buffer
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
            if len(self._wholes) > MAX_CACHED:
                self._wholes.clear()
            num_bytes = numel * dtype.itemsize
            with torch.inference_mode(False):  # views that are kept must serve calls of either kind
                first = [part[:num_bytes].view(dtype) for part in self.buffer.peers]
                second = [part[SLOT_BYTES : SLOT_BYTES + num_bytes].view(dtype) for part in self.buffer.peers]
            found = self._wholes[dtype, numel] = (first, second)
        return found

    def shares(self, dtype: torch.dtype, numel: int) -> tuple[list[Parts], list[Parts]]:
        """The same, cut: [slot][rank][share]."""
        found = self._shares.get((dtype, numel))
        if found is None:
            if len(self._shares) > MAX_CACHED // 4:
                self._shares.clear()
            sizes = share_sizes(numel, len(self.buffer.peers))
            first, second = self.wholes(dtype, numel)
            with torch.inference_mode(False):
                found = ([list(p.split(sizes)) for p in first], [list(p.split(sizes)) for p in second])
            self._shares[dtype, numel] = found
        return found

    def chunks(self, numel: int, element_size: int) -> tuple[list[int], list[int]]:
        """How a vector passes through the slots: the chunks' lengths, and those of all shares of all chunks."""
        found = self._chunks.get((numel, element_size))
        if found is None:
            if len(self._chunks) > MAX_CACHED // 4:
                self._chunks.clear()
            step = SLOT_BYTES // element_size
            counts = [min(step, numel - start) for start in range(0, numel, step)]
            cut = [length for count in counts for length in share_sizes(count, len(self.buffer.peers))]
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
        _by_shares(group, staging, count, views[index * group.size : (index + 1) * group.size], operation)


def _whole(group: Group, staging: StagingSlots, flat: torch.Tensor, operation: Operation) -> None:
    buffer = staging.buffer
    epoch = buffer.epoch
    buffer.epoch = epoch + 1
    parts = staging.wholes(flat.dtype, flat.numel())[epoch & 1]
    parts[group.rank].copy_(flat)
    group.arrive_and_wait(buffer, epoch)
    operation.reduce(parts, flat)


def _by_shares(
    group: Group, staging: StagingSlots, count: int, chunk: Sequence[torch.Tensor], operation: Operation
) -> None:
    """`chunk` is the chunk's shares, in order of rank."""
    buffer, me = staging.buffer, group.rank
    epoch = buffer.epoch
    buffer.epoch = epoch + 1
    slots = staging.shares(chunk[0].dtype, count)[epoch & 1]
    mine = slots[me]
    # copy in what the others reduce
    for peer in group.others:
        mine[peer].copy_(chunk[peer])
    group.arrive_and_wait(buffer, epoch)
    # reduce my share
    parts = [slot[me] for slot in slots]
    parts[me] = chunk[me]
    operation.reduce(parts, mine[me])
    buffer.signal(4 * epoch + REDUCED)
    chunk[me].copy_(mine[me])
    # copy out what they reduced
    for peer in group.others:
        buffer.await_signal(peer, 4 * epoch + REDUCED)
        chunk[peer].copy_(slots[peer][peer])


def reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    """Rank 0's `flat` becomes the reduction of all, the others' stay as they are: they copy in, rank 0 adds up."""
    staging, buffer = group.staging, group.staging.buffer
    for chunk in _through_slots(staging, flat):
        epoch = buffer.epoch
        buffer.epoch = epoch + 1
        parts = staging.wholes(flat.dtype, chunk.numel())[epoch & 1]
        if group.rank:
            parts[group.rank].copy_(chunk)
        group.arrive_and_wait(buffer, epoch)
        if not group.rank:
            operation.reduce([chunk, *parts[1:]], chunk)


def broadcast(group: Group, flat: torch.Tensor) -> None:
    """Every rank's `flat` becomes rank 0's, which copies it in once for all."""
    staging, buffer = group.staging, group.staging.buffer
    for chunk in _through_slots(staging, flat):
        epoch = buffer.epoch
        buffer.epoch = epoch + 1
        source = staging.wholes(flat.dtype, chunk.numel())[epoch & 1][0]
        if not group.rank:
            source.copy_(chunk)
        group.arrive_and_wait(buffer, epoch)
        if group.rank:
            chunk.copy_(source)


def _through_slots(staging: StagingSlots, flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """The chunks that fit into a slot; an empty vector is one empty chunk, so that its ranks synchronise too."""
    counts, _ = staging.chunks(flat.numel(), flat.element_size())
    return flat.split(counts) if counts else (flat,)
