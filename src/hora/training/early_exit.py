"""EarlyExit: runs a worker's JoinState (join.py). Sends its notices through the coordinator, and waits."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Set

import msgspec

from ..collectives.group import Group
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, PeerLost
from ..strategies.common.hooks import TrainingHooks
from ..strategies.common.sync import ExchangeCancelled, Sync, ended_inside
from .join import LOOP, STEP, TRAINING, JoinState, LeaveNotice

log = logging.getLogger(__name__)

TOPIC = "training"
CATCH_UP_S = 30.0  # how long one that leaves before its step waits to hear whether others took it


class EarlyExit:
    """One worker's. `hear` is called on the coordinator connection's thread, the rest on the training thread. Only
    `leave` and `await_others` wait for other workers."""

    def __init__(self, group: Group, control: CoordinatorConnection, hooks: TrainingHooks, sync: Sync) -> None:
        self.state = JoinState(hooks)
        self._group = group
        self._control = control
        self._hooks = hooks
        self._sync = sync
        self._announced = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def update(self) -> Iterator[JoinState]:
        """The state, locked. Afterwards the notices that are due are sent."""
        with self._changed:
            yield self.state
            due = self.state.due()
            self._changed.notify_all()
        for notice in due:
            with contextlib.suppress(HoraError):
                self._control.send(TOPIC, msgspec.msgpack.encode(notice))

    def check(self) -> None:
        """ExchangeCancelled if a worker will not come to the exchange under way."""
        with self.update():
            cause = self._cause()
        if cause is not None:
            raise cause

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Around the meeting that opens a step. ExchangeCancelled if a worker has left before it. Afterwards it counts
        as taken."""
        with self.update() as state:
            state.stepping = self._sync.together
            cause = self._cause() if state.stepping else None
            if not state.stepping:
                state.applied = self._hooks.num_exchanges
        try:
            if cause is not None:
                raise cause
            yield
        finally:
            state.stepping = False
        state.applied = self._hooks.num_exchanges

    def leave(self, loop: int, finished: bool, alone: bool) -> bool:
        """Loop `loop` is over here, as JoinState.leave. `alone`: a step needs no other worker.

        True if the step of the last exchange, which this worker has left out, must be made up for."""
        with self.update() as state:
            asks = state.leave(loop, finished, self._hooks.ended)
        if not asks or self._hooks.ended or not alone or self._sync.together:
            return False
        step = (STEP, self._hooks.num_exchanges)
        if self._await(lambda: state.heard(step).keys()):
            return any(notice.stepped for notice in state.heard(step).values())
        if self._group.transport.cause is None:
            log.warning("rank %d left before its step and does not know whether others took it", self._group.rank)
        return False

    def await_others(self, loop: int) -> bool:
        """After leaving `loop` before its end: blocks until all are out of it (True), or one says that there is no
        more."""
        state, others = self.state, set(self._group.others)
        done = self._await(lambda: others if state.heard((TRAINING, 0)) else state.heard((LOOP, loop)).keys())
        if state.heard((TRAINING, 0)):
            self._hooks.halted = self._hooks.halted or "this worker left its loop, the others had not"
            self._announced = True  # by the one that halted; here every exchange so far has taken place
            return False
        return done

    def _await(self, ranks: Callable[[], Set[int]]) -> bool:
        """Blocks until `ranks` has all others that are alive; False if that does not happen in time."""
        transport = self._group.transport
        deadline = time.monotonic() + min(CATCH_UP_S, transport.spec.timeout_s)
        with self._changed:
            while not set(self._group.others) <= ranks() | transport.gone.keys():
                if transport.cause is not None or time.monotonic() > deadline:
                    return False
                self._changed.wait(0.05)
        return True

    def announce_halt(self) -> None:
        """After an exchange that did not take place: tells all workers that there will be no more."""
        if self._hooks.halted and not self._announced:
            self._announced = True
            with self.update() as state:
                state.tell((TRAINING, 0), self._hooks.num_exchanges - 1)
            self._control.stop(self._hooks.halted)

    def hear(self, event: CoordinatorEvent) -> None:
        if event.kind != "message" or event.topic != TOPIC or event.member is None:
            return
        notice = msgspec.msgpack.decode(event.body, type=LeaveNotice)
        with self.update() as state:
            state.hear(event.member.rank, notice)
            cause = self._cause()
        if cause is not None:
            self._sync.abort(cause)

    def _cause(self) -> HoraError | None:
        """The error if a worker will not come to the exchange under way. Called under the lock."""
        obstacle = self.state.obstacle()
        if obstacle is None:
            return None
        rank, notice = obstacle
        name_of = self._group.transport.name_of
        left = f"{name_of(rank)} left its loop after step {notice.step}"
        if notice.ended:
            return PeerLost(f"{name_of(self._group.rank)}: {ended_inside(left)}", (), secondary=True)
        return ExchangeCancelled(left)
