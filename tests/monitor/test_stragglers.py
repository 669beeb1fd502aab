from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable

import pytest

from hora.monitor.stragglers import StragglerChange, Stragglers

LIVE = {0, 1, 2, 3}


def steps(
    stragglers: Stragglers, seconds: dict[int, float], count: int, at: float
) -> list[tuple[int, StragglerChange]]:
    """Each step of each worker is heard by itself, all at the pace of the slowest."""
    changes: list[tuple[int, StragglerChange]] = []
    for step in range(count):
        at += max(seconds.values())
        for rank, each in seconds.items():
            changes += [(step, change) for change in stragglers.on_report(rank, [each], LIVE, at)]
    return changes


def test_a_slow_worker_is_named_within_ten_steps() -> None:
    found = steps(Stragglers(), {0: 0.1, 1: 0.412, 2: 0.1, 3: 0.102}, 10, 0.0)
    assert [(change.rank, change.slow) for _, change in found] == [(1, True)]
    assert found[0][1].own_s == 0.412 and 0.1 <= found[0][1].others_s <= 0.102


def test_one_that_becomes_slow_later_is_named_within_ten_steps_and_so_is_its_end() -> None:
    stragglers = Stragglers()
    assert steps(stragglers, dict.fromkeys(LIVE, 0.1), 50, 0.0) == []
    [(_, change)] = steps(stragglers, {0: 0.1, 1: 0.1, 2: 0.16, 3: 0.1}, 10, 5.0)
    assert change.rank == 2 and change.slow
    assert stragglers.factor(2) > 1.5 and stragglers.factor(1) == 0
    [(_, change)] = steps(stragglers, dict.fromkeys(LIVE, 0.1), 10, 8.0)
    assert change.rank == 2 and not change.slow
    assert stragglers.factor(2) == 0


def test_between_the_two_bounds_a_worker_stays_what_it_was() -> None:
    stragglers = Stragglers()
    assert steps(stragglers, {0: 0.1, 1: 0.14}, 20, 0.0) == []
    assert len(steps(stragglers, {0: 0.1, 1: 0.2}, 20, 5.0)) == 1
    assert steps(stragglers, {0: 0.1, 1: 0.14}, 20, 10.0) == []
    assert stragglers.factor(1) > 0


def test_less_than_a_millisecond_is_nothing() -> None:
    assert steps(Stragglers(), {0: 0.0001, 1: 0.001}, 5000, 0.0) == []


def test_a_hiccup_of_short_steps_is_not_told() -> None:
    stragglers = Stragglers()
    for at in range(40):
        for rank in LIVE:
            slow = rank == 1 and at == 20
            assert stragglers.on_report(rank, [0.01 if slow else 0.002] * 32, LIVE, at * 0.25) == []


def test_short_steps_that_stay_slow_are_told() -> None:
    stragglers = Stragglers()
    found = [
        change.rank
        for at in range(6)
        for rank in (0, 1)
        for change in stragglers.on_report(rank, [0.01 if rank else 0.002] * 32, {0, 1}, at / 4)
    ]
    assert found == [1]


def test_nobody_alone_is_slow_and_the_dead_are_no_measure() -> None:
    stragglers = Stragglers()
    for at in range(20):
        assert stragglers.on_report(0, [0.1], {0}, float(at)) == []
    for at in range(20, 40):
        assert stragglers.on_report(1, [1.0], {1}, float(at)) == []
    assert stragglers.on_report(1, [1.0], {0, 1}, 40.0) != []


def test_two_of_five_are_both_named() -> None:
    stragglers = Stragglers()
    pace = {0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1, 4: 0.4}
    found = [
        change.rank
        for step in range(10)
        for rank, seconds in pace.items()
        for change in stragglers.on_report(rank, [seconds], set(pace), step * 0.4)
    ]
    assert sorted(found) == [1, 4]


def test_noise_names_nobody() -> None:
    stragglers, random_ = Stragglers(), random.Random(3)
    for at in range(2000):
        for rank in LIVE:
            assert stragglers.on_report(rank, [random_.uniform(0.08, 0.12) for _ in range(3)], LIVE, at * 0.3) == []


def test_the_forgotten_begin_anew() -> None:
    stragglers = Stragglers()
    steps(stragglers, {0: 0.1, 1: 0.4}, 10, 0.0)
    assert stragglers.factor(1) > 0
    stragglers.forget(1)
    assert stragglers.factor(1) == 0
    assert stragglers.on_report(1, [0.4] * 4, LIVE, 9.0) == []


# -- as reports come: a few times a second, each worker's at its own moment -------------------------------------------


def reported(
    pace: Callable[[int, int], float], ranks: int, count: int, seed: int
) -> tuple[list[StragglerChange], list[int]]:
    """Workers that step together report every 0.25 s: the changes, and at which step of the run each was told."""
    stragglers, random_, live = Stragglers(), random.Random(seed), set(range(ranks))
    computes = [[pace(rank, step) for rank in live] for step in range(count)]
    ends = list(itertools.accumulate(max(each) for each in computes))
    phases = [random_.uniform(0.0, 0.25) for _ in live]
    moments = sorted((phases[rank] + 0.25 * k, rank) for rank in live for k in range(int(ends[-1] * 4) + 2))
    told, changes, steps = [0] * ranks, [], []
    for at, rank in moments:
        done = bisect.bisect_right(ends, at)
        newest = [each[rank] for each in computes[told[rank] : done]][-32:]
        told[rank] = done
        for change in stragglers.on_report(rank, newest, live, at, done):
            changes.append(change)
            steps.append(bisect.bisect_right(ends, at + 0.25))  # the watcher looks at it a little later
    return changes, steps


@pytest.mark.parametrize("since", [0, 40])
def test_a_worker_four_times_as_slow_is_named_by_its_eighth_slow_step(since: int) -> None:
    for seed in range(40):
        changes, steps = reported(lambda rank, step: 0.2 if rank == 1 and step >= since else 0.05, 2, since + 15, seed)
        assert [(change.rank, change.slow) for change in changes] == [(1, True)] and steps[0] - since <= 8


@pytest.mark.parametrize("ms", [(5, 12), (25, 60), (100, 300)])
def test_when_all_slow_down_at_once_nobody_is_named(ms: tuple[int, int]) -> None:
    for seed in range(20):
        assert reported(lambda rank, step: ms[step >= 60] / 1000, 4, 120, seed)[0] == []


def test_much_jitter_seldom_names_anybody() -> None:
    random_ = random.Random(1)
    for ranks in (2, 8):
        changes, _ = reported(lambda rank, step: 0.2 * random_.lognormvariate(0.0, 0.3), ranks, 3000, 1)
        assert sum(change.slow for change in changes) <= 10


def test_one_long_step_is_no_reason() -> None:
    for seed in range(20):
        assert reported(lambda rank, step: 2.0 if rank == 1 and step in (0, 30) else 0.05, 2, 60, seed)[0] == []
