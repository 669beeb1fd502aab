"""The parameter server as a pure state machine: messages in, messages out; no socket, no thread, no clock of its own.

Who may go on when, by mode:

    sync      a parcel is updated once the gradients of all workers are in, by their mean; then all may read it.
              `backup=b`: all but b; server 0 chooses whose, the first that are complete, and tells the other servers
    async     a parcel is updated by each gradient as it comes, and its worker may read it at once
    ssp       as async, but a worker may read only when it is at most `staleness` steps ahead of the slowest that trains
    sync_every=k   as async, but after its k-th step a worker may read only when all that train have come so far; until
              all have read, nothing more is applied. Server 0 says who comes together

Where steps are counted (ssp, sync_every) server 0 says where one that enters stands, so that every server counts alike:
else one worker could wait for another on one server, and that one for the first on the other.

*Lag* is how many updates a block got between the reading that a gradient is based on and its arrival.

A worker is lost or rests: nobody waits for it. Each call returns what is to be sent, a list of (address, message); an
address is ("worker", rank) or ("server", number). Gradients come beside a Push, as tensors that must not change before
the Ready that answers it. What does not fit (a Push twice, or of a step never begun) changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from ..compression.codec import Codec, codec
from ..monitor import spans
from ..parameters.hyperparameters import Hyper
from .keeper import Address, Keeper, Out, ServerCounts
from .layout import Chunk
from .messages import (
    BeginStep,
    ChunkReady,
    DropStep,
    EnterLoop,
    FromServer,
    FromWorker,
    LeaveLoop,
    Push,
    SynchronizeAt,
    SynchronizedAck,
    WorkerEntered,
)
from .rounds import SynchronousSteps
from .rows import num_bytes, shift
from .shelf import Gradient, Shelf

__all__ = ["Address", "Out", "Rules", "ServerCounts", "ServerState", "WorkerState"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What `hora.PS` says, as far as servers care."""

    mode: str = "sync"
    staleness: int = 0
    sync_every: int | None = None
    backup: int = 0
    correct: str = "none"
    dc_lambda: float = 20.0
    clip_norm: float | None = None
    wire: str = "fp32"
    topk: float = 0.01

    @functools.cached_property
    def codec(self) -> Codec | None:
        """What gradients that cross a wire are encoded with; None where they travel as they are."""
        return None if self.wire == "fp32" else codec(self.wire, self.topk)


@dataclasses.dataclass
class WorkerState:
    """What is known of one worker. `clock` counts the steps whose gradients are all in."""

    clock: int = 0
    inside: bool = False  # it has entered
    trains: bool = False  # it is known where it stands
    unplaced: int = 0  # how often it has entered, less how often server 0 has said where it stands
    stands: int = 0  # what server 0 said last
    begin: BeginStep | None = None  # the step under way
    last: int | None = None  # the last step that was complete
    missing: int = 0  # parcels of it that are still to come
    pushed: set[int] = dataclasses.field(default_factory=set)  # those that are in
    early: list[tuple[Push, Sequence[Gradient]]] = dataclasses.field(default_factory=list)  # came before their Begin
    ahead: list[BeginStep] = dataclasses.field(default_factory=list)  # came before the step under way was complete
    waiting: list[tuple[int, ChunkReady]] = dataclasses.field(
        default_factory=list
    )  # answers held back, and their clock
    hyper: Hyper | None = None


