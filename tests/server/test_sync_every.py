"""async with a full synchronisation every k steps, in random order."""

from __future__ import annotations

import random

import pytest
from checker import MeetingChecker
from simulation import LR, Plan, World, random_plans

from hora.server.state import Rules


def run(seed: int, plans: list[Plan], every: int, num_servers: int) -> MeetingChecker:
    checker = MeetingChecker(LR)
    rules = Rules(mode="async", sync_every=every)
    world = World(seed, rules, plans, checker, num_servers=num_servers, lines=1 + seed % 2)
    try:
        world.run()
    except Exception as problem:
        raise AssertionError(f"seed {seed}: {problem!r}") from problem
    return checker


@pytest.mark.cases(3)
@pytest.mark.parametrize("batch", range(8))
def test_all_that_train_hold_the_same_bits_after_every_kth_step(batch: int) -> None:
    """Some rest, leave, come later, or are killed, also while the others wait for them."""
    met = 0
    for seed in range(batch * 40, batch * 40 + 40):
        dice = random.Random(seed)
        plans = random_plans(dice, dice.randint(1, 5), dice.randint(2, 7), lively=True)
        checker = run(seed, plans, dice.randint(1, 3), dice.randint(1, 3))
        met += sum(count > 1 for count in checker.met.values())
    assert met > 15


def test_all_present_come_together_at_every_kth_step() -> None:
    for seed in range(60):
        dice = random.Random(seed)
        num_workers, every = dice.randint(2, 5), dice.randint(1, 3)
        script: list[str | int] = ["enter", "pause", *[0] * 6, "rest"]
        plans = [Plan(script, pace=dice.choice([0.05, 1.0, 4.0])) for _ in range(num_workers)]
        checker = run(seed, plans, every, dice.randint(1, 3))
        assert checker.met == dict.fromkeys(range(every, 7, every), num_workers), f"seed {seed}"


@pytest.mark.cases(1)
@pytest.mark.parametrize("end", ["rest", "bye", "killed"])
def test_one_that_never_comes_to_the_meeting_is_not_waited_for(end: str) -> None:
    for seed in range(60):
        dice = random.Random(seed)
        plans = [Plan(["enter", "pause", *[0] * 4, "rest"], pace=2.0) for _ in range(3)]
        if end == "killed":
            plans[1].dies = dice.randint(15, 80)
            plans[1].pace = 0.05
        else:
            plans[1].script = ["enter", "pause", 0, end]
        checker = run(seed, plans, 2, dice.randint(1, 3))
        assert checker.met[2] >= 2 and checker.met[4] >= 2, f"seed {seed}"
