"""Independent checkers. They know what was sent, delivered, answered, recorded and read, and work out by themselves
what should have happened; they call nothing of the server's own rules."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hora.server.messages import BeginStep, ChunkReady, EnterLoop, LeaveLoop, Push, WorkerEntered


class Checker:
    """Listens, and objects to nothing."""

    def begins(self, world: Any) -> None:
        self.world = world

    def joins(self, number: int, rank: int) -> None:
        """A worker is known to a server."""

    def pushes(self, walker: Any, step: int, optimizer: int, given: Any) -> None:
        """A worker sends a step off."""

    def delivers(self, number: int, rank: int, message: Any, gradients: Any) -> None:
        """A server is about to hear this; 'leave': that the worker is gone."""

    def hears(self, number: int, message: Any) -> None:
        """A server is about to hear this from another."""

    def records(self, number: int, kind: str, facts: dict[str, Any]) -> None:
        """What a server says of itself."""

    def emits(self, number: int, rank: int, ready: ChunkReady) -> None:
        """A server has answered."""

    def reads(self, walker: Any, number: int, ready: ChunkReady) -> None:
        """A worker has read a chunk."""

    def finishes(self, walker: Any, step: int, readies: list[ChunkReady]) -> None:
        """A worker has read all chunks of its step."""

    def ends(self) -> None:
        """All queues are empty."""


class Clocks:
    """How many steps of each worker are in at one server, counted from what was delivered to it. Where one that enters
    stands is worked out for the `first` server; the others are told, and count nothing of it before."""

    def __init__(self, first: Clocks | None = None) -> None:
        self.first = first
        self.entries: dict[int, list[int]] = collections.defaultdict(list)  # where it stood each time it entered
        self.inside: set[int] = set()
        self.told: collections.Counter[int] = collections.Counter()
        self.entered: collections.Counter[int] = collections.Counter()
        self.held: dict[int, list[Any]] = collections.defaultdict(list)
        self.clock: dict[int, int] = collections.defaultdict(int)
        self.trains: set[int] = set()
        self.here: set[int] = set()
        self.highest = 0
        self.of_step: dict[tuple[int, int], int] = {}
        self._chunks: dict[tuple[int, int], int] = {}
        self._came: collections.Counter[tuple[int, int]] = collections.Counter()

    def hears(self, rank: int, message: Any) -> None:
        if message == "leave":
            self.here.discard(rank)
            self.trains.discard(rank)
        if rank not in self.here:
            return
        if isinstance(message, LeaveLoop):
            self.trains.discard(rank)
            self.inside.discard(rank)
        if isinstance(message, EnterLoop | BeginStep) and rank not in self.inside:
            self.inside.add(rank)
            self.entered[rank] += 1
            if self.first is None:
                slowest = min((self.clock[other] for other in self.trains), default=self.highest)
                self.clock[rank] = max(self.clock[rank], slowest)
                self.entries[rank].append(self.clock[rank])
                self.trains.add(rank)
            else:
                self._place(rank)
        if self.first is not None and self.told[rank] != self.entered[rank]:
            self.held[rank].append(message)
        else:
            self._count(rank, message)

    def places(self, rank: int, clock: int) -> None:
        """The first server says where one stands that has entered."""
        assert self.first is not None and clock == self.first.entries[rank][self.told[rank]]
        self.told[rank] += 1
        self._place(rank)

    def _place(self, rank: int) -> None:
        assert self.first is not None
        if self.told[rank] == self.entered[rank] and rank in self.inside and rank in self.here:
            self.clock[rank] = self.first.entries[rank][self.told[rank] - 1]
            self.trains.add(rank)
            for message in self.held.pop(rank, []):
                self._count(rank, message)

    def _count(self, rank: int, message: Any) -> None:
        if isinstance(message, BeginStep):
            self._chunks[rank, message.step] = message.num_chunks
        if isinstance(message, Push):
            self._came[rank, message.step] += 1
        if isinstance(message, BeginStep | Push):
            key = (rank, message.step)
            if key in self._chunks:
                self.of_step.setdefault(key, self.clock[rank] + 1)
                if self._came[key] == self._chunks[key]:
                    self.clock[rank] += 1
                    self.highest = max(self.highest, self.clock[rank])

    def staleness(self, rank: int, step: int) -> int:
        """How far this step puts the worker ahead of the slowest other that trains."""
        mine = self.of_step[rank, step]
        return mine - min((self.clock[other] for other in self.trains if other != rank), default=mine)


class AsyncChecker(Checker):
    """Each push applied exactly once and answered exactly once; values, versions and lags as counted here."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def begins(self, world: Any) -> None:
        self.world = world
        self.exact = world.rules.correct == "none"
        self.values = [[flat.numpy().copy() for flat in server.store.flats] for server in world.servers]
        self.counts = [[1] * len(server.store.flats) for server in world.servers]  # filling was the first
        self.history = [[[value] for value in values] for values in self.values]  # by server and block, each version's
        self.given: dict[tuple[int, int, int], np.ndarray] = {}  # by server, worker, block
        self.read_at: dict[tuple[int, int, int], int] = {}
        self.begun: dict[tuple[int, int, int], BeginStep] = {}
        self.delivered: dict[tuple[int, int, int, int], list[np.ndarray | None]] = {}
        self.bases: dict[tuple[int, int, int, int], list[int]] = {}
        self.lags: dict[tuple[int, int, int, int], int] = {}
        self.applied_at: dict[tuple[int, int, int, int], list[int]] = {}
        self.answered: set[tuple[int, int, int, int]] = set()
        self.gone: set[tuple[int, int]] = set()
        first = Clocks()
        counting = world.rules.mode == "ssp"
        self.clocks = [first] + [Clocks(first if counting else None) for _ in world.servers[1:]]
        self.staleness_seen: collections.Counter[int] = collections.Counter()

    def joins(self, number: int, rank: int) -> None:
        self.clocks[number].here.add(rank)

    def hears(self, number: int, message: Any) -> None:
        if isinstance(message, WorkerEntered) and self.world.rules.mode == "ssp":
            self.clocks[number].places(message.worker, message.clock)

    def delivers(self, number: int, rank: int, message: Any, gradients: Any) -> None:
        self.clocks[number].hears(rank, message)
        if message == "leave":
            self.gone.add((number, rank))
        elif (number, rank) in self.gone:
            return
        elif isinstance(message, BeginStep):
            self.begun[number, rank, message.step] = message
        elif isinstance(message, Push):
            key = (number, rank, message.step, message.chunk)
            assert key not in self.delivered
            self.delivered[key] = [None if g is None else g.numpy().copy() for g in gradients]
            blocks = self.world.layout.parts[number].chunks[message.chunk].blocks
            self.bases[key] = [self.read_at[number, rank, block.number] for block in blocks]
            assert message.base == self.bases[key]

    def records(self, number: int, kind: str, facts: dict[str, Any]) -> None:
        if kind != "apply":
            return
        rules, rank = self.world.rules, facts["worker"]
        key = (number, rank, facts["step"], facts["chunk"])
        assert key in self.delivered, f"{key} was applied and never delivered"
        assert key not in self.lags, f"{key} was applied twice"
        begin = self.begun[number, rank, facts["step"]]
        assert not begin.nonfinite
        blocks = self.world.layout.parts[number].chunks[facts["chunk"]].blocks
        counts, values = self.counts[number], self.values[number]
        lag = max(counts[block.number] - base for block, base in zip(blocks, self.bases[key], strict=True))
        assert facts["lag"] == lag, f"{key}: recorded a lag of {facts['lag']}, there were {lag} versions between"
        self.lags[key] = lag
        for block, gradient in zip(blocks, self.delivered[key], strict=True):
            if gradient is None:
                continue
            step = gradient * begin.scale
            if rules.correct == "scale":
                step = step / (1 + lag)
            if rules.correct == "dc" and lag:
                then = self.given[number, rank, block.number]
                step = step + rules.dc_lambda * step * step * (values[block.number] - then)
            values[block.number] = values[block.number] - self.lr * step
            counts[block.number] += 1
            self.history[number][block.number].append(values[block.number])
        self.applied_at[key] = [counts[block.number] for block in blocks]

    def emits(self, number: int, rank: int, ready: ChunkReady) -> None:
        blocks = self.world.layout.parts[number].chunks[ready.chunk].blocks
        for block, version in zip(blocks, ready.versions, strict=True):
            self.given[number, rank, block.number] = self.history[number][block.number][version - 1]
        if ready.step < 0:
            return
        key = (number, rank, ready.step, ready.chunk)
        assert key not in self.answered, f"{key} was answered twice"
        self.answered.add(key)
        begin = self.begun[number, rank, ready.step]
        assert key in self.lags or begin.nonfinite, f"{key} was answered and not applied"
        assert all(a <= b for a, b in zip(self.applied_at.get(key, ready.versions), ready.versions, strict=True))
        assert ready.skipped == begin.nonfinite
        assert ready.lag == self.lags.get(key, ready.lag)
        if self.world.rules.mode == "ssp":
            ahead = self.clocks[number].staleness(rank, ready.step)
            self.staleness_seen[ahead] += 1
            assert ahead <= self.world.rules.staleness, f"{key} was answered {ahead} steps ahead of the slowest"

    def reads(self, walker: Any, number: int, ready: ChunkReady) -> None:
        for block in self.world.layout.parts[number].chunks[ready.chunk].blocks:
            private = self.world.rules.correct == "dc"
            given = self.given[number, walker.rank, block.number]
            self._same(walker.held[number][block.number], given if private else self.values[number][block.number])
            self.read_at[number, walker.rank, block.number] = walker.base[number][block.number]
            if not private:
                assert walker.base[number][block.number] == self.counts[number][block.number]

    def _same(self, found: torch.Tensor, expected: np.ndarray) -> None:
        if self.exact:
            assert np.array_equal(found.numpy(), expected)
        else:
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)

    def ends(self) -> None:
        for key in self.delivered:
            number, rank, step, _ = key
            begin = self.begun.get((number, rank, step))
            if begin is None:
                assert (number, rank) in self.gone and key not in self.lags
                continue
            counting = self.world.rules.sync_every or self.world.rules.mode == "ssp"
            if counting and (number, rank) in self.gone and key not in self.lags:
                assert key not in self.answered  # it has gone while what it sent was held back
                continue
            assert key in self.lags or begin.nonfinite, f"{key} was lost"
            assert key in self.answered or (number, rank) in self.gone, f"{key} was never answered"
        for server, values in zip(self.world.servers, self.values, strict=True):
            for flat, value in zip(server.store.flats, values, strict=True):
                self._same(flat, value)


