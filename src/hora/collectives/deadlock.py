"""Deadlock: two ranks that wait for each other in different calls learn it within a second, not after `timeout_s`.

Ranks of one group compare the calls that they make in it (accord.py). A rank that makes a call which another never
makes, as a collective inside `if job.rank == 0:`, waits in one group while the other waits for it elsewhere, in the
exchange of gradients perhaps. So a rank whose training thread has waited for a moment tells the others where it stands,
and in every group how many calls it has begun. Two ranks are deadlocked if each has begun a call that the other has
not, and both wait in them: nothing but one of them could go on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import msgspec

from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, Mismatch

log = logging.getLogger(__name__)

TOPIC = "waits"


class WaitState(msgspec.Struct, array_like=True):
    """Where a rank's training thread waits: `place` names a group or the like, `number` counts the calls there.
    `begun` has that number for every place."""

    place: str
    number: int
    text: str
    begun: dict[str, int]


class WaitScope:
    """A context around what may wait there. Of several inside each other, the outermost counts."""

    __slots__ = ("_deadlocks", "aborted", "name", "text")

    def __init__(
        self, deadlocks: DeadlockDetector, name: str, text: Callable[[], str], aborted: Callable[[], bool]
    ) -> None:
        self._deadlocks = deadlocks
        self.name = name
        self.text = text
        self.aborted = aborted

    def __enter__(self) -> None:
        deadlocks = self._deadlocks
        if threading.get_ident() == deadlocks.thread:
            deadlocks.depth += 1
            if deadlocks.depth == 1:
                deadlocks.here = self

    def __exit__(self, *_: object) -> None:
        deadlocks = self._deadlocks
        if threading.get_ident() == deadlocks.thread:
            deadlocks.depth -= 1
            if deadlocks.depth == 0:
                deadlocks.here = None


class DeadlockDetector:
    """One rank's side. `numbers` gives for each group, by name, how many calls were begun in it; `end` is told the
    error when there is one. A `scope` and `on_long_wait` are for the rank's own threads, `hear` for the line's."""

    def __init__(
        self,
        control: CoordinatorConnection,
        name: str,
        numbers: Callable[[], dict[str, int]],
        end: Callable[[HoraError], None],
    ) -> None:
        self._control = control
        self._name = name
        self._numbers = numbers
        self._end = end
        self.thread = threading.get_ident()  # the training thread
        self.here: WaitScope | None = None  # where that waits
        self.depth = 0
        self._counts: dict[str, Callable[[], int]] = {}  # of places that are no groups
        self._found = False

    def scope(
        self,
        name: str,
        text: Callable[[], str],
        aborted: Callable[[], bool],
        count: Callable[[], int] | None = None,
    ) -> WaitScope:
        """Where this rank may wait for others: a group, or with `count` something else in which calls are counted.
        `aborted`: the wait ends without the others."""
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

    def hear(self, event: CoordinatorEvent) -> None:
        if event.kind != "message" or event.topic != TOPIC or event.member is None:
            return
        theirs = msgspec.msgpack.decode(event.body, type=WaitState)
        mine = self._state()
        if mine is None or self._found or not _is_deadlock(mine, theirs):
            return
        self._found = True
        self._send(mine)  # the other compares it with its own state, and raises too
        self._end(
            Mismatch(
                f"{self._name} waits in {mine.text} while {event.member} waits in {theirs.text}: each waits for the "
                "other. All ranks must make the same calls in the same order; is one of them made by some ranks only?"
            )
        )

    def _state(self) -> WaitState | None:
        """Where this rank waits right now. A received state is compared with this one alone: the sender of it still
        waits there, or its wait was aborted and this rank's will be."""
        here = self.here
        if here is None or here.aborted():
            return None
        begun = {**self._numbers(), **{name: count() for name, count in self._counts.items()}}
        return WaitState(here.name, begun.get(here.name, 0), here.text(), begun)


def _is_deadlock(mine: WaitState, theirs: WaitState) -> bool:
    """Each waits in a call that the other has not begun, in a place that both know."""
    if mine.place == theirs.place or mine.place not in theirs.begun or theirs.place not in mine.begun:
        return False
    return theirs.begun[mine.place] < mine.number and mine.begun[theirs.place] < theirs.number
