"""The coordinator as a pure state machine: messages in, messages out; no socket, no thread, no clock of its own.

It knows which processes take part and which are alive, numbers the generations of that membership, stores small values
under keys, leases blocks of samples, and delivers messages and events to the members. It never sees a tensor.

Each call returns what to send: a list of (connection, message). A connection is a number that the caller chose.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol

from .lease_manager import LeaseManager
from .messages import (
    MAX_NAME_CHARS,
    MAX_REPORT_BYTES,
    MAX_VALUE_BYTES,
    PROTOCOL,
    AnyAnswer,
    AnyRequest,
    CoordinatorEvent,
    CoordinatorReply,
    EventKind,
    Fail,
    Get,
    Join,
    LeaseRequest,
    Leave,
    ListMembers,
    Member,
    Put,
    Report,
    Reserve,
    Send,
    ShowData,
    Stop,
)

MAX_KEYS = 100_000
MAX_JOINERS = 1024  # ranks in one Reserve
DISCONNECT_GRACE_S = 0.3  # the launcher knows a dead child's signal; it gets this long to report it first

COUNTED = ("worker", "server")  # the roles whose members a run waits for, and whose ends are events
VISITOR = "visitor"  # the role of a process that only reads
EXITED = "its script ended"

Out = list[tuple[int, AnyAnswer]]
Key = tuple[str, int]  # role and rank


@dataclasses.dataclass
class _MemberState:
    member: Member
    connection: int | None  # None once it is gone
    state: Literal["alive", "left", "died"] = "alive"
    lost_at: float | None = None  # when its connection broke without a Leave or Fail
    reason: str = ""  # of its end, as far as it is known
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


class CoordinatorObserver(Protocol):
    """Receives what happens in the run; the launcher's monitor is one. Must not block."""

    def on_report(self, member: Member, body: bytes) -> None: ...

    def on_event(self, event: CoordinatorEvent) -> None:
        """A member joined, left or died, or asked all to stop."""


