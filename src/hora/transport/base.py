"""Transport: moves bytes between the ranks of one group and allocates memory that all of them see.

    open(context, spec, option) -> Transport              (a collective call; how a transport is added: registry.py)
    send(peer, tensor, channel, fingerprint) -> Transfer  recv(peer, tensor, channel, fingerprint, combine) -> Transfer
    buffer(name, numel, dtype) -> RegisteredBuffer        (a collective call; only where `shares_memory`)
    abort(cause)                                          close()

- Tensors are one-dimensional, contiguous and on the CPU; the collectives see to that.
- `send` and `recv` return at once. `Transfer.wait()` drives every transfer of its channel until its own is done, so a
  send and a receive that are both in flight never block each other. Messages of one channel between two ranks arrive
  in order. Any thread may wait; threads that work at the same time use different channels.
- `combine(part, piece)` reduces arriving data into the tensor, piece by piece; without it the data is copied. `piece`
  is the transport's own memory, valid during the call.
- `fingerprint` identifies the call. It travels with every message, and a receiver that expects another one raises
  `Mismatch` before any data is written.
- Every wait ends: with what it waited for, with the cause given to `abort`, with `PeerLost` if that peer has left, or
  with `Timeout` after `timeout_s`. A slow peer is waited for, and named in a warning after `SLOW_S`.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch

from ..coordinator.messages import Member
from ..errors import HoraError, PeerLost, Timeout
from ..net.machine import num_cores

if TYPE_CHECKING:
    from .context import TransportContext

log = logging.getLogger(__name__)

COLLECTIVES, POINT_TO_POINT = 0, 1  # the channels that every transport opens
NUM_CHANNELS = 2
ARRIVED, REDUCED = 1, 2  # what a flag says about an epoch of registered memory

POLL_S = 0.05  # a sleeping wait looks this often for an abort
LONG_WAIT_S = 0.2  # after this long the ranks compare which call they are in
CAUSE_S = 0.5  # how long a broken connection waits to learn why
SLOW_S = 10.0  # after this long a warning names the peer

Combine = Callable[[torch.Tensor, torch.Tensor], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The members of a group in order of rank, this process's rank among them, and the generation of the run."""

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
        """The rank in this group of the run's worker `rank`; None if it is not a member."""
        return next((index for index, member in enumerate(self.members) if member.rank == rank), None)


