from __future__ import annotations

import random

from hora.watch.stragglers import Change, Stragglers

LIVE = {0, 1, 2, 3}


def steps(stragglers: Stragglers, seconds: dict[int, float], count: int, at: float) -> list[tuple[int, Change]]:
    """Each step of each worker is heard by itself, all at the pace of the slowest."""
    changes = []
    for step in range(count):
        at += max(seconds.values())
        for rank, each in seconds.items():
            change = stragglers.hear(rank, [each], LIVE, at)
            if change is not None:
                changes.append((step, change))
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
            assert stragglers.hear(rank, [0.01 if slow else 0.002] * 32, LIVE, at * 0.25) is None


def test_short_steps_that_stay_slow_are_told() -> None:
    stragglers = Stragglers()
    found = [
        stragglers.hear(rank, [0.01 if rank else 0.002] * 32, {0, 1}, at / 4) for at in range(6) for rank in (0, 1)
    ]
    assert [change.rank for change in found if change] == [1]


def test_nobody_alone_is_slow_and_the_dead_are_no_measure() -> None:
    stragglers = Stragglers()
    for at in range(20):
        assert stragglers.hear(0, [0.1], {0}, float(at)) is None
    for at in range(20, 40):
        assert stragglers.hear(1, [1.0], {1}, float(at)) is None
    assert stragglers.hear(1, [1.0], {0, 1}, 40.0) is not None


def test_two_of_five_are_both_named() -> None:
    stragglers = Stragglers()
    pace = {0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1, 4: 0.4}
    found = [
        change.rank
        for step in range(10)
        for rank, seconds in pace.items()
        if (change := stragglers.hear(rank, [seconds], set(pace), step * 0.4)) is not None
    ]
    assert sorted(found) == [1, 4]


def test_noise_names_nobody() -> None:
    stragglers, random_ = Stragglers(), random.Random(3)
    for at in range(2000):
        for rank in LIVE:
            assert stragglers.hear(rank, [random_.uniform(0.08, 0.12) for _ in range(3)], LIVE, at * 0.3) is None


def test_the_forgotten_begin_anew() -> None:
    stragglers = Stragglers()
    steps(stragglers, {0: 0.1, 1: 0.4}, 10, 0.0)
    assert stragglers.factor(1) > 0
    stragglers.forget(1)
    assert stragglers.factor(1) == 0
    assert stragglers.hear(1, [0.4] * 4, LIVE, 9.0) is None
