"""JoinState: which exchanges and steps can still take place while workers leave their training loops.

A pure state machine: it reads no clock, starts no thread and sends nothing. early_exit.py runs it.

A worker is in several places at a time: its open training loops, its `job.epochs`, the time before its next meeting
with all workers, and the training as a whole. An exchange needs every worker, so a worker that leaves a place before
its end tells the others how many exchanges it has taken part in. A worker that has left the same place too ignores the
notice. One that is still there takes part in no later exchange, which no worker can have finished: it drops that step,
stops, and leaves the training. All workers then hold the parameters of the same step.

A worker may leave between an exchange and its step. Where a step needs all workers (shards, workers without samples) it
is then taken by all or by none. Elsewhere others may have taken it already: the worker that leaves asks them, and takes
it too if one has.
"""

from __future__ import annotations

import msgspec

from ..strategies.common.hooks import TrainingHooks

LOOP, RUN, MEETING, TRAINING, STEP = "loop", "run", "meeting", "training", "step"

Place = tuple[str, int]


class LeaveNotice(msgspec.Struct, frozen=True, array_like=True):
    """The sender takes part in no exchange beyond `num_exchanges` with workers that are still in this place.

    LOOP, n        it has left loop n
    RUN, n         it has left the `job.epochs` of that number
    MEETING, n     it has come to meeting n, outside of all loops
    TRAINING, 0    it will not take part in any exchange
    STEP, n        it is past the step of exchange n, taken (`stepped`) or not
    """

    place: Place
    num_exchanges: int
    step: int
    stepped: bool = True  # False with LOOP: it has not taken the step of its last exchange; did another worker take it?
    ended: bool = False  # so has its script: a worker in a later exchange fails


class JoinState:
    """One worker's. `hooks` says where it is: run, exchanges and steps. Not thread-safe."""

    def __init__(self, hooks: TrainingHooks) -> None:
        self.following = False  # this worker waits for rank 0's next action
        self.stepping = False  # it waits for all to come to a step
        self.applied = 0  # the exchange whose step was taken last
        self._hooks = hooks
        self._last_loop = 0
        self._open: set[int] = set()  # loops that this worker is in
        self._num_meetings = 0
        self._heard: dict[Place, dict[int, LeaveNotice]] = {}
        self._unanswered: list[LeaveNotice] = []
        self._told: set[Place] = set()
        self._due: list[LeaveNotice] = []

    # -- this worker -------------------------------------------------------------------------------------------------

    def enter(self, loop: int) -> None:
        self._last_loop = loop
        self._open.add(loop)

    def leave(self, loop: int, finished: bool, ended: bool = False) -> bool:
        """Loop `loop` is over here; unless it is `finished`, the others are told. `ended`: so is the script.

        True if they are asked whether they took the step of the last exchange, which this worker has left out."""
        hooks = self._hooks
        asks = self.applied < hooks.num_exchanges and not (hooks.exchanging or finished or hooks.halted)
        self._open.discard(loop)
        if asks:
            self._told.add((STEP, hooks.num_exchanges))
        if not finished:
            self.tell((LOOP, loop), stepped=not asks, ended=ended)
        return asks

    def meet(self) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        self._num_meetings += 1
        self.tell((MEETING, self._num_meetings))

    def tell(self, place: Place, num_exchanges: int | None = None, stepped: bool = True, ended: bool = False) -> None:
        """This worker has left `place`."""
        hooks = self._hooks
        if num_exchanges is None:
            num_exchanges = hooks.num_exchanges - hooks.exchanging  # one that broke off does not count
        self._told.add(place)
        self._due.append(LeaveNotice(place, num_exchanges, hooks.step, stepped, ended))

    # -- the others --------------------------------------------------------------------------------------------------

    def hear(self, rank: int, notice: LeaveNotice) -> None:
        self._heard.setdefault(notice.place, {})[rank] = notice
        if notice.place[0] == LOOP:
            self._unanswered.append(notice)
            if not notice.stepped:
                self._heard.setdefault((STEP, notice.num_exchanges), {})[rank] = notice

    def heard(self, place: Place) -> dict[int, LeaveNotice]:
        """The notices of the workers that have left `place`, by rank."""
        return self._heard.get(place, {})

    def due(self) -> list[LeaveNotice]:
        """The notices to be sent to all now, each once. What another worker has left before its end is answered as soon
        as it is certain: that this worker has left it too, and whether it took the step."""
        waiting, self._unanswered = self._unanswered, []
        for notice in waiting:
            (_, loop), exchange = notice.place, notice.num_exchanges
            out = loop <= self._last_loop and loop not in self._open
            if out and notice.place not in self._told:
                self.tell(notice.place)
            took = self.applied >= exchange
            certain = took or out or self._hooks.num_exchanges > exchange or self._hooks.halted
            if certain and not notice.stepped and (STEP, exchange) not in self._told:
                self.tell((STEP, exchange), exchange, stepped=took)
            if not out:
                self._unanswered.append(notice)
        due, self._due = self._due, []
        return due

    def obstacle(self) -> tuple[int, LeaveNotice] | None:
        """The rank that will not come to the exchange under way, and its notice."""
        hooks = self._hooks
        places = [(LOOP, loop) for loop in self._open]
        for place in [*places, (RUN, hooks.run), (MEETING, self._num_meetings + 1), (TRAINING, 0)]:
            for rank, notice in self.heard(place).items():
                # Behind the exchange itself: for rank 0's next action, or for all to come to the step.
                waits = self.following if place[0] == TRAINING else self.stepping and not notice.stepped
                if hooks.num_exchanges + waits > notice.num_exchanges:
                    return rank, notice
        return None