class MeetingChecker(AsyncChecker):
    """With sync_every: after every k-th step all hold the same bits, and nothing is applied until all have read."""

    def begins(self, world: Any) -> None:
        super().begins(world)
        self.stands: dict[int, tuple[int, int]] = {}  # clock when a worker entered, and its steps until then
        self.snapshots: dict[int, bytes] = {}  # by clock
        self.met: collections.Counter[int] = collections.Counter()
        self.unread: dict[int, set[int]] = collections.defaultdict(set)

    def _clock(self, rank: int) -> int:
        clock, taken = self.stands[rank]
        return clock + self.world.walkers[rank].taken - taken + 1

    def delivers(self, number: int, rank: int, message: Any, gradients: Any) -> None:
        super().delivers(number, rank, message, gradients)
        if message == "leave":
            self.unread[number].discard(rank)

    def records(self, number: int, kind: str, facts: dict[str, Any]) -> None:
        if kind == "enter":
            assert number == 0
            self.stands[facts["worker"]] = (facts["clock"], self.world.walkers[facts["worker"]].taken)
        if kind == "apply":
            assert not self.unread[number], f"server {number} applied while {self.unread[number]} had not read"
        super().records(number, kind, facts)

    def emits(self, number: int, rank: int, ready: ChunkReady) -> None:
        super().emits(number, rank, ready)
        if ready.step >= 0 and self._clock(rank) % self.world.rules.sync_every == 0:
            self.unread[number].add(rank)

    def reads(self, walker: Any, number: int, ready: ChunkReady) -> None:
        super().reads(walker, number, ready)
        left = {(n, chunk) for n, chunk in walker.outstanding if n == number} - {(number, ready.chunk)}
        if not left:
            self.unread[number].discard(walker.rank)

    def finishes(self, walker: Any, step: int, readies: list[ChunkReady]) -> None:
        clock = self._clock(walker.rank)
        if clock % self.world.rules.sync_every:
            return
        bits = b"".join(block.numpy().tobytes() for blocks in walker.held for block in blocks)
        self.met[clock] += 1
        assert self.snapshots.setdefault(clock, bits) == bits, f"after step {clock} rank {walker.rank} holds other bits"


