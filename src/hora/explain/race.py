"""Simulation of asynchronous workers and one parameter server on a clock of ticks. The server is server/state.py.

The model is a single number w with the loss w²/2, whose gradient is w itself: a gradient is the value of w that its
worker has read. A worker reads, computes for some ticks, pushes, and reads again when the server lets it.
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
from ..server.store import ParameterStore

START = 16.0
RATE = 0.5
_BLOCK_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerPace:
    """A worker first reads at tick `start`, and each of its gradients takes `ticks`."""

    ticks: int
    start: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushedGradient:
    """`base` is the version that the gradient was computed on, `lag` the number of updates since."""

    gradient: float
    base: int
    lag: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaceEvent:
    """A tick with reads or pushes, by rank, and the server after it. `reads` has the version that was read; `waits` the
    workers that have pushed and may not read yet."""

    time: int
    pushes: dict[int, PushedGradient]
    reads: dict[int, int]
    waits: frozenset[int]
    version: int
    w: float


def race(
    paces: Sequence[WorkerPace], rules: Rules, ticks: int, momentum: float = 0.0, rate: float = RATE
) -> list[RaceEvent]:
    """What happens within so many ticks. Within a tick, lower ranks come first."""
    server = _Server(rules, len(paces), momentum, rate)
    workers = [_Worker(pace) for pace in paces]
    events = []
    for time in range(ticks + 1):
        reads: dict[int, int] = {}
        pushes: dict[int, PushedGradient] = {}
        for rank, worker in enumerate(workers):
            readers: list[int] = []
            if time == worker.pace.start:
                readers = [rank]
            elif time == worker.due:
                worker.due = None
                pushes[rank] = PushedGradient(gradient=worker.w, base=worker.base, lag=server.version - worker.base)
                readers = server.push(rank, worker.steps, worker.w, worker.base)
                worker.steps += 1
            for reader in readers:
                reads[reader] = server.version
                workers[reader].read(server, time)
        if reads or pushes:
            waits = frozenset(rank for rank, each in enumerate(workers) if each.steps and each.due is None)
            events.append(
                RaceEvent(time=time, pushes=pushes, reads=reads, waits=waits, version=server.version, w=server.w)
            )
    return events


class _Worker:
    def __init__(self, pace: WorkerPace) -> None:
        self.pace = pace
        self.due: int | None = None  # when its gradient is ready; None while it waits
        self.steps = 0
        self.base, self.w = 0, START

    def read(self, server: _Server, time: int) -> None:
        self.base, self.w, self.due = server.version, server.w, time + self.pace.ticks


class _Server:
    """The server's state machine, and the messages that bring a gradient to it."""

    def __init__(self, rules: Rules, size: int, momentum: float, rate: float) -> None:
        w = torch.nn.Parameter(torch.tensor([START], dtype=torch.float64))
        optimizer = torch.optim.SGD([w], lr=rate, momentum=momentum)
        self._hyper = hyperparameters.read([optimizer])
        part = cut([w], [optimizer], 1, _BLOCK_BYTES).parts[0]
        self._store = ParameterStore(part, BlockMemory(1, part.num_bytes), [w], [optimizer])
        self._store.fill(part.chunks[0], [w.detach()])
        self._state = ServerState(self._store, rules)
        self._size = size
        for rank in range(size):
            self._state.join(rank)
        for rank in range(size):
            self._state.handle(rank, EnterLoop())

    @property
    def version(self) -> int:
        """The number of updates."""
        return self._store.version(self._store.part.blocks[0]) - self._store.memory.origins[0]

    @property
    def w(self) -> float:
        return float(self._store.flats[0])

    def push(self, rank: int, step: int, gradient: float, base: int) -> list[int]:
        """The ranks that may read now."""
        begin = BeginStep(step, 0, 1, hyper=self._hyper, present=self._size)
        push = Push(step, 0, [base + self._store.memory.origins[0]])
        out = self._state.handle(rank, begin)
        out += self._state.handle(rank, push, [torch.tensor([gradient], dtype=torch.float64)])
        ready = [(rank, message) for (_, rank), message in out if isinstance(message, ChunkReady)]
        for reader, message in ready:  # after a full synchronisation all read before the next update
            more = self._state.handle(reader, SynchronizedAck(message.step + 1))
            assert not more, "no worker has pushed meanwhile"
        return [reader for reader, _ in ready]
