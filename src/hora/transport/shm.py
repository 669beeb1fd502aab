"""Shared memory on one host: memfds handed from rank 0 to its peers, flags on cache lines of their own.

Two kinds of memory, both sealed against shrinking before anybody maps them, so that a read can never fault:

- *registered* (`buffer`): one part per rank, woven into the whole, plus a flag, two stamps and a sleep mark per rank;
- *links*: for each ordered pair of ranks and each channel a queue of a few slots, through which `send` and `recv` pass.

A waiter spins for a moment, then sleeps in the kernel (see futex.py). With more ranks than cores it does not spin: the
core is what the awaited peer needs. Sleeps are cut into slices, so an abort is noticed within `SLICE_S` in any case.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..errors import HoraError, OutOfMemory
from ..net.fd_passing import FdPassing
from . import futex
from .arena import PAGE, Arena, round_up
from .base import (
    NUM_CHANNELS,
    SLICE_S,
    BoundedWait,
    GroupSpec,
    Land,
    RegisteredBuffer,
    Transfer,
    Transport,
    element_shares,
    page_shares,
)

LINE = 128  # bytes: two cache lines, since processors fetch lines in pairs
NUM_SLOTS = 2
LINKS_BYTES = 128 << 20  # for all links of a group together, within these bounds per slot; taken page by page when used
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 32 << 10, 512 << 10
SPINS = 4000  # about 0.2 ms
POLITE_SPINS = 3  # with more ranks than cores: offer the core to the others this often, then sleep

# `agree(key, word, check)` tells every rank's word to every rank: "" for fine, else what is wrong. It blocks until all
# have spoken or `check` raises.
Agree = Callable[[str, str, Callable[[], None]], list[str]]


class ShmTransport(Transport):
    """See the module. Making one is a collective call of all ranks of the spec."""

    kind = "shm"
    shares_memory = True
    overlaps_without_spare_core = False
    clone_kind = "auto"  # shared memory may run out

    def __init__(self, spec: GroupSpec, passing: FdPassing, leader: str, agree: Agree) -> None:
        super().__init__(spec)
        self._passing = passing
        self._leader = leader
        self._agree = agree
        pairs = spec.size * spec.size
        slot = LINKS_BYTES // max(1, pairs * NUM_CHANNELS * NUM_SLOTS)
        self.slot_bytes = max(MIN_SLOT_BYTES, min(MAX_SLOT_BYTES, slot // PAGE * PAGE))
        bells = NUM_CHANNELS * spec.size * LINE
        self._link_bytes = round_up(LINE + NUM_SLOTS * LINE, PAGE) + NUM_SLOTS * self.slot_bytes
        self._links_offset = round_up(bells, PAGE)
        self._arena = self._map("links", self._links_offset + NUM_CHANNELS * pairs * self._link_bytes)
        self._rings = 0
        self._links: dict[tuple[int, int, int], _Link] = {}

    def _map(self, name: str, num_bytes: int, woven: list[tuple[int, int]] | None = None) -> Arena:
        """Collective: rank 0 makes the memory, the others fetch it; all succeed or all raise."""
        key = f"{self.spec.name}/{name}"
        arena, problem, descriptor = None, "", -1
        try:
            if self.rank == 0:
                try:
                    descriptor = Arena.create(num_bytes)
                except HoraError as refusal:
                    self._passing.refuse(key, str(refusal))
                    raise
                self._passing.offer(key, descriptor)
            else:
                descriptor = self._passing.fetch(self._leader, key)
            arena = Arena(descriptor, num_bytes, woven)
        except (HoraError, OSError) as refusal:
            problem = str(refusal) or type(refusal).__name__
        words = self._agree(key, problem, self.check)
        if self.rank == 0:
            self._passing.withdraw(key)
        if descriptor >= 0:
            os.close(descriptor)
        for peer, word in enumerate(words):
            if word:
                raise OutOfMemory(f"{self.name_of(peer)}: {word}")
        assert arena is not None
        return arena

    # -- registered memory -----------------------------------------------------------------------------------------

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        part = max(PAGE, round_up(numel * dtype.itemsize, PAGE))
        header = round_up(self.size * LINE, PAGE)
        starts = [header + rank * part for rank in range(self.size)]
        cut = page_shares(part, self.size)
        woven = [(starts[rank] + start, stop - start) for rank, (start, stop) in enumerate(cut)]
        arena = self._map(name, header + self.size * part, woven)
        arena.populate()
        memory = ShmBuffer(self, arena)
        memory.peers = [arena.tensor(start, numel, dtype) for start in starts]
        memory.mine = memory.peers[self.rank]
        memory.whole = arena.whole(numel, dtype)
        memory.span = arena.tensor(header, self.size * part, torch.uint8)
        memory.shares = element_shares(cut, numel, dtype)
        return memory

    # -- links -----------------------------------------------------------------------------------------------------

    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Transfer:
        return _Send(self, peer, channel, stamp, tensor)

    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Transfer:
        return _Recv(self, peer, channel, stamp, tensor, land)

    def link(self, source: int, target: int, channel: int) -> _Link:
        key = (source, target, channel)
        found = self._links.get(key)
        if found is None:
            number = (channel * self.size + source) * self.size + target
            with torch.inference_mode(False):  # its views serve calls of either kind
                found = self._links[key] = _Link(self._arena, self._links_offset + number * self._link_bytes, self)
        return found

    def ring_bell(self, peer: int, channel: int) -> None:
        """Tells `peer` that something has changed on a link with it."""
        index = (channel * self.size + peer) * (LINE // 4)
        self._rings += 1
        halves = self._arena.halves
        # A value that nobody else ever writes: a waiter that saw an older one cannot mistake it.
        halves[index] = (self._rings * self.size + self.rank) & 0xFFFFFFFF
        futex.fence()
        if halves[index + LINE // 8]:
            futex.wake(self._arena.address + index * 4)

    def _idle(self, handle: Transfer, rounds: int) -> None:
        if self.crowded or self.background:
            if rounds <= POLITE_SPINS:
                os.sched_yield()
                return
        elif rounds <= 30:
            return
        index = (handle.channel * self.size + self.rank) * (LINE // 4)
        halves = self._arena.halves
        seen = halves[index]
        halves[index + LINE // 8] = 1
        futex.fence()
        if not self._advance(handle.channel):
            futex.wait(self._arena.address + index * 4, seen, SLICE_S)
        halves[index + LINE // 8] = 0


class _Link:
    """A queue of slots from one rank to another: `written` is the sender's count, `read` the receiver's."""

    def __init__(self, arena: Arena, offset: int, transport: ShmTransport) -> None:
        self.words = arena.words
        self._written = offset // 8
        self._read = offset // 8 + LINE // 16
        self._meta = [(offset + LINE + slot * LINE) // 8 for slot in range(NUM_SLOTS)]
        start = offset + round_up(LINE + NUM_SLOTS * LINE, PAGE)
        self.slots = [
            arena.bytes[start + slot * transport.slot_bytes : start + (slot + 1) * transport.slot_bytes]
            for slot in range(NUM_SLOTS)
        ]
        self.num_written = 0
        self.num_read = 0

    def has_room(self) -> bool:
        return self.num_written - self.words[self._read] < NUM_SLOTS

    def has_piece(self) -> bool:
        return self.words[self._written] > self.num_read

    def publish(self, stamp: int, total: int) -> None:
        meta = self._meta[self.num_written % NUM_SLOTS]
        self.words[meta] = stamp
        self.words[meta + 1] = total
        self.num_written += 1
        self.words[self._written] = self.num_written

    def meta(self) -> tuple[int, int]:
        meta = self._meta[self.num_read % NUM_SLOTS]
        return self.words[meta], self.words[meta + 1]

    def free(self) -> None:
        self.num_read += 1
        self.words[self._read] = self.num_read


class _Send(Transfer):
    __slots__ = ("data", "link", "offset", "stamp")

    def __init__(self, transport: ShmTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor) -> None:
        super().__init__(transport, peer, channel)
        self.link = transport.link(transport.rank, peer, channel)
        self.data = tensor.view(torch.uint8) if tensor.numel() else tensor
        self.offset = 0
        self.stamp = stamp

    def advance(self) -> bool:
        transport, link = self.transport, self.link
        assert isinstance(transport, ShmTransport)
        total = self.data.numel()
        moved = False
        while not self.done and link.has_room():
            stop = min(total, self.offset + transport.slot_bytes)
            if stop > self.offset:
                slot = link.slots[link.num_written % NUM_SLOTS]
                slot[: stop - self.offset].copy_(self.data[self.offset : stop])
            link.publish(self.stamp, total)
            transport.ring_bell(self.peer, self.channel)
            self.offset = stop
            self.done = stop >= total
            moved = True
        return moved


class _Recv(Transfer):
    __slots__ = ("land", "link", "offset", "stamp", "tensor")

    def __init__(
        self, transport: ShmTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor, land: Land
    ) -> None:
        super().__init__(transport, peer, channel)
        self.link = transport.link(peer, transport.rank, channel)
        self.tensor = tensor
        self.land = land
        self.offset = 0
        self.stamp = stamp

    def advance(self) -> bool:
        transport, link, tensor = self.transport, self.link, self.tensor
        assert isinstance(transport, ShmTransport)
        size = tensor.element_size()
        total = tensor.numel() * size
        moved = False
        while not self.done and link.has_piece():
            if link.meta() != (self.stamp, total):
                raise transport.watcher.differ(self.peer, self.channel)
            stop = min(total, self.offset + transport.slot_bytes)
            if stop > self.offset:
                piece = link.slots[link.num_read % NUM_SLOTS][: stop - self.offset].view(tensor.dtype)
                self.land(tensor[self.offset // size : stop // size], piece)
            link.free()
            transport.ring_bell(self.peer, self.channel)
            self.offset = stop
            self.done = stop >= total
            moved = True
        return moved


class ShmBuffer(RegisteredBuffer):
    """Per rank one line: the flag, two stamps (by parity of the turn) and, half a line on, the sleep mark."""

    def __init__(self, transport: ShmTransport, arena: Arena) -> None:
        self._transport = transport
        self._arena = arena
        self._words = arena.words
        self._halves = arena.halves
        self._flag = [rank * (LINE // 8) for rank in range(transport.size)]
        self._mark = [rank * (LINE // 4) + LINE // 8 for rank in range(transport.size)]
        self._me = self._flag[transport.rank]
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._other_flags = [self._flag[rank] for rank in self._others]
        self._other_marks = [self._mark[rank] for rank in self._others]
        self._my_address = arena.address + self._me * 8

    def signal(self, value: int, stamp: int | None = None) -> None:
        words, me = self._words, self._me
        if stamp is not None:
            words[me + 1 + ((value >> 2) & 1)] = stamp
        words[me] = value
        with futex.lock:  # a fence, spelled out: this is the hottest path there is
            pass
        halves, name = self._halves, self._transport.rank + 1
        for mark in self._other_marks:
            if halves[mark] == name:
                futex.wake(self._my_address)
                return

    def stamp_of(self, peer: int, value: int) -> int:
        return self._words[self._flag[peer] + 1 + ((value >> 2) & 1)]

    def await_signal(self, peer: int, value: int) -> None:
        if self._words[self._flag[peer]] < value:
            self._await(peer, value)

    def await_all(self, value: int) -> None:
        words = self._words
        for flag in self._other_flags:
            if words[flag] < value:
                break
        else:
            return
        for peer in self._others:
            if words[self._flag[peer]] < value:
                self._await(peer, value)

    def reached(self, value: int) -> bool:
        words = self._words
        return all(words[flag] >= value for flag in self._other_flags)

    def _await(self, peer: int, value: int) -> None:
        transport, words, flag = self._transport, self._words, self._flag[peer]
        if transport.crowded or transport.background:
            for _ in range(POLITE_SPINS):
                os.sched_yield()
                if words[flag] >= value:
                    return
        else:
            for _ in range(SPINS):
                if words[flag] >= value:
                    return
        patience = BoundedWait(transport, (peer,))
        halves, mark = self._halves, self._mark[transport.rank]
        address = self._arena.address + flag * 8
        while True:
            halves[mark] = peer + 1
            futex.fence()
            seen = words[flag]
            if seen >= value:
                break
            futex.wait(address, seen & 0xFFFFFFFF, SLICE_S)
            if words[flag] >= value:
                break
            patience.check()
        halves[mark] = 0
