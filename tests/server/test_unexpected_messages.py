"""Messages that are late, doubled or out of place: the server goes on, and applies nothing twice."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from checker import Checker
from simulation import LR, Plan, World

from hora.server.messages import (
    BeginStep,
    ChosenWorkers,
    ChunkReady,
    DropStep,
    EnterLoop,
    GradientNorm,
    LeaveLoop,
    Push,
    SynchronizeAt,
    SynchronizedAck,
    WorkerEntered,
)
from hora.server.state import Rules

RULES = {
    "sync": Rules(),
    "backup": Rules(backup=1),
    "clip": Rules(clip_norm=1.0),
    "async": Rules(mode="async"),
    "ssp": Rules(mode="ssp", staleness=1),
    "sync_every": Rules(mode="async", sync_every=2),
    "dc": Rules(mode="async", correct="dc"),
}


def lone(rules: Rules, num_workers: int = 1) -> World:
    return World(0, rules, [Plan([]) for _ in range(num_workers)], Checker(), gaps=0.0)


def gradients(world: World, chunk: Any, value: float = 1.0) -> list[torch.Tensor | None]:
    return [torch.full((block.numel,), value, dtype=torch.float64) for block in chunk.blocks]


def take(world: World, rank: int, step: int) -> list[Any]:
    server = world.servers[0]
    chunks = server.store.part.chunks
    out = server.handle(rank, BeginStep(step, 0, len(chunks)))
    for chunk in chunks:
        out += server.handle(rank, Push(step, chunk.number, [1] * len(chunk.blocks)), gradients(world, chunk))
    return out


def applied(world: World) -> float:
    """How often a gradient of ones was applied to every block: the same number everywhere."""
    server = world.servers[0]
    counts = set()
    for block in server.store.part.blocks:
        before = world.parameters[block.index].detach().reshape(-1)[block.start : block.stop]
        counts |= set(((before - server.store.flats[block.number]) / LR).tolist())
    assert len(counts) == 1
    return float(counts.pop())


@pytest.mark.parametrize("kind", ["sync", "async", "ssp"])
def test_a_push_of_a_step_never_begun_changes_nothing(kind: str) -> None:
    world = lone(RULES[kind])
    server, chunk = world.servers[0], world.servers[0].store.part.chunks[0]
    for step in (0, 7, -3):
        assert server.handle(0, Push(step, 0, [1] * len(chunk.blocks)), gradients(world, chunk, 5.0)) == []
    assert applied(world) == 0
    assert len(take(world, 0, 8)) == len(server.store.part.chunks) * (kind != "sync")
    assert applied(world) == (kind != "sync")  # in sync step 0 has to come first


@pytest.mark.parametrize("kind", ["sync", "async", "ssp"])
def test_words_of_one_that_is_gone_change_nothing(kind: str) -> None:
    world = lone(RULES[kind], 2)
    server = world.servers[0]
    server.leave(1)
    assert server.leave(1) == []
    for message in (BeginStep(0, 0, 1), EnterLoop(), LeaveLoop(), SynchronizedAck(0), DropStep(0)):
        assert server.handle(1, message) == []
    assert take(world, 1, 0) == []
    assert applied(world) == 0
    take(world, 0, 0)
    assert applied(world) == 1


@pytest.mark.parametrize("kind", ["sync", "backup", "clip", "async", "ssp"])
def test_begin_and_push_twice_count_once(kind: str) -> None:
    rules = RULES[kind]
    world = lone(Rules(clip_norm=1e9) if kind == "clip" else rules, 1 if kind != "backup" else 2)
    server = world.servers[0]
    chunks = server.store.part.chunks
    answers: list[ChunkReady] = []
    for step in range(3):
        for chunk in chunks:
            for _ in range(2):
                answers += [m for _, m in server.handle(0, BeginStep(step, 0, len(chunks)))]
                push = Push(step, chunk.number, [1] * len(chunk.blocks))
                answers += [m for _, m in server.handle(0, push, gradients(world, chunk))]
    assert applied(world) == 3
    assert sorted((r.step, r.chunk) for r in answers if not r.dropped) == [
        (step, chunk.number) for step in range(3) for chunk in chunks
    ]


def test_the_begin_of_the_next_step_may_overtake_the_last_push_of_this_one() -> None:
    """With prefetch a worker begins before it has read, and tensors have lines of their own."""
    for kind in ("async", "ssp"):
        world = lone(RULES[kind])
        server = world.servers[0]
        chunks = server.store.part.chunks
        answers = server.handle(0, BeginStep(0, 0, len(chunks)))
        for chunk in chunks[1:]:
            answers += server.handle(0, Push(0, chunk.number, [1] * len(chunk.blocks)), gradients(world, chunk))
        answers += server.handle(0, BeginStep(1, 0, len(chunks)))
        answers += server.handle(0, Push(1, 1, [1] * len(chunks[1].blocks)), gradients(world, chunks[1]))
        answers += server.handle(0, Push(0, 0, [1] * len(chunks[0].blocks)), gradients(world, chunks[0]))
        for chunk in [chunks[0], *chunks[2:]]:
            answers += server.handle(0, Push(1, chunk.number, [1] * len(chunk.blocks)), gradients(world, chunk))
        assert applied(world) == 2 and len(answers) == 2 * len(chunks)


def test_under_ssp_an_answer_that_waits_comes_though_the_next_step_has_begun() -> None:
    world = lone(Rules(mode="ssp", staleness=0), 2)
    server = world.servers[0]
    num_chunks = len(server.store.part.chunks)
    server.handle(1, EnterLoop())
    assert take(world, 0, 0) == []
    assert server.handle(0, BeginStep(1, 0, num_chunks)) == []
    out = take(world, 1, 0)
    assert sorted(rank for (_, rank), _ in out) == [0] * num_chunks + [1] * num_chunks


def test_a_dropped_step_is_forgotten_and_may_begin_again() -> None:
    world = lone(RULES["sync"], 2)
    server = world.servers[0]
    chunk = server.store.part.chunks[0]
    server.handle(0, BeginStep(0, 0, len(server.store.part.chunks)))
    server.handle(0, Push(0, 0, [1] * len(chunk.blocks)), gradients(world, chunk, 100.0))
    server.handle(0, DropStep(0))
    out = take(world, 0, 0) + take(world, 1, 0)
    assert applied(world) == 1 and len(out) == 2 * len(server.store.part.chunks)


def test_one_that_dies_in_a_synchronous_step_is_not_waited_for_and_its_half_counts_for_nothing() -> None:
    for seed in range(20):
        world = lone(RULES["sync"], 3)
        server, dice = world.servers[0], random.Random(seed)
        chunks = server.store.part.chunks
        take(world, 0, 0)
        server.handle(1, BeginStep(0, 0, len(chunks)))
        out: list[Any] = []
        early = dice.random() < 0.5
        if early:
            out += take(world, 2, 0)
        for chunk in chunks[: dice.randint(0, len(chunks) - 1)]:
            out += server.handle(1, Push(0, chunk.number, [1] * len(chunk.blocks)), gradients(world, chunk, 1.0))
        out += server.leave(1)
        if not early:
            out += take(world, 2, 0)
        assert applied(world) == 1 and server.now == 1
        assert sorted(m.chunk for (_, rank), m in out if rank == 0) == [chunk.number for chunk in chunks]


@pytest.mark.parametrize("kind", RULES)
def test_a_storm_of_random_messages_ends_no_server_and_is_never_applied_to_half(kind: str) -> None:
    """Any message at any time, doubled and in any order: no exception, and no more updates than pushes."""
    for seed in range(60):
        dice = random.Random(seed)
        world = lone(RULES[kind], 3)
        server = world.servers[0]
        chunks = server.store.part.chunks
        last: tuple[Any, ...] | None = None
        pushes = 0
        for _ in range(120):
            rank, step = dice.randrange(4), dice.randint(-1, 4)
            chunk = dice.choice(chunks)
            begin = BeginStep(step, dice.choice([0, 0, 0, 1]), dice.choice([len(chunks), len(chunks), 0, 1]))
            push = Push(step, chunk.number, [1] * len(chunk.blocks))
            others: list[Any] = [
                SynchronizedAck(step),
                EnterLoop(),
                LeaveLoop(),
                DropStep(step),
                "leave",
                "join",
                "pull",
            ]
            message: Any = dice.choice([begin, begin, push, push, push, *others])
            if last is not None and dice.random() < 0.2:
                rank, message, chunk = copy.copy(last)
            last = (rank, message, chunk)
            if message == "leave":
                if dice.random() < 0.1:
                    server.leave(rank)
            elif message == "join":
                if rank not in server.workers:
                    server.join(rank)
            elif message == "pull":
                server.refresh(rank, -1)
            elif isinstance(message, Push):
                pushes += 1
                server.handle(rank, message, gradients(world, chunk, 0.5))
            else:
                server.handle(rank, message)
        assert all(word % 2 == 0 for word in server.store.memory.counters), f"seed {seed}"
        assert sum(server.store.versions(each)[0] - 1 for each in chunks) <= pushes, f"seed {seed}"


def test_late_words_of_other_servers_change_nothing() -> None:
    world = lone(RULES["clip"])
    server = world.servers[0]
    take(world, 0, 0)
    assert server.handle_server(1, GradientNorm(0, 4.0)) == []
    follower = World(0, Rules(backup=1), [Plan([])], Checker(), num_servers=2).servers[1]
    assert (
        follower.handle_server(0, ChosenWorkers(0, [9])) == [] and follower.now == 1
    )  # nobody is left whose gradients were chosen
    assert follower.handle_server(0, ChosenWorkers(0, [0])) == [] and follower.now == 1
    other = World(0, Rules(mode="async", sync_every=2), [Plan([])], Checker(), num_servers=2).servers[1]
    assert other.handle_server(0, WorkerEntered(9, 3)) == [] and other.handle_server(0, SynchronizeAt(2, [9])) == []


def test_gradients_that_were_all_in_count_though_their_worker_is_gone() -> None:
    world = lone(RULES["sync"], 2)
    server = world.servers[0]
    chunks = server.store.part.chunks
    server.handle(1, BeginStep(0, 0, len(chunks)))
    for chunk in chunks:
        server.handle(1, Push(0, chunk.number, [1] * len(chunk.blocks)), gradients(world, chunk, 3.0))
    server.leave(1)
    out = take(world, 0, 0)
    assert applied(world) == 2 and len(out) == len(chunks)


def test_a_server_that_hears_late_who_was_chosen_still_has_the_gradients_of_one_that_is_gone() -> None:
    world = World(0, Rules(backup=1), [Plan([]) for _ in range(3)], Checker(), num_servers=2)
    follower = world.servers[1]
    chunks = follower.store.part.chunks
    for rank, value in ((0, 1.0), (1, 3.0)):
        follower.handle(rank, BeginStep(0, 0, len(chunks), present=3))
        for chunk in chunks:
            push = Push(0, chunk.number, [1] * len(chunk.blocks))
            follower.handle(rank, push, gradients(world, chunk, value))
    follower.leave(1)
    follower.handle_server(0, ChosenWorkers(0, [0, 1]))
    assert follower.now == 1
    for block in follower.store.part.blocks:
        before = world.parameters[block.index].detach().reshape(-1)[block.start : block.stop]
        assert torch.equal(follower.store.flats[block.number], before - LR * 2)
