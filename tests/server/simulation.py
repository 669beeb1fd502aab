"""A network in one thread: workers and servers, queues between them, and a random order of everything, by seed.

Queues keep their order, one per line and direction; nothing else is promised. A worker acts as hora's own client does:
it pushes a step's gradients to all servers, reads each chunk when it is Ready, and goes on when it has read all.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.server.block_memory import BlockMemory
from hora.server.layout import cut
from hora.server.messages import (
    BeginStep,
    ChosenWorkers,
    ChunkReady,
    EnterLoop,
    GradientNorm,
    LeaveLoop,
    Pull,
    Push,
    SynchronizeAt,
    SynchronizedAck,
    WorkerEntered,
)
from hora.server.state import Rules, ServerState
from hora.server.store import ParameterStore

LR = 2.0**-6
SHAPES = ((10, 8), (3,), (5, 4), (70,))  # of 256 bytes each: blocks of 3, 1, 1 and 3 slices
Optimizers = Callable[[list[torch.nn.Parameter]], list[torch.optim.Optimizer]]


def plain(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=LR)]


def two(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters[::2], lr=LR), torch.optim.SGD(parameters[1::2], lr=LR)]


def whole_numbers(shape: Sequence[int], dice: random.Random, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dice.randrange(1 << 30))
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


@dataclasses.dataclass
class Plan:
    """What a worker will do: `script` of 'enter', 'rest', 'bye' and optimizers' numbers, one for each step; 'pause'
    waits until everything that was sent has been heard and all others pause too. It joins and is killed at these
    events; `pace` is how often it moves, against 1 for a queue."""

    script: list[str | int]
    joins: int = 0
    dies: int | None = None
    pace: float = 1.0


@dataclasses.dataclass
class Contribution:
    """A worker's gradients of one step, by parameter, and what its Begin says of them."""

    gradients: list[torch.Tensor | None]
    begin: dict[str, Any] = dataclasses.field(default_factory=dict)


class Walker:
    """One simulated worker."""

    def __init__(self, rank: int, plan: Plan, world: World) -> None:
        self.rank = rank
        self.plan = plan
        self.script = collections.deque(plan.script)
        self.world = world
        self.joined = self.gone = False
        self.step = 0
        self.taken = 0  # steps, counting those that were dropped
        self.pulls = 0
        self.outstanding: set[tuple[int, int]] = set()
        self.held = [[flat.clone() for flat in server.store.flats] for server in world.servers]
        self.base = [[0] * len(server.store.flats) for server in world.servers]
        self.readies: list[ChunkReady] = []
        self.nows: dict[int, int] = {}
        self.told: list[list[ChunkReady]] = []  # by step

    def can_act(self) -> bool:
        ready = self.joined and not self.gone and not self.outstanding and bool(self.script)
        return ready and (self.script[0] != "pause" or self.world.all_pause())

    def act(self) -> None:
        world, action = self.world, self.script.popleft()
        if action == "enter":
            world.tell(self.rank, EnterLoop())
        elif action == "rest":
            world.tell(self.rank, LeaveLoop())
        elif action == "pause":
            for walker in world.walkers:
                if walker is not self:
                    walker.script.popleft()
        elif action == "bye":
            self.gone = True
            for number in range(len(world.servers)):
                world.queue(("w", self.rank, number, 0)).append(("leave", ()))
        else:
            assert isinstance(action, int)
            self._push(action)

    def _push(self, optimizer: int) -> None:
        world = self.world
        given = world.contribute(self, self.step, optimizer)
        self.readies = []
        world.checker.pushes(self, self.step, optimizer, given)
        eligible = len(set(self.nows.values())) <= 1
        for number, part in enumerate(world.layout.parts):
            mine = [chunk for chunk in part.chunks if chunk.optimizer == optimizer]
            begin = BeginStep(self.step, optimizer, len(mine), **{"eligible": eligible, **given.begin})
            world.queue(("w", self.rank, number, 0)).append((begin, ()))
            world.dice.shuffle(mine)
            for chunk in mine:
                gradients = [
                    None if (g := given.gradients[block.index]) is None else g.reshape(-1)[block.start : block.stop]
                    for block in chunk.blocks
                ]
                have = None if all(g is not None for g in gradients) else [g is not None for g in gradients]
                base = [self.base[number][block.number] for block in chunk.blocks]
                line = world.dice.randrange(world.lines)
                push = Push(self.step, chunk.number, base, have)
                world.queue(("w", self.rank, number, line)).append((push, gradients))
                self.outstanding.add((number, chunk.number))
        if not self.outstanding:
            self._finish()

    def _pull(self) -> None:
        """Reads everything anew, since the servers were at different steps."""
        self.pulls += 1
        for number, part in enumerate(self.world.layout.parts):
            self.world.queue(("w", self.rank, number, 0)).append((Pull(-1 - self.pulls), ()))
            self.outstanding |= {(number, chunk.number) for chunk in part.chunks}

    def hear(self, number: int, ready: ChunkReady) -> None:
        """Reads the chunk, as it is now or as it was copied for this worker."""
        server = self.world.servers[number]
        chunk = server.store.part.chunks[ready.chunk]
        readable = server.store.readable(self.rank)
        private = readable is not server.store.flats
        for position, block in enumerate(chunk.blocks):
            self.held[number][block.number].copy_(readable[block.number])
            self.base[number][block.number] = ready.versions[position] if private else server.store.version(block)
        self.world.checker.reads(self, number, ready)
        if not self.joined:
            return
        assert (number, ready.chunk) in self.outstanding, f"rank {self.rank} did not wait for {ready}"
        self.outstanding.discard((number, ready.chunk))
        self.nows[number] = ready.now
        if ready.step >= 0:
            self.readies.append(ready)
        if not self.outstanding:
            self._finish() if ready.step >= 0 else self._go_on()

    def _finish(self) -> None:
        self.world.checker.finishes(self, self.step, self.readies)
        self.told.append(self.readies)
        if self.world.rules.sync_every:
            self.world.tell(self.rank, SynchronizedAck(self.step))
        self.taken += 1
        self._go_on()

    def _go_on(self) -> None:
        if self.world.rules.backup and len(set(self.nows.values())) > 1 and self.world.dice.random() < 0.7:
            self._pull()
            return
        self.step = max(self.step + 1, *self.nows.values(), 0)


