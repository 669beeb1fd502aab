"""Race: workers and one server on a clock of ticks. The server is the real one (server/state.py).

The model is a single number w with the loss w²/2, whose gradient is w itself: a gradient tells where its worker stood
when it read. A worker reads, computes for as many ticks as it takes, pushes, and reads again once the server lets it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..parameters import hyperparameters
from ..server.block_memory import BlockMemory
from ..server.layout import cut
from ..server.messages import BeginStep, ChunkReady, EnterLoop, Push, SynchronizedAck
from ..server.state import Rules, ServerState
from ..server.store import Outbox, ParameterStore

START = 16.0
RATE = 0.5
_BLOCK_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPace:
    """A worker reads first at `start`, and each of its gradients takes `ticks`."""

    ticks: int
    start: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushedGradient:
    """`base` is the version that the gradient was computed on, `lag` how many updates have come since."""

    gradient: float
    base: int
    lag: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaceEvent:
    """A tick at which something happened, and how it left the server. `reads`: which version who read then;
    `waits`: who has pushed and may not read yet."""

    time: int
    pushes: dict[int, PushedGradient]
    reads: dict[int, int]
    waits: frozenset[int]
    version: int
    w: float


def race(
    paces: Sequence[WorkerPace], rules: Rules, ticks: int, momentum: float = 0.0, rate: float = RATE
) -> list[RaceEvent]:
    """What happens within so many ticks. In one tick lower ranks come first."""
    desk = _Desk(rules, len(paces), momentum, rate)
    workers = [_Worker(pace) for pace in paces]
    moments = []
    for time in range(ticks + 1):
        reads: dict[int, int] = {}
        pushes: dict[int, PushedGradient] = {}
        for rank, worker in enumerate(workers):
            free: list[int] = []
            if time == worker.pace.start:
                free = [rank]
            elif time == worker.due:
                worker.due = None
                pushes[rank] = PushedGradient(gradient=worker.w, base=worker.base, lag=desk.version - worker.base)
                free = desk.push(rank, worker.steps, worker.w, worker.base)
                worker.steps += 1
            for other in free:
                reads[other] = workers[other].read(desk, time)
        if reads or pushes:
            waits = frozenset(rank for rank, each in enumerate(workers) if each.steps and each.due is None)
            moments.append(
                RaceEvent(time=time, pushes=pushes, reads=reads, waits=waits, version=desk.version, w=desk.w)
            )
    return moments


class _Worker:
    def __init__(self, pace: WorkerPace) -> None:
        self.pace = pace
        self.due: int | None = None  # when its gradient will be computed; None while it waits
        self.steps = 0
        self.base, self.w = 0, START

    def read(self, desk: _Desk, time: int) -> int:
        self.base, self.w, self.due = desk.version, desk.w, time + self.pace.ticks
        return self.base


class _Desk:
    """The server, and the messages that bring a gradient to it."""

    def __init__(self, rules: Rules, size: int, momentum: float, rate: float) -> None:
        w = torch.nn.Parameter(torch.tensor([START], dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=rate, momentum=momentum)
        self._settings = hyperparameters.read([optimizer])
        part = cut([w], [optimizer], 1, _BLOCK_BYTES).parts[0]
        self._store = ParameterStore(part, BlockMemory(1, part.num_bytes), [w], [optimizer])
        self._store.fill(part.chunks[0], [w.detach()])
        self._server = ServerState(self._store, rules)
        self._size = size
        for rank in range(size):
            self._server.join(rank)
        for rank in range(size):
            self._server.handle(rank, EnterLoop())

    @property
    def version(self) -> int:
        """How many updates there were."""
        return self._store.version(self._store.part.blocks[0]) - self._store.memory.origins[0]

    @property
    def w(self) -> float:
        return float(self._store.flats[0])

    def push(self, rank: int, step: int, gradient: float, base: int) -> list[int]:
        """Who may read now."""
        begin = BeginStep(step, 0, 1, hyper=self._settings, present=self._size)
        push = Push(step, 0, [base + self._store.memory.origins[0]])
        out = self._server.handle(rank, begin)
        return self._deliver(out + self._server.handle(rank, push, [torch.tensor([gradient], dtype=torch.float64)]))

    def _deliver(self, out: Outbox) -> list[int]:
        freed = [(rank, message) for (_, rank), message in out if isinstance(message, ChunkReady)]
        for rank, ready in freed:  # what a full synchronisation left is read by all before anything else is applied
            more = self._server.handle(rank, SynchronizedAck(ready.step + 1))
            assert not more, "nobody has pushed meanwhile"
        return [rank for rank, _ in freed]
