"""Control: a member's line to the coordinator. Few verbs, the same over a socket and inside one process."""

from __future__ import annotations

import abc
import collections
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..errors import HoraError, PeerLost, Timeout
from .messages import (
    AnyRequest,
    BeginBlock,
    BlockGrant,
    CoordinatorEvent,
    CoordinatorReply,
    DoneBlocks,
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
    TakeBlock,
)

log = logging.getLogger(__name__)

ANSWER_S = 30.0
SLOW_S = 10.0  # after this long a wait is said aloud
MAX_EARLY = 1000  # events kept for a handler that is still to come
Handler = Callable[[CoordinatorEvent], None]


class CoordinatorConnection(abc.ABC):
    """Every verb is thread-safe. Those that wait have a deadline; `send`, `fail` and `stop` do not wait.

    Handlers given to `subscribe` are called on the connection's own thread, in the order of events: they must not block
    and must not ask the coordinator for anything that waits. `hosted_by` is the member in whose process the coordinator
    runs, if any: a broken connection is then its loss.
    """

    def __init__(self) -> None:
        self.hosted_by: Member | None = None
        self._handlers: list[Handler] = []
        self._early: collections.deque[CoordinatorEvent] = collections.deque(maxlen=MAX_EARLY)
        self._hearing = threading.Lock()
        self._answers: dict[int, CoordinatorReply | None] = {}
        self._next_id = 1
        self._news = threading.Condition()
        self._broken: str | None = None

    # -- verbs ---------------------------------------------------------------------------------------------------

    def join(
        self, member: Member, versions: str = "", timeout_s: float = 300.0, size: int = 0, servers: int = 0
    ) -> CoordinatorReply:
        """Blocks until all workers and servers are there; the reply holds the members and the generation.

        With the run's `size` and `servers` those that are missing are named, after `SLOW_S` and when it fails.
        """

        def missing() -> str:
            there = {(m.role, m.rank) for m in self.members()}
            ranks = [str(rank) for rank in range(size) if ("worker", rank) not in there]
            others = [str(rank) for rank in range(servers) if ("server", rank) not in there]
            names = [f"ranks {', '.join(ranks)}"] if ranks else []
            if others:
                names.append(f"server{'s' if len(others) > 1 else ''} {', '.join(others)}")
            return f"{' and '.join(names) or 'the other ranks'} to join"

        return self._ask(Join(member=member, versions=versions), timeout_s, missing, str(member))

    def members(self) -> tuple[Member, ...]:
        """Who is there now."""
        return self._ask(ListMembers(), ANSWER_S, "the roll call").members

    def reserve(self, count: int, timeout_s: float = 300.0) -> int:
        """The first of `count` ranks for workers that will join the run; blocks until the run has formed."""
        return int(self._ask(Reserve(count=count), timeout_s, "the run to form").value)

    def put(self, key: str, value: bytes) -> None:
        self._ask(Put(key=key, value=value), ANSWER_S, f"the coordinator to store {key!r}")

    def put_nowait(self, key: str, value: bytes) -> None:
        """As put, but nobody waits for it to arrive."""
        self._transmit(Put(key=key, value=value))

    def get(self, key: str, timeout_s: float = ANSWER_S, check: Callable[[], None] | None = None) -> bytes:
        """The value under `key`; blocks until somebody has put it, or `check`, called after every event, raises."""
        return self._ask(Get(key=key), timeout_s, f"somebody to put {key!r}", check=check).value

    def get_nowait(self, key: str) -> bytes | None:
        """The value under `key` if there is one now."""
        try:
            return self._ask(Get(key=key, wait=False), ANSWER_S, f"the coordinator's answer about {key!r}").value
        except HoraError:
            return None

    def lease(self, name: str, seconds: float) -> bool:
        """Whether `name` is ours now, for `seconds`; asking again while it is ours prolongs it."""
        return self._ask(Lease(name=name, seconds=seconds), ANSWER_S, f"the lease {name!r}").value == b"held"

    def release(self, name: str) -> None:
        self._ask(Release(name=name), ANSWER_S, f"the release of {name!r}")

    def take_block(self, request: TakeBlock) -> BlockGrant:
        """The next block of samples for this worker; "wait" is an answer too, so this returns at once."""
        reply = self._ask(request, ANSWER_S, f"a block of epoch {request.epoch}")
        return msgspec.msgpack.decode(reply.value, type=BlockGrant)

    def begin_block(self, request: BeginBlock) -> bool:
        """Whether a block that was taken ahead is still this worker's; then it stays so."""
        reply = self._ask(request, ANSWER_S, f"block {request.block} of epoch {request.epoch}")
        return bool(msgspec.msgpack.decode(reply.value))

    def done_blocks(self, request: DoneBlocks) -> None:
        self._ask(request, ANSWER_S, "the coordinator to note what is done")

    def account(self, loader: int) -> dict[str, Any]:
        """Where one loader's open epochs stand."""
        return msgspec.msgpack.decode(self._ask(ShowData(loader=loader), ANSWER_S, "the ledger").value)

    def views(self) -> list[dict[str, Any]]:
        """Where the newest epoch of each loader stands and who holds what; `book.describe` puts it into words."""
        return msgspec.msgpack.decode(self._ask(ShowData(), ANSWER_S, "the ledgers").value)

    def newest_epoch(self) -> int | None:
        """The newest epoch that a worker has taken samples of; None before the first."""
        return max((int(view["epoch"]) for view in self.views()), default=None)

    def send(self, topic: str, body: bytes, to: tuple[int, ...] = ()) -> None:
        """A word to the ranks in `to` (all others if empty)."""
        self._transmit(Send(topic=topic, body=body, to=to))

    def report(self, body: bytes) -> None:
        """For whoever watches the run; nobody waits for it to arrive."""
        self._transmit(Report(body=body))

    def stop(self, reason: str) -> None:
        """Asks everybody to stop; each member hears it as an event, this one too."""
        self._transmit(Stop(reason=reason))

    def fail(self, reason: str) -> None:
        """Says why this member is about to die, so that the others hear the cause and not only the silence."""
        self._transmit(Fail(reason=reason))

    def leave(self, timeout_s: float = 2.0) -> None:
        """This member is done."""
        self._ask(Leave(), timeout_s, "the coordinator's goodbye")

    def subscribe(self, handler: Handler) -> None:
        """From now on events go to `handler` too; the first one also hears what came before it listened."""
        while True:
            with self._hearing:
                early = list(self._early)
                self._early.clear()
                if not early:
                    self._handlers.append(handler)
                    return
            for event in early:  # what comes meanwhile queues up behind
                self._hand(event, [handler])

    def check(self) -> None:
        """PeerLost if the coordinator is gone with the process that hosted it."""
        if self._broken is not None and self.hosted_by is not None:
            raise self._lost(self._broken)

    def inject(self, event: CoordinatorEvent) -> None:
        """As if the coordinator had told it: for what is known without it."""
        self._receive(event)

    @abc.abstractmethod
    def close(self) -> None: ...

    # -- for the implementations -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _transmit(self, request: AnyRequest) -> None:
        """Puts the request on its way; HoraError if the line is broken."""

    def _ask(
        self,
        request: AnyRequest,
        timeout_s: float,
        what: str | Callable[[], str],
        who: str = "this member",
        check: Callable[[], None] | None = None,
    ) -> CoordinatorReply:
        """Sends the request and waits for its answer. `what` says what is missing; it is asked only when that shows."""
        started = time.monotonic()
        next_word = SLOW_S
        with self._news:
            request.id = self._next_id
            self._next_id += 1
            self._answers[request.id] = None
        try:
            self._transmit(request)
            while True:
                waited = time.monotonic() - started
                with self._news:
                    reply = self._answers[request.id]
                    if reply is None and check is not None:
                        check()
                    if reply is None and self._broken is None and waited < min(timeout_s, next_word):
                        self._news.wait(min(timeout_s, next_word) - waited)
                        continue
                if reply is not None:
                    break
                if self._broken:
                    raise self._lost(self._broken)
                words = f"{who} has waited {waited:.0f} s for {what if isinstance(what, str) else what()}"
                if waited >= timeout_s:
                    raise Timeout(words)
                log.warning("%s", words)
                next_word *= 2
        finally:
            with self._news:
                self._answers.pop(request.id, None)
        if reply.error:
            raise HoraError(reply.error)
        return reply

    def _lost(self, reason: str) -> HoraError:
        """The line is broken."""
        host = self.hosted_by
        if host is None:
            return HoraError(f"the line to the coordinator broke: {reason}")
        words = f"lost {host}, in whose process the coordinator was: {self._broken or reason}"
        return PeerLost(words, (host.rank,), secondary=True)

    def _receive(self, answer: CoordinatorReply | CoordinatorEvent) -> None:
        if isinstance(answer, CoordinatorReply):
            with self._news:
                if answer.id in self._answers:
                    self._answers[answer.id] = answer
                    self._news.notify_all()
            return
        with self._hearing:
            handlers = list(self._handlers)
            if not handlers:
                self._early.append(answer)
        self._hand(answer, handlers)
        with self._news:
            self._news.notify_all()  # for the checks of those who wait

    def _hand(self, event: CoordinatorEvent, handlers: list[Handler]) -> None:
        for handler in handlers:
            try:
                handler(event)
            except Exception:
                log.exception("a handler of control events failed")

    def _break(self, reason: str) -> None:
        with self._news:
            self._broken = self._broken or reason
            self._news.notify_all()
