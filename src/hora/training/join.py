"""Early exit: what happens to the other workers when one leaves its training loop, so that none waits for it in vain.

An exchange needs every worker, so a worker that leaves ends those of the others. It tells them, through the
coordinator, how many exchanges it has taken part in. A worker that has left the same loop after as many ignores the
notice. One that is in a later exchange, which no worker can have finished, drops that step, stops, and announces the
halt to all. All workers then hold the parameters of the same step.

A worker may leave between an exchange and its step. Where a step needs all workers (shards, workers without samples) it
is then taken by all or by none. Elsewhere others may have taken it already: the worker that leaves asks them, and takes
it too if one has.
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
from ..strategies.common.hooks import TrainingHooks
from ..strategies.common.sync import ExchangeCancelled, Sync, ended_inside

log = logging.getLogger(__name__)

TOPIC = "training"
CATCH_UP_S = 30.0  # how long one that leaves before its step waits to hear whether others took it


class LeaveNotice(msgspec.Struct, array_like=True):
    """What a worker tells the others of its loops.

    left        it has left loop `loop` after `num_exchanges`
    ended       so has its script: a worker in a later exchange fails
    open        it has left before the step of the last exchange; did another worker take that step?
    took, passed    the answers to `open`
    done        the answer to `left` of a worker that is out of that loop too
    halt        there will be no exchange beyond that number
    quit        it has left the `job.epochs` of number `loop`
    meet        it has come to meeting `loop` outside of all loops
    """

    kind: str
    loop: int
    num_exchanges: int
    step: int


class EarlyExit:
    """One worker's side. `hear` is called on the coordinator connection's thread, the rest on the training thread."""

    def __init__(self, group: Group, control: CoordinatorConnection, hooks: TrainingHooks, sync: Sync) -> None:
        self.following = False  # this worker waits for rank 0's next action
        self._group = group
        self._control = control
        self._hooks = hooks
        self._sync = sync
        self._applied = 0  # the exchange whose step was taken last
        self._stepping = False  # this worker waits for all to come to a step
        self._num_meetings = 0
        self._ended: dict[int, int] = {}  # loops that are over, with the number of exchanges then
        self._notices: list[tuple[LeaveNotice, str]] = []
        self._answers: dict[int, set[int]] = {}  # by exchange: ranks that have answered an `open` notice
        self._taken_by_others: set[int] = set()  # exchanges whose step another worker took
        self._answered: set[int] = set()
        self._out_of: dict[int, set[int]] = {}  # by loop: the other ranks that are out of it
        self._announced = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    # -- exchanges and steps ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """ExchangeCancelled if a worker will not come to the exchange under way."""
        with self._lock:
            halt = self._judge()
        if halt is not None:
            raise halt

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Around the meeting that opens a step. ExchangeCancelled if a worker has left before it. Afterwards it counts
        as taken."""
        hooks = self._hooks
        with self._lock:
            self._stepping = self._sync.together
            halt = self._judge() if self._stepping else None
            if not self._stepping:
                self._applied = hooks.num_exchanges
        try:
            if halt is not None:
                raise halt
            self.answer()
            yield
        finally:
            self._stepping = False
        self._applied = hooks.num_exchanges

    @property
    def stepped(self) -> bool:
        """Whether the step of the last exchange was taken."""
        return self._applied >= self._hooks.num_exchanges

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, loop: int, finished: bool, alone: bool, ended: bool = False) -> bool:
        """Loop `loop` is over here; unless it is `finished`, the others are told. `alone`: a step needs no other
        worker. `ended`: so is the script.

        True if the step of the last exchange, which this worker has left out, must be made up for.
        """
        hooks = self._hooks
        with self._lock:
            num_exchanges = self._num_concluded
            unstepped = self._applied < num_exchanges and not hooks.exchanging
            is_open = unstepped and not finished and not hooks.halted
            self._ended[loop] = num_exchanges
            asked = loop in self._out_of
            if finished:
                self._out_of.pop(loop, None)
        self.answer()
        if finished:
            if asked:
                self._send("done", loop, num_exchanges)
            return False
        self._send("ended" if ended else "open" if is_open else "left", loop, num_exchanges)
        return not ended and is_open and alone and not self._sync.together and self._taken_elsewhere(num_exchanges)

    def await_others(self, loop: int) -> bool:
        """After leaving `loop` before its end: blocks until all are out of it (True), or one says that there is no
        more."""
        hooks = self._hooks
        deadline = time.monotonic() + min(CATCH_UP_S, self._group.transport.spec.timeout_s)
        others = set(self._group.others)
        with self._changed:
            while self._group.transport.cause is None and time.monotonic() < deadline:
                if any(notice.kind == "halt" for notice, _ in self._notices):
                    hooks.halted = hooks.halted or "this worker left its loop, the others had not"
                    self._announced = True  # by the one that halted; here every exchange so far has taken place
                    return False
                if others <= self._out_of.get(loop, set()) | self._group.transport.gone.keys():
                    return True
                self._changed.wait(0.05)
        return False

    def quit(self, run: int) -> None:
        """`job.epochs` number `run` was left before its end."""
        self._send("quit", run, self._num_concluded)

    def meet(self) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        with self._lock:
            self._num_meetings += 1
        self._send("meet", self._num_meetings, self._num_concluded)

    def announce_halt(self) -> None:
        """After an exchange that did not take place: tells all workers that there will be no more."""
        hooks = self._hooks
        if not hooks.halted or self._announced:
            return
        self._announced = True
        self._send("halt", hooks.loop, hooks.num_exchanges - 1)
        self._control.stop(hooks.halted)

    def answer(self) -> None:
        """Tells workers that left before a step whether it was taken here, as soon as that is certain."""
        hooks = self._hooks
        with self._lock:
            answers = []
            for notice, _ in self._notices:
                exchange = notice.num_exchanges
                if notice.kind != "open" or exchange in self._answered:
                    continue
                if self._applied >= exchange:
                    answers.append(("took", notice.loop, exchange))
                elif notice.loop in self._ended or hooks.num_exchanges > exchange or hooks.halted:
                    answers.append(("passed", notice.loop, exchange))
            self._answered |= {exchange for _, _, exchange in answers}
        for answer in answers:
            self._send(*answer)

    def _taken_elsewhere(self, exchange: int) -> bool:
        """Whether another worker has taken the step of this exchange; waits for the answers of all."""
        deadline = time.monotonic() + min(CATCH_UP_S, self._group.transport.spec.timeout_s)
        others = set(self._group.others)
        with self._changed:
            while not others <= self._answers.get(exchange, set()) | self._group.transport.gone.keys():
                if self._group.transport.cause is not None:
                    return False
                if time.monotonic() > deadline:
                    log.warning(
                        "rank %d left before its step and does not know whether others took it", self._group.rank
                    )
                    return False
                self._changed.wait(0.05)
            return exchange in self._taken_by_others

    # -- notices ---------------------------------------------------------------------------------------------------

    def hear(self, event: CoordinatorEvent) -> None:
        if event.kind != "message" or event.topic != TOPIC or event.member is None:
            return
        notice = msgspec.msgpack.decode(event.body, type=LeaveNotice)
        with self._changed:
            if notice.kind in ("took", "passed", "open"):
                self._answers.setdefault(notice.num_exchanges, set()).add(event.member.rank)
            if notice.kind == "took":
                self._taken_by_others.add(notice.num_exchanges)
            if notice.kind in ("left", "open", "ended", "done"):
                self._out_of.setdefault(notice.loop, set()).add(event.member.rank)
            if notice.kind not in ("took", "passed", "done"):
                self._notices.append((notice, str(event.member)))
            is_out = notice.kind in ("left", "open", "ended") and notice.loop in self._ended
            halt = self._judge()
            self._changed.notify_all()
        self.answer()
        if is_out:
            self._send("done", notice.loop, notice.num_exchanges)
        if halt is not None:
            self._sync.abort(halt)

    def _judge(self) -> HoraError | None:
        """The error if a worker will not come to the exchange under way. Called under the lock."""
        hooks = self._hooks
        self._notices = [(notice, who) for notice, who in self._notices if not self._is_past(notice)]
        for notice, who in self._notices:
            waits = self.following and notice.kind == "halt"  # for the next action, which will not come
            waits = waits or (self._stepping and notice.kind in ("open", "ended"))  # for all to come to the step
            if hooks.num_exchanges + waits <= notice.num_exchanges:
                continue
            if notice.kind == "quit" and notice.loop != hooks.run:
                continue
            if notice.kind in ("left", "open", "ended") and (notice.loop in self._ended or notice.loop > hooks.loop):
                continue
            left = f"{who} left its loop after step {notice.step}"
            if notice.kind == "ended":
                return PeerLost(
                    f"{self._group.transport.name_of(self._group.rank)}: {ended_inside(left)}", (), secondary=True
                )
            return ExchangeCancelled(left)
        return None

    def _is_past(self, notice: LeaveNotice) -> bool:
        """Whether this worker has come to where the sender was, so that the notice has no meaning any more."""
        if notice.kind == "meet":
            return notice.loop <= self._num_meetings
        return notice.kind in ("left", "ended") and notice.loop in self._ended

    def _send(self, kind: str, loop: int, num_exchanges: int) -> None:
        with contextlib.suppress(HoraError):
            self._control.send(TOPIC, msgspec.msgpack.encode(LeaveNotice(kind, loop, num_exchanges, self._hooks.step)))

    @property
    def _num_concluded(self) -> int:
        """The exchanges that this worker has gone through to their end; one that broke off is none."""
        return self._hooks.num_exchanges - self._hooks.exchanging
