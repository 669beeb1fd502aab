"""The schedules keep their docstrings' promises, for every number of ranks from 1 to 16."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from hora.collectives.schedule import (
    SCHEDULES,
    Schedule,
    ScheduledTransfer,
    ScheduleStep,
    State,
    bounds,
    ceil_log2,
    halving,
    initial,
    reduce_serial,
    reduce_tree,
    ring,
    simulate,
    star,
    tree,
)

SIZES = range(1, 17)
every_size = pytest.mark.parametrize("n", SIZES)
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def final(schedule: Schedule) -> State:
    state = initial(schedule)
    for after in simulate(schedule):
        state = after
    return state


def largest_power_of_two(n: int) -> int:
    return max(1 << k for k in range(n.bit_length()) if 1 << k <= n)


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 15, 16, 17, 1000, 1023])
def test_bounds_cover_everything_once_and_differ_by_at_most_one_with_the_larger_first(numel: int) -> None:
    for parts in SIZES:
        cut = bounds(numel, parts)
        sizes = [stop - start for start, stop in cut]
        assert len(cut) == parts and cut[0][0] == 0 and cut[-1][1] == numel
        assert all(a[1] == b[0] for a, b in pairwise(cut))
        assert sizes == [numel // parts + 1] * (numel % parts) + [numel // parts] * (parts - numel % parts)


def test_bounds_refuse_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="parts=0"):
        bounds(3, 0)
    with pytest.raises(ValueError, match="numel=-1"):
        bounds(-1, 2)


@every_schedule
@every_size
def test_everyone_who_should_ends_with_the_sum_of_every_chunk(name: str, n: int) -> None:
    schedule = SCHEDULES[name](n)
    assert (schedule.name, schedule.ranks) == (name, n)
    everyone = frozenset(range(n))
    holders = range(n) if schedule.root is None else [schedule.root]
    state = final(schedule)  # simulate itself asserts that nothing is added twice
    assert all(state[rank] == (everyone,) * schedule.parts for rank in holders)


@every_schedule
def test_one_rank_has_nothing_to_send(name: str) -> None:
    schedule = SCHEDULES[name](1)
    assert schedule.steps == () and schedule.parts == 1 and schedule.num_messages == 0
    assert list(simulate(schedule)) == []


@every_schedule
@pytest.mark.parametrize("n", [0, -1])
def test_a_schedule_of_no_ranks_is_refused(name: str, n: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 rank, got {n}"):
        SCHEDULES[name](n)


@every_schedule
@every_size
def test_no_step_is_empty_and_transfers_stand_in_order_of_rank(name: str, n: int) -> None:
    for step in SCHEDULES[name](n).steps:
        sources = [transfer.source for transfer in step.transfers]
        assert sources and sources == sorted(set(sources)), "a rank sends at most one message per step"
        targets = [transfer.target for transfer in step.transfers]
        assert len(set(targets)) == len(targets), "a rank receives at most one message per step"


@every_schedule
@every_size
def test_elements_sent_agree_with_the_chunks(name: str, n: int) -> None:
    schedule = SCHEDULES[name](n)
    for numel in (0, 3, 16, 101):
        sizes = [stop - start for start, stop in bounds(numel, schedule.parts)]
        for rank in range(n):
            expected = sum(sizes[chunk] for transfer in schedule.sends(rank) for chunk in transfer.chunks)
            assert schedule.elements_sent(rank, numel) == expected
            if numel % schedule.parts == 0:
                assert expected == schedule.share_sent(rank) * numel


def test_adding_twice_is_caught() -> None:
    once = star(3).steps[0]
    with pytest.raises(AssertionError, match=r"rank 0 would hold ranks \[1\] twice"):
        list(simulate(Schedule("bad", 3, 1, (once, once))))


def test_losing_a_contribution_is_caught() -> None:
    overwrite = ScheduleStep("bad", (ScheduledTransfer(1, 0, 0, 1, reduce=False),))
    with pytest.raises(AssertionError, match=r"rank 0 would lose \[0\]"):
        list(simulate(Schedule("bad", 2, 1, (overwrite,))))


def test_two_writes_to_one_chunk_in_one_step_are_caught() -> None:
    both = ScheduleStep("bad", (ScheduledTransfer(1, 0, 0, 1, reduce=True), ScheduledTransfer(2, 0, 0, 1, reduce=True)))
    with pytest.raises(AssertionError, match="written twice"):
        list(simulate(Schedule("bad", 3, 1, (both,))))


def test_a_ring_with_a_step_missing_does_not_finish() -> None:
    whole = ring(4)
    short = replace(whole, steps=whole.steps[:-1])
    assert any(cell != frozenset(range(4)) for row in final(short) for cell in row)


# ── ring ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_size
def test_ring_takes_2n_minus_2_steps_of_one_chunk_and_sends_2_n_minus_1_over_n_of_the_data(n: int) -> None:
    schedule = ring(n)
    assert schedule.num_steps == 2 * (n - 1)
    assert schedule.num_messages == 2 * n * (n - 1)
    assert all(len(transfer.chunks) == 1 for transfer in schedule.transfers)
    for rank in range(n):
        assert len(schedule.sends(rank)) == len(schedule.receives(rank)) == 2 * (n - 1)
        assert schedule.share_sent(rank) == Fraction(2 * (n - 1), n)
        assert Fraction(schedule.chunks_added(rank), n) == Fraction(n - 1, n)


@pytest.mark.parametrize("n", range(2, 17))
@pytest.mark.parametrize("numel", [0, 1, 7, 100])
def test_ring_leaves_out_one_chunk_in_each_phase(n: int, numel: int) -> None:
    sizes = [stop - start for start, stop in bounds(numel, n)]
    for j in range(n):
        assert ring(n).elements_sent(j, numel) == 2 * numel - sizes[(j + 1) % n] - sizes[(j + 2) % n]


@every_size
def test_ring_rank_j_only_sends_to_j_plus_1_and_hears_from_j_minus_1(n: int) -> None:
    schedule = ring(n)
    for j in range(n):
        assert {transfer.target for transfer in schedule.sends(j)} <= {(j + 1) % n}
        assert {transfer.source for transfer in schedule.receives(j)} <= {(j - 1) % n}
        assert schedule.peers(j) <= {(j - 1) % n, (j + 1) % n}


@every_size
def test_ring_sends_the_chunks_that_the_design_says(n: int) -> None:
    schedule = ring(n)
    for i in range(n - 1):
        scatter, gather = schedule.steps[i], schedule.steps[n - 1 + i]
        assert (scatter.phase, gather.phase) == ("scatter-reduce", "all-gather")
        assert [t.start for t in scatter.transfers] == [(j - i) % n for j in range(n)]
        assert [t.start for t in gather.transfers] == [(j + 1 - i) % n for j in range(n)]
        into = {t.target: t.start for t in scatter.transfers}
        assert into == {j: (j - i - 1) % n for j in range(n)}
        into = {t.target: t.start for t in gather.transfers}
        assert into == {j: (j - i) % n for j in range(n)}


@pytest.mark.parametrize("n", range(2, 17))
def test_ring_rank_j_owns_chunk_j_plus_1_after_scatter_reduce(n: int) -> None:
    middle = list(simulate(ring(n)))[n - 2]
    complete = [[chunk for chunk in range(n) if len(row[chunk]) == n] for row in middle]
    assert complete == [[(j + 1) % n] for j in range(n)]


# ── tree ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_size
def test_tree_takes_twice_ceil_log2_n_steps_and_down_mirrors_up(n: int) -> None:
    schedule = tree(n)
    rounds = ceil_log2(n)
    assert schedule.num_steps == 2 * rounds and schedule.num_messages == 2 * (n - 1)
    for up, down in zip(schedule.steps[:rounds], reversed(schedule.steps[rounds:]), strict=True):
        assert (up.phase, down.phase) == ("reduce up", "broadcast down")
        assert [(t.source, t.target) for t in up.transfers] == [(t.target, t.source) for t in down.transfers]


@every_size
def test_tree_round_k_goes_from_ranks_with_bit_k_lowest_to_rank_minus_2_to_the_k(n: int) -> None:
    for k, step in enumerate(tree(n).steps[: ceil_log2(n)]):
        expected = [(r, r - 2**k) for r in range(n) if r % 2 ** (k + 1) == 2**k]
        assert [(t.source, t.target) for t in step.transfers] == expected


@every_size
def test_tree_rank_sends_one_vector_up_and_one_to_each_child_and_none_more_than_ceil_log2_n(n: int) -> None:
    schedule = tree(n)
    for r in range(n):
        lowest = r & -r or n
        children = [r + 2**k for k in range(5) if 2**k < lowest and r + 2**k < n]
        assert schedule.share_sent(r) == (r > 0) + len(children)
        assert schedule.chunks_added(r) == len(children)
        assert schedule.share_sent(r) <= ceil_log2(n)
    assert schedule.share_sent(0) == schedule.chunks_received(0) == ceil_log2(n)


# ── halving ────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_size
def test_halving_takes_twice_log2_p_steps_and_two_for_the_folds_which_is_twice_ceil_log2_n(n: int) -> None:
    schedule = halving(n)
    p = largest_power_of_two(n)
    folds = 2 if n > p else 0
    assert schedule.parts == p
    assert schedule.num_steps == 2 * ceil_log2(p) + folds == 2 * ceil_log2(n)
    assert schedule.num_messages == 2 * p * ceil_log2(p) + 2 * (n - p)
    phases = ["halving"] * ceil_log2(p) + ["doubling"] * ceil_log2(p)
    assert [step.phase for step in schedule.steps] == (["fold in", *phases, "fold out"] if folds else phases)


@every_size
def test_halving_sends_what_its_docstring_says_folds_included(n: int) -> None:
    schedule = halving(n)
    p = largest_power_of_two(n)
    e = n - p
    exchange = Fraction(2 * (p - 1), p)
    for rank in range(n):
        expected = exchange if rank >= 2 * e else exchange + 1 if rank % 2 == 0 else Fraction(1)
        assert schedule.share_sent(rank) == expected
        assert schedule.chunks_received(rank) == schedule.chunks_sent(rank)
    busiest = max(schedule.share_sent(rank) for rank in range(n))
    assert busiest == (3 - Fraction(2, p) if e else Fraction(2 * (n - 1), n))


@every_size
def test_halving_pairs_by_xor_and_the_lower_keeps_the_lower_half(n: int) -> None:
    p = largest_power_of_two(n)
    e = n - p
    participants = [r for r in range(n) if r >= 2 * e or r % 2 == 0]
    steps = [step for step in halving(n).steps if step.phase == "halving"]
    kept = dict.fromkeys(range(p), (0, p))
    for k, step in enumerate(steps):
        bit = p >> (k + 1)
        for v, transfer in enumerate(step.transfers):
            low, high = kept[v]
            middle = (low + high) // 2
            keep, send = ((middle, high), (low, middle)) if v & bit else ((low, middle), (middle, high))
            assert (transfer.source, transfer.target) == (participants[v], participants[v ^ bit])
            assert (transfer.start, transfer.stop, transfer.reduce) == (*send, True)
            kept[v] = keep
    assert kept == {v: (v, v + 1) for v in range(p)}


@pytest.mark.parametrize("n", [n for n in SIZES if n & (n - 1)])
def test_halving_folds_odd_ranks_in_first_and_out_last_and_leaves_them_alone_between(n: int) -> None:
    schedule = halving(n)
    p = schedule.parts
    pairs = [(2 * i + 1, 2 * i) for i in range(n - p)]
    first, *middle, last = schedule.steps
    assert [(t.source, t.target, t.start, t.stop, t.reduce) for t in first.transfers] == [
        (odd, even, 0, p, True) for odd, even in pairs
    ]
    assert [(t.source, t.target, t.start, t.stop, t.reduce) for t in last.transfers] == [
        (even, odd, 0, p, False) for odd, even in pairs
    ]
    busy = {rank for step in middle for t in step.transfers for rank in (t.source, t.target)}
    assert not busy & {odd for odd, _ in pairs}


# ── star and reduce ────────────────────────────────────────────────────────────────────────────────────────────────


@every_size
def test_star_root_receives_adds_and_sends_n_minus_1_vectors_in_rank_order(n: int) -> None:
    schedule = star(n)
    assert schedule.num_steps == schedule.num_messages == 2 * (n - 1)
    assert [t.source for t in schedule.receives(0)] == [t.target for t in schedule.sends(0)] == list(range(1, n))
    assert schedule.chunks_added(0) == n - 1
    assert all(len(schedule.sends(r)) == len(schedule.receives(r)) == 1 for r in range(1, n))


@every_size
def test_reduce_takes_n_minus_1_steps_serially_and_ceil_log2_n_by_tree_with_as_many_messages(n: int) -> None:
    serial, by_tree = reduce_serial(n), reduce_tree(n)
    assert (serial.num_steps, by_tree.num_steps) == (n - 1, ceil_log2(n))
    assert serial.num_messages == by_tree.num_messages == n - 1
    assert (len(serial.receives(0)), len(by_tree.receives(0))) == (n - 1, ceil_log2(n))
    for schedule in (serial, by_tree):
        assert schedule.share_sent(0) == 0 and all(schedule.share_sent(r) == 1 for r in range(1, n))
