"""Accord: sees to it that the ranks of a group mean the same calls, and says so when they do not.

Every call is numbered and gets a *stamp*, its 64-bit fingerprint (number, operation, shape, dtype, name, group,
generation). Transports carry it in every message and compare it; where ranks wait for each other without a message
between them, the coordinator's line carries the question. Whoever knows both sides tells everybody the same sentence,
and the group is aborted with it on every rank.

The last `KEPT` calls are on record, so that a rank which has gone on can still answer.

The parts that a group is made of (see Hierarchy) have deputies: what goes wrong in a part is the whole group's affair.
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
ASK_S = 0.7  # how long a rank that met a foreign stamp waits to learn what the other side called
_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15  # odd: call numbers give stamps that lie far apart


class CallPlan:
    """What calls with equal arguments share: how they run, the words for them and the root of their stamps."""

    __slots__ = ("base", "run", "text")

    def __init__(self, group: str, text: str, run: Callable[[Any], Any]) -> None:
        self.text = text
        self.run = run
        self.base = int.from_bytes(hashlib.blake2b(f"{group}|{text}".encode(), digest_size=8).digest(), "little")


class CallNotice(msgspec.Struct, array_like=True):
    """What ranks tell each other about their calls. `kind`: wait, letter, or the name of an error that ends it."""

    kind: str
    number: int = 0
    stamp: int = 0
    text: str = ""
    ranks: tuple[int, ...] = ()  # whom a PeerLost is about

    def error(self) -> HoraError | None:
        kinds: dict[str, type[HoraError]] = {kind.__name__: kind for kind in (HoraError, Mismatch, PeerLost, Timeout)}
        found = kinds.get(self.kind)
        if found is PeerLost:
            return PeerLost(self.text, self.ranks, secondary=True)
        return found(self.text) if found else None


class ConsistencyChecker(WaitObserver):
    """One rank's side of it. `number` and `stamp` are those of the call under way."""

    def __init__(self, transport: Transport, control: CoordinatorConnection) -> None:
        self.transports = [transport]  # the group's own first, then its engines and those of its parts
        self.number = 0
        self.stamp = 0
        self._transport = transport
        self._control = control
        self._others = [peer for peer in range(transport.size) if peer != transport.rank]
        self._ranks = {member.rank: index for index, member in enumerate(transport.spec.members)}
        self._calls: list[tuple[int, int, CallPlan] | None] = [None] * KEPT
        self._ahead: dict[int, tuple[int, int, str]] = {}  # calls that others have reached and we have not
        self.on_long_wait: Callable[[], None] = lambda: None  # a wait has lasted for a moment
        self._sent: dict[tuple[int, int], int] = {}
        self._letters: dict[tuple[int, int, int], str] = {}
        transport.watcher = self

    def include(self, transport: Transport, watcher: WaitObserver) -> None:
        """From now on this transport, over the same ranks or some of them, ends when the group ends."""
        transport.watcher = watcher
        self.transports.append(transport)
        if self._transport.cause is not None:  # it came in between
            transport.abort(self._transport.cause)
        for peer, reason in list(self._transport.gone.items()):
            self._leave(transport, self._transport.spec.members[peer].rank, reason)

    # -- keeping the record ----------------------------------------------------------------------------------------

    def begin(self, plan: CallPlan) -> None:
        """Puts the next call on record, before the first message of it leaves."""
        self._transport.check()
        self.number = number = self.number + 1
        self.stamp = stamp = (plan.base + number * _SPREAD) & _MASK
        self._calls[number % KEPT] = (number, stamp, plan)
        if self._ahead:
            peer, theirs, text = self._ahead.pop(number, (0, stamp, ""))
            if theirs != stamp:
                self._dispute(peer, f"called {text} as call {number}", plan.text)
                self._transport.check()

    def letter(self, source: int, target: int, plan: CallPlan) -> int:
        """The stamp of the next point-to-point message from source to target."""
        number = self._sent[source, target] = self._sent.get((source, target), 0) + 1
        self._letters[source, target, number] = plan.text
        self._letters.pop((source, target, number - KEPT), None)
        return (plan.base + number * _SPREAD) & _MASK

    def _current(self) -> CallPlan:
        call = self._calls[self.number % KEPT]
        assert call is not None
        return call[2]

    # -- what the transport asks -------------------------------------------------------------------------------------

    def doing(self) -> str:
        return f"{self._current().text} (call {self.number})" if self.number else "a transfer"

    def waiting(self, peers: tuple[int, ...]) -> None:
        if self.number:
            self._say(CallNotice("wait", self.number, self.stamp, self._current().text), peers)
        self.on_long_wait()

    def differ(self, peer: int, channel: int) -> HoraError:
        if channel == POINT_TO_POINT:
            number = self._sent.get((peer, self._transport.rank), 0)
            text = self._letters.get((peer, self._transport.rank, number), "a message")
            self._say(CallNotice("letter", number, 0, text), (peer,))
        else:
            text = self.doing()
            self.waiting((peer,))
        deadline = time.monotonic() + ASK_S
        while self._transport.cause is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._transport.cause or Mismatch(
            f"{self._name(self._transport.rank)}: {text} met another operation of {self._name(peer)}. "
            "All ranks must make the same calls in the same order."
        )

    # -- what the coordinator's line says ----------------------------------------------------------------------------

    def hear(self, event: CoordinatorEvent) -> None:
        """Called on the line's thread; never blocks."""
        peer = self._ranks.get(event.member.rank) if event.member and event.member.role == "worker" else None
        if peer is None or peer == self._transport.rank:
            return
        if event.kind == "died":
            me, lost = self._name(self._transport.rank), self._name(peer)
            self._abort_transports(
                PeerLost(f"{me}: lost {lost} in {self.doing()}: {event.text}", (peer,), secondary=True)
            )
        elif event.kind == "left":
            assert event.member is not None
            for transport in self.transports:
                self._leave(transport, event.member.rank, event.text)
        elif event.kind == "message" and event.topic == self._transport.spec.name:
            self._answer(peer, msgspec.msgpack.decode(event.body, type=CallNotice))

    def _answer(self, peer: int, word: CallNotice) -> None:
        error = word.error()
        if error is not None:
            self._abort_transports(error)
        elif word.kind == "letter":
            mine = self._letters.get((self._transport.rank, peer, word.number), "nothing of the kind")
            self._dispute(peer, f"expected a {word.text}", mine)
        else:
            mine_then = self._calls[word.number % KEPT]
            if mine_then is not None and mine_then[0] == word.number:
                if mine_then[1] != word.stamp:
                    self._dispute(peer, f"called {word.text} as call {word.number}", mine_then[2].text)
            elif word.number > self.number:
                self._ahead[word.number] = (peer, word.stamp, word.text)

    def _dispute(self, peer: int, theirs: str, mine: str) -> None:
        """Both sides are known: everybody gets the same sentence."""
        text = (
            f"{self._name(peer)} {theirs}; {self._name(self._transport.rank)} called {mine}. "
            "All ranks must make the same calls on the same shapes and dtypes in the same order; did one skip a call?"
        )
        self.abort(Mismatch(text))

    # -- ending it ---------------------------------------------------------------------------------------------------

    def abort(self, cause: HoraError) -> None:
        """This rank cannot go on with the group; the others learn it, unless they know by themselves."""
        first = self._transport.cause is None
        self._abort_transports(cause)
        if first and not (isinstance(cause, PeerLost) and cause.secondary):
            ranks = cause.ranks if isinstance(cause, PeerLost) else ()
            self._say(CallNotice(type(cause).__name__, text=str(cause), ranks=ranks))

    @staticmethod
    def _leave(transport: Transport, rank: int, reason: str) -> None:
        place = transport.spec.index_of(rank)
        if place is not None:
            transport.leave(place, reason)

    def _abort_transports(self, cause: HoraError) -> None:
        for transport in self.transports:
            transport.abort(cause)

    def _say(self, word: CallNotice, to: tuple[int, ...] = ()) -> None:
        members = self._transport.spec.members
        ranks = tuple(members[peer].rank for peer in (to or self._others) if peer != self._transport.rank)
        if not ranks:
            return
        try:
            self._control.send(self._transport.spec.name, msgspec.msgpack.encode(word), ranks)
        except HoraError as problem:
            log.debug("could not tell the others: %s", problem)

    def _name(self, peer: int) -> str:
        return self._transport.name_of(peer)


class SubgroupChecker(ConsistencyChecker):
    """The accord of a part of a group. The part's messages carry the stamp of the call of the `whole` that is under
    way, and whatever is asked or goes wrong in it is passed on to the whole, in the numbers of its ranks."""

    def __init__(self, transport: Transport, control: CoordinatorConnection, whole: ConsistencyChecker) -> None:
        super().__init__(transport, control)
        self._whole = whole
        places = [whole.transports[0].spec.index_of(member.rank) for member in transport.spec.members]
        self._places = [place for place in places if place is not None]
        assert len(self._places) == transport.size
        whole.include(transport, self)

    def stand_in(self) -> None:
        """The messages that follow belong to the call of the whole that is under way."""
        self._transport.check()
        self.stamp = self._whole.stamp

    def doing(self) -> str:
        return self._whole.doing()

    def ranks_of(self, peers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._places[peer] for peer in peers)

    def waiting(self, peers: tuple[int, ...]) -> None:
        self._whole.waiting(self.ranks_of(peers))

    def differ(self, peer: int, channel: int) -> HoraError:
        return self._whole.differ(self._places[peer], channel)

    def abort(self, cause: HoraError) -> None:
        self._whole.abort(cause)
