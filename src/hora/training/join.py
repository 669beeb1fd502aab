"""Farewell: what happens to the others when a worker leaves its loop, so that nobody waits for it in vain.

An exchange needs every worker, so one that leaves ends the others': it tells them, over the coordinator's line, how
many exchanges it has taken part in. A worker that has left the same loop after as many ignores it. One that is in a
later exchange, which nobody can have finished, drops that step, stops, and says so to all. Everybody then holds the
parameters of the same step.

One may leave between an exchange and its step. Where a step needs everybody (shares, absent workers) it is then taken
by all or by none. Elsewhere the others may have taken it already: who leaves asks them, and takes it too if one has.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import msgspec

from ..collectives.group import Group
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, PeerLost
from ..strategies.common.sync import ExchangeCancelled, Sync, ended_inside

log = logging.getLogger(__name__)

TOPIC = "training"
CATCH_UP_S = 30.0  # how long one that leaves before its step waits to hear whether others took it


class LeaveNotice(msgspec.Struct, array_like=True):
    """`left`: this rank has left loop `loop` after `num_exchanges`. `halt`: there will be none beyond that number.

    `ended`: so has its script; who is in a later exchange fails. `open`: it has left before the step of the last of
    them; has anybody taken that? The answers are `took`, `passed`.
    `done`: the answer to `left` of one that is out of that loop too.
    `quit`: it has left the `job.epochs` of number `loop`. `meet`: it has come to meeting `loop` outside of all loops.
    """

    kind: str
    loop: int
    num_exchanges: int
    step: int


class EarlyExit:
    """One worker's side. `hear` is called on the line's thread, everything else on the training thread."""

    def __init__(self, group: Group, control: CoordinatorConnection) -> None:
        self.sync: Sync | None = None
        self.step = 0  # of the first optimizer, for the words
        self.following = False  # this worker waits for rank 0's next order
        self.run = 0  # which `job.epochs` is under way, 0 outside
        self._group = group
        self._control = control
        self._applied = 0  # the exchange whose step was taken last
        self._stepping = False  # this worker waits for all to come to a step
        self._num_meetings = 0
        self._ended: dict[int, int] = {}  # loops that are over, with the number of exchanges then
        self._words: list[tuple[LeaveNotice, str]] = []
        self._answers: dict[int, set[int]] = {}  # by exchange: whose answer to an `open` word has come
        self._taken_by_others: set[int] = set()  # exchanges whose step somebody took
        self._answered: set[int] = set()
        self._out_of: dict[int, set[int]] = {}  # by loop: who else is out of it
        self._mourned = False
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)

    # -- exchanges and steps ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Halt if somebody will not come to the exchange under way."""
        with self._lock:
            halt = self._judge()
        if halt is not None:
            raise halt

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Around the meeting that opens a step; Halt if somebody has left before it. Afterwards it counts as taken."""
        sync = self._at_work
        with self._lock:
            self._stepping = sync.together
            halt = self._judge() if self._stepping else None
            if not self._stepping:
                self._applied = sync.num_exchanges
        try:
            if halt is not None:
                raise halt
            self.answer()
            yield
        finally:
            self._stepping = False
        self._applied = sync.num_exchanges

    @property
    def stepped(self) -> bool:
        """Whether the step of the last exchange was taken."""
        return self._applied >= self._at_work.num_exchanges

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, loop: int, finished: bool, alone: bool, ended: bool = False) -> bool:
        """Loop `loop` is over here; unless it is `finished`, the others hear of it. `alone`: a step needs nobody else.
        `ended`: so is the script.

        True if the step of the last exchange, which this worker has left out, must be made up for.
        """
        sync = self._at_work
        with self._lock:
            num_exchanges = self._num_concluded
            unstepped = self._applied < num_exchanges and not sync.exchanging
            is_open = unstepped and not finished and not sync.halted
            self._ended[loop] = num_exchanges
            asked = loop in self._out_of
            if finished:
                self._out_of.pop(loop, None)
        self.answer()
        if finished:
            if asked:
                self._tell("done", loop, num_exchanges)
            return False
        self._tell("ended" if ended else "open" if is_open else "left", loop, num_exchanges)
        return not ended and is_open and alone and not sync.together and self._taken_elsewhere(num_exchanges)

    def await_others(self, loop: int) -> bool:
        """After leaving `loop` before its end: blocks until all are out of it (True), or one says that there is no
        more."""
        sync = self._at_work
        deadline = time.monotonic() + min(CATCH_UP_S, self._group.transport.spec.timeout_s)
        others = set(self._group.others)
        with self._news:
            while self._group.transport.cause is None and time.monotonic() < deadline:
                if any(word.kind == "halt" for word, _ in self._words):
                    sync.halted = sync.halted or "this worker left its loop, the others had not"
                    return False
                if others <= self._out_of.get(loop, set()) | self._group.transport.gone.keys():
                    return True
                self._news.wait(0.05)
        return False

    def quit(self, run: int) -> None:
        """`job.epochs` number `run` was left before its end."""
        self._tell("quit", run, self._num_concluded)

    def meet(self) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        with self._lock:
            self._num_meetings += 1
        self._tell("meet", self._num_meetings, self._num_concluded)

    def mourn(self) -> None:
        """After an exchange that did not take place: everybody hears that there will be no more."""
        sync = self.sync
        if sync is None or not sync.halted or self._mourned:
            return
        self._mourned = True
        self._tell("halt", sync.loop, sync.num_exchanges - 1)
        self._control.stop(sync.halted)

    def answer(self) -> None:
        """Tells those who left before a step whether it was taken here, as soon as that is certain."""
        sync = self._at_work
        with self._lock:
            answers = []
            for word, _ in self._words:
                exchange = word.num_exchanges
                if word.kind != "open" or exchange in self._answered:
                    continue
                if self._applied >= exchange:
                    answers.append(("took", word.loop, exchange))
                elif word.loop in self._ended or sync.num_exchanges > exchange or sync.halted:
                    answers.append(("passed", word.loop, exchange))
            self._answered |= {exchange for _, _, exchange in answers}
        for answer in answers:
            self._tell(*answer)

    def _taken_elsewhere(self, exchange: int) -> bool:
        """Whether another worker has taken the step of this exchange; waits until all have said."""
        deadline = time.monotonic() + min(CATCH_UP_S, self._group.transport.spec.timeout_s)
        others = set(self._group.others)
        with self._news:
            while not others <= self._answers.get(exchange, set()) | self._group.transport.gone.keys():
                if self._group.transport.cause is not None:
                    return False
                if time.monotonic() > deadline:
                    log.warning("rank %d left before its step, and does not know if others took it", self._group.rank)
                    return False
                self._news.wait(0.05)
            return exchange in self._taken_by_others

    # -- the line --------------------------------------------------------------------------------------------------

    def hear(self, event: CoordinatorEvent) -> None:
        if event.kind != "message" or event.topic != TOPIC or event.member is None:
            return
        word = msgspec.msgpack.decode(event.body, type=LeaveNotice)
        with self._news:
            if word.kind in ("took", "passed", "open"):
                self._answers.setdefault(word.num_exchanges, set()).add(event.member.rank)
            if word.kind == "took":
                self._taken_by_others.add(word.num_exchanges)
            if word.kind in ("left", "open", "ended", "done"):
                self._out_of.setdefault(word.loop, set()).add(event.member.rank)
            if word.kind not in ("took", "passed", "done"):
                self._words.append((word, str(event.member)))
            is_out = word.kind in ("left", "open", "ended") and word.loop in self._ended
            halt = self._judge() if self.sync is not None else None
            self._news.notify_all()
        if self.sync is not None:
            self.answer()
            if is_out:
                self._tell("done", word.loop, word.num_exchanges)
            if halt is not None:
                self.sync.abort(halt)

    def _judge(self) -> HoraError | None:
        """Whether somebody will not come to the exchange under way. Called under the lock."""
        sync = self._at_work
        self._words = [(word, who) for word, who in self._words if not self._is_past(word)]
        for word, who in self._words:
            waits = self.following and word.kind == "halt"  # for the next order, which will not come
            waits = waits or (self._stepping and word.kind in ("open", "ended"))  # for all to come to the step
            if sync.num_exchanges + waits <= word.num_exchanges:
                continue
            if word.kind == "quit" and word.loop != self.run:
                continue
            if word.kind in ("left", "open", "ended") and (word.loop in self._ended or word.loop > sync.loop):
                continue
            left = f"{who} left its loop after step {word.step}"
            if word.kind == "ended":
                return PeerLost(
                    f"{self._group.transport.name_of(self._group.rank)}: {ended_inside(left)}", (), secondary=True
                )
            return ExchangeCancelled(left)
        return None

    def _is_past(self, word: LeaveNotice) -> bool:
        """Whether this worker has come where the word's sender was, so that it means nothing any more."""
        if word.kind == "meet":
            return word.loop <= self._num_meetings
        return word.kind in ("left", "ended") and word.loop in self._ended

    def _tell(self, kind: str, loop: int, num_exchanges: int) -> None:
        with contextlib.suppress(HoraError):
            self._control.send(TOPIC, msgspec.msgpack.encode(LeaveNotice(kind, loop, num_exchanges, self.step)))

    @property
    def _num_concluded(self) -> int:
        """The exchanges that this worker has gone through to their end; one that broke off is none."""
        return self._at_work.num_exchanges - self._at_work.exchanging

    @property
    def _at_work(self) -> Sync:
        assert self.sync is not None
        return self.sync
