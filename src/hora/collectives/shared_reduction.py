"""Mailbox: many vectors are reduced through registered memory, one after the other, without anybody waiting.

Each vector is cut into *lanes*, one or more per owner. Each rank posts what others own in its part, the owner adds up
its lane straight out of its peers' parts and, unless only the owner wants it, leaves the result in its own part:

    post     copy the others' lanes of my vector into my part; `posted` goes up by one
    reduce   once all have posted it: my lane = mine + the peers' posted ones, in order of rank; `reduced` goes up
    collect  once all have reduced it: copy the others' results out of their parts

All ranks post the same vectors in the same order, so one count per rank and phase says everything. `advance` does what
can be done without waiting, `finish` waits for the rest. My own lane is not copied into shared memory before it is
reduced, and what is mine stays private: peers read only what was posted for them.

Of S bytes on n ranks each rank writes (n−1)/n S + S/n, and reads S (its lanes of all) + (n−1)/n S. Values are scaled as
they are posted, so the mean costs nothing. Half precision is added in float32 and rounded once. The owner alone
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
    """What one vector looks like: its dtype, its length, and its lanes as (owner, offset, length)."""

    dtype: torch.dtype
    numel: int
    lanes: tuple[tuple[int, int, int], ...]

    @property
    def num_bytes(self) -> int:
        return -(-self.numel * self.dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


class _Slot:
    """The place of one form in everybody's part."""

    def __init__(self, number: int, form: VectorLayout, parts: Sequence[torch.Tensor], rank: int) -> None:
        self.number = number
        self.halves = form.dtype in HALVES
        self.parts = [[part.view(form.dtype)[at : at + length] for part in parts] for _, at, length in form.lanes]
        self.mine = [lane for lane, (owner, _, _) in enumerate(form.lanes) if owner == rank]
        self.others = [(lane, owner) for lane, (owner, _, _) in enumerate(form.lanes) if owner != rank]
        self.views: Sequence[torch.Tensor] = ()
        self.scale = 1.0
        self.sums: list[torch.Tensor] = []


class SharedReduction:
    """The places of all `forms`. Making one is a collective call; OutOfMemory, on every rank, if memory is short.

    `keep`: every rank wants the whole result; otherwise each owner its own lanes. Between the `finish` of one round
    and the first `post` of the next all ranks must have met: only then may a place be written again. Who wants to know
    when is told: `done(form)` when a vector's result is there, `waited(begin, end)` after each wait for peers, in
    seconds as time.perf_counter counts them.
    """

    def __init__(self, group: Group, forms: Sequence[VectorLayout], keep: bool) -> None:
        self.group = group
        self.keep = keep
        self.done: Callable[[int], None] | None = None
        self.waited: Callable[[float, float], None] | None = None
        memory = group.buffer("mailbox", max(ALIGN_BYTES, sum(form.num_bytes for form in forms)), torch.uint8)
        self._posted = group.buffer("posted", 1, torch.uint8)
        self._reduced = group.buffer("reduced", 1, torch.uint8)
        self._boxes = []
        at = 0
        with torch.inference_mode(False):
            for number, form in enumerate(forms):
                places = [part[at : at + form.num_bytes] for part in memory.peers]
                self._boxes.append(_Slot(number, form, places, group.rank))
                at += form.num_bytes
        self._num_posted = self._num_reduced = self._num_collected = 0
        self._to_reduce: collections.deque[_Slot] = collections.deque()
        self._to_collect: collections.deque[_Slot] = collections.deque()

    def post(self, number: int, views: Sequence[torch.Tensor], scale: float) -> None:
        """Form `number`: `views` are my tensors of its lanes, flat; the result lands in them. `scale` is mine."""
        box, me = self._boxes[number], self.group.rank
        for lane, _ in box.others:
            place = box.parts[lane][me]
            if not box.halves:
                torch.mul(views[lane], scale, out=place)
            elif scale * self.group.size == 1.0:
                place.copy_(views[lane])  # scaled by the owner, in float32
            else:
                torch.mul(views[lane], scale * self.group.size, out=place)
        box.views, box.scale = views, scale
        self._num_posted += 1
        self._posted.signal(4 * self._num_posted, self.group.consistency.stamp)
        self._to_reduce.append(box)

    def advance(self) -> None:
        """Does what can be done without waiting."""
        while self._to_reduce and self._posted.reached(4 * (self._num_reduced + 1)):
            self._reduce()
        while self._to_collect and self._reduced.reached(4 * (self._num_collected + 1)):
            self._collect()

    def finish(self) -> None:
        """Returns when everything that was posted is done."""
        while self._to_reduce:
            self._await(self._posted, 4 * (self._num_reduced + 1))
            self._reduce()
            self.advance()
        while self._to_collect:
            self._await(self._reduced, 4 * (self._num_collected + 1))
            self._collect()

    def _await(self, flags: RegisteredBuffer, value: int) -> None:
        if self.waited is None or flags.reached(value):
            flags.await_all(value)
            return
        begin = time.perf_counter()
        flags.await_all(value)
        self.waited(begin, time.perf_counter())

    def _reduce(self) -> None:
        group, me = self.group, self.group.rank
        stamp, value = group.consistency.stamp, 4 * (self._num_reduced + 1)
        for peer in group.others:
            if self._posted.stamp_of(peer, value) != stamp:
                raise group.consistency.differ(peer, COLLECTIVES)
        box = self._to_reduce.popleft()
        box.sums = []
        for lane in box.mine:
            view, parts = box.views[lane], box.parts[lane]
            if box.halves:
                total = view.float().mul_(box.scale * group.size)
                for peer in group.others:
                    total.add_(parts[peer])
                view.copy_(total.mul_(1.0 / group.size))
                box.sums.append(total.sum())
            else:
                others = iter(group.others)
                torch.add(parts[next(others)], view, alpha=box.scale, out=view)
                for peer in others:
                    view.add_(parts[peer])
                box.sums.append(view.sum())
            if self.keep:
                parts[me].copy_(view)
        self._num_reduced += 1
        self._reduced.signal(4 * self._num_reduced)
        if self.keep:
            self._to_collect.append(box)
        else:
            self._num_collected += 1
            self._let_go(box)

    def _collect(self) -> None:
        box = self._to_collect.popleft()
        for lane, owner in box.others:
            box.views[lane].copy_(box.parts[lane][owner])
        self._num_collected += 1
        self._let_go(box)

    def _let_go(self, box: _Slot) -> None:
        box.views = ()
        if self.done is not None:
            self.done(box.number)

    def suspects(self) -> list[tuple[int, int]]:
        """My lanes whose sums are not finite, as (form, lane). Asked after `finish`."""
        sums = [(number, lane, total) for number, box in enumerate(self._boxes)
                for lane, total in zip(box.mine, box.sums, strict=False)]  # fmt: skip
        if not sums:
            return []
        finite = torch.isfinite(torch.stack([total.double() for _, _, total in sums]))
        if bool(finite.all()):
            return []
        return [(number, lane) for (number, lane, _), fine in zip(sums, finite.tolist(), strict=True) if not fine]

    def culprits(self, number: int, lane: int) -> list[int]:
        """The ranks whose posted values in this lane of mine are not finite; else me. Before anybody posts again."""
        parts = self._boxes[number].parts[lane]
        return [peer for peer in self.group.others if not bool(torch.isfinite(parts[peer]).all())] or [self.group.rank]
