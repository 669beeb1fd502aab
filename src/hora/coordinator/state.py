"""The coordinator as a pure state machine: messages in, messages out; no socket, no thread, no clock of its own.

It knows who takes part and who is alive, numbers the generations of that membership, keeps small values under keys,
lends names (leases), and passes on what members must hear. It never sees a tensor.

Each call returns what is to be sent: a list of (connection, message). A connection is a number that the caller chose.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Protocol

from .lease_manager import LeaseManager
from .messages import (
    MAX_NAME_CHARS,
    MAX_REPORT_BYTES,
    MAX_VALUE_BYTES,
    PROTOCOL,
    AboutData,
    AnyAnswer,
    AnyRequest,
    CoordinatorEvent,
    CoordinatorReply,
    EventKind,
    Fail,
    Get,
    Join,
    Lease,
    Leave,
    ListMembers,
    Member,
    Put,
    Release,
    Report,
    Reserve,
    Send,
    ShowData,
    Stop,
)

MAX_KEYS = 100_000
MAX_JOINERS = 1024  # that one Reserve may ask for
DISCONNECT_GRACE_S = 0.3  # the launcher knows a dead child's signal; it gets this long to say it first

COUNTED = ("worker", "server")  # the roles whose members a run waits for; nobody hears of the others, who hear of all
OBSERVED = ("joined", "left", "died", "stop")
VISITOR = "visitor"  # the role of one who only looks

Out = list[tuple[int, AnyAnswer]]
Key = tuple[str, int]


@dataclasses.dataclass
class _MemberState:
    """One member's place: `connection` is None once it is gone, `lost_at` when its connection broke without a word, and
    `why` how it ended, as far as that is known. `versions`: what it runs on, by name."""

    member: Member
    connection: int | None
    state: str = "alive"  # alive, left, died
    lost_at: float | None = None
    why: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Loan:
    holder: Key
    until: float


class CoordinatorObserver(Protocol):
    """Who watches the run. It is told and asked nothing, and must not block."""

    def on_report(self, member: Member, body: bytes) -> None:
        """A member reports."""

    def on_event(self, event: CoordinatorEvent) -> None:
        """A member joined, left or died, or asked everybody to stop."""


class Coordinator:
    """The master of one run of `size` workers and `servers` servers, which forms once all of these have joined.

    Later workers take ranks from `size` on, each number once. Not thread-safe: its caller owns the order of events.
    """

    def __init__(self, size: int, servers: int = 0) -> None:
        self.size = size
        self.servers = servers
        self.generation = 0
        self.stop_reason: str | None = None
        self.failures: list[tuple[Key, str]] = []  # who said that it fails, and why, in that order
        self.book = LeaseManager()
        self.observer: CoordinatorObserver | None = None
        self._seats: dict[Key, _MemberState] = {}
        self._by_connection: dict[int, Key] = {}
        self._visitors: set[int] = set()
        self._next_rank = size
        self._reserving: list[tuple[int, Reserve]] = []
        self._joining: list[tuple[int, int]] = []
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        self._loans: dict[str, _Loan] = {}

    @property
    def alive(self) -> list[Member]:
        """Workers first, then the other roles, each by rank."""
        members = [seat.member for seat in self._seats.values() if seat.state == "alive"]
        return sorted(members, key=lambda m: (m.role != "worker", m.role, m.rank))

    @property
    def joined(self) -> dict[int, str]:
        """What became of the workers that joined later, by rank: alive, left or died."""
        return {rank: s.state for (role, rank), s in self._seats.items() if role == "worker" and rank >= self.size}

    @property
    def missing(self) -> list[Key]:
        """Of the workers and servers that a run begins with, those that have not joined yet."""
        wanted = [("worker", rank) for rank in range(self.size)] + [("server", rank) for rank in range(self.servers)]
        return [key for key in wanted if key not in self._seats]

    def values(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    def holder(self, name: str) -> Member | None:
        loan = self._loans.get(name)
        return self._seats[loan.holder].member if loan else None

    def handle(self, connection: int, request: AnyRequest, now: float) -> Out:
        """What a member asked for. Anything but Join is refused before the member has joined."""
        if isinstance(request, Join):
            return self._join(connection, request)
        key = self._by_connection.get(connection)
        if key is None and connection not in self._visitors:
            return [(connection, CoordinatorReply(id=request.id, error="join first"))]
        if isinstance(request, Put | Get | Lease | Release | Send) and len(_name(request)) > MAX_NAME_CHARS:
            return self._answer(connection, request, error=f"a name may have {MAX_NAME_CHARS} characters at most")
        if isinstance(request, AboutData):
            return self._data(connection, key, request)
        if key is None:
            return self._guide(connection, request)
        if isinstance(request, Report):
            if self.observer is not None and len(request.body) <= MAX_REPORT_BYTES:
                self.observer.on_report(self._seats[key].member, request.body)
            return self._answer(connection, request)
        if isinstance(request, ListMembers):
            return self._roll(connection, request)
        if isinstance(request, Reserve):
            return self._reserve(connection, request)
        if isinstance(request, Leave):
            return self._depart(key, "left", "its script ended") + self._answer(connection, request)
        if isinstance(request, Fail):
            if key[0] in COUNTED:
                self.failures.append((key, request.reason[:MAX_VALUE_BYTES]))
            return self._depart(key, "died", request.reason, failed=True) + self._answer(connection, request)
        if isinstance(request, Put):
            return self._put(connection, request)
        if isinstance(request, Get):
            return self._get(connection, request)
        if isinstance(request, Lease):
            return self._lease(connection, key, request, now)
        if isinstance(request, Release):
            loan = self._loans.get(request.name)
            if loan and loan.holder == key:
                del self._loans[request.name]
            return self._answer(connection, request)
        if isinstance(request, Send):
            return self._send(connection, key, request)
        assert isinstance(request, Stop)
        return self._stop(key, request.reason) + self._answer(connection, request)

    def disconnected(self, connection: int, now: float, why: str = "") -> Out:
        """A connection broke, and `why`, unless it was just closed. Its member is dead unless it had left; a better
        cause may still come from elsewhere."""
        self._visitors.discard(connection)
        self._joining = [(c, i) for c, i in self._joining if c != connection]
        self._reserving = [(c, request) for c, request in self._reserving if c != connection]
        for name, waiters in list(self._waiting.items()):
            waiters[:] = [(c, i) for c, i in waiters if c != connection]
            if not waiters:
                del self._waiting[name]
        key = self._by_connection.pop(connection, None)
        if key is not None:
            seat = self._seats[key]
            seat.connection = None
            seat.lost_at = now
            seat.why = why
        return []

    def died(self, role: str, rank: int, reason: str) -> Out:
        """Whoever watches the processes saw one end badly. Also before it has joined: then nobody waits in vain."""
        key = (role, rank)
        if key not in self._seats:
            self._seats[key] = _MemberState(Member(role, rank, "?", 0), None)
        return self._depart(key, "died", reason)

    def ended(self, role: str, rank: int) -> Out:
        """Whoever watches the processes saw one end well."""
        key = (role, rank)
        if key not in self._seats:
            self._seats[key] = _MemberState(Member(role, rank, "?", 0), None)
        return self._depart(key, "left", "its script ended")

    def tick(self, now: float) -> Out:
        """Time has passed: broken connections become deaths, leases run out. Call it a few times a second."""
        out: Out = []
        for key, seat in list(self._seats.items()):
            if seat.state == "alive" and seat.lost_at is not None and now - seat.lost_at > DISCONNECT_GRACE_S:
                out += self._depart(key, "died", f"its connection broke{f': {seat.why}' if seat.why else ''}")
        for name, loan in list(self._loans.items()):
            if now >= loan.until:
                del self._loans[name]
                out += self._to_all(self._event("expired", key=loan.holder, topic=name))
        return out

    # -- the verbs -----------------------------------------------------------------------------------------------

    def _join(self, connection: int, request: Join) -> Out:
        member = request.member
        key = (member.role, member.rank)
        problem = self._objection(connection, request)
        if problem:
            return [(connection, CoordinatorReply(id=request.id, error=problem))]
        versions = _versions(request.versions)
        problem = self._difference(member, versions)
        if problem:
            return self._refuse(connection, request, problem)
        if member.role == VISITOR:
            self._visitors.add(connection)
            return [
                (connection, CoordinatorReply(id=request.id, members=tuple(self.alive), generation=self.generation))
            ]
        out: Out = []
        again = key in self._seats
        if again:  # a process that was given up is fenced: what it still sends is not this member's
            self._by_connection = {c: k for c, k in self._by_connection.items() if k != key}
        self._seats[key] = _MemberState(member, connection, versions=versions)
        self._by_connection[connection] = key
        if self.generation and member.role not in COUNTED:
            return [
                (connection, CoordinatorReply(id=request.id, members=tuple(self.alive), generation=self.generation))
            ]
        if self.generation:
            self.generation += 1
            out += self._to_all(self._event("joined", key=key, text="again" if again else ""))
            self._joining.append((connection, request.id))
            return out + self._welcome()
        self._joining.append((connection, request.id))
        if self.missing:
            return out
        self.generation = 1
        out += self._to_all(self._event("formed")) + self._welcome()
        reserving, self._reserving = self._reserving, []
        for waiting, asked in reserving:
            out += self._reserve(waiting, asked)
        return out

    def _objection(self, connection: int, request: Join) -> str:
        member = request.member
        if len(member.role) + len(member.host) > MAX_NAME_CHARS:
            return f"the names of a member may have {MAX_NAME_CHARS} characters at most"
        if request.protocol != PROTOCOL:
            return f"{member} speaks protocol {request.protocol}, this run {PROTOCOL}: install one version of Hora"
        if connection in self._by_connection or connection in self._visitors:
            return f"{member}: this connection has joined already"
        if member.role == VISITOR:
            return ""
        if member.role == "worker" and not 0 <= member.rank < self._next_rank:
            return f"{member}: this run has the ranks 0 to {self._next_rank - 1}"
        if member.role == "server" and self.servers and not 0 <= member.rank < self.servers:
            return f"{member}: this run has the servers 0 to {self.servers - 1}"
        seat = self._seats.get((member.role, member.rank))
        if seat and seat.state == "alive":
            return f"{member}: {seat.member} has that place already"
        if seat and member.role == "worker" and member.rank >= self.size:
            return f"{member}: {seat.member} had that place; one who joins takes a new number"
        gone = [s for s in self._seats.values() if s.state != "alive" and s.member.role in COUNTED]
        if gone and not self.generation:
            why = f": {gone[0].why}" if gone[0].why else ""
            return f"{member}: the run cannot form, {gone[0].member} has ended before it joined{why}"
        return ""

    def _difference(self, member: Member, versions: dict[str, str]) -> str:
        """How this member's versions differ from those of the first one that said any."""
        for seat in sorted(self._seats.values(), key=lambda s: (s.member.role != "worker", s.member.rank)):
            if not seat.versions or seat.state != "alive":
                continue
            unlike = [name for name in versions if versions[name] != seat.versions.get(name, versions[name])]
            if unlike:
                mine = ", ".join(f"{name} {versions[name]}" for name in unlike)
                theirs = ", ".join(f"{name} {seat.versions[name]}" for name in unlike)
                return f"{member} has {mine}, {seat.member} {theirs}: install the same on every host"
            return ""
        return ""

    def _refuse(self, connection: int, request: Join, problem: str) -> Out:
        """This member cannot take part, and before the run has formed nobody else can without it."""
        out: Out = [(connection, CoordinatorReply(id=request.id, error=problem))]
        if not self.generation and request.member.role in COUNTED:
            key = (request.member.role, request.member.rank)
            self._seats[key] = _MemberState(request.member, None)
            out += self._depart(key, "died", problem)
        return out

    def _guide(self, connection: int, request: AnyRequest) -> Out:
        """What a visitor may ask: who is there, what is known, and places for workers that it will start."""
        if isinstance(request, ListMembers):
            return self._roll(connection, request)
        if isinstance(request, Reserve):
            return self._reserve(connection, request)
        if isinstance(request, Get):
            return self._get(connection, request)
        if isinstance(request, Leave):
            return self.disconnected(connection, 0.0) + self._answer(connection, request)
        return self._answer(connection, request, error="a visitor may look and change nothing")

    def _roll(self, connection: int, request: ListMembers) -> Out:
        return [(connection, CoordinatorReply(id=request.id, members=tuple(self.alive), generation=self.generation))]

    def _reserve(self, connection: int, request: Reserve) -> Out:
        if not 1 <= request.count <= MAX_JOINERS:
            return self._answer(connection, request, error=f"1 to {MAX_JOINERS} may join at once, not {request.count}")
        if self.stop_reason is not None:
            return self._answer(connection, request, error=f"the run is stopping: {self.stop_reason}")
        if not self.generation:
            self._reserving.append((connection, request))
            return []
        if all(member.role != "worker" for member in self.alive):
            return self._answer(connection, request, error="the run is over: no worker is left in it")
        first = self._next_rank
        self._next_rank += request.count
        return [(connection, CoordinatorReply(id=request.id, value=str(first).encode(), generation=self.generation))]

    def _welcome(self) -> Out:
        members = tuple(self.alive)
        out: Out = [(c, CoordinatorReply(id=i, members=members, generation=self.generation)) for c, i in self._joining]
        self._joining = []
        return out

    def _depart(self, key: Key, state: Literal["left", "died"], reason: str, failed: bool = False) -> Out:
        """The first word on a member's end counts, except that one which has left may still be found to have failed."""
        seat = self._seats[key]
        if seat.state == "died" or seat.state == state:
            return []
        was_there = seat.state == "alive"
        seat.state = state
        seat.why = reason = reason[:MAX_VALUE_BYTES]
        self._loans = {name: loan for name, loan in self._loans.items() if loan.holder != key}
        if key[0] == "worker":
            self.book.gone(key[1])
        if key[0] not in COUNTED:
            return []
        if self.generation and was_there:
            self.generation += 1
        event = self._event(state, key=key, text=reason)
        event.failed = failed
        out = self._to_all(event, but=seat.connection)
        if not self.generation:
            error = f"{seat.member} has ended before the run was complete: {reason}"
            waiting = self._joining + [(c, asked.id) for c, asked in self._reserving]
            out += [(c, CoordinatorReply(id=i, error=error)) for c, i in waiting if c != seat.connection]
            self._joining, self._reserving = [], []
        return out

    def _put(self, connection: int, request: Put) -> Out:
        if len(request.value) > MAX_VALUE_BYTES:
            return self._answer(connection, request, error=f"a value may have {MAX_VALUE_BYTES} bytes at most")
        if len(self._values) >= MAX_KEYS and request.key not in self._values:
            return self._answer(connection, request, error=f"there are {MAX_KEYS} keys already")
        self._values[request.key] = request.value
        out: Out = [(c, CoordinatorReply(id=i, value=request.value)) for c, i in self._waiting.pop(request.key, [])]
        return out + self._answer(connection, request)

    def _get(self, connection: int, request: Get) -> Out:
        if request.key in self._values:
            return [(connection, CoordinatorReply(id=request.id, value=self._values[request.key]))]
        if not request.wait:
            return self._answer(connection, request, error=f"there is nothing under {request.key!r}")
        self._waiting.setdefault(request.key, []).append((connection, request.id))
        return []

    def _lease(self, connection: int, key: Key, request: Lease, now: float) -> Out:
        if not 0 < request.seconds < math.inf:
            return self._answer(connection, request, error=f"a lease has an end, after 0 s; not {request.seconds}")
        seat = self._seats[key]
        if seat.state != "alive":
            return self._answer(connection, request, error=f"{seat.member} has {seat.state} and can hold no lease")
        loan = self._loans.get(request.name)
        if loan is None or loan.holder == key or now >= loan.until:
            self._loans[request.name] = _Loan(key, now + request.seconds)
            return [(connection, CoordinatorReply(id=request.id, value=b"held"))]
        return [(connection, CoordinatorReply(id=request.id, value=b""))]

    def _send(self, connection: int, key: Key, request: Send) -> Out:
        if len(request.body) > MAX_VALUE_BYTES:
            return self._answer(connection, request, error=f"a word may have {MAX_VALUE_BYTES} bytes at most")
        event = self._event("message", key=key, topic=request.topic, body=request.body)
        out: Out = [
            (seat.connection, event)
            for (role, rank), seat in self._seats.items()
            if seat.connection is not None
            and (role, rank) != key
            and role == key[0]
            and (not request.to or rank in request.to)
        ]
        return out + self._answer(connection, request)

    def _data(self, connection: int, key: Key | None, request: AboutData) -> Out:
        """Everybody may look at the book; blocks of samples are lent to workers only, while they are alive."""
        if not isinstance(request, ShowData):
            if key is None or key[0] != "worker":
                return self._answer(connection, request, error="samples are lent to workers only")
            seat = self._seats[key]
            if seat.state != "alive":
                return self._answer(connection, request, error=f"{seat.member} has {seat.state} and is lent no samples")
        return [(connection, self.book.answer(key[1] if key else -1, request))]

    def _stop(self, key: Key, reason: str) -> Out:
        if self.stop_reason is not None:
            return []
        self.stop_reason = reason[:MAX_VALUE_BYTES]
        return self._to_all(self._event("stop", key=key, text=self.stop_reason))

    # -- answers -------------------------------------------------------------------------------------------------

    def _answer(self, connection: int, request: AnyRequest, error: str = "") -> Out:
        return [(connection, CoordinatorReply(id=request.id, error=error))] if request.id or error else []

    def _event(
        self, kind: EventKind, key: Key | None = None, text: str = "", topic: str = "", body: bytes = b""
    ) -> CoordinatorEvent:
        member = self._seats[key].member if key else None
        event = CoordinatorEvent(
            kind=kind, generation=self.generation, member=member, text=text, topic=topic, body=body
        )
        if self.observer is not None and kind in OBSERVED:
            self.observer.on_event(event)
        return event

    def _to_all(self, event: CoordinatorEvent, but: int | None = None) -> Out:
        return [
            (seat.connection, event)
            for seat in self._seats.values()
            if seat.connection is not None and seat.connection != but
        ]


def _versions(text: str) -> dict[str, str]:
    """`torch 2.13.0, python 3.11` by name."""
    pairs = [words.split() for words in text[:MAX_NAME_CHARS].split(",")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _name(request: Put | Get | Lease | Release | Send) -> str:
    if isinstance(request, Send):
        return request.topic
    return request.key if isinstance(request, Put | Get) else request.name
