"""Transport: moves bytes between the ranks of one group, and gives them memory that all of them see.

The seam is a few verbs:

    send(peer, tensor, channel, stamp) -> Handle          recv(peer, tensor, channel, stamp, land) -> Handle
    buffer(name, numel, dtype) -> Registered              (a collective call; only where `shares_memory`)
    abort(cause)                                          close()

- Tensors are one-dimensional, contiguous and on the CPU; the collectives see to that.
- `send` and `recv` return at once. `Handle.wait()` drives every operation of its channel until its own is done, so a
  send and a receive that are both under way can never block each other. Messages of one channel between two ranks
  arrive in order. Any thread may wait; threads that work at the same time use different channels.
- `land(part, piece)` says how arriving data joins the tensor, piece by piece (default: it is copied). `piece` is the
  transport's own memory, valid during the call: a reduction reads it in place.
- `stamp` is the fingerprint of the operation. It travels with every message, and a receiver that expected another one
  raises `Mismatch` before any data lands.
- Every wait ends: with what it waited for, with the cause given to `abort`, with `PeerLost` if that peer has left, or
  with `Timeout` after `timeout_s`. A peer that is merely slow is waited for, and named after `SLOW_S`.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import itertools
import logging
import mmap
import threading
import time
from collections.abc import Callable

import torch

from ..coordinator.messages import Member
from ..errors import HoraError, PeerLost, Timeout
from ..net.machine import num_cores

log = logging.getLogger(__name__)

COLLECTIVES, POINT_TO_POINT = 0, 1  # the channels that every transport opens
NUM_CHANNELS = 2
CAME, REDUCED, RELEASED = 1, 2, 3  # what a flag says about a turn at registered memory

SLICE_S = 0.05  # a sleeping wait looks up this often for an abort
NOTICE_S = 0.2  # after this long the group asks whether both sides mean the same operation
CAUSE_S = 0.5  # a broken link waits this long for word of why
SLOW_S = 10.0  # after this long the wait is said aloud

Land = Callable[[torch.Tensor, torch.Tensor], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Who belongs to a group: `members` in order of rank, `rank` among them, and the generation of this membership."""

    rank: int
    members: tuple[Member, ...]
    generation: int
    group: int
    timeout_s: float = 1800.0

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def name(self) -> str:
        """A key that no other group of the run has."""
        return f"g{self.generation}/{self.group}"

    def index_of(self, rank: int) -> int | None:
        """Where the run's worker `rank` stands in this spec; None if it is not in it."""
        return next((index for index, member in enumerate(self.members) if member.rank == rank), None)


