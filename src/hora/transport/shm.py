"""Shared memory on one host: memfds handed from rank 0 to its peers, flags on cache lines of their own.

Two kinds of memory, both sealed against shrinking before anybody maps them, so that a read can never fault:

- *registered* (`buffer`): one part per rank and a common one, plus a flag, two stamps and a sleep mark per rank;
- *links*: for each ordered pair of ranks and each channel a queue of a few slots, through which `send` and `recv` pass.

A waiter spins for a moment, then sleeps in the kernel (see futex.py). With more ranks than cores it does not spin: the
core is what the awaited peer needs. Sleeps are cut into slices, so an abort is noticed within `SLICE_S` in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable

import torch

from ..errors import HoraError, OutOfMemory
from . import futex, limits
from .base import NUM_CHANNELS, SLICE_S, Circle, Handle, Land, Patience, Registered, Transport
from .passing import Passing

LINE = 128  # bytes: two cache lines, since processors fetch lines in pairs
PAGE = 4096
NUM_SLOTS = 2
LINKS_BYTES = 16 << 20  # for all links of a group together, within these bounds per slot
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 32 << 10, 512 << 10
SPINS = 4000  # about 0.2 ms
POLITE_SPINS = 3  # with more ranks than cores: offer the core to the others this often, then sleep
MADV_POPULATE_WRITE = 23
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SHRINK") else 0

# `agree(key, word)` tells every rank's word to every rank: "" for fine, else what is wrong. It blocks.
Agree = Callable[[str, str], list[str]]


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


class Arena:
    """One mapping of one memfd, as words for flags and as tensors for data."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < num_bytes:
            raise HoraError("the shared memory offered is too small or not sealed")
        self.map = mmap.mmap(descriptor, num_bytes)
        self.words = memoryview(self.map).cast("Q")
        self.halves = memoryview(self.map).cast("I")
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @staticmethod
    def create(num_bytes: int) -> int:
        """A sealed memfd of that size. OutOfMemory if there is too little, or none is to be had."""
        short = limits.shortage(num_bytes)
        if short:
            raise OutOfMemory(short)
        try:
            descriptor = os.memfd_create("hora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError) as problem:
            raise OutOfMemory(f"the kernel refused shared memory: {problem}") from None
        try:
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as problem:
            os.close(descriptor)
            raise OutOfMemory(f"the kernel refused {num_bytes >> 20} MiB of shared memory: {problem}") from None
        return descriptor

    def populate(self) -> None:
        """Takes the pages now: a first touch costs six times a copy."""
        with contextlib.suppress(OSError, ValueError):  # older kernels fault them in one by one
            self.map.madvise(MADV_POPULATE_WRITE)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=numel, offset=offset)


class ShmTransport(Transport):
    """See the module. Made by `ShmTransport.connect`, a collective call of all ranks of the circle."""

    kind = "shm"
    shares_memory = True

    def __init__(self, circle: Circle, passing: Passing, leader: str, agree: Agree) -> None:
        super().__init__(circle)
        self._passing = passing
        self._leader = leader
        self._agree = agree
        pairs = circle.size * circle.size
        slot = LINKS_BYTES // max(1, pairs * NUM_CHANNELS * NUM_SLOTS)
        self.slot_bytes = max(MIN_SLOT_BYTES, min(MAX_SLOT_BYTES, slot // PAGE * PAGE))
        bells = NUM_CHANNELS * circle.size * LINE
        self._link_bytes = _round_up(LINE + NUM_SLOTS * LINE, PAGE) + NUM_SLOTS * self.slot_bytes
        self._links_offset = _round_up(bells, PAGE)
        self._arena = self._map("links", self._links_offset + NUM_CHANNELS * pairs * self._link_bytes)
        self._rings = 0
        self._links: dict[tuple[int, int, int], _Link] = {}

    def _map(self, name: str, num_bytes: int) -> Arena:
        """Collective: rank 0 makes the memory, the others fetch it; all succeed or all raise."""
        key = f"{self.circle.name}/{name}"
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
            arena = Arena(descriptor, num_bytes)
        except (HoraError, OSError) as refusal:
            problem = str(refusal) or type(refusal).__name__
        words = self._agree(key, problem)
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

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Registered:
        part = max(PAGE, _round_up(numel * dtype.itemsize, PAGE))
        header = _round_up(self.size * LINE, PAGE)
        arena = self._map(name, header + (self.size + 1) * part)
        arena.populate()
        offsets = [header + rank * part for rank in range(self.size + 1)]
        return ShmRegistered(self, arena, [arena.tensor(offset, numel, dtype) for offset in offsets])

    # -- links -----------------------------------------------------------------------------------------------------

    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Handle:
        return _Send(self, peer, channel, stamp, tensor)

    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Handle:
        return _Recv(self, peer, channel, stamp, tensor, land)

    def link(self, source: int, target: int, channel: int) -> _Link:
        key = (source, target, channel)
        found = self._links.get(key)
        if found is None:
            number = (channel * self.size + source) * self.size + target
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

    def _idle(self, handle: Handle, rounds: int) -> None:
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
        start = offset + _round_up(LINE + NUM_SLOTS * LINE, PAGE)
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


class _Send(Handle):
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


class _Recv(Handle):
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


class ShmRegistered(Registered):
    """Per rank one line: the flag, two stamps (by parity of the turn) and, half a line on, the sleep mark."""

    def __init__(self, transport: ShmTransport, arena: Arena, parts: list[torch.Tensor]) -> None:
        self._transport = transport
        self._arena = arena
        self.peers = parts[:-1]
        self.common = parts[-1]
        self.mine = parts[transport.rank]
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
            words[me + 1 + ((value >> 1) & 1)] = stamp
        words[me] = value
        futex.lock.acquire()  # a fence, spelled out: this is the hottest path there is
        futex.lock.release()
        halves, name = self._halves, self._transport.rank + 1
        for mark in self._other_marks:
            if halves[mark] == name:
                futex.wake(self._my_address)
                return

    def stamp_of(self, peer: int, value: int) -> int:
        return self._words[self._flag[peer] + 1 + ((value >> 1) & 1)]

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
        patience = Patience(transport, (peer,))
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