class SyncChecker(Checker):
    """Every worker that took part in a step holds what a sequential run holds after it; `reference` is that run: it is
    given the steps' contributions, and returns the parameters after each."""

    def __init__(self, reference: Any, *, exact: bool) -> None:
        self.reference = reference
        self.exact = exact

    def begins(self, world: Any) -> None:
        self.world = world
        self.given: dict[int, dict[int, Any]] = collections.defaultdict(dict)  # by step and worker
        self.optimizer: dict[int, int] = {}
        self.after: list[list[torch.Tensor]] = [[p.detach().clone() for p in world.parameters]]
        self.chosen: dict[int, list[int]] = {}
        self.present: dict[int, int] = {}
        self.means: dict[tuple[int, int, int], list[int]] = {}  # by server, step, chunk
        self.answers: collections.Counter[tuple[int, int, int, int]] = collections.Counter()
        self.dropped: set[tuple[int, int]] = set()
        self.nows: dict[tuple[int, int, int], int] = {}  # by worker, step, server

    def pushes(self, walker: Any, step: int, optimizer: int, given: Any) -> None:
        self.given[step][walker.rank] = given
        assert self.optimizer.setdefault(step, optimizer) == optimizer

    def records(self, number: int, kind: str, facts: dict[str, Any]) -> None:
        if kind == "mean":
            key = (number, facts["step"], facts["chunk"])
            assert key not in self.means, f"{key} was updated twice"
            self.means[key] = facts["workers"]
        if kind == "chosen":
            assert number == 0
            self.chosen[facts["step"]] = facts["workers"]
            self.present[facts["step"]] = facts["present"]

    def emits(self, number: int, rank: int, ready: ChunkReady) -> None:
        if ready.step >= 0:
            self.answers[number, rank, ready.step, ready.chunk] += 1
            assert self.answers[number, rank, ready.step, ready.chunk] == 1

    def state(self, step: int) -> list[torch.Tensor]:
        """The parameters before this step, by the sequential run."""
        while len(self.after) <= step:
            at = len(self.after) - 1
            members = self.chosen.get(at, sorted(self.given[at])) if self.world.rules.backup else sorted(self.given[at])
            given = {rank: self.given[at][rank] for rank in members}
            self.after.append(self.reference.step(self.optimizer[at], given))
        return self.after[step]

    def same(self, found: torch.Tensor, block: Any, step: int) -> bool:
        expected = self.state(step)[block.index].reshape(-1)[block.start : block.stop]
        if self.exact:
            return torch.equal(found, expected)
        return torch.allclose(found, expected, rtol=1e-9, atol=1e-9)

    def reads(self, walker: Any, number: int, ready: ChunkReady) -> None:
        if ready.step < 0 and not self.world.rules.backup:
            return
        at = ready.now if self.world.rules.backup else ready.step + 1
        assert self.nows.setdefault((walker.rank, ready.step, number), ready.now) == ready.now, (
            f"rank {walker.rank} read chunks of two steps on server {number}"
        )
        for block in self.world.layout.parts[number].chunks[ready.chunk].blocks:
            assert self.same(walker.held[number][block.number], block, at), (
                f"rank {walker.rank} read other values of block {block.number} of server {number} than step {at}'s"
            )

    def finishes(self, walker: Any, step: int, readies: list[ChunkReady]) -> None:
        assert len({ready.dropped for ready in readies}) <= 1, f"step {step} is dropped on one server, not on the other"
        if readies and readies[0].dropped:
            self.dropped.add((walker.rank, step))
            return
        said = {ready.skipped for ready in readies}
        assert len(said) <= 1 and len({ready.stop for ready in readies}) <= 1
        assert all(ready.now == step + 1 for ready in readies)
        given = self.given[step].values()
        if not self.world.rules.backup and readies:
            reasons = {each.begin.get("nonfinite", "") for each in given} - {""}
            assert (said == {""}) if not reasons else said <= reasons
            assert readies[0].stop == any(each.begin.get("stop", False) for each in given)

    def ends(self) -> None:
        for (number, step, chunk), workers in self.means.items():
            expected = self.chosen[step] if self.world.rules.backup else sorted(self.given[step])
            assert workers == expected, f"server {number} took {workers} for chunk {chunk} of step {step}"


