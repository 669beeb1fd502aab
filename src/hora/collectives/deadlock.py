"""DeadlockDetector: two ranks that wait for each other in different groups learn it within a second.

Ranks of one group compare the calls that they make in it (consistency.py). A rank that makes a call which another never
makes, such as a collective inside `if job.rank == 0:`, waits in one group while the other waits for it elsewhere, for
example while gradients are averaged. So a rank whose training thread has waited for a moment tells the others where it
waits, and how many calls it has begun in every group. Two ranks are deadlocked if each waits in a call that the other
has not begun.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import msgspec

from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Mismatch
from .consistency import RULE

TOPIC = "waits"


class WaitState(msgspec.Struct, array_like=True):
    """Where a rank's training thread waits: `scope` names a group or the like, `number` is its call there.
    `begun` has the number of calls in every scope."""

    scope: str
    number: int
    text: str
    begun: dict[str, int]


class WaitScope:
    """A context around code that may wait there. Of nested ones the outermost counts."""

    __slots__ = ("_detector", "aborted", "name", "text")

    def __init__(
        self, detector: DeadlockDetector, name: str, text: Callable[[], str], aborted: Callable[[], bool]
    ) -> None:
        self._detector = detector
        self.name = name
        self.text = text
        self.aborted = aborted

    def __enter__(self) -> None:
        detector = self._detector
        if threading.get_ident() == detector.thread:
            detector.depth += 1
            if detector.depth == 1:
                detector.current = self

    def __exit__(self, *_: object) -> None:
        detector = self._detector
        if threading.get_ident() == detector.thread:
            detector.depth -= 1
            if detector.depth == 0:
                detector.current = None


class DeadlockDetector:
    """One rank's side. `call_numbers` returns for each group, by name, how many calls were begun in it; `abort` gets
    the error. The rank's own threads call `scope` and `on_long_wait`, the coordinator connection's calls `on_event`."""

    def __init__(
        self,
        control: CoordinatorConnection,
        name: str,
        call_numbers: Callable[[], dict[str, int]],
        abort: Callable[[HoraError], None],
    ) -> None:
        self._control = control
        self._name = name
        self._call_numbers = call_numbers
        self._abort = abort
        self.thread = threading.get_ident()  # the training thread
        self.current: WaitScope | None = None  # where it is
        self.depth = 0
        self.beside: WaitScope | None = None  # where its GPU is, while the thread is elsewhere
        self._counts: dict[str, Callable[[], int]] = {}  # of scopes that are not groups
        self._found = False

    def scope(
        self, name: str, text: Callable[[], str], aborted: Callable[[], bool], count: Callable[[], int] | None = None
    ) -> WaitScope:
        """Where this rank may wait for others: a group, or something else whose calls `count` counts. `text` is the
        end of a sentence: "in barrier (call 3)". `aborted` tells that the wait ends without the others."""
        if count is not None:
            self._counts[name] = count
        return WaitScope(self, name, text, aborted)

    def on_long_wait(self) -> None:
        """A wait of this rank, on any thread, has lasted for a moment. Never blocks."""
        mine = self._state()
        if mine is not None:
            self._send(mine)

    def _send(self, mine: WaitState) -> None:
        with contextlib.suppress(HoraError):
            self._control.send(TOPIC, msgspec.msgpack.encode(mine))

    def on_event(self, event: CoordinatorEvent) -> None:
        if event.kind != "message" or event.topic != TOPIC or event.member is None:
            return
        theirs = msgspec.msgpack.decode(event.body, type=WaitState)
        mine = self._state()
        if mine is None or self._found or not _is_deadlock(mine, theirs):
            return
        self._found = True
        self._send(mine)  # the other compares it with its own state, and raises too
        self._abort(
            Mismatch(
                f"{self._name} waits {mine.text} and {event.member} waits {theirs.text}: each waits for the other. "
                f"{RULE}; is one of them made by some ranks only?"
            )
        )

    def _state(self) -> WaitState | None:
        """Where this rank waits right now. A received state is compared with this one alone: the sender of it still
        waits there, or its wait was aborted and this rank's will be."""
        current = self.current or self.beside
        if current is None or current.aborted():
            return None
        begun = {**self._call_numbers(), **{name: count() for name, count in self._counts.items()}}
        return WaitState(current.name, begun.get(current.name, 0), current.text(), begun)


def _is_deadlock(mine: WaitState, theirs: WaitState) -> bool:
    """Each waits in a call that the other has not begun, in a scope that both know."""
    if mine.scope == theirs.scope or mine.scope not in theirs.begun or theirs.scope not in mine.begun:
        return False
    return theirs.begun[mine.scope] < mine.number and mine.begun[theirs.scope] < theirs.number
