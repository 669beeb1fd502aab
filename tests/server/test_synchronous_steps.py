"""sync equals the sequential reference: plain torch on the weighted mean, in any order of arrival."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checker import Reference, SyncChecker
from simulation import LR, Contribution, Optimizers, Plan, Walker, World, plain, two, whole_numbers

from hora.server.state import Rules

STEPS = 5


def momentum(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}]
    return [torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def adamw(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=0.01)]


def adagrad_and_sgd(parameters: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adagrad(parameters[::2], lr=0.1, initial_accumulator_value=0.5),
        torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.5),
    ]


OPTIMIZERS = {"sgd": plain, "momentum": momentum, "adamw": adamw, "two": two, "adagrad and sgd": adagrad_and_sgd}
Deal = Callable[[random.Random, int, int, int], dict[str, Any]]


def run(
    seed: int,
    optimizers: Optimizers,
    deal: Deal | None = None,
    *,
    exact: bool = False,
    clip_norm: float | None = None,
    gaps: float = 0.2,
    num_backwards: int = 1,
    dtypes: tuple[torch.dtype, ...] = (torch.float64,),
) -> World:
    """`deal(dice, rank, step, num_workers)` says what a Begin says."""
    dice = random.Random(seed)
    num_workers = dice.randint(1, 4)
    num_optimizers = len(optimizers([torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]))
    if exact and num_workers == 3:
        num_workers = 4  # a third is not exact
    order = [dice.randrange(num_optimizers) for _ in range(STEPS)]
    plans = [Plan(["enter", *order, "rest"], pace=dice.choice([0.05, 0.5, 3.0])) for _ in range(num_workers)]
    checker = SyncChecker(None, exact=exact)
    rules = Rules(mode="sync", clip_norm=clip_norm)
    world = World(seed, rules, plans, checker, num_servers=dice.randint(1, 3), lines=dice.randint(1, 2), gaps=gaps,
                  optimizers=optimizers, dtypes=dtypes)  # fmt: skip
    checker.reference = Reference(world.parameters, optimizers, clip_norm)
    give = world.random_gradients

    def contribute(walker: Walker, step: int, optimizer: int) -> Contribution:
        given = give(walker, step, optimizer)
        if deal is not None:
            given.begin = deal(random.Random(f"{seed} {step} {walker.rank}"), walker.rank, step, num_workers)
        if num_backwards > 1:
            pile(given, random.Random(f"{seed} {step}"), walker.rank, num_workers, num_backwards, world)
        if given.begin.get("weight", 1.0) == 0.0:
            given.gradients = [None] * len(given.gradients)
        return given

    world.contribute = contribute
    try:
        world.run()
        for number, server in enumerate(world.servers):
            assert server.now == STEPS, f"server {number} is at step {server.now}"
    except Exception as problem:
        raise AssertionError(f"seed {seed}: {problem!r}") from problem
    return world


def pile(
    given: Contribution, shared: random.Random, rank: int, num_workers: int, num_backwards: int, world: World
) -> None:
    """Several backwards before a step: their gradients add up, in units of the newest one's weight."""
    samples = [shared.randint(1, 5) for _ in range(num_workers)]
    rows = []
    for _ in range(num_backwards):
        shared.shuffle(samples)
        rows.append(list(samples))
    weights = [row[rank] for row in rows]
    micro = [(float(w), [whole_numbers(p.shape, world.dice) for p in world.parameters]) for w in weights]
    for index in range(len(world.parameters)):
        parts = torch.stack([w * gradients[index] for w, gradients in micro])
        given.gradients[index] = parts.sum(0) / weights[-1]
    given.micro = micro  # type: ignore[attr-defined]
    given.begin = {"weight": float(weights[-1]), "total": float(sum(weights)), "count": num_backwards}


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sync_equals_the_sequential_reference(kind: str) -> None:
    """One to four workers, one to three servers; blocks without a gradient on some workers or on all."""
    exact = kind in ("sgd", "two")
    for seed in range(60):
        run(seed, OPTIMIZERS[kind], exact=exact)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_mean_is_over_samples_and_absent_workers_weigh_nothing(kind: str) -> None:
    def deal(dice: random.Random, rank: int, step: int, num_workers: int) -> dict[str, Any]:
        weight = float(dice.choice([0, 1, 3, 8]))
        return {"weight": weight, "total": weight}

    for seed in range(30):
        run(seed, OPTIMIZERS[kind], deal)