class ServerState:
    """Server `number` of `num_servers`. Not thread-safe: its caller owns the order of messages.

    `record(kind, **facts)` is told of everything that a checker may want to know.
    """

    def __init__(
        self,
        shelf: Shelf,
        rules: Rules,
        *,
        number: int = 0,
        num_servers: int = 1,
        record: Callable[..., None] | None = None,
    ) -> None:
        self.shelf = shelf
        self.rules = rules
        self.number = number
        self.num_servers = num_servers
        self._keeper = Keeper(shelf, record)
        self._workers: dict[int, WorkerState] = {}
        self._rounds = SynchronousSteps(self._keeper, rules, self._workers, number, num_servers)
        self._reached = 0  # the highest clock there was
        self._met = 0  # the newest full synchronisation that was decided on
        self._meeting: dict[int, list[int]] = {}  # by clock: whom server 0 has named that may not be there yet
        self._reading: dict[int, int] = {}  # who has still to read after a full synchronisation, and which step
        self._held: list[tuple[int, FromWorker, Sequence[Gradient]]] = []  # what came meanwhile

    @property
    def counts(self) -> ServerCounts:
        return self._keeper.counts

    @property
    def now(self) -> int:
        """The step that is next, in sync."""
        return self._rounds.now

    @property
    def place(self) -> tuple[int, int]:
        return self._rounds.place

    @property
    def queue(self) -> int:
        """How many gradients wait for other workers: to be applied, or, where they are at once, to be answered."""
        held = sum(isinstance(message, Push) for _, message, _ in self._held)
        early = sum(len(each.early) + len(each.waiting) for each in self._workers.values())
        return held + early + self._rounds.queue

    # -- members -------------------------------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        """From now on this worker counts: in sync at once, else when it enters a loop."""
        self._workers[worker] = WorkerState()
        self._keeper.join(worker)
        if self.rules.correct == "dc" or self.rules.backup:
            self.lend(worker, [torch.empty_like(flat) for flat in self.shelf.flats])

    def lend(self, worker: int, copies: list[torch.Tensor]) -> None:
        """Memory, block by block, into which what this worker may read is copied: then later updates, for which it is
        not waited, cannot get into its reading."""
        self._keeper.lend(worker, copies)

    def readable(self, worker: int) -> list[torch.Tensor]:
        """Where this worker reads the blocks."""
        return self._keeper.copies.get(worker, self.shelf.flats)

    def leave(self, worker: int) -> Out:
        """It is gone, well or not. What it was told of stays; what was not complete is forgotten."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return []
        self._keeper.record("leave", worker=worker)
        self._reading.pop(worker, None)
        self._held = [held for held in self._held if held[0] != worker]
        self._keeper.leave(worker)
        return self._rounds.leave(worker) + self._settle()

    @property
    def workers(self) -> list[int]:
        return sorted(self._workers)

    def staleness(self, worker: int) -> int:
        """How many steps this worker is ahead of the slowest that trains."""
        mine = self._workers[worker].clock
        return mine - min((each.clock for each in self._workers.values() if each.trains), default=mine)

    def awaited(self, worker: int) -> str:
        """Whom this worker waits for, in words."""
        if self.rules.mode == "sync":
            ranks = self._rounds.awaited()
        else:
            mine = max((clock for clock, _ in self._workers[worker].waiting), default=0)
            ranks = sorted(self._reading) or [
                r for r in self.workers if self._workers[r].trains and self._workers[r].clock < mine
            ]
        return ", ".join(f"rank {rank}" for rank in ranks if rank != worker) or "nobody"

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, worker: int, message: FromWorker, gradients: Sequence[Gradient] = ()) -> Out:
        """What a worker said."""
        state = self._workers.get(worker)
        if state is None:
            return []  # a late word of one that is gone
        if isinstance(message, SynchronizedAck):
            if message.step >= self._reading.get(worker, message.step):
                self._reading.pop(worker, None)
            return self._settle()
        if isinstance(message, LeaveLoop):
            state.inside = state.trains = False
            self._reading.pop(worker, None)
            return self._rounds.rest() if self.rules.mode == "sync" else self._settle()
        if isinstance(message, EnterLoop):
            return self._enter(worker)
        if isinstance(message, DropStep):
            return self._drop(worker, message.step)
        assert isinstance(message, BeginStep | Push)
        out = self._enter(worker) if isinstance(message, BeginStep) else []
        if self._reading or state.unplaced:
            self._held.append((worker, message, gradients))
            return out
        if isinstance(message, BeginStep):
            return out + self._begin(worker, message)
        return self._push(worker, message, gradients)

    def hear(self, server: int, message: FromServer) -> Out:
        """What another server said."""
        if isinstance(message, WorkerEntered):
            state = self._workers.get(message.worker)
            if state is not None:
                state.unplaced -= 1
                state.stands = message.clock
                self._place(state)
            return self._settle()
        if isinstance(message, SynchronizeAt):
            self._met = message.clock
            self._meeting[message.clock] = message.workers
            return self._settle()
        return self._rounds.hear(server, message)

    def _enter(self, worker: int) -> Out:
        """One that comes, or comes back, stands where the slowest stands: nobody waits for what it has missed."""
        state = self._workers[worker]
        if state.inside:
            return []
        state.inside = True
        counting = self.rules.mode == "ssp" or self.rules.sync_every is not None
        if counting and self.number:
            state.unplaced += 1
            self._place(state)
            return self._settle()
        others = [each.clock for each in self._workers.values() if each.trains]
        state.clock = max(state.clock, min(others, default=self._reached))
        state.trains = True
        self._keeper.record("enter", worker=worker, clock=state.clock)
        if not counting:
            return []
        return [(("server", other), WorkerEntered(worker, state.clock)) for other in range(1, self.num_servers)]

    @staticmethod
    def _place(state: WorkerState) -> None:
        """Elsewhere than on server 0: when the worker and server 0 have both said it."""
        if state.inside and not state.unplaced:
            state.clock, state.trains = state.stands, True

    def _begin(self, worker: int, message: BeginStep) -> Out:
        state = self._workers[worker]
        if state.missing and state.begin is not None and state.begin.step == message.step:
            return []
        if state.last is not None and message.step <= state.last:
            return []  # each step is taken once
        if state.missing:
            state.ahead.append(message)
            return []
        if message.hyper is not None:
            state.hyper = message.hyper
        if self.rules.mode == "sync":
            self._rounds.begin(worker, message, state.hyper)
        state.begin, state.missing, state.pushed = message, message.parcels, set()
        early, state.early = state.early, []
        out: Out = []
        if not message.parcels:
            out += self._complete(worker)
        for push, gradients in early:
            if push.step >= message.step:
                out += self._push(worker, push, gradients)
        return out

    def _push(self, worker: int, message: Push, gradients: Sequence[Gradient]) -> Out:
        state = self._workers[worker]
        begin = state.begin
        if begin is None or begin.step < message.step:
            state.early.append((message, gradients))
            return []
        parcel = self.shelf.part.parcels[message.parcel]
        expected = state.missing and begin.step == message.step and parcel.optimizer == begin.optimizer
        if not expected or parcel.number in state.pushed:
            return []
        self.counts.bytes_in += self._num_bytes(parcel, message, gradients)
        state.missing -= 1
        state.pushed.add(parcel.number)
        if self.rules.mode == "sync":
            out = self._rounds.push(worker, parcel, message, gradients)
        else:
            out = self._take(worker, parcel, message, gradients)
        if not state.missing:
            out += self._complete(worker)
        return out

    def _num_bytes(self, parcel: Chunk, push: Push, gradients: Sequence[Gradient]) -> int:
        """What these gradients weighed on their way."""
        if push.wire and self.rules.codec is not None:
            return self.rules.codec.num_bytes(parcel.num_bytes // self.shelf.flats[parcel.numbers[0]].element_size())
        return num_bytes(gradients)

    def _complete(self, worker: int) -> Out:
        """All gradients of the worker's step are in."""
        state = self._workers[worker]
        assert state.begin is not None
        state.clock += 1
        state.last = state.begin.step
        self._reached = max(self._reached, state.clock)
        self._keeper.record("step", worker=worker, step=state.begin.step, clock=state.clock)
        if self.rules.mode == "sync":
            out = self._rounds.complete(worker, state.begin.step)
        else:
            self.counts.updates += not state.begin.nonfinite
            out = self._settle()
        if state.ahead:
            out += self._begin(worker, state.ahead.pop(0))
        return out

    def _drop(self, worker: int, step: int) -> Out:
        state = self._workers[worker]
        state.begin, state.missing, state.waiting, state.early, state.ahead = None, 0, [], [], []
        if state.last is not None:
            state.last = min(state.last, step - 1)
        self._held = [held for held in self._held if held[0] != worker]
        self._rounds.drop(worker, step)
        return []

    def refresh(self, worker: int, number: int) -> Out:
        """All parcels as they are now, outside of a step; with backups between two of the others' steps."""
        if worker not in self._workers:
            return []
        return self._rounds.refresh(
            worker, [ChunkReady(number, parcel.number, []) for parcel in self.shelf.part.parcels]
        )

    def look_up(self, parcel: Chunk, rows: torch.Tensor) -> tuple[int, torch.Tensor]:
        """A table's version and these rows of it, as they are now: a worker asks for what its next gradient is to be
        based on once it was told that it may go on."""
        return self._keeper.look_up(parcel, rows)

    # -- async, ssp ----------------------------------------------------------------------------------------------------

    def _take(self, worker: int, parcel: Chunk, push: Push, gradients: Sequence[Gradient]) -> Out:
        """One worker's gradients, applied as they come."""
        state = self._workers[worker]
        begin = state.begin
        assert begin is not None
        lag = max(self.shelf.version(block) - base for block, base in zip(parcel.blocks, push.base, strict=True))
        if not begin.nonfinite:
            self.counts.lags[lag] += 1
            self.counts.parcels += 1
            factor = begin.scale if begin.factor is None or not parcel.whole else begin.factor
            factor = factor / (1 + lag) if self.rules.correct == "scale" else factor
            settled = gradients if factor == 1.0 else self.shelf.mean(parcel, [(gradients, factor)])
            if self.rules.correct == "dc" and lag:
                settled = self._compensate(worker, parcel, settled)
            began = spans.clock() if spans.on else 0
            self._keeper.apply(parcel, settled, state.hyper)
            if spans.on:
                spans.add(spans.SERVER, "update", began, blocks=parcel.numbers, worker=worker, lag=lag)
            self._keeper.record("apply", worker=worker, step=push.step, parcel=parcel.number, lag=lag)
        clock = state.clock + 1
        ready = ChunkReady(push.step, parcel.number, [], lag=lag, skipped=begin.nonfinite)
        if state.waiting or not self._may_read(worker, clock):
            state.waiting.append((clock, ready))
            return []
        return self._keeper.answer(worker, [ready])

    def _compensate(self, worker: int, parcel: Chunk, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Delay compensation: g + λ g ⊙ g ⊙ (w now − w then), an estimate of the gradient at the parameters of now.

        Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017."""
        result: list[Gradient] = []
        for block, gradient in zip(parcel.blocks, gradients, strict=True):
            now, then = self.shelf.flats[block.number], self._keeper.copies[worker][block.number]
            if gradient is not None and gradient.is_sparse:
                gradient = shift(gradient, now.view(-1, parcel.row), then.view(-1, parcel.row), self.rules.dc_lambda)
            elif gradient is not None:
                gradient = (now - then).mul_(gradient).mul_(gradient).mul_(self.rules.dc_lambda).add_(gradient)
            result.append(gradient)
        return result

    def _may_read(self, worker: int, clock: int) -> bool:
        """Whether a worker with so many steps behind it may go on."""
        if self.rules.mode == "ssp":
            others = [each.clock for rank, each in self._workers.items() if each.trains and rank != worker]
            return clock - min(others, default=clock) <= self.rules.staleness
        if self.rules.sync_every and clock % self.rules.sync_every == 0:
            return clock <= self._met and clock not in self._meeting
        return True

    def _settle(self) -> Out:
        """Somebody's clock has moved, or somebody is gone: answers what may be answered now."""
        out: Out = []
        if self._reading or self.rules.mode == "sync":
            return out
        if self.rules.sync_every:
            out += self._meet(self.rules.sync_every)
        for rank, each in self._workers.items():
            free = [(clock, ready) for clock, ready in each.waiting if self._may_read(rank, clock)]
            if not free:
                continue
            each.waiting = each.waiting[len(free) :]
            out += self._keeper.answer(rank, [ready for _, ready in free])
            clock, ready = free[-1]
            self._keeper.record("free", worker=rank, clock=clock, staleness=self.staleness(rank))
            if self.rules.sync_every and clock % self.rules.sync_every == 0:
                self._reading[rank] = ready.step
        return out + self._go_on()

    def _meet(self, every: int) -> Out:
        """Full synchronisations: server 0 decides on one when all that train have come so far; the others follow when
        those that it named are there too."""
        out: Out = []
        if self.number == 0:
            here = {rank: each.clock for rank, each in self._workers.items() if each.trains or each.waiting}
            while here and min(here.values()) >= self._met + every:
                self._met += every
                out += [
                    (("server", other), SynchronizeAt(self._met, list(here))) for other in range(1, self.num_servers)
                ]
        for clock, named in list(self._meeting.items()):
            if all(rank not in self._workers or self._workers[rank].clock >= clock for rank in named):
                del self._meeting[clock]
        return out

    def _go_on(self) -> Out:
        """What was held, in the order in which it came, as far as nothing holds it any more."""
        out: Out = []
        moved = True
        while moved and not self._reading:
            moved = False
            held, self._held = self._held, []
            for position, (worker, message, gradients) in enumerate(held):
                if self._reading:  # one of these has come to the next full synchronisation
                    self._held += held[position:]
                    break
                moved = moved or not self._workers[worker].unplaced
                out += self.handle(worker, message, gradients)
        return out
