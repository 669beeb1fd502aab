"""ConsistencyChecker: detects that the ranks of a group make different calls, and aborts the group with one message.

Every call is numbered and has a 64-bit *fingerprint* (of its number, operation, shape, dtype, name, group, generation).
Transports send it with every message and compare it; where ranks wait for each other without a message between them,
they compare it through the coordinator. The rank that knows both sides sends the same error to all, and the group is
aborted with it on every rank.

The last `KEPT` calls are recorded, so that a rank which has gone on can still answer.

A part of a group (hierarchy.py) has a SubgroupChecker: what goes wrong in the part aborts the whole group.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Mismatch, PeerLost, Timeout
from ..transport import Transport, WaitObserver
from ..transport.base import POINT_TO_POINT

log = logging.getLogger(__name__)

KEPT = 64
ASK_S = 0.7  # how long a rank that received another fingerprint waits to learn what the other side called
_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd: successive call numbers give fingerprints that are far apart

RULE = "All ranks must make the same calls in the same order"


class CallPlan:
    """What calls with equal arguments share: how they run, their description, and the base of their fingerprints."""

    __slots__ = ("base", "run", "text")

    def __init__(self, group: str, text: str, run: Callable[[Any], Any]) -> None:
        self.text = text
        self.run = run
        self.base = int.from_bytes(hashlib.blake2b(f"{group}|{text}".encode(), digest_size=8).digest(), "little")


class CallNotice(msgspec.Struct, array_like=True):
    """What ranks send each other about their calls. `kind`: wait, message, or the name of an error that ends it."""

    kind: str
    number: int = 0
    fingerprint: int = 0
    text: str = ""
    ranks: tuple[int, ...] = ()  # those that a PeerLost names

    def error(self) -> HoraError | None:
        kinds: dict[str, type[HoraError]] = {kind.__name__: kind for kind in (HoraError, Mismatch, PeerLost, Timeout)}
        found = kinds.get(self.kind)
        if found is PeerLost:
            return PeerLost(self.text, self.ranks, secondary=True)
        return found(self.text) if found else None


class ConsistencyChecker(WaitObserver):
    """One rank's side of it. `number` and `fingerprint` are those of the call in progress."""

    def __init__(self, transport: Transport, control: CoordinatorConnection) -> None:
        self.transports = [transport]  # the group's own first, then those of its engines and parts
        self.number = 0
        self.fingerprint = 0
        self.describe: Callable[[], str | None] = lambda: None  # what the calls are for
        self.on_long_wait: Callable[[], None] = lambda: None
        self._transport = transport
        self._control = control
        self._others = [peer for peer in range(transport.size) if peer != transport.rank]
        self._calls: list[tuple[int, int, CallPlan] | None] = [None] * KEPT
        self._ahead: dict[int, tuple[int, int, str]] = {}  # calls that others have reached and we have not
        self._num_messages: dict[tuple[int, int], int] = {}
        self._messages: dict[tuple[int, int, int], str] = {}
        transport.observer = self

    def include(self, transport: Transport, observer: WaitObserver) -> None:
        """From now on this transport, over the same ranks or some of them, is aborted with the group."""
        transport.observer = observer
        self.transports.append(transport)
        if self._transport.cause is not None:  # aborted meanwhile
            transport.abort(self._transport.cause)
        for peer, reason in list(self._transport.gone.items()):
            self._mark_left(transport, self._transport.spec.members[peer].rank, reason)

    # -- recording calls ---------------------------------------------------------------------------------------------

    def begin(self, plan: CallPlan) -> None:
        """Records the next call, before its first message is sent."""
        self._transport.check()
        self.number = number = self.number + 1
        self.fingerprint = fingerprint = (plan.base + number * _SPREAD) & _MASK
        self._calls[number % KEPT] = (number, fingerprint, plan)
        if self._ahead:
            peer, theirs, text = self._ahead.pop(number, (0, fingerprint, ""))
            if theirs != fingerprint:
                self._abort_mismatch(peer, f"called {text} as call {number}", plan.text)
                self._transport.check()

    def message(self, source: int, target: int, plan: CallPlan) -> int:
        """The fingerprint of the next point-to-point message from source to target."""
        number = self._num_messages[source, target] = self._num_messages.get((source, target), 0) + 1
        self._messages[source, target, number] = plan.text
        self._messages.pop((source, target, number - KEPT), None)
        return (plan.base + number * _SPREAD) & _MASK

    def _current(self) -> CallPlan:
        call = self._calls[self.number % KEPT]
        assert call is not None
        return call[2]

    # -- what the transport asks -------------------------------------------------------------------------------------

    def doing(self) -> str:
        purpose = self.describe()
        if purpose is not None:
            return f"while {purpose}"
        return f"in {self._current().text} (call {self.number})" if self.number else "in a transfer"

    def waiting(self, peers: tuple[int, ...]) -> None:
        if self.number:
            self._send(CallNotice("wait", self.number, self.fingerprint, self._current().text), peers)
        self.on_long_wait()

    def mismatch(self, peer: int, channel: int) -> HoraError:
        if channel == POINT_TO_POINT:
            number = self._num_messages.get((peer, self._transport.rank), 0)
            text = self._messages.get((peer, self._transport.rank, number), "a message")
            self._send(CallNotice("message", number, 0, text), (peer,))
        else:
            text = f"{self._current().text} (call {self.number})" if self.number else "a transfer"
            self.waiting((peer,))
        deadline = time.monotonic() + ASK_S
        while self._transport.cause is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._transport.cause or Mismatch(
            f"{self._name(self._transport.rank)} called {text}; {self._name(peer)} called something else. {RULE}."
        )

    # -- what the coordinator reports --------------------------------------------------------------------------------

    def on_event(self, event: CoordinatorEvent) -> None:
        """Called on the coordinator connection's thread; never blocks."""
        if event.member is None or event.member.role != "worker":
            return
        peer = self._transport.spec.index_of(event.member.rank)
        if peer is None or peer == self._transport.rank:
            return
        if event.kind == "died":
            me, lost = self._name(self._transport.rank), self._name(peer)
            message = f"{me}: lost {lost} {self.doing()}: {event.text}"
            self._abort_transports(PeerLost(message, (peer,), secondary=True))
        elif event.kind == "left":
            for transport in self.transports:
                self._mark_left(transport, event.member.rank, event.text)
        elif event.kind == "message" and event.topic == self._transport.spec.name:
            self._on_notice(peer, msgspec.msgpack.decode(event.body, type=CallNotice))

    def _on_notice(self, peer: int, notice: CallNotice) -> None:
        error = notice.error()
        if error is not None:
            self._abort_transports(error)
        elif notice.kind == "message":
            mine = self._messages.get((self._transport.rank, peer, notice.number), "nothing of the kind")
            self._abort_mismatch(peer, f"expected a {notice.text}", mine)
        else:
            mine_then = self._calls[notice.number % KEPT]
            if mine_then is not None and mine_then[0] == notice.number:
                if mine_then[1] != notice.fingerprint:
                    self._abort_mismatch(peer, f"called {notice.text} as call {notice.number}", mine_then[2].text)
            elif notice.number > self.number:
                self._ahead[notice.number] = (peer, notice.fingerprint, notice.text)

    # -- aborting ----------------------------------------------------------------------------------------------------

    def _abort_mismatch(self, peer: int, theirs: str, mine: str) -> None:
        """Both sides are known: all ranks get the same message."""
        when = f" {self.doing()}" if self.describe() is not None else ""
        self.abort(
            Mismatch(
                f"{self._name(peer)} {theirs}; {self._name(self._transport.rank)} called {mine}{when}. "
                f"{RULE}, on the same shapes and dtypes; did one skip a call?"
            )
        )

    def abort(self, cause: HoraError) -> None:
        """This rank cannot go on with the group; the others learn the cause, unless they know it already."""
        first = self._transport.cause is None
        self._abort_transports(cause)
        if first and not (isinstance(cause, PeerLost) and cause.secondary):
            ranks = cause.ranks if isinstance(cause, PeerLost) else ()
            self._send(CallNotice(type(cause).__name__, text=str(cause), ranks=ranks))

    def _abort_transports(self, cause: HoraError) -> None:
        for transport in self.transports:
            transport.abort(cause)

    @staticmethod
    def _mark_left(transport: Transport, rank: int, reason: str) -> None:
        peer = transport.spec.index_of(rank)
        if peer is not None:
            transport.mark_left(peer, reason)

    def _send(self, notice: CallNotice, peers: tuple[int, ...] = ()) -> None:
        spec = self._transport.spec
        ranks = tuple(spec.members[peer].rank for peer in (peers or self._others) if peer != spec.rank)
        if not ranks:
            return
        try:
            self._control.send(spec.name, msgspec.msgpack.encode(notice), ranks)
        except HoraError as problem:
            log.debug("could not notify the other ranks: %s", problem)

    def _name(self, peer: int) -> str:
        return self._transport.name_of(peer)


class SubgroupChecker(ConsistencyChecker):
    """The checker of a part of a group. The part's messages carry the fingerprint of the group's call in progress, and
    whatever goes wrong in the part is passed on to the group's checker, `whole`, in the ranks of the group."""

    def __init__(self, transport: Transport, control: CoordinatorConnection, whole: ConsistencyChecker) -> None:
        super().__init__(transport, control)
        self._whole = whole
        ranks = [whole.transports[0].spec.index_of(member.rank) for member in transport.spec.members]
        self._ranks = [rank for rank in ranks if rank is not None]
        assert len(self._ranks) == transport.size
        whole.include(transport, self)

    def enter_call(self) -> None:
        """The messages that follow belong to the group's call in progress."""
        self._transport.check()
        self.fingerprint = self._whole.fingerprint

    def doing(self) -> str:
        return self._whole.doing()

    def ranks_of(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._ranks[peer] for peer in peers)

    def waiting(self, peers: tuple[int, ...]) -> None:
        self._whole.waiting(self.ranks_of(peers))

    def mismatch(self, peer: int, channel: int) -> HoraError:
        return self._whole.mismatch(self._ranks[peer], channel)

    def abort(self, cause: HoraError) -> None:
        self._whole.abort(cause)
