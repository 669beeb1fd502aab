"""The coordinator as a pure state machine: messages in, messages out; no socket, no thread, no clock of its own.

It knows who takes part and who is alive, numbers the generations of that membership, keeps small values under keys,
lends names (leases), and passes on what members must hear. It never sees a tensor.

Each call returns what is to be sent: a list of (connection, message). A connection is a number that the caller chose.
"""

from __future__ import annotations

import dataclasses
import math

from .messages import (
    MAX_NAME_CHARS,
    MAX_VALUE_BYTES,
    PROTOCOL,
    AnyAnswer,
    AnyRequest,
    Event,
    Fail,
    Get,
    Join,
    Lease,
    Leave,
    Member,
    Put,
    Release,
    Reply,
    Roll,
    Stop,
    Tell,
)

MAX_KEYS = 100_000
DISCONNECT_GRACE_S = 0.3  # the launcher knows a dead child's signal; it gets this long to say it first

Out = list[tuple[int, AnyAnswer]]
Key = tuple[str, int]


@dataclasses.dataclass
class _Seat:
    """One member's place: `connection` is None once it is gone, `lost_at` when its connection broke without a word."""

    member: Member
    connection: int | None
    state: str = "alive"  # alive, left, died
    lost_at: float | None = None


@dataclasses.dataclass
class _Loan:
    holder: Key
    until: float