def test_gradients_of_several_backwards_add_up() -> None:
    for seed in range(60):
        run(seed, momentum, num_backwards=2 + seed % 2)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_hyper_parameters_are_the_lowest_ranks_of_that_step(kind: str) -> None:
    def deal(dice: random.Random, rank: int, step: int, num_workers: int) -> dict[str, Any]:
        if step == 2:
            return {}  # as they were
        groups = 2 if kind == "momentum" else 1
        return {"hyper": [[{"lr": 2.0 ** -(3 + step + rank)} for _ in range(groups)]]}

    for seed in range(40):
        run(seed, OPTIMIZERS[kind], deal)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [1.0, 100.0])
def test_clipping_equals_clip_grad_norm_of_the_mean(kind: str, clip_norm: float) -> None:
    def deal(dice: random.Random, rank: int, step: int, num_workers: int) -> dict[str, Any]:
        weight = float(dice.choice([1, 2]))
        return {"weight": weight, "total": weight}

    for seed in range(20):
        run(seed, OPTIMIZERS[kind], deal if seed % 2 else None, clip_norm=clip_norm)


def test_clipping_leaves_a_workers_own_gradient_alone() -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(10):
        checker = SyncChecker(None, exact=False)
        world = World(seed, Rules(clip_norm=0.5), [Plan([0])], checker, gaps=0.0)
        checker.reference = Reference(world.parameters, plain, 0.5)
        give = world.random_gradients

        def noted(walker: Walker, step: int, optimizer: int, give: Any = give) -> Contribution:
            given = give(walker, step, optimizer)
            seen.extend((g, g.clone()) for g in given.gradients if g is not None)
            return given

        world.contribute = noted
        world.run()
    assert all(torch.equal(after, before) for after, before in seen)


def test_a_step_that_is_not_finite_anywhere_is_applied_nowhere_and_all_are_told_the_same() -> None:
    def deal(dice: random.Random, rank: int, step: int, num_workers: int) -> dict[str, Any]:
        return {"nonfinite": f"rank {rank}: inf"} if step in (1, 3) and rank == step % num_workers else {}

    for seed in range(80):
        world = run(seed, OPTIMIZERS[["sgd", "adamw"][seed % 2]], deal, clip_norm=1.0 if seed % 3 == 0 else None)
        told = [[{ready.skipped for ready in readies} for readies in walker.told] for walker in world.walkers]
        assert all(each == told[0] for each in told)
        assert all((told[0][step] == {""}) == (step not in (1, 3)) for step in range(STEPS))
        assert all(server.counts.skipped == 2 and server.counts.updates == STEPS - 2 for server in world.servers)


def test_a_stop_is_told_to_all_in_the_same_step() -> None:
    def deal(dice: random.Random, rank: int, step: int, num_workers: int) -> dict[str, Any]:
        return {"stop": step == 2 and rank == num_workers - 1, "buffers": step == 3 and rank == 0}

    for seed in range(60):
        world = run(seed, plain, deal, exact=True)
        for walker in world.walkers:
            assert [all(r.stop for r in readies) for readies in walker.told] == [step == 2 for step in range(STEPS)]
            assert [any(r.stop for r in readies) for readies in walker.told] == [step == 2 for step in range(STEPS)]
            assert [all(r.buffers for r in readies) for readies in walker.told] == [step == 3 for step in range(STEPS)]


def test_every_worker_reads_version_t_plus_1_everywhere_after_step_t() -> None:
    for seed in range(60):
        world = run(seed, plain, exact=True, gaps=0.0)
        for walker in world.walkers:
            for step, readies in enumerate(walker.told):
                assert readies and all(set(ready.versions) == {step + 2} for ready in readies)  # filling was the first


def test_half_precision_is_added_up_in_float32_and_rounded_once() -> None:
    checker = SyncChecker(None, exact=True)
    world = World(0, Rules(), [Plan([0]) for _ in range(4)], checker, shapes=((4,),), dtypes=(torch.bfloat16,))
    parts = [256.0, 1.0, 1.0, 1.0]  # in bfloat16 256 + 1 is 256

    def contribute(walker: Walker, step: int, optimizer: int) -> Contribution:
        return Contribution([torch.full((4,), parts[walker.rank], dtype=torch.bfloat16)])

    world.contribute = contribute
    mean = torch.tensor(sum(parts) / 4).to(torch.bfloat16)
    expected = world.parameters[0].detach() - LR * mean

    class Once:
        def step(self, number: int, given: dict[int, Any]) -> list[torch.Tensor]:
            return [expected]

    checker.reference = Once()
    world.run()