class World:
    """`checker` is told of everything. `contribute(walker, step, optimizer)` gives a step's gradients."""

    def __init__(
        self,
        seed: int,
        rules: Rules,
        plans: Sequence[Plan],
        checker: Any,
        *,
        num_servers: int = 1,
        shapes: Sequence[Sequence[int]] = SHAPES,
        dtypes: Sequence[torch.dtype] = (torch.float64,),
        optimizers: Optimizers = plain,
        lines: int = 1,
        contribute: Callable[[Walker, int, int], Contribution] | None = None,
        gaps: float = 0.1,
    ) -> None:
        self.dice = random.Random(seed)
        self.rules = rules
        self.lines = lines
        self.gaps = gaps
        self.checker = checker
        self.events = 0
        self.learns = True  # whether servers hear of a worker's death
        self.parameters = [
            torch.nn.Parameter(whole_numbers(shape, self.dice, dtypes[number % len(dtypes)]))
            for number, shape in enumerate(shapes)
        ]
        self.layout = cut(self.parameters, optimizers(self.parameters), num_servers, 256)
        self.servers: list[ServerState] = []
        for number, part in enumerate(self.layout.parts):
            own = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
            store = ParameterStore(part, BlockMemory(len(part.blocks), part.num_bytes), own, optimizers(own))
            for chunk in part.chunks:
                store.fill(chunk, [own[b.index].detach().reshape(-1)[b.start : b.stop] for b in chunk.blocks])
            record = self._recorder(number)
            self.servers.append(ServerState(store, rules, number=number, num_servers=num_servers, record=record))
        self.contribute = contribute or self.random_gradients
        self._queues: dict[tuple[Any, ...], collections.deque[Any]] = {}
        self.walkers = [Walker(rank, plan, self) for rank, plan in enumerate(plans)]
        checker.begins(self)
        for walker in self.walkers:
            if walker.plan.joins == 0:
                self._join(walker)

    def _recorder(self, number: int) -> Callable[..., None]:
        return lambda kind, **facts: self.checker.records(number, kind, facts)

    def random_gradients(self, walker: Walker, step: int, optimizer: int) -> Contribution:
        gradients: list[torch.Tensor | None] = [
            None if self.dice.random() < self.gaps else whole_numbers(parameter.shape, self.dice, parameter.dtype)
            for parameter in self.parameters
        ]
        return Contribution(gradients)

    def queue(self, key: tuple[Any, ...]) -> collections.deque[Any]:
        return self._queues.setdefault(key, collections.deque())

    def all_pause(self) -> bool:
        still = not any(self._queues.values())
        return still and all(walker.script and walker.script[0] == "pause" for walker in self.walkers)

    def tell(self, rank: int, message: Any) -> None:
        for number in range(len(self.servers)):
            self.queue(("w", rank, number, 0)).append((copy.copy(message), ()))

    def _join(self, walker: Walker) -> None:
        for number, server in enumerate(self.servers):
            server.join(walker.rank)
            self.checker.joins(number, walker.rank)
            for _, ready in server.refresh(walker.rank, -1):
                self.checker.emits(number, walker.rank, ready)
                walker.hear(number, ready)
        walker.joined = True

    def kill(self, walker: Walker) -> None:
        """What it has sent may get through in part; then each server learns of it, one line before the other."""
        walker.gone = True
        for number in range(len(self.servers)):
            for line in range(self.lines):
                queue = self.queue(("w", walker.rank, number, line))
                for _ in range(self.dice.randint(0, len(queue))):
                    queue.pop()
            if self.learns:
                self.queue(("w", walker.rank, number, self.dice.randrange(self.lines))).append(("leave", ()))

    def post(self, number: int, out: list[tuple[tuple[str, int], Any]]) -> None:
        for (role, other), message in out:
            if role == "server":
                assert isinstance(message, ChosenWorkers | GradientNorm | WorkerEntered | SynchronizeAt)
                self.queue(("p", number, other)).append(message)
            else:
                assert isinstance(message, ChunkReady)
                self.checker.emits(number, other, message)
                self.queue(("r", number, other)).append(message)

    def _deliver(self, key: tuple[Any, ...]) -> None:
        message = self._queues[key].popleft()
        if key[0] == "p":
            self.checker.hears(key[2], message)
            self.post(key[2], self.servers[key[2]].handle_server(key[1], message))
        elif key[0] == "r":
            walker = self.walkers[key[2]]
            if not walker.gone:
                walker.hear(key[1], message)
        else:
            _, rank, number, _ = key
            word, gradients = message
            self.checker.delivers(number, rank, word, gradients)
            server = self.servers[number]
            if isinstance(word, Pull):
                self.post(number, server.refresh(rank, word.number))
                return
            self.post(number, server.leave(rank) if word == "leave" else server.handle(rank, word, gradients))

    def run(self, limit: int = 100_000) -> None:
        """Until nothing is left to do. A worker that still waits then, waits for ever."""
        while True:
            self.events += 1
            assert self.events < limit, "no end"
            for walker in self.walkers:
                if not walker.joined and walker.plan.joins <= self.events:
                    self._join(walker)
                dies = walker.plan.dies
                if walker.joined and not walker.gone and dies is not None and dies <= self.events:
                    self.kill(walker)
            choices: list[Any] = [key for key, queue in self._queues.items() if queue]
            weights = [1.0] * len(choices)
            for walker in self.walkers:
                if walker.can_act():
                    choices.append(walker)
                    weights.append(walker.plan.pace)
            if not choices:
                late = [walker.plan.joins for walker in self.walkers if not walker.joined]
                if not late:
                    break
                self.events = max(self.events, min(late))
                continue
            choice = self.dice.choices(choices, weights)[0]
            if isinstance(choice, Walker):
                choice.act()
            else:
                self._deliver(choice)
        for walker in self.walkers:
            assert walker.gone or not walker.outstanding, (
                f"rank {walker.rank} waits for ever at step {walker.step} for {sorted(walker.outstanding)}"
            )
        self.checker.ends()


def random_plans(
    dice: random.Random, num_workers: int, num_steps: int, *, lively: bool, num_optimizers: int = 1
) -> list[Plan]:
    """Workers of different pace; `lively` ones also rest, leave, are killed and come later. At least one stays."""
    plans = []
    for rank in range(num_workers):
        script: list[str | int] = ["enter"] if dice.random() < 0.7 else []
        for _ in range(num_steps):
            script.append(dice.randrange(num_optimizers))
            if lively and dice.random() < 0.1:
                script += ["rest", "enter"] if dice.random() < 0.7 else ["rest"]
        script.append("bye" if lively and dice.random() < 0.3 else "rest")
        plan = Plan(script, pace=dice.choice([0.02, 0.2, 1.0, 3.0]))
        if lively and rank and dice.random() < 0.3:
            plan.joins = dice.randint(1, 60 * num_workers)
        if lively and rank and dice.random() < 0.3:
            plan.dies = plan.joins + dice.randint(1, 60 * num_workers)
        plans.append(plan)
    return plans