class Coordinator:
    """The master of one run of `size` workers. Not thread-safe: its caller owns the order of events."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.generation = 0
        self.stop_reason: str | None = None
        self._seats: dict[Key, _Seat] = {}
        self._by_connection: dict[int, Key] = {}
        self._joining: list[tuple[int, int]] = []
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[int, int]]] = {}
        self._loans: dict[str, _Loan] = {}

    @property
    def alive(self) -> list[Member]:
        return sorted((s.member for s in self._seats.values() if s.state == "alive"), key=lambda m: (m.role, m.rank))

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
        if key is None:
            return [(connection, Reply(id=request.id, error="join first"))]
        if isinstance(request, Put | Get | Lease | Release | Tell) and len(_name(request)) > MAX_NAME_CHARS:
            return self._answer(connection, request, error=f"a name may have {MAX_NAME_CHARS} characters at most")
        if isinstance(request, Roll):
            return [(connection, Reply(id=request.id, members=tuple(self.alive), generation=self.generation))]
        if isinstance(request, Leave):
            return self._depart(key, "left", "its script ended") + self._answer(connection, request)
        if isinstance(request, Fail):
            return self._depart(key, "died", request.reason) + self._answer(connection, request)
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
        if isinstance(request, Tell):
            return self._tell(connection, key, request)
        assert isinstance(request, Stop)
        return self._stop(key, request.reason) + self._answer(connection, request)

    def disconnected(self, connection: int, now: float) -> Out:
        """A connection broke. Its member is dead unless it had left; the cause may still come from elsewhere."""
        self._joining = [(c, i) for c, i in self._joining if c != connection]
        for name, waiters in list(self._waiting.items()):
            waiters[:] = [(c, i) for c, i in waiters if c != connection]
            if not waiters:
                del self._waiting[name]
        key = self._by_connection.pop(connection, None)
        if key is not None:
            seat = self._seats[key]
            seat.connection = None
            seat.lost_at = now
        return []

    def died(self, role: str, rank: int, reason: str) -> Out:
        """Whoever watches the processes saw one end badly. Also before it has joined: then nobody waits in vain."""
        key = (role, rank)
        if key not in self._seats:
            self._seats[key] = _Seat(Member(role, rank, "?", 0), None)
        return self._depart(key, "died", reason)

    def ended(self, role: str, rank: int) -> Out:
        """Whoever watches the processes saw one end well."""
        key = (role, rank)
        if key not in self._seats:
            self._seats[key] = _Seat(Member(role, rank, "?", 0), None)
        return self._depart(key, "left", "its script ended")

    def tick(self, now: float) -> Out:
        """Time has passed: broken connections become deaths, leases run out. Call it a few times a second."""
        out: Out = []
        for key, seat in list(self._seats.items()):
            if seat.state == "alive" and seat.lost_at is not None and now - seat.lost_at > DISCONNECT_GRACE_S:
                out += self._depart(key, "died", "its connection broke")
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
            return [(connection, Reply(id=request.id, error=problem))]
        out: Out = []
        again = key in self._seats
        if again:  # a process that was given up is fenced: what it still sends is not this member's
            self._by_connection = {c: k for c, k in self._by_connection.items() if k != key}
        self._seats[key] = _Seat(member, connection)
        self._by_connection[connection] = key
        if self.generation:
            self.generation += 1
            out += self._to_all(self._event("joined", key=key, text="again" if again else ""))
            self._joining.append((connection, request.id))
            return out + self._welcome()
        self._joining.append((connection, request.id))
        missing = [r for r in range(self.size) if ("worker", r) not in self._seats]
        if missing:
            return out
        self.generation = 1
        return out + self._to_all(self._event("formed")) + self._welcome()

    def _objection(self, connection: int, request: Join) -> str:
        member = request.member
        if len(member.role) + len(member.host) > MAX_NAME_CHARS:
            return f"the names of a member may have {MAX_NAME_CHARS} characters at most"
        if request.protocol != PROTOCOL:
            return f"{member} speaks protocol {request.protocol}, this run {PROTOCOL}: install one version of Hora"
        if connection in self._by_connection:
            return f"{member}: this connection has joined already"
        if member.role == "worker" and not 0 <= member.rank < self.size:
            return f"{member}: this run has the ranks 0 to {self.size - 1}"
        seat = self._seats.get((member.role, member.rank))
        if seat and seat.state == "alive":
            return f"{member}: {seat.member} has that place already"
        gone = [str(s.member) for s in self._seats.values() if s.state != "alive" and s.member.role == "worker"]
        if gone and not self.generation:
            return f"{member}: the run cannot form, {gone[0]} has ended before it joined"
        return ""

    def _welcome(self) -> Out:
        members = tuple(self.alive)
        out: Out = [(c, Reply(id=i, members=members, generation=self.generation)) for c, i in self._joining]
        self._joining = []
        return out

    def _depart(self, key: Key, state: str, reason: str) -> Out:
        """The first word on a member's end counts, except that one which has left may still be found to have failed."""
        seat = self._seats[key]
        if seat.state == "died" or seat.state == state:
            return []
        was_there = seat.state == "alive"
        seat.state = state
        reason = reason[:MAX_VALUE_BYTES]
        self._loans = {name: loan for name, loan in self._loans.items() if loan.holder != key}
        if self.generation and was_there:
            self.generation += 1
        out = self._to_all(self._event(state, key=key, text=reason), but=seat.connection)
        if not self.generation:
            error = f"{seat.member} has ended before the run was complete: {reason}"
            out += [(c, Reply(id=i, error=error)) for c, i in self._joining if c != seat.connection]
            self._joining = []
        return out

    def _put(self, connection: int, request: Put) -> Out:
        if len(request.value) > MAX_VALUE_BYTES:
            return self._answer(connection, request, error=f"a value may have {MAX_VALUE_BYTES} bytes at most")
        if len(self._values) >= MAX_KEYS and request.key not in self._values:
            return self._answer(connection, request, error=f"there are {MAX_KEYS} keys already")
        self._values[request.key] = request.value
        out: Out = [(c, Reply(id=i, value=request.value)) for c, i in self._waiting.pop(request.key, [])]
        return out + self._answer(connection, request)

    def _get(self, connection: int, request: Get) -> Out:
        if request.key in self._values:
            return [(connection, Reply(id=request.id, value=self._values[request.key]))]
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
            return [(connection, Reply(id=request.id, value=b"held"))]
        return [(connection, Reply(id=request.id, value=b""))]

    def _tell(self, connection: int, key: Key, request: Tell) -> Out:
        if len(request.body) > MAX_VALUE_BYTES:
            return self._answer(connection, request, error=f"a word may have {MAX_VALUE_BYTES} bytes at most")
        event = self._event("told", key=key, topic=request.topic, body=request.body)
        out: Out = [
            (seat.connection, event)
            for (role, rank), seat in self._seats.items()
            if seat.connection is not None
            and (role, rank) != key
            and role == key[0]
            and (not request.to or rank in request.to)
        ]
        return out + self._answer(connection, request)

    def _stop(self, key: Key, reason: str) -> Out:
        if self.stop_reason is not None:
            return []
        self.stop_reason = reason[:MAX_VALUE_BYTES]
        return self._to_all(self._event("stop", key=key, text=self.stop_reason))

    # -- answers -------------------------------------------------------------------------------------------------

    def _answer(self, connection: int, request: AnyRequest, error: str = "") -> Out:
        return [(connection, Reply(id=request.id, error=error))] if request.id or error else []

    def _event(self, kind: str, key: Key | None = None, text: str = "", topic: str = "", body: bytes = b"") -> Event:
        member = self._seats[key].member if key else None
        return Event(kind=kind, generation=self.generation, member=member, text=text, topic=topic, body=body)

    def _to_all(self, event: Event, but: int | None = None) -> Out:
        return [
            (seat.connection, event)
            for seat in self._seats.values()
            if seat.connection is not None and seat.connection != but
        ]


def _name(request: Put | Get | Lease | Release | Tell) -> str:
    if isinstance(request, Tell):
        return request.topic
    return request.key if isinstance(request, Put | Get) else request.name
