"""SharedReduction: many vectors are reduced through registered memory, one after the other, without blocking.

Each vector is cut into *shards*, one or more per owner. Each rank posts what others own in its part of the memory. The
owner adds up its shard straight out of its peers' parts and, unless only the owner wants it, leaves the result in its
own part:

    post     copy the others' shards of my vector into my part; `posted` grows by one
    reduce   once all have posted it: my shard = mine + the peers' posted ones, in order of rank; `reduced` grows
    collect  once all have reduced it: copy the others' results out of their parts

All ranks post the same vectors in the same order, so one count per rank and phase suffices. `advance` does what can be
done without waiting, `finish` waits for the rest. My own shard is not copied into shared memory before it is reduced.

Of S bytes on n ranks each rank writes (n−1)/n S + S/n, and reads S (its shards of all) + (n−1)/n S. Values are scaled
as they are posted, so the mean costs nothing. Half precision is added in float32 and rounded once. The owner alone
computes an element and the order is that of the ranks, so the bits are the same on every rank and in every run.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..transport import RegisteredBuffer
from ..transport.base import COLLECTIVES
from .reduction import HALVES

if TYPE_CHECKING:
    from .group import Group

ALIGN_BYTES = 128


@dataclasses.dataclass(frozen=True)
class VectorLayout:
    """One vector: its dtype, its length, and its shards as (owner, offset, length)."""

    dtype: torch.dtype
    numel: int
    shards: tuple[tuple[int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class _Slot:
    """The memory of one vector in every rank's part."""

    def __init__(self, number: int, layout: VectorLayout, parts: Sequence[torch.Tensor], rank: int) -> None:
        self.number = number
        self.halves = layout.dtype in HALVES
        self.parts = [[part.view(layout.dtype)[at : at + size] for part in parts] for _, at, size in layout.shards]
        self.mine = [shard for shard, (owner, _, _) in enumerate(layout.shards) if owner == rank]
        self.others = [(shard, owner) for shard, (owner, _, _) in enumerate(layout.shards) if owner != rank]
        self.views: Sequence[torch.Tensor] = ()
        self.scale = 1.0
        self.sums: list[torch.Tensor] = []