class WaitObserver:
    """Whom a transport tells about long waits. The group is one; this default keeps quiet."""

    def doing(self) -> str:
        """The operation under way, in words."""
        return "a transfer"

    def ranks_of(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """What these peers are called in the group that will hear of them: a PeerLost carries these numbers."""
        return peers

    def waiting(self, peers: tuple[int, ...]) -> None:
        """A wait for these peers has lasted `NOTICE_S`. Must not block."""

    def differ(self, peer: int, channel: int) -> HoraError:
        """The error to raise: a message of `peer` carries another stamp than ours. May wait a moment to ask it."""
        return HoraError(f"rank {peer} sent a message of another operation")


class Transfer:
    """One transfer under way. `done` turns true once; `wait` blocks until then or raises."""

    __slots__ = ("channel", "done", "peer", "transport")

    def __init__(self, transport: Transport, peer: int, channel: int) -> None:
        self.transport = transport
        self.peer = peer
        self.channel = channel
        self.done = False

    def wait(self) -> None:
        self.transport.drive(self)

    def advance(self) -> bool:
        """Moves what can be moved without blocking; tells whether anything moved. Called under the channel's lock."""
        raise NotImplementedError  # each transport's handles say how


class BoundedWait:
    """One long wait: asks for news of an abort, speaks up when it takes long, gives up when `timeout_s` is over."""

    def __init__(self, transport: Transport, peers: tuple[int, ...]) -> None:
        self.transport = transport
        self.peers = peers
        self.started = time.monotonic()
        self._noticed = False
        self._gone_at: float | None = None
        self._next_word = SLOW_S

    def check(self) -> None:
        transport = self.transport
        transport.check()
        waited = time.monotonic() - self.started
        if any(peer in transport.gone for peer in self.peers):
            if self._gone_at is None:
                self._gone_at = waited  # what it sent before it left may still be on its way
            elif waited - self._gone_at >= transport.left_s:
                raise transport.left(self.peers)
        if waited >= NOTICE_S and not self._noticed:
            self._noticed = True
            transport.watcher.waiting(self.peers)
        if waited >= self._next_word:
            self._next_word *= 2
            log.warning("%s", self._sentence(waited))
        if waited >= transport.spec.timeout_s:
            raise Timeout(f"{self._sentence(waited)}; gave up after timeout_s={transport.spec.timeout_s:g}")

    def _sentence(self, waited: float) -> str:
        transport = self.transport
        others = ", ".join(transport.name_of(peer) for peer in self.peers)
        return (
            f"{transport.name_of(transport.rank)} has waited {waited:.0f} s for {others} in {transport.watcher.doing()}"
        )


class RegisteredBuffer(abc.ABC):
    """Memory that every rank of the group sees, with one flag per rank.

    `mine` is this rank's part, `peers[r]` rank r's (one's own included). `whole` shows the parts' shares side by
    side, as one contiguous tensor without a copy: its elements in `shares[r]` are those of rank r's part, so what
    each rank writes into its own share of its own part is there for all to read. Shares are whole pages. `span` is
    all parts in a row, as bytes, for memory that belongs to everybody. A rank's
    flag only grows. `signal(value, stamp)` raises mine after everything I wrote before is visible; `await_all(value)`
    returns once every rank's flag has reached `value`. The memory belongs to one generation and is never used again.

    A collective takes one or more *turns* at the memory. In turn t a rank's flag goes to 4t + `CAME`, with the stamp
    of its call, then, if the turn has a second phase, to 4t + `REDUCED`, and to 4t + `RELEASED` when it no longer
    reads what the others hold. A rank that has come to turn t + 1 has finished turn t, so nobody gets further than
    one turn ahead.
    """

    mine: torch.Tensor
    peers: list[torch.Tensor]
    whole: torch.Tensor
    span: torch.Tensor
    shares: list[tuple[int, int]]
    name: str = ""
    turn: int = 0  # how many times this memory has been through a collective; the same on every rank

    @abc.abstractmethod
    def signal(self, value: int, stamp: int | None = None) -> None: ...

    @abc.abstractmethod
    def await_signal(self, peer: int, value: int) -> None: ...

    @abc.abstractmethod
    def await_all(self, value: int) -> None: ...

    @abc.abstractmethod
    def reached(self, value: int) -> bool:
        """Whether every rank's flag has reached `value`. Never blocks."""

    def release(self) -> None:
        """I no longer read the last turn's result: the others may overwrite their share of it. Does not block."""
        if self.turn:
            self.signal(4 * self.turn - 4 + RELEASED)

    def claim(self) -> None:
        """Blocks until nobody reads the last turn's result any more: then `mine` is free to be written."""
        if self.turn:
            self.await_all(4 * self.turn - 4 + RELEASED)

    @abc.abstractmethod
    def stamp_of(self, peer: int, value: int) -> int:
        """The stamp that `peer` gave with flag `value`; kept until it gives the one two turns later."""


def page_shares(num_bytes: int, parts: int) -> list[tuple[int, int]]:
    """`num_bytes`, whole pages, dealt to the parts: (start, stop) in bytes, whole pages each."""
    pages = num_bytes // mmap.PAGESIZE
    edges = [(pages * part // parts) * mmap.PAGESIZE for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def element_shares(cut: list[tuple[int, int]], numel: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The same shares counted in elements, as far as there are any."""
    size = dtype.itemsize
    return [(min(numel, start // size), min(numel, stop // size)) for start, stop in cut]


class _Channel:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[tuple[str, int], collections.deque[Transfer]] = {}


class Transport(abc.ABC):
    """What all transports share: queues of transfers per channel, waiting, abort, and counting what was sent."""

    kind: str = ""
    shares_memory: bool = False
    overlaps_without_spare_core: bool = True  # whether a thread may transfer while all cores of the host compute
    left_s: float = 0.5  # how long what a rank sent before it left may take to arrive

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.watcher = WaitObserver()
        self.cause: HoraError | None = None
        self.gone: dict[int, str] = {}
        self.sent_messages = [0] * spec.size
        self.sent_bytes = [0] * spec.size
        self.crowded = spec.size > num_cores()  # then a spin burns the time of the peer it waits for
        self.background = False  # set while a thread beside the user's computes: it must not spin with the GIL in hand
        self._channels = [_Channel() for _ in range(NUM_CHANNELS)]

    # -- verbs ---------------------------------------------------------------------------------------------------

    def send(self, peer: int, tensor: torch.Tensor, channel: int = COLLECTIVES, stamp: int = 0) -> Transfer:
        self.check()
        self.sent_messages[peer] += 1
        self.sent_bytes[peer] += tensor.numel() * tensor.element_size()
        return self._begin("send", self._send(peer, tensor, channel, stamp))

    def recv(
        self,
        peer: int,
        tensor: torch.Tensor,
        channel: int = COLLECTIVES,
        stamp: int = 0,
        land: Land | None = None,
    ) -> Transfer:
        self.check()
        return self._begin("recv", self._recv(peer, tensor, channel, stamp, land or torch.Tensor.copy_))

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        """Registered memory of `numel` elements per rank; collective. OutOfMemory, on every rank, if it is refused."""
        raise HoraError(f"the {self.kind} transport has no memory that all ranks see")

    def abort(self, cause: HoraError) -> None:
        """Ends every wait with `cause`, now and from now on. The first cause counts. Thread-safe."""
        if self.cause is None:
            self.cause = cause
            self._wake()

    def broken(self, peers: tuple[int, ...], problem: object) -> HoraError:
        """A link to one of `peers` is gone: the cause, if it is told within `CAUSE_S`, else what was seen here."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            if self.cause is not None:
                return self.cause
            if any(peer in self.gone for peer in peers):
                return self.left(peers)
            time.sleep(0.005)
        others, ranks = ", ".join(self.name_of(peer) for peer in peers), self.watcher.ranks_of(peers)
        self.abort(PeerLost(f"{self.name_of(self.rank)}: lost {others} in {self.watcher.doing()}: {problem}", ranks))
        assert self.cause is not None
        return self.cause

    def left(self, peers: tuple[int, ...]) -> PeerLost:
        """The error for a wait on peers of which one has left."""
        peer = next(peer for peer in peers if peer in self.gone)
        me, doing, gone = self.name_of(self.rank), self.watcher.doing(), self.name_of(peer)
        why = f"which has left the run: {self.gone[peer]}. Do all ranks make the same calls?"
        return PeerLost(f"{me}: {doing} needs {gone}, {why}", self.watcher.ranks_of((peer,)))

    def leave(self, peer: int, reason: str) -> None:
        """`peer` has ended well. What it sent before is still good; a wait for more of it fails."""
        self.gone.setdefault(peer, reason)

    def close(self) -> None:
        """Gives everything back. Others may still read what was sent before."""

    def forget(self) -> None:
        """In a forked child: drops inherited descriptors without a word to anybody."""

    @property
    def clone_kind(self) -> str:
        """The kind to ask for in a second group of the same ranks."""
        return self.kind

    def name_of(self, peer: int) -> str:
        return str(self.spec.members[peer])

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause

    # -- driving transfers -----------------------------------------------------------------------------------------

    def drive(self, handle: Transfer) -> None:
        """Moves the transfers of the handle's channel until that one is done."""
        patience: BoundedWait | None = None
        idle_rounds = 0
        while not handle.done:
            self.check()
            if self._advance(handle.channel):
                idle_rounds = 0
                patience = None
                continue
            if handle.done:
                return
            idle_rounds += 1
            if patience is None:
                patience = BoundedWait(self, (handle.peer,))
            elif idle_rounds > 2:
                patience.check()
            self._idle(handle, idle_rounds)

    def _advance(self, channel: int) -> bool:
        moved = False
        state = self._channels[channel]
        with state.lock:
            for queue in list(state.queues.values()):
                while queue:
                    moved |= queue[0].advance()
                    if not queue[0].done:
                        break
                    queue.popleft()
        return moved

    def _begin(self, direction: str, handle: Transfer) -> Transfer:
        state = self._channels[handle.channel]
        with state.lock:
            queue = state.queues.setdefault((direction, handle.peer), collections.deque())
            if not queue:
                handle.advance()
            if not handle.done:
                queue.append(handle)
        return handle

    def _pending(self, channel: int) -> list[Transfer]:
        state = self._channels[channel]
        with state.lock:
            return [queue[0] for queue in state.queues.values() if queue]

    # -- for the implementations -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Transfer: ...

    @abc.abstractmethod
    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Transfer: ...

    @abc.abstractmethod
    def _idle(self, handle: Transfer, rounds: int) -> None:
        """Nothing could move: sleeps until something may, at most `SLICE_S`. `rounds` counts such calls in a row."""

    def _wake(self) -> None:
        """Ends the sleep of threads in `_idle`, if that can be done before their slice is over."""