class Reference:
    """Plain torch, one process: the weighted mean of the given gradients, clipped, and the optimizer's own step."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizers: Any, clip_norm: float | None = None) -> None:
        self.parameters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        self.optimizers = optimizers(self.parameters)
        self.clip_norm = clip_norm

    def step(self, number: int, given: dict[int, Any]) -> list[torch.Tensor]:
        if not any(each.begin.get("nonfinite") for each in given.values()):
            settings = given[min(given)].begin.get("hyper")
            if settings is not None:
                for optimizer, groups in zip(self.optimizers, settings, strict=True):
                    for group, values in zip(optimizer.param_groups, groups, strict=True):
                        group.update(values)
            optimizer = self.optimizers[number]
            members = [p for group in optimizer.param_groups for p in group["params"]]
            for index, parameter in enumerate(self.parameters):
                mine = any(parameter is member for member in members)
                parameter.grad = self._mean(index, given) if mine else None
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(members, self.clip_norm)
            optimizer.step()
        return [p.detach().clone() for p in self.parameters]

    @staticmethod
    def _mean(index: int, given: dict[int, Any]) -> torch.Tensor | None:
        """The sum over backwards of the mean over each backward's samples. `micro`: (samples, gradients) of each."""
        total: torch.Tensor | None = None
        per_worker = [getattr(each, "micro", None) or [(each.begin.get("weight", 1.0), each.gradients)]
                      for each in given.values()]  # fmt: skip
        for backward in zip(*per_worker, strict=True):
            samples = math.fsum(weight for weight, _ in backward)
            for weight, gradients in backward:
                if gradients[index] is not None:
                    part = gradients[index] * (weight / samples if samples else 0.0)
                    total = part if total is None else total + part
        return total
