"""async and ssp, in random order: nothing is lost or applied twice, and the bound holds."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from checker import AsyncChecker
from checker import Checker as Quiet
from simulation import LR, Contribution, Plan, Walker, World, plain, random_plans, two

from hora.server.state import Rules

BATCHES = 8


def run(seed: int, rules: Rules, *, lively: bool = True, **options: Any) -> AsyncChecker:
    dice = random.Random(seed)
    optimizers = dice.choice([plain, plain, two])
    num_optimizers = 2 if optimizers is two else 1
    plans = random_plans(dice, dice.randint(1, 5), dice.randint(1, 5), lively=lively, num_optimizers=num_optimizers)
    checker = AsyncChecker(LR)
    options = {"num_servers": dice.randint(1, 3), "lines": dice.randint(1, 2), "optimizers": optimizers, **options}
    world = World(seed, rules, plans, checker, **options)
    try:
        world.run()
    except Exception as problem:
        raise AssertionError(f"seed {seed}: {problem!r}") from problem
    return checker


@pytest.mark.cases(3)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_async_loses_no_update_and_applies_none_twice(batch: int) -> None:
    for seed in range(batch * 50, batch * 50 + 50):
        run(seed, Rules(mode="async"))


@pytest.mark.cases(3)
@pytest.mark.parametrize("batch", range(BATCHES))
def test_ssp_never_exceeds_its_bound_and_nobody_waits_for_ever(batch: int) -> None:
    for seed in range(batch * 50, batch * 50 + 50):
        run(seed, Rules(mode="ssp", staleness=seed % 4))


def test_ssp_uses_its_bound() -> None:
    seen = set()
    for seed in range(30):
        seen |= set(run(seed, Rules(mode="ssp", staleness=2), lively=False).staleness_seen)
    assert max(seen) == 2


def test_ssp_with_staleness_0_is_lockstep() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        script: list[str | int] = ["enter", "pause", *[0] * 5, "rest"]
        plans = [Plan(script, pace=dice.choice([0.05, 1.0, 4.0])) for _ in range(dice.randint(2, 5))]
        checker = AsyncChecker(LR)
        world = World(seed, Rules(mode="ssp", staleness=0), plans, checker, num_servers=dice.randint(1, 3))
        started: list[int] = []
        give = world.random_gradients

        def note(walker: Walker, step: int, optimizer: int, started: Any = started, give: Any = give) -> Contribution:
            started.append(step)
            return give(walker, step, optimizer)

        world.contribute = note
        world.run()
        assert started == sorted(started), f"seed {seed}: a step began before all had taken the one before it"


@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("correct", ["scale", "dc"])
def test_corrections_are_the_formulas_of_their_papers(mode: str, correct: str) -> None:
    lags: set[int] = set()
    for seed in range(40):
        scale = 1.0 if seed % 2 else 0.5
        checker = AsyncChecker(LR)
        dice = random.Random(seed)
        plans = random_plans(dice, dice.randint(2, 5), 5, lively=seed % 3 == 0)
        rules = Rules(mode=mode, staleness=2 * (mode == "ssp"), correct=correct, dc_lambda=0.25)
        world = World(seed, rules, plans, checker, num_servers=dice.randint(1, 2), lines=2)
        give = world.random_gradients

        def scaled(walker: Walker, step: int, optimizer: int, give: Any = give, scale: float = scale) -> Contribution:
            return Contribution(give(walker, step, optimizer).gradients, {"scale": scale})

        world.contribute = scaled
        try:
            world.run()
        except Exception as problem:
            raise AssertionError(f"seed {seed}: {problem!r}") from problem
        lags |= set(checker.lags.values())
    assert max(lags) >= 3


def test_async_with_mixed_types_loses_nothing() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        plans = random_plans(dice, dice.randint(1, 4), 4, lively=True)
        checker = AsyncChecker(LR)
        world = World(seed, Rules(mode="async"), plans, checker, num_servers=dice.randint(1, 3),
                      dtypes=(torch.float64, torch.float32))  # fmt: skip
        world.run()


def test_a_step_that_is_not_finite_is_told_and_not_applied() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        checker = AsyncChecker(LR)
        plans = random_plans(dice, 3, 4, lively=False)
        world = World(seed, Rules(mode=dice.choice(["async", "ssp"])), plans, checker, num_servers=dice.randint(1, 3))
        give = world.random_gradients

        def some(walker: Walker, step: int, optimizer: int, give: Any = give) -> Contribution:
            broken = "inf in w" if (walker.rank + step) % 3 == 0 else ""
            return Contribution(give(walker, step, optimizer).gradients, {"nonfinite": broken})

        world.contribute = some
        world.run()
        assert sum(server.counts.updates for server in world.servers) == 8 * len(world.servers)


def test_each_gradient_is_applied_with_its_workers_own_hyper_parameters() -> None:
    """Rank r has a learning rate of 2^-(r+2), and says so only when it changes."""
    for seed in range(40):
        checker = AsyncChecker(1.0)
        world = World(seed, Rules(mode="async"), [Plan([0] * 4, pace=1.0) for _ in range(3)], checker, gaps=0.0)
        give = world.random_gradients
        used: list[tuple[Contribution, float]] = []

        def mine(walker: Walker, step: int, optimizer: int, give: Any = give, used: Any = used) -> Contribution:
            lr = 2.0 ** -(walker.rank + 2) if step < 2 else 2.0 ** -(walker.rank + 3)
            given = Contribution(give(walker, step, optimizer).gradients)
            if step in (0, 2):
                given.begin["hyper"] = [[{"lr": lr}]]
            used.append((given, lr))
            return given

        world.contribute = mine
        world.checker = Quiet()
        world.checker.begins(world)
        world.run()
        for server, part in zip(world.servers, world.layout.parts, strict=True):
            for block in part.blocks:
                expected = world.parameters[block.index].detach().reshape(-1)[block.start : block.stop].clone()
                for given, lr in used:
                    gradient = given.gradients[block.index]
                    assert gradient is not None
                    expected -= lr * gradient.reshape(-1)[block.start : block.stop]
                assert torch.equal(server.store.flats[block.number], expected), f"seed {seed}"
