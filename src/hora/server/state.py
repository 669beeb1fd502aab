"""ServerState: one parameter server as a pure state machine. Messages in, messages out; no socket, thread or clock.

When a worker may continue, by mode:

    sync      a chunk is updated when all workers' gradients have arrived, with their mean; then all may read it.
              `backup=b`: all but b; server 0 chooses the workers that completed first, and tells the other servers
    async     a chunk is updated by each gradient on arrival, and its worker may read it at once
    ssp       as async, but a worker may read only while it is at most `staleness` steps ahead of the slowest
    sync_every=k   as async, but after every k-th step a worker may read only when all training workers have come as
              far; until all have read, nothing more is applied. Server 0 decides which workers synchronise

Where clocks matter (ssp, sync_every), server 0 decides at which clock an entering worker starts, so that all servers
count alike. Otherwise one worker could wait for a second on one server, and the second for the first on another.

*Lag* is how many updates a block got between the read that a gradient is based on and the gradient's arrival.

No worker waits for one that is lost or outside of its loop. Each call returns the messages to send. Gradients come
beside a Push, as tensors that must not change before the ChunkReady that answers it. Unexpected messages (a second Push
of a chunk, or one of a step that never began) change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from ..compression.codec import Codec, make_codec
from ..monitor import spans
from ..parameters.hyperparameters import Hyper
from . import messages
from .layout import Chunk
from .messages import BeginStep, ChunkReady, Push, ServerMessage
from .rows import compensate_delay, num_bytes
from .store import Gradient, Outbox, ParameterStore
from .synchronous_steps import SynchronousSteps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The options of `hora.PS` that matter to servers."""

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
        """Encodes gradients that cross a network; None where they travel as they are."""
        return None if self.wire == "fp32" else make_codec(self.wire, self.topk)

    @property
    def private_copies(self) -> bool:
        """Whether each worker reads a copy of its own: which later updates must not change, or which correct=dc
        needs."""
        return bool(self.backup) or self.correct == "dc"

    @property
    def counts_clocks(self) -> bool:
        return self.mode == "ssp" or self.sync_every is not None


@dataclasses.dataclass
class WorkerState:
    """One worker. `clock` counts the steps of which all pushes have arrived."""

    clock: int = 0
    in_loop: bool = False
    training: bool = False  # in its loop, and its start clock is known
    unplaced: int = 0  # how often it entered, less how often server 0 told its start clock
    start_clock: int = 0  # as server 0 told last
    begin: BeginStep | None = None  # the current step
    last: int | None = None  # the last complete step
    missing: int = 0  # chunks of the current step that have not arrived
    pushed: set[int] = dataclasses.field(default_factory=set)  # chunks that have
    early: list[tuple[Push, Sequence[Gradient]]] = dataclasses.field(default_factory=list)  # before their BeginStep
    ahead: list[BeginStep] = dataclasses.field(default_factory=list)  # came before the current step was complete
    waiting: list[tuple[int, ChunkReady]] = dataclasses.field(default_factory=list)  # answers to come, by clock
    hyper: Hyper | None = None


