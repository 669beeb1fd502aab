"""CoordinatorConnection: a member's connection to the coordinator, the same over a socket and inside one process."""

from __future__ import annotations

import abc
import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import HoraError, PeerLost, Timeout
from .messages import (
    AnyRequest,
    CoordinatorEvent,
    CoordinatorReply,
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

log = logging.getLogger(__name__)

ANSWER_S = 30.0
SLOW_S = 10.0  # a longer wait is logged
MAX_EARLY = 1000  # events kept for the first handler
Handler = Callable[[CoordinatorEvent], None]
T = TypeVar("T")


class CoordinatorConnection(abc.ABC):
    """All methods are thread-safe. Those that block have a deadline and raise Timeout; a broken connection raises
    HoraError, or PeerLost if the coordinator ran in the process of the member `hosted_by`."""

    def __init__(self) -> None:
        self.hosted_by: Member | None = None
        self._handlers: list[Handler] = []
        self._early: collections.deque[CoordinatorEvent] = collections.deque(maxlen=MAX_EARLY)
        self._handlers_lock = threading.Lock()
        self._replies: dict[int, CoordinatorReply | None] = {}
        self._next_id = 1
        self._received = threading.Condition()
        self._broken: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def join(
        self, member: Member, versions: str = "", timeout_s: float = 300.0, size: int = 0, servers: int = 0
    ) -> CoordinatorReply:
        """Blocks until all workers and servers have joined; the reply holds the members and the generation.

        With `size` and `servers` a long wait and a Timeout name the members that are missing.
        """

        def missing() -> str:
            there = {(m.role, m.rank) for m in self.members()}
            ranks = [str(rank) for rank in range(size) if ("worker", rank) not in there]
            others = [str(rank) for rank in range(servers) if ("server", rank) not in there]
            names = [f"ranks {', '.join(ranks)}"] if ranks else []
            if others:
                names.append(f"server{'s' if len(others) > 1 else ''} {', '.join(others)}")
            return f"{' and '.join(names) or 'the other ranks'} to join"

        return self._ask(Join(member=member, versions=versions), missing, timeout_s, str(member))

    def members(self) -> tuple[Member, ...]:
        """The members that are alive."""
        return self._ask(ListMembers(), "the list of members").members

    def reserve(self, count: int, timeout_s: float = 300.0) -> int:
        """The first of `count` ranks for workers that will join; blocks until the run has formed."""
        return int(self._ask(Reserve(count=count), "the run to form", timeout_s).value)

    def put(self, key: str, value: bytes) -> None:
        self._ask(Put(key=key, value=value), f"the coordinator to store {key!r}")

    def put_nowait(self, key: str, value: bytes) -> None:
        """As `put`, without waiting for the answer."""
        self._transmit(Put(key=key, value=value))

    def get(self, key: str, timeout_s: float = ANSWER_S, check: Callable[[], None] | None = None) -> bytes:
        """Blocks until `key` has a value, or until `check`, which is called after every event, raises."""
        return self._ask(Get(key=key), f"key {key!r} to be put", timeout_s, check=check).value

    def get_nowait(self, key: str) -> bytes | None:
        """The value that `key` has now, if any."""
        try:
            return self._ask(Get(key=key, wait=False), f"the value of {key!r}").value
        except HoraError:
            return None

    def lease_request(self, request: LeaseRequest, answer: type[T]) -> T:
        """Sends a request about leased samples (lease_manager.py). Does not wait for other workers."""
        return msgspec.msgpack.decode(self._ask(request, "the coordinator's answer about samples").value, type=answer)

    def lease_views(self) -> list[dict[str, Any]]:
        """The state of each loader's newest epoch, and who holds which block; `describe` makes it a text."""
        return self.lease_request(ShowData(), list)

    def newest_epoch(self) -> int | None:
        """The newest epoch of which a worker has taken samples; None before the first."""
        return max((int(view["epoch"]) for view in self.lease_views()), default=None)

    def send(self, topic: str, body: bytes, to: tuple[int, ...] = ()) -> None:
        """Sends a message to the ranks `to` (all others if empty), which receive it as an event. Does not block."""
        self._transmit(Send(topic=topic, body=body, to=to))

    def report(self, body: bytes) -> None:
        """Statistics for the observer of the run. Does not block."""
        self._transmit(Report(body=body))

    def stop(self, reason: str) -> None:
        """Asks all members to stop; each receives an event, this one too. Does not block."""
        self._transmit(Stop(reason=reason))

    def fail(self, reason: str) -> None:
        """Announces why this member is about to die. Does not block."""
        self._transmit(Fail(reason=reason))

    def leave(self, timeout_s: float = 2.0) -> None:
        """This member has finished well."""
        self._ask(Leave(), "the coordinator to confirm the leave", timeout_s)

    # -- events --------------------------------------------------------------------------------------------------------

    def subscribe(self, handler: Handler) -> None:
        """Passes events to `handler` from now on; the first handler also gets those that came before it.

        Handlers run on the connection's own thread, in the order of events. They must not block and must not make a
        request that blocks."""
        while True:
            with self._handlers_lock:
                early = list(self._early)
                self._early.clear()
                if not early:
                    self._handlers.append(handler)
                    return
            for event in early:  # later ones queue up behind them
                self._dispatch(event, [handler])

    def inject(self, event: CoordinatorEvent) -> None:
        """Handles `event` as if the coordinator had sent it."""
        self._receive(event)

    def check(self) -> None:
        """PeerLost if the coordinator is gone with the process that hosted it."""
        if self._broken is not None and self.hosted_by is not None:
            raise self._lost(self._broken)

    @abc.abstractmethod
    def close(self) -> None: ...

    # -- for the implementations ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _transmit(self, request: AnyRequest) -> None:
        """Sends the request; HoraError if the connection is broken."""

    def _ask(
        self,
        request: AnyRequest,
        what: str | Callable[[], str],
        timeout_s: float = ANSWER_S,
        who: str = "this process",
        check: Callable[[], None] | None = None,
    ) -> CoordinatorReply:
        """Sends the request and waits for its reply. `what` is awaited; it is evaluated only for a message."""
        started = time.monotonic()
        next_warning = SLOW_S
        with self._received:
            request.id = self._next_id
            self._next_id += 1
            self._replies[request.id] = None
        try:
            self._transmit(request)
            while True:
                waited = time.monotonic() - started
                with self._received:
                    reply = self._replies[request.id]
                    if reply is None and check is not None:
                        check()
                    if reply is None and self._broken is None and waited < min(timeout_s, next_warning):
                        self._received.wait(min(timeout_s, next_warning) - waited)
                        continue
                if reply is not None:
                    break
                if self._broken:
                    raise self._lost(self._broken)
                text = f"{who} has waited {waited:.0f} s for {what if isinstance(what, str) else what()}"
                if waited >= timeout_s:
                    raise Timeout(text)
                log.warning("%s", text)
                next_warning *= 2
        finally:
            with self._received:
                self._replies.pop(request.id, None)
        if reply.error:
            raise HoraError(reply.error)
        return reply

    def _lost(self, reason: str) -> HoraError:
        host = self.hosted_by
        if host is None:
            return HoraError(f"lost the connection to the coordinator: {reason}")
        text = f"lost {host}, whose process ran the coordinator: {self._broken or reason}"
        return PeerLost(text, (host.rank,), secondary=True)

    def _receive(self, answer: CoordinatorReply | CoordinatorEvent) -> None:
        if isinstance(answer, CoordinatorReply):
            with self._received:
                if answer.id in self._replies:
                    self._replies[answer.id] = answer
                    self._received.notify_all()
            return
        with self._handlers_lock:
            handlers = list(self._handlers)
            if not handlers:
                self._early.append(answer)
        self._dispatch(answer, handlers)
        with self._received:
            self._received.notify_all()  # for the `check` of waiting requests

    def _dispatch(self, event: CoordinatorEvent, handlers: list[Handler]) -> None:
        for handler in handlers:
            try:
                handler(event)
            except Exception:
                log.exception("an event handler of the coordinator connection failed")

    def _break(self, reason: str) -> None:
        with self._received:
            self._broken = self._broken or reason
            self._received.notify_all()