class WaitObserver:
    """What a transport calls about its waits. A group's ConsistencyChecker is one; this default does nothing."""

    def doing(self) -> str:
        """The call in progress, as the end of a sentence: "in barrier (call 3)"."""
        return "in a transfer"

    def ranks_of(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks of these peers in the group that will report them; a PeerLost carries these numbers."""
        return peers

    def waiting(self, peers: tuple[int, ...]) -> None:
        """A wait for these peers has lasted `LONG_WAIT_S`. Must not block."""

    def mismatch(self, peer: int, channel: int) -> HoraError:
        """The error to raise: a message of `peer` has another fingerprint than ours. May wait a moment to ask it."""
        return HoraError(f"rank {peer} sent a message of another call")


class Transfer:
    """A message being sent or received. `done` turns true once; `wait` blocks until then or raises."""

    __slots__ = ("channel", "combine", "done", "fingerprint", "peer", "tensor", "transport")

    def __init__(
        self,
        transport: Transport,
        peer: int,
        tensor: torch.Tensor,
        channel: int,
        fingerprint: int,
        combine: Combine | None,
    ) -> None:
        self.transport = transport
        self.peer = peer
        self.tensor = tensor
        self.channel = channel
        self.fingerprint = fingerprint
        self.combine = combine
        self.done = False

    def wait(self) -> None:
        self.transport.drive(self)

    def advance(self) -> bool:
        """Moves what can be moved without blocking; tells whether anything moved. Called under the channel's lock."""
        raise NotImplementedError


class BoundedWait:
    """One long wait. `check` raises on abort, loss or timeout, and logs a warning when the wait takes long."""

    def __init__(self, transport: Transport, peers: tuple[int, ...]) -> None:
        self.transport = transport
        self.peers = peers
        self.started = time.monotonic()
        self._reported = False
        self._left_at: float | None = None
        self._next_warning = SLOW_S

    def check(self) -> None:
        transport = self.transport
        transport.check()
        waited = time.monotonic() - self.started
        if any(peer in transport.gone for peer in self.peers):
            if self._left_at is None:
                self._left_at = waited  # what it sent before it left may still arrive
            elif waited - self._left_at >= transport.drain_s:
                raise transport.left_error(self.peers)
        if waited >= LONG_WAIT_S and not self._reported:
            self._reported = True
            transport.observer.waiting(self.peers)
        if waited >= self._next_warning:
            self._next_warning *= 2
            log.warning("%s", self._message(waited))
        if waited >= transport.spec.timeout_s:
            raise Timeout(f"{self._message(waited)}; gave up after timeout_s={transport.spec.timeout_s:g}")

    def _message(self, waited: float) -> str:
        me, others = self.transport.name_of(self.transport.rank), self.transport.names_of(self.peers)
        return f"{me} has waited {waited:.0f} s for {others} {self.transport.observer.doing()}"


class RegisteredBuffer(abc.ABC):
    """Memory that every rank of the group sees, with one flag per rank.

    `mine` is this rank's part, `peers[r]` rank r's (this rank's own included), `storage` the bytes of all parts in a
    row. A rank's flag only grows. `signal(value, fingerprint)` raises mine after everything I wrote is visible.

    A collective uses the memory for one or more *epochs*. In epoch t a rank's flag goes to 4t + `ARRIVED`, with the
    fingerprint of its call, and then, if the epoch has a second phase, to 4t + `REDUCED`. A rank that has arrived in
    epoch t + 1 has finished epoch t, so no rank is more than one epoch ahead of another.
    """

    mine: torch.Tensor
    peers: list[torch.Tensor]
    storage: torch.Tensor
    epoch: int = 0  # the next one; the same on every rank

    @abc.abstractmethod
    def signal(self, value: int, fingerprint: int | None = None) -> None: ...

    @abc.abstractmethod
    def await_signal(self, peer: int, value: int) -> None: ...

    @abc.abstractmethod
    def await_all(self, value: int) -> None:
        """Returns once every rank's flag has reached `value`."""

    @abc.abstractmethod
    def reached(self, value: int) -> bool:
        """Whether every rank's flag has reached `value`. Never blocks."""

    @abc.abstractmethod
    def fingerprint_of(self, peer: int, value: int) -> int:
        """The fingerprint that `peer` gave with flag `value`; kept until the one two epochs later."""


class _Channel:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queues: dict[tuple[type[Transfer], int], collections.deque[Transfer]] = {}


class Transport(abc.ABC):
    """What all transports share: queues of transfers per channel, waiting, abort, and counting what was sent.

    A subclass with a `kind` is registered under that name (registry.py). It names its Transfer classes, and opens.
    """

    REGISTERED: ClassVar[dict[str, type[Transport]]] = {}

    kind: ClassVar[str] = ""
    auto_order: ClassVar[int | None] = None  # "auto" opens the first of these that is `usable`; None: never
    limits_rate: ClassVar[bool] = False  # whether it observes the run's rate limit
    shares_memory: ClassVar[bool] = False
    overlaps_without_spare_core: ClassVar[bool] = True  # whether a thread may transfer while all cores compute
    clone_as_auto: ClassVar[bool] = False  # whether a second group of the same ranks may get another kind
    drain_s: ClassVar[float] = 0.5  # how long what a rank sent before it left may take to arrive

    send_transfer: ClassVar[type[Transfer]]
    recv_transfer: ClassVar[type[Transfer]]

    def __init_subclass__(cls) -> None:
        if "kind" in cls.__dict__:
            Transport.REGISTERED[cls.kind] = cls

    @classmethod
    def usable(cls, context: TransportContext, spec: GroupSpec) -> bool:
        """Whether "auto" may choose it for these ranks; the same answer on all of them. Does not block."""
        return True

    @classmethod
    def open(cls, context: TransportContext, spec: GroupSpec, option: str = "") -> Transport:
        """Collective. ValueError, on every rank, if there is no such transport here; `option` is what the name has
        behind a colon."""
        raise NotImplementedError

    def __init__(self, spec: GroupSpec) -> None:
        self.spec = spec
        self.rank = spec.rank
        self.size = spec.size
        self.observer = WaitObserver()
        self.cause: HoraError | None = None
        self.gone: dict[int, str] = {}  # peers that have left the run, and why
        self.on_abort: list[Callable[[HoraError], None]] = []  # thread-safe, must not block
        self.sent_messages = [0] * spec.size
        self.sent_bytes = [0] * spec.size
        self.oversubscribed = spec.size > num_cores()  # then a spin takes the time of the peer it waits for
        self.background = False  # set while a thread beside the user's transfers: it must not spin with the GIL held
        self._channels = [_Channel() for _ in range(NUM_CHANNELS)]

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, peer: int, tensor: torch.Tensor, channel: int = COLLECTIVES, fingerprint: int = 0) -> Transfer:
        self.check()
        self.sent_messages[peer] += 1
        self.sent_bytes[peer] += tensor.numel() * tensor.element_size()
        return self._begin(self.send_transfer(self, peer, tensor, channel, fingerprint, None))

    def recv(
        self,
        peer: int,
        tensor: torch.Tensor,
        channel: int = COLLECTIVES,
        fingerprint: int = 0,
        combine: Combine | None = None,
    ) -> Transfer:
        self.check()
        return self._begin(self.recv_transfer(self, peer, tensor, channel, fingerprint, combine))

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        """Registered memory of `numel` elements per rank; collective. OutOfMemory, on every rank, if it is refused."""
        raise HoraError(f"the {self.kind} transport has no memory that all ranks see")

    def close(self) -> None:
        """Releases everything. Peers may still read what was sent before."""

    def forget(self) -> None:
        """In a forked child: closes inherited descriptors without sending anything."""

    # -- failures ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.cause is not None:
            raise self.cause

    def abort(self, cause: HoraError) -> None:
        """Ends every wait with `cause`, now and from now on. The first cause counts. Thread-safe."""
        if self.cause is None:
            self.cause = cause
            self._wake()
            for notify in list(self.on_abort):
                notify(cause)

    def lost_error(self, peers: tuple[int, ...], problem: object) -> HoraError:
        """A connection to one of `peers` broke: the cause, if it becomes known within `CAUSE_S`, else `problem`."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            if self.cause is not None:
                return self.cause
            if any(peer in self.gone for peer in peers):
                return self.left_error(peers)
            time.sleep(0.005)
        me, others, doing = self.name_of(self.rank), self.names_of(peers), self.observer.doing()
        self.abort(PeerLost(f"{me}: lost {others} {doing}: {problem}", self.observer.ranks_of(peers)))
        assert self.cause is not None
        return self.cause

    def left_error(self, peers: tuple[int, ...]) -> PeerLost:
        """The error for a wait on peers of which one has left."""
        peer = next(peer for peer in peers if peer in self.gone)
        return PeerLost(
            f"{self.name_of(self.rank)} needs {self.name_of(peer)} {self.observer.doing()}, which has left the run: "
            f"{self.gone[peer]}. Do all ranks make the same calls?",
            self.observer.ranks_of((peer,)),
        )

    def mark_left(self, peer: int, reason: str) -> None:
        """`peer` has left without an error. What it sent before is still delivered; a wait for more of it fails."""
        self.gone.setdefault(peer, reason)

    def name_of(self, peer: int) -> str:
        return str(self.spec.members[peer])

    def names_of(self, peers: tuple[int, ...]) -> str:
        return ", ".join(self.name_of(peer) for peer in peers)

    # -- driving transfers -------------------------------------------------------------------------------------------

    def drive(self, transfer: Transfer) -> None:
        """Moves the transfers of its channel until this one is done."""
        wait: BoundedWait | None = None
        idle_rounds = 0
        while not transfer.done:
            self.check()
            if self._advance(transfer.channel):
                idle_rounds = 0
                wait = None
                continue
            if transfer.done:
                return
            idle_rounds += 1
            if wait is None:
                wait = BoundedWait(self, (transfer.peer,))
            elif idle_rounds > 2:
                wait.check()
            self._idle(transfer, idle_rounds)

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

    def _begin(self, transfer: Transfer) -> Transfer:
        state = self._channels[transfer.channel]
        with state.lock:
            queue = state.queues.setdefault((type(transfer), transfer.peer), collections.deque())
            if not queue:
                transfer.advance()
            if not transfer.done:
                queue.append(transfer)
        return transfer

    def _pending(self, channel: int) -> list[Transfer]:
        state = self._channels[channel]
        with state.lock:
            return [queue[0] for queue in state.queues.values() if queue]

    @abc.abstractmethod
    def _idle(self, transfer: Transfer, rounds: int) -> None:
        """Nothing could move: sleeps until something may, at most `POLL_S`. `rounds` counts such calls in a row."""

    def _wake(self) -> None:
        """Ends the sleep of threads in `_idle`, if the transport can do that before `POLL_S` is over."""
