"""Control: a member's line to the coordinator. Few verbs, the same over a socket and inside one process."""

from __future__ import annotations

import abc
import logging
import threading
import time
from collections.abc import Callable

from ..errors import HoraError, Timeout
from .messages import AnyRequest, Event, Fail, Get, Join, Lease, Leave, Member, Put, Release, Reply, Stop, Tell

log = logging.getLogger(__name__)

ANSWER_S = 30.0
Handler = Callable[[Event], None]


class Control(abc.ABC):
    """Every verb is thread-safe. Those that wait have a deadline; `tell`, `fail` and `stop` do not wait.

    Handlers given to `listen` are called on the line's own thread, in the order of events: they must not block and must
    not ask the coordinator for anything that waits.
    """

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._answers: dict[int, Reply | None] = {}
        self._next_id = 1
        self._news = threading.Condition()
        self._broken: str | None = None

    # -- verbs ---------------------------------------------------------------------------------------------------

    def join(self, member: Member, versions: str = "", timeout_s: float = 300.0) -> Reply:
        """Blocks until all ranks are there; the reply holds the members and the generation."""
        return self._ask(Join(member=member, versions=versions), timeout_s, "the other ranks to join")

    def put(self, key: str, value: bytes) -> None:
        self._ask(Put(key=key, value=value), ANSWER_S, f"the coordinator to store {key!r}")

    def get(self, key: str, timeout_s: float = ANSWER_S) -> bytes:
        """The value under `key`; blocks until somebody has put it."""
        return self._ask(Get(key=key), timeout_s, f"somebody to put {key!r}").value

    def lease(self, name: str, seconds: float) -> bool:
        """Whether `name` is ours now, for `seconds`; asking again while it is ours prolongs it."""
        return self._ask(Lease(name=name, seconds=seconds), ANSWER_S, f"the lease {name!r}").value == b"held"

    def release(self, name: str) -> None:
        self._ask(Release(name=name), ANSWER_S, f"the release of {name!r}")

    def tell(self, topic: str, body: bytes, to: tuple[int, ...] = ()) -> None:
        """A word to the ranks in `to` (all others if empty)."""
        self._send(Tell(topic=topic, body=body, to=to))

    def stop(self, reason: str) -> None:
        """Asks everybody to stop; each member hears it as an event, this one too."""
        self._send(Stop(reason=reason))

    def fail(self, reason: str) -> None:
        """Says why this member is about to die, so that the others hear the cause and not only the silence."""
        self._send(Fail(reason=reason))

    def leave(self, timeout_s: float = 2.0) -> None:
        """This member is done."""
        self._ask(Leave(), timeout_s, "the coordinator's goodbye")

    def listen(self, handler: Handler) -> None:
        self._handlers.append(handler)

    @abc.abstractmethod
    def close(self) -> None: ...

    # -- for the implementations -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def _send(self, request: AnyRequest) -> None:
        """Puts the request on its way; HoraError if the line is broken."""

    def _ask(self, request: AnyRequest, timeout_s: float, what: str) -> Reply:
        deadline = time.monotonic() + timeout_s
        with self._news:
            request.id = self._next_id
            self._next_id += 1
            self._answers[request.id] = None
        try:
            self._send(request)
            with self._news:
                while (reply := self._answers[request.id]) is None:
                    if self._broken:
                        raise HoraError(f"the line to the coordinator broke while waiting for {what}: {self._broken}")
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise Timeout(f"waited {timeout_s:g} s for {what}")
                    self._news.wait(min(left, 1.0))
        finally:
            with self._news:
                self._answers.pop(request.id, None)
        if reply.error:
            raise HoraError(reply.error)
        return reply

    def _receive(self, answer: Reply | Event) -> None:
        if isinstance(answer, Reply):
            with self._news:
                if answer.id in self._answers:
                    self._answers[answer.id] = answer
                    self._news.notify_all()
            return
        for handler in list(self._handlers):
            try:
                handler(answer)
            except Exception:
                log.exception("a handler of control events failed")

    def _break(self, reason: str) -> None:
        with self._news:
            self._broken = self._broken or reason
            self._news.notify_all()