class Coordinator:
    """The coordinator of one run of `size` workers and `servers` servers, which forms once all of these have joined.

    Workers that join later have ranks from `size` on; a rank is never used twice. Not thread-safe.
    """

    def __init__(self, size: int, servers: int = 0) -> None:
        self.size = size
        self.servers = servers
        self.generation = 0  # 0 until the run has formed
        self.stop_reason: str | None = None
        self.failures: list[tuple[Key, str]] = []  # from Fail requests, in order
        self.leases = LeaseManager()
        self.observer: CoordinatorObserver | None = None
        self._members: dict[Key, _MemberState] = {}
        self._by_connection: dict[int, Key] = {}
        self._visitors: set[int] = set()
        self._next_rank = size
        # Requests that cannot be answered yet, as (connection, id); gets by key.
        self._joining: list[tuple[int, int]] = []
        self._reserving: list[tuple[int, Reserve]] = []
        self._getting: dict[str, list[tuple[int, int]]] = {}
        self._values: dict[str, bytes] = {}

    @property
    def alive(self) -> list[Member]:
        """Workers first, then the other roles, each by rank."""
        members = [each.member for each in self._members.values() if each.state == "alive"]
        return sorted(members, key=lambda m: (m.role != "worker", m.role, m.rank))

    @property
    def joined(self) -> dict[int, str]:
        """The state of the workers that joined later, by rank: alive, left or died."""
        return {rank: s.state for (role, rank), s in self._members.items() if role == "worker" and rank >= self.size}

    @property
    def missing(self) -> list[Key]:
        """The workers and servers of the launch that have not joined yet."""
        expected = [("worker", rank) for rank in range(self.size)] + [("server", rank) for rank in range(self.servers)]
        return [key for key in expected if key not in self._members]

    def values(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, value in self._values.items() if key.startswith(prefix)}

    # -- inputs --------------------------------------------------------------------------------------------------------

    def handle(self, connection: int, request: AnyRequest) -> Out:
        """A request from a member. Before Join all others are refused."""
        if isinstance(request, Join):
            return self._join(connection, request)
        key = self._by_connection.get(connection)
        if key is None and connection not in self._visitors:
            return self._reply(connection, request, error="join first")
        if error := self._excess(request):
            return self._reply(connection, request, error=error)
        if isinstance(request, LeaseRequest):
            return self._lease(connection, key, request)
        if isinstance(request, ListMembers):
            return [self._current(connection, request.id)]
        if isinstance(request, Reserve):
            return self._reserve(connection, request)
        if isinstance(request, Get):
            return self._get(connection, request)
        if key is None and isinstance(request, Leave):
            return self.disconnected(connection, 0.0) + self._reply(connection, request)
        if key is None:
            return self._reply(connection, request, error="a visitor may look and change nothing")
        return self._change(key, request) + self._reply(connection, request)

    def _change(self, key: Key, request: Leave | Fail | Put | Send | Stop | Report) -> Out:
        """What a member's request sends to others."""
        if isinstance(request, Leave):
            return self._end(key, "left", EXITED)
        if isinstance(request, Fail):
            if key[0] in COUNTED:
                self.failures.append((key, request.reason[:MAX_VALUE_BYTES]))
            return self._end(key, "died", request.reason, failed=True)
        if isinstance(request, Put):
            self._values[request.key] = request.value
            waiting = self._getting.pop(request.key, [])
            return [(c, CoordinatorReply(id=i, value=request.value)) for c, i in waiting]
        if isinstance(request, Send):
            event = self._event("message", key, topic=request.topic, body=request.body)
            others = [(k, each.connection) for k, each in self._members.items() if k[0] == key[0] and k != key]
            return [(c, event) for k, c in others if c is not None and (not request.to or k[1] in request.to)]
        if isinstance(request, Stop):
            if self.stop_reason is not None:
                return []
            self.stop_reason = request.reason[:MAX_VALUE_BYTES]
            return self._to_all(self._event("stop", key, self.stop_reason))
        if self.observer is not None and len(request.body) <= MAX_REPORT_BYTES:
            self.observer.on_report(self._members[key].member, request.body)
        return []

    def _excess(self, request: AnyRequest) -> str:
        """Which limit the request exceeds, if any."""
        if isinstance(request, Put | Get | Send):
            name = request.topic if isinstance(request, Send) else request.key
            if len(name) > MAX_NAME_CHARS:
                return f"a name may have at most {MAX_NAME_CHARS} characters"
        if isinstance(request, Put) and len(request.value) > MAX_VALUE_BYTES:
            return f"a value may have at most {MAX_VALUE_BYTES} bytes"
        if isinstance(request, Put) and len(self._values) >= MAX_KEYS and request.key not in self._values:
            return f"the coordinator already stores {MAX_KEYS} keys, its limit"
        if isinstance(request, Send) and len(request.body) > MAX_VALUE_BYTES:
            return f"a message may have at most {MAX_VALUE_BYTES} bytes"
        return ""

    def disconnected(self, connection: int, now: float, reason: str = "") -> Out:
        """A connection broke; `reason` is empty if it was just closed. Its member counts as dead after a grace period,
        in which the launcher may report a better cause."""
        self._visitors.discard(connection)
        self._joining = [(c, i) for c, i in self._joining if c != connection]
        self._reserving = [(c, request) for c, request in self._reserving if c != connection]
        getting = {key: [(c, i) for c, i in waiting if c != connection] for key, waiting in self._getting.items()}
        self._getting = {key: waiting for key, waiting in getting.items() if waiting}
        key = self._by_connection.pop(connection, None)
        if key is not None:
            lost = self._members[key]
            lost.connection, lost.lost_at, lost.reason = None, now, reason
        return []

    def died(self, role: str, rank: int, reason: str) -> Out:
        """The launcher saw this process fail, possibly before it joined."""
        self._members.setdefault((role, rank), _MemberState(Member(role, rank, "?", 0), None))
        return self._end((role, rank), "died", reason)

    def ended(self, role: str, rank: int) -> Out:
        """The launcher saw this process end well, possibly before it joined."""
        self._members.setdefault((role, rank), _MemberState(Member(role, rank, "?", 0), None))
        return self._end((role, rank), "left", EXITED)

    def tick(self, now: float) -> Out:
        """Turns connections that broke `DISCONNECT_GRACE_S` ago into deaths. Call it a few times a second."""
        out: Out = []
        for key, each in list(self._members.items()):
            if each.state == "alive" and each.lost_at is not None and now - each.lost_at > DISCONNECT_GRACE_S:
                out += self._end(key, "died", "its connection broke" + (f": {each.reason}" if each.reason else ""))
        return out

    # -- membership ----------------------------------------------------------------------------------------------------

    def _join(self, connection: int, request: Join) -> Out:
        member, key = request.member, (request.member.role, request.member.rank)
        refused = self._refusal(connection, request)
        if refused:
            return self._reply(connection, request, error=refused)
        versions = _parse_versions(request.versions)
        if refused := self._difference(member, versions):
            out = self._reply(connection, request, error=refused)
            if not self.generation and member.role in COUNTED:  # the run cannot form without it
                self._members[key] = _MemberState(member, None)
                out += self._end(key, "died", refused)
            return out
        if member.role == VISITOR:
            self._visitors.add(connection)
            return [self._current(connection, request.id)]
        again = key in self._members
        if again:  # what a process that was given up still sends is not this member's
            self._by_connection = {c: k for c, k in self._by_connection.items() if k != key}
        self._members[key] = _MemberState(member, connection, versions=versions)
        self._by_connection[connection] = key
        if self.generation and member.role not in COUNTED:
            return [self._current(connection, request.id)]
        self._joining.append((connection, request.id))
        if self.missing and not self.generation:
            return []
        self.generation += 1
        event = self._event("joined", key, "again" if again else "") if self.generation > 1 else self._event("formed")
        out = self._to_all(event) + [self._current(c, i) for c, i in self._joining]
        reserving, self._joining, self._reserving = self._reserving, [], []
        for waiting, reserve in reserving:
            out += self._reserve(waiting, reserve)
        return out

    def _refusal(self, connection: int, request: Join) -> str:
        member = request.member
        if len(member.role) + len(member.host) > MAX_NAME_CHARS:
            return f"role and host of a member may have at most {MAX_NAME_CHARS} characters"
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
        known = self._members.get((member.role, member.rank))
        if known and known.state == "alive":
            return f"{member}: {known.member} has that rank already"
        if known and member.role == "worker" and member.rank >= self.size:
            return f"{member}: {known.member} had that rank; a worker that joins takes a new number"
        gone = [s for s in self._members.values() if s.state != "alive" and s.member.role in COUNTED]
        if gone and not self.generation:
            reason = f": {gone[0].reason}" if gone[0].reason else ""
            return f"{member}: the run cannot form, {gone[0].member} has ended before it joined{reason}"
        return ""

    def _difference(self, member: Member, versions: dict[str, str]) -> str:
        """How this member's versions differ from those of the first living member that stated any."""
        for other in sorted(self._members.values(), key=lambda s: (s.member.role != "worker", s.member.rank)):
            if not other.versions or other.state != "alive":
                continue
            unlike = [name for name in versions if versions[name] != other.versions.get(name, versions[name])]
            if unlike:
                mine = ", ".join(f"{name} {versions[name]}" for name in unlike)
                theirs = ", ".join(f"{name} {other.versions[name]}" for name in unlike)
                return f"{member} has {mine}, {other.member} {theirs}: install the same on every host"
            return ""
        return ""

    def _reserve(self, connection: int, request: Reserve) -> Out:
        if not 1 <= request.count <= MAX_JOINERS:
            return self._reply(connection, request, error=f"1 to {MAX_JOINERS} may join at once, not {request.count}")
        if self.stop_reason is not None:
            return self._reply(connection, request, error=f"the run is stopping: {self.stop_reason}")
        if not self.generation:
            self._reserving.append((connection, request))
            return []
        if all(member.role != "worker" for member in self.alive):
            return self._reply(connection, request, error="the run is over: no worker is left in it")
        first, self._next_rank = self._next_rank, self._next_rank + request.count
        return [(connection, CoordinatorReply(id=request.id, value=str(first).encode(), generation=self.generation))]

    def _end(self, key: Key, state: Literal["left", "died"], reason: str, failed: bool = False) -> Out:
        """The first report of a member's end counts, except that one which has left may still be found to have died."""
        ended = self._members[key]
        if ended.state in ("died", state):
            return []
        was_alive = ended.state == "alive"
        ended.state, ended.reason = state, reason[:MAX_VALUE_BYTES]
        if key[0] == "worker":
            self.leases.gone(key[1])
        if key[0] not in COUNTED:
            return []
        if self.generation and was_alive:
            self.generation += 1
        out = self._to_all(self._event(state, key, ended.reason, failed=failed), but=ended.connection)
        if not self.generation:
            error = f"{ended.member} has ended before the run was complete: {ended.reason}"
            waiting = self._joining + [(c, request.id) for c, request in self._reserving]
            out += [(c, CoordinatorReply(id=i, error=error)) for c, i in waiting if c != ended.connection]
            self._joining, self._reserving = [], []
        return out

    # -- values and samples --------------------------------------------------------------------------------------------

    def _get(self, connection: int, request: Get) -> Out:
        if request.key in self._values:
            return [(connection, CoordinatorReply(id=request.id, value=self._values[request.key]))]
        if not request.wait:
            return self._reply(connection, request, error=f"there is no value under {request.key!r}")
        self._getting.setdefault(request.key, []).append((connection, request.id))
        return []

    def _lease(self, connection: int, key: Key | None, request: LeaseRequest) -> Out:
        """All may look at the leases; blocks are leased to workers only, while they are alive."""
        if not isinstance(request, ShowData):
            if key is None or key[0] != "worker":
                return self._reply(connection, request, error="samples are leased to workers only")
            worker = self._members[key]
            if worker.state != "alive":
                error = f"{worker.member} has {worker.state} and can lease no samples"
                return self._reply(connection, request, error=error)
        return [(connection, self.leases.answer(key[1] if key else -1, request))]

    # -- answers -------------------------------------------------------------------------------------------------------

    def _reply(self, connection: int, request: AnyRequest, error: str = "") -> Out:
        return [(connection, CoordinatorReply(id=request.id, error=error))] if request.id or error else []

    def _current(self, connection: int, id: int) -> tuple[int, AnyAnswer]:
        return connection, CoordinatorReply(id=id, members=tuple(self.alive), generation=self.generation)

    def _event(self, kind: EventKind, key: Key | None = None, text: str = "", **fields: Any) -> CoordinatorEvent:
        member = self._members[key].member if key else None
        event = CoordinatorEvent(kind=kind, generation=self.generation, member=member, text=text, **fields)
        if self.observer is not None and kind not in ("formed", "message"):
            self.observer.on_event(event)
        return event

    def _to_all(self, event: CoordinatorEvent, but: int | None = None) -> Out:
        connections = [each.connection for each in self._members.values()]
        return [(c, event) for c in connections if c is not None and c != but]


def _parse_versions(text: str) -> dict[str, str]:
    """`torch 2.13.0, python 3.11` by name."""
    pairs = [part.split() for part in text[:MAX_NAME_CHARS].split(",")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
