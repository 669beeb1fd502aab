"""The "shm" transport: shared memory on one host, memfds that rank 0 hands to its peers.

Two kinds of memory, both sealed against shrinking before they are mapped, so that a read can never fault:

- *registered* (`buffer`): one part per rank, plus a flag, two fingerprints and a sleep mark per rank;
- *links*: for each ordered pair of ranks and each channel a queue of a few slots, which `send` and `recv` use.

A waiter spins for a moment, then sleeps in the kernel (futex.py). With more ranks than cores it does not spin, because
the awaited peer needs the core. A sleep lasts at most `POLL_S`, so an abort is noticed by then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import HoraError, OutOfMemory
from ..net.fd_passing import FdPassing
from . import futex
from .arena import PAGE, Arena, round_up
from .base import NUM_CHANNELS, POLL_S, BoundedWait, GroupSpec, RegisteredBuffer, Transfer, Transport

if TYPE_CHECKING:
    from .context import TransportContext

LINE = 128  # bytes: two cache lines, since processors fetch lines in pairs
NUM_SLOTS = 2
LINKS_BYTES = 128 << 20  # for all links of a group together, within these bounds per slot; pages are taken when used
MIN_SLOT_BYTES, MAX_SLOT_BYTES = 32 << 10, 512 << 10
SPINS = 4000  # about 0.2 ms
YIELDS = 3  # with more ranks than cores: offer the core to the others this often, then sleep

# `gather(key, value, check)` returns every rank's value. It blocks until all have given theirs or `check` raises.
Gather = Callable[[str, str, Callable[[], None]], list[str]]


class _Link:
    """A queue of slots from one rank to another: `written` is the sender's count, `read` the receiver's."""

    def __init__(self, arena: Arena, offset: int, slot_bytes: int) -> None:
        self.words = arena.words
        self._written = offset // 8
        self._read = offset // 8 + LINE // 16
        self._headers = [(offset + LINE + slot * LINE) // 8 for slot in range(NUM_SLOTS)]
        start = offset + round_up(LINE + NUM_SLOTS * LINE, PAGE)
        self.slots = arena.bytes[start : start + NUM_SLOTS * slot_bytes].split(slot_bytes)
        self.num_written = 0
        self.num_read = 0

    def has_room(self) -> bool:
        return self.num_written - self.words[self._read] < NUM_SLOTS

    def has_piece(self) -> bool:
        return self.words[self._written] > self.num_read

    def publish(self, fingerprint: int, num_bytes: int) -> None:
        header = self._headers[self.num_written % NUM_SLOTS]
        self.words[header] = fingerprint
        self.words[header + 1] = num_bytes
        self.num_written += 1
        self.words[self._written] = self.num_written

    def header(self) -> tuple[int, int]:
        """Fingerprint and length of the message that the next piece belongs to."""
        header = self._headers[self.num_read % NUM_SLOTS]
        return self.words[header], self.words[header + 1]

    def free(self) -> None:
        self.num_read += 1
        self.words[self._read] = self.num_read


class _Send(Transfer):
    __slots__ = ("data", "link", "offset")
    transport: ShmTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.link = self.transport.link(self.transport.rank, self.peer, self.channel)
        self.data = self.tensor.view(torch.uint8) if self.tensor.numel() else self.tensor
        self.offset = 0

    def advance(self) -> bool:
        transport, link = self.transport, self.link
        total = self.data.numel()
        moved = False
        while not self.done and link.has_room():
            stop = min(total, self.offset + transport.slot_bytes)
            if stop > self.offset:
                slot = link.slots[link.num_written % NUM_SLOTS]
                slot[: stop - self.offset].copy_(self.data[self.offset : stop])
            link.publish(self.fingerprint, total)
            transport.notify(self.peer, self.channel)
            self.offset = stop
            self.done = stop >= total
            moved = True
        return moved


class _Recv(Transfer):
    __slots__ = ("link", "offset")
    transport: ShmTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.link = self.transport.link(self.peer, self.transport.rank, self.channel)
        self.offset = 0

    def advance(self) -> bool:
        transport, link, tensor = self.transport, self.link, self.tensor
        size = tensor.element_size()
        total = tensor.numel() * size
        moved = False
        while not self.done and link.has_piece():
            if link.header() != (self.fingerprint, total):
                raise transport.observer.mismatch(self.peer, self.channel)
            stop = min(total, self.offset + transport.slot_bytes)
            if stop > self.offset:
                piece = link.slots[link.num_read % NUM_SLOTS][: stop - self.offset].view(tensor.dtype)
                (self.combine or torch.Tensor.copy_)(tensor[self.offset // size : stop // size], piece)
            link.free()
            transport.notify(self.peer, self.channel)
            self.offset = stop
            self.done = stop >= total
            moved = True
        return moved


class ShmTransport(Transport):
    """See the module. Making one is a collective call of all ranks of the group; `leader` is rank 0's address."""

    kind = "shm"
    auto_order = 1
    shares_memory = True
    overlaps_without_spare_core = False
    clone_as_auto = True  # shared memory may run out
    send_transfer, recv_transfer = _Send, _Recv

    @classmethod
    def usable(cls, context: TransportContext, spec: GroupSpec) -> bool:
        return len({context.hosts[member.rank] for member in spec.members}) == 1

    @classmethod
    def open(cls, context: TransportContext, spec: GroupSpec, option: str = "") -> Transport:
        if context.fd_passing is None:
            raise ValueError("shared memory between ranks needs Linux on x86-64; use the tcp transport")
        leader = context.places[spec.members[0].rank].fd_passing
        return cls(spec, context.fd_passing, leader, lambda *given: context.gather(spec, *given))

    def __init__(self, spec: GroupSpec, fd_passing: FdPassing, leader: str, gather: Gather) -> None:
        super().__init__(spec)
        self._fd_passing = fd_passing
        self._leader = leader
        self._gather = gather
        pairs = spec.size * spec.size
        slot = LINKS_BYTES // max(1, pairs * NUM_CHANNELS * NUM_SLOTS)
        self.slot_bytes = max(MIN_SLOT_BYTES, min(MAX_SLOT_BYTES, slot // PAGE * PAGE))
        self._link_bytes = round_up(LINE + NUM_SLOTS * LINE, PAGE) + NUM_SLOTS * self.slot_bytes
        self._links_offset = round_up(NUM_CHANNELS * spec.size * LINE, PAGE)  # before them: the notification words
        self._arena = self._map("links", self._links_offset + NUM_CHANNELS * pairs * self._link_bytes)
        self._num_notifications = 0
        self._links: dict[tuple[int, int, int], _Link] = {}

    def _map(self, name: str, num_bytes: int) -> Arena:
        """Collective: rank 0 makes the memory, the others fetch it; all succeed or all raise."""
        key = f"{self.spec.name}/{name}"
        arena, problem, descriptor = None, "", -1
        try:
            if self.rank == 0:
                try:
                    descriptor = Arena.create(num_bytes)
                except HoraError as refusal:
                    self._fd_passing.refuse(key, str(refusal))
                    raise
                self._fd_passing.offer(key, descriptor)
            else:
                descriptor = self._fd_passing.fetch(self._leader, key)
            arena = Arena(descriptor, num_bytes)
        except (HoraError, OSError) as refusal:
            problem = str(refusal) or type(refusal).__name__
        problems = self._gather(key, problem, self.check)
        if self.rank == 0:
            self._fd_passing.withdraw(key)
        if descriptor >= 0:
            os.close(descriptor)
        for peer, problem in enumerate(problems):
            if problem:
                raise OutOfMemory(f"{self.name_of(peer)}: {problem}")
        assert arena is not None
        return arena

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        part = max(PAGE, round_up(numel * dtype.itemsize, PAGE))
        header = round_up(self.size * LINE, PAGE)
        arena = self._map(name, header + self.size * part)
        arena.populate()
        memory = ShmBuffer(self, arena)
        memory.peers = [arena.tensor(header + rank * part, numel, dtype) for rank in range(self.size)]
        memory.mine = memory.peers[self.rank]
        memory.storage = arena.tensor(header, self.size * part, torch.uint8)
        return memory

    def link(self, source: int, target: int, channel: int) -> _Link:
        key = (source, target, channel)
        found = self._links.get(key)
        if found is None:
            number = (channel * self.size + source) * self.size + target
            with torch.inference_mode(False):  # its views serve calls of either kind
                offset = self._links_offset + number * self._link_bytes
                found = self._links[key] = _Link(self._arena, offset, self.slot_bytes)
        return found

    def notify(self, peer: int, channel: int) -> None:
        """Tells `peer` that something has changed on a link with it."""
        index = (channel * self.size + peer) * (LINE // 4)
        self._num_notifications += 1
        halves = self._arena.halves
        # A value that no other rank ever writes: a waiter that saw an older one cannot mistake it.
        halves[index] = (self._num_notifications * self.size + self.rank) & 0xFFFFFFFF
        futex.fence()
        if halves[index + LINE // 8]:
            futex.wake(self._arena.address + index * 4)

    def _idle(self, transfer: Transfer, rounds: int) -> None:
        if self.oversubscribed or self.background:
            if rounds <= YIELDS:
                os.sched_yield()
                return
        elif rounds <= 30:
            return
        index = (transfer.channel * self.size + self.rank) * (LINE // 4)
        halves = self._arena.halves
        seen = halves[index]
        halves[index + LINE // 8] = 1
        futex.fence()
        if not self._advance(transfer.channel):
            futex.wait(self._arena.address + index * 4, seen, POLL_S)
        halves[index + LINE // 8] = 0


class ShmBuffer(RegisteredBuffer):
    """Per rank one LINE: the flag, two fingerprints (by parity of the epoch) and, half a line on, the sleep mark."""

    def __init__(self, transport: ShmTransport, arena: Arena) -> None:
        self._transport = transport
        self._address = arena.address
        self._words = arena.words
        self._halves = arena.halves
        self._flag = [rank * (LINE // 8) for rank in range(transport.size)]
        self._mark = [rank * (LINE // 4) + LINE // 8 for rank in range(transport.size)]
        self._me = self._flag[transport.rank]
        self._others = [rank for rank in range(transport.size) if rank != transport.rank]
        self._other_flags = [self._flag[rank] for rank in self._others]
        self._other_marks = [self._mark[rank] for rank in self._others]

    def signal(self, value: int, fingerprint: int | None = None) -> None:
        words, me = self._words, self._me
        if fingerprint is not None:
            words[me + 1 + ((value >> 2) & 1)] = fingerprint
        words[me] = value
        with futex.lock:  # futex.fence(), inlined: this is the hottest path there is
            pass
        halves, name = self._halves, self._transport.rank + 1
        for mark in self._other_marks:
            if halves[mark] == name:
                futex.wake(self._address + me * 8)
                return

    def fingerprint_of(self, peer: int, value: int) -> int:
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
        if transport.oversubscribed or transport.background:
            for _ in range(YIELDS):
                os.sched_yield()
                if words[flag] >= value:
                    return
        else:
            for _ in range(SPINS):
                if words[flag] >= value:
                    return
        wait = BoundedWait(transport, (peer,))
        halves, mark = self._halves, self._mark[transport.rank]
        while True:
            halves[mark] = peer + 1
            futex.fence()
            seen = words[flag]
            if seen >= value:
                break
            futex.wait(self._address + flag * 8, seen & 0xFFFFFFFF, POLL_S)
            if words[flag] >= value:
                break
            wait.check()
        halves[mark] = 0