class SharedReduction:
    """Memory for vectors of these `layouts`. Making one is a collective call; OutOfMemory, on every rank, if memory is
    short.

    With `keep` every rank gets the whole result, otherwise each owner its own shards. Between the `finish` of one round
    and the first `post` of the next all ranks must have synchronised: only then may a slot be written again.
    `on_done(number)` is called when a vector's result is there, `on_waited(begin, end)` after each wait for peers, in
    seconds of time.perf_counter.
    """

    def __init__(self, group: Group, layouts: Sequence[VectorLayout], keep: bool) -> None:
        self.group = group
        self.keep = keep
        self.on_done: Callable[[int], None] | None = None
        self.on_waited: Callable[[float, float], None] | None = None
        num_bytes = max(ALIGN_BYTES, sum(layout.num_bytes for layout in layouts))
        memory = group.buffer("shared reduction", num_bytes, torch.uint8)
        self._posted = group.buffer("posted", 1, torch.uint8)
        self._reduced = group.buffer("reduced", 1, torch.uint8)
        self._slots = []
        at = 0
        with torch.inference_mode(False):
            for number, layout in enumerate(layouts):
                parts = [part[at : at + layout.num_bytes] for part in memory.peers]
                self._slots.append(_Slot(number, layout, parts, group.rank))
                at += layout.num_bytes
        self._num_posted = self._num_reduced = self._num_collected = 0
        self._to_reduce: collections.deque[_Slot] = collections.deque()
        self._to_collect: collections.deque[_Slot] = collections.deque()

    def post(self, number: int, views: Sequence[torch.Tensor], scale: float) -> None:
        """Vector `number`: `views` are my tensors of its shards, flat, which become the result; `scale` is mine."""
        slot, me = self._slots[number], self.group.rank
        for shard, _ in slot.others:
            part = slot.parts[shard][me]
            if not slot.halves:
                torch.mul(views[shard], scale, out=part)
            elif scale * self.group.size == 1.0:
                part.copy_(views[shard])  # scaled by the owner, in float32
            else:
                torch.mul(views[shard], scale * self.group.size, out=part)
        slot.views, slot.scale = views, scale
        self._num_posted += 1
        self._posted.signal(4 * self._num_posted, self.group.consistency.fingerprint)
        self._to_reduce.append(slot)

    def advance(self) -> None:
        """Does what can be done without waiting."""
        while self._to_reduce and self._posted.reached(4 * (self._num_reduced + 1)):
            self._reduce()
        while self._to_collect and self._reduced.reached(4 * (self._num_collected + 1)):
            self._collect()

    def finish(self) -> None:
        """Blocks until everything that was posted is done."""
        while self._to_reduce:
            self._await(self._posted, 4 * (self._num_reduced + 1))
            self._reduce()
            self.advance()
        while self._to_collect:
            self._await(self._reduced, 4 * (self._num_collected + 1))
            self._collect()

    def _await(self, flags: RegisteredBuffer, value: int) -> None:
        if self.on_waited is None or flags.reached(value):
            flags.await_all(value)
            return
        begin = time.perf_counter()
        flags.await_all(value)
        self.on_waited(begin, time.perf_counter())

    def _reduce(self) -> None:
        group, me = self.group, self.group.rank
        fingerprint, value = group.consistency.fingerprint, 4 * (self._num_reduced + 1)
        for peer in group.others:
            if self._posted.fingerprint_of(peer, value) != fingerprint:
                raise group.consistency.mismatch(peer, COLLECTIVES)
        slot = self._to_reduce.popleft()
        slot.sums = []
        for shard in slot.mine:
            view, parts = slot.views[shard], slot.parts[shard]
            if slot.halves:
                total = view.float().mul_(slot.scale * group.size)
                for peer in group.others:
                    total.add_(parts[peer])
                view.copy_(total.mul_(1.0 / group.size))
                slot.sums.append(total.sum())
            else:
                others = iter(group.others)
                torch.add(parts[next(others)], view, alpha=slot.scale, out=view)
                for peer in others:
                    view.add_(parts[peer])
                slot.sums.append(view.sum())
            if self.keep:
                parts[me].copy_(view)
        self._num_reduced += 1
        self._reduced.signal(4 * self._num_reduced)
        if self.keep:
            self._to_collect.append(slot)
        else:
            self._done(slot)

    def _collect(self) -> None:
        slot = self._to_collect.popleft()
        for shard, owner in slot.others:
            slot.views[shard].copy_(slot.parts[shard][owner])
        self._done(slot)

    def _done(self, slot: _Slot) -> None:
        self._num_collected += 1
        slot.views = ()
        if self.on_done is not None:
            self.on_done(slot.number)

    def nonfinite_shards(self) -> list[tuple[int, int]]:
        """My shards whose sums are not finite, as (vector, shard). To be called after `finish`."""
        sums = [(slot.number, shard, total) for slot in self._slots
                for shard, total in zip(slot.mine, slot.sums, strict=False)]  # fmt: skip
        if not sums:
            return []
        finite = torch.isfinite(torch.stack([total.double() for _, _, total in sums]))
        if bool(finite.all()):
            return []
        return [(number, shard) for (number, shard, _), fine in zip(sums, finite.tolist(), strict=True) if not fine]

    def nonfinite_ranks(self, number: int, shard: int) -> list[int]:
        """The ranks whose posted values in this shard of mine are not finite; else me. Before any rank posts again."""
        parts = self._slots[number].parts[shard]
        return [peer for peer in self.group.others if not bool(torch.isfinite(parts[peer]).all())] or [self.group.rank]