class ServerState:
    """Server `number` of `num_servers`. Not thread-safe: its caller decides the order of messages.

    `record(kind, **facts)` is called for everything that a checker may want to know.
    """

    def __init__(
        self,
        store: ParameterStore,
        rules: Rules,
        *,
        number: int = 0,
        num_servers: int = 1,
        record: Callable[..., None] | None = None,
    ) -> None:
        self.store = store
        self.counts = store.counts
        self.rules = rules
        self.number = number
        self.num_servers = num_servers
        self._record = record or (lambda kind, **facts: None)
        self._workers: dict[int, WorkerState] = {}
        self._sync = SynchronousSteps(store, rules, self._workers, number, num_servers, self._record)
        self._highest_clock = 0
        self._synchronized = 0  # the clock of the newest full synchronisation
        self._announced: dict[int, list[int]] = {}  # by clock: workers named by server 0 that may not be there yet
        self._unread: dict[int, int] = {}  # workers that have to read after a full synchronisation, and its step
        self._held: list[tuple[int, ServerMessage, Sequence[Gradient]]] = []  # what came meanwhile

    @property
    def now(self) -> int:
        """The next step, in sync."""
        return self._sync.now

    @property
    def queue(self) -> int:
        """How many gradients wait for other workers: to be applied, or, where that happens at once, to be answered."""
        held = sum(isinstance(message, Push) for _, message, _ in self._held)
        early = sum(len(each.early) + len(each.waiting) for each in self._workers.values())
        return held + early + self._sync.queue

    # -- workers -------------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> list[int]:
        return sorted(self._workers)

    def join(self, worker: int) -> None:
        """From now on this worker counts: in sync at once, else when it enters a loop."""
        self._workers[worker] = WorkerState()
        self.store.join(worker)
        if self.rules.private_copies:
            self.store.set_copy(worker, [torch.empty_like(flat) for flat in self.store.flats])

    def leave(self, worker: int) -> Outbox:
        """The worker is gone, for whatever reason. Incomplete steps of it are discarded."""
        if self._workers.pop(worker, None) is None:
            return []
        self._record("leave", worker=worker)
        self._unread.pop(worker, None)
        self._held = [held for held in self._held if held[0] != worker]
        self.store.leave(worker)
        return self._sync.leave(worker) + self._release()

    def staleness(self, worker: int) -> int:
        """How many steps this worker is ahead of the slowest that trains."""
        mine = self._workers[worker].clock
        return mine - min((each.clock for each in self._workers.values() if each.training), default=mine)

    def awaited(self, worker: int) -> str:
        """The ranks that this worker waits for, as text."""
        if self.rules.mode == "sync":
            ranks = self._sync.awaited()
        else:
            mine = max((clock for clock, _ in self._workers[worker].waiting), default=0)
            ranks = sorted(self._unread) or [
                r for r in self.workers if self._workers[r].training and self._workers[r].clock < mine
            ]
        return ", ".join(f"rank {rank}" for rank in ranks if rank != worker) or "no other rank"

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, worker: int, message: ServerMessage, gradients: Sequence[Gradient] = ()) -> Outbox:
        """A message of a worker that concerns its steps."""
        state = self._workers.get(worker)
        if state is None:
            return []  # it is gone
        if isinstance(message, messages.SynchronizedAck):
            if message.step >= self._unread.get(worker, message.step):
                self._unread.pop(worker, None)
            return self._release()
        if isinstance(message, messages.LeaveLoop):
            state.in_loop = state.training = False
            self._unread.pop(worker, None)
            return self._sync.leave_loop() if self.rules.mode == "sync" else self._release()
        if isinstance(message, messages.EnterLoop):
            return self._enter(worker)
        if isinstance(message, messages.DropStep):
            self._drop(worker, message.step)
            return []
        assert isinstance(message, BeginStep | Push)
        out = self._enter(worker) if isinstance(message, BeginStep) else []
        if self._unread or state.unplaced:
            self._held.append((worker, message, gradients))
            return out
        if isinstance(message, BeginStep):
            return out + self._begin(worker, message)
        return self._push(worker, message, gradients)

    def handle_server(self, server: int, message: messages.FromServer) -> Outbox:
        """A message of another server."""
        if isinstance(message, messages.WorkerEntered):
            state = self._workers.get(message.worker)
            if state is not None:
                state.unplaced -= 1
                state.start_clock = message.clock
                self._start(state)
            return self._release()
        if isinstance(message, messages.SynchronizeAt):
            self._synchronized = message.clock
            self._announced[message.clock] = message.workers
            return self._release()
        return self._sync.on_server_message(server, message)

    def refresh(self, worker: int, number: int) -> Outbox:
        """All chunks as they are now, outside of a step; with backups between two of the others' steps."""
        if worker not in self._workers:
            return []
        return self._sync.refresh(worker, [ChunkReady(number, chunk.number, []) for chunk in self.store.part.chunks])

    def _enter(self, worker: int) -> Outbox:
        """An entering worker starts at the clock of the slowest: the others do not wait for steps it has missed."""
        state = self._workers[worker]
        if state.in_loop:
            return []
        state.in_loop = True
        if self.rules.counts_clocks and self.number:
            state.unplaced += 1
            self._start(state)
            return self._release()
        others = [each.clock for each in self._workers.values() if each.training]
        state.clock = max(state.clock, min(others, default=self._highest_clock))
        state.training = True
        self._record("enter", worker=worker, clock=state.clock)
        if not self.rules.counts_clocks:
            return []
        return [
            (("server", other), messages.WorkerEntered(worker, state.clock)) for other in range(1, self.num_servers)
        ]

    @staticmethod
    def _start(state: WorkerState) -> None:
        """On other servers than server 0: when the worker has entered and server 0 has told its clock."""
        if state.in_loop and not state.unplaced:
            state.clock, state.training = state.start_clock, True

    def _begin(self, worker: int, message: BeginStep) -> Outbox:
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
            self._sync.begin(worker, message, state.hyper)
        state.begin, state.missing, state.pushed = message, message.num_chunks, set()
        early, state.early = state.early, []
        out: Outbox = []
        if not message.num_chunks:
            out += self._complete(worker)
        for push, gradients in early:
            if push.step >= message.step:
                out += self._push(worker, push, gradients)
        return out

    def _push(self, worker: int, message: Push, gradients: Sequence[Gradient]) -> Outbox:
        state = self._workers[worker]
        begin = state.begin
        if begin is None or begin.step < message.step:
            state.early.append((message, gradients))
            return []
        chunk = self.store.part.chunks[message.chunk]
        expected = state.missing and begin.step == message.step and chunk.optimizer == begin.optimizer
        if not expected or chunk.number in state.pushed:
            return []
        if message.wire and self.rules.codec is not None:
            numel = chunk.num_bytes // self.store.flats[chunk.blocks[0].number].element_size()
            self.counts.bytes_in += self.rules.codec.num_bytes(numel)
        else:
            self.counts.bytes_in += num_bytes(gradients)
        state.missing -= 1
        state.pushed.add(chunk.number)
        if self.rules.mode == "sync":
            out = self._sync.push(worker, chunk, message, gradients)
        else:
            out = self._apply(worker, chunk, message, gradients)
        if not state.missing:
            out += self._complete(worker)
        return out

    def _complete(self, worker: int) -> Outbox:
        """All pushes of the worker's step have arrived."""
        state = self._workers[worker]
        assert state.begin is not None
        state.clock += 1
        state.last = state.begin.step
        self._highest_clock = max(self._highest_clock, state.clock)
        self._record("step", worker=worker, step=state.begin.step, clock=state.clock)
        if self.rules.mode == "sync":
            out = self._sync.complete(worker, state.begin.step)
        else:
            self.counts.updates += not state.begin.nonfinite
            out = self._release()
        if state.ahead:
            out += self._begin(worker, state.ahead.pop(0))
        return out

    def _drop(self, worker: int, step: int) -> None:
        state = self._workers[worker]
        state.begin, state.missing, state.waiting, state.early, state.ahead = None, 0, [], [], []
        if state.last is not None:
            state.last = min(state.last, step - 1)
        self._held = [held for held in self._held if held[0] != worker]
        self._sync.drop(worker, step)

    # -- async, ssp, sync_every ----------------------------------------------------------------------------------------

    def _apply(self, worker: int, chunk: Chunk, push: Push, gradients: Sequence[Gradient]) -> Outbox:
        """Applies one worker's gradients on arrival."""
        state = self._workers[worker]
        begin = state.begin
        assert begin is not None
        lag = max(self.store.version(block) - base for block, base in zip(chunk.blocks, push.base, strict=True))
        if not begin.nonfinite:
            self.counts.lags[lag] += 1
            factor = begin.scale if begin.factor is None or not chunk.dense else begin.factor
            factor = factor / (1 + lag) if self.rules.correct == "scale" else factor
            scaled = gradients if factor == 1.0 else self.store.weighted_sum(chunk, [(gradients, factor)])
            if self.rules.correct == "dc" and lag:
                scaled = self._compensate(worker, chunk, scaled)
            began = spans.clock() if spans.on else 0
            self.store.apply(chunk, scaled, state.hyper)
            spans.add(spans.SERVER, "update", began, blocks=chunk.block_numbers, worker=worker, lag=lag)
            self._record("apply", worker=worker, step=push.step, chunk=chunk.number, lag=lag)
        clock = state.clock + 1
        ready = ChunkReady(push.step, chunk.number, [], lag=lag, skipped=begin.nonfinite)
        if state.waiting or not self._may_read(worker, clock):
            state.waiting.append((clock, ready))
            return []
        return self.store.answer(worker, [ready])

    def _compensate(self, worker: int, chunk: Chunk, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Delay compensation: g + λ g ⊙ g ⊙ (w now − w then), an estimate of the gradient at the current parameters.

        Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, 2017."""
        result: list[Gradient] = []
        for block, gradient in zip(chunk.blocks, gradients, strict=True):
            now, then = self.store.flats[block.number], self.store.copies[worker][block.number]
            if gradient is not None and gradient.is_sparse:
                now, then = now.view(-1, chunk.row_numel), then.view(-1, chunk.row_numel)
                gradient = compensate_delay(gradient, now, then, self.rules.dc_lambda)
            elif gradient is not None:
                gradient = (now - then).mul_(gradient).mul_(gradient).mul_(self.rules.dc_lambda).add_(gradient)
            result.append(gradient)
        return result

    def _may_read(self, worker: int, clock: int) -> bool:
        """Whether a worker at this clock may continue."""
        if self.rules.mode == "ssp":
            others = [each.clock for rank, each in self._workers.items() if each.training and rank != worker]
            return clock - min(others, default=clock) <= self.rules.staleness
        if self.rules.sync_every and clock % self.rules.sync_every == 0:
            return clock <= self._synchronized and clock not in self._announced
        return True

    def _release(self) -> Outbox:
        """A clock has moved, or a worker is gone: answers what may be answered now."""
        out: Outbox = []
        if self._unread or self.rules.mode == "sync":
            return out
        if self.rules.sync_every:
            out += self._synchronize(self.rules.sync_every)
        for rank, each in self._workers.items():
            free = [(clock, ready) for clock, ready in each.waiting if self._may_read(rank, clock)]
            if not free:
                continue
            each.waiting = each.waiting[len(free) :]
            out += self.store.answer(rank, [ready for _, ready in free])
            clock, ready = free[-1]
            self._record("free", worker=rank, clock=clock, staleness=self.staleness(rank))
            if self.rules.sync_every and clock % self.rules.sync_every == 0:
                self._unread[rank] = ready.step
        return out + self._replay_held()

    def _synchronize(self, every: int) -> Outbox:
        """Full synchronisations: server 0 decides on one when all training workers have come as far; the other servers
        follow when the workers that it named have arrived there too."""
        out: Outbox = []
        if self.number == 0:
            here = {rank: each.clock for rank, each in self._workers.items() if each.training or each.waiting}
            while here and min(here.values()) >= self._synchronized + every:
                self._synchronized += every
                message = messages.SynchronizeAt(self._synchronized, list(here))
                out += [(("server", other), message) for other in range(1, self.num_servers)]
        for clock, named in list(self._announced.items()):
            if all(rank not in self._workers or self._workers[rank].clock >= clock for rank in named):
                del self._announced[clock]
        return out

    def _replay_held(self) -> Outbox:
        """Handles held messages in the order of their arrival, until one has to be held again."""
        out: Outbox = []
        moved = True
        while moved and not self._unread:
            moved = False
            held, self._held = self._held, []
            for position, (worker, message, gradients) in enumerate(held):
                if self._unread:  # one of these has reached the next full synchronisation
                    self._held += held[position:]
                    break
                moved = moved or not self._workers[worker].unplaced
                out += self.handle(worker, message, gradients)
        return out
