"""A dealt ledger gives every sample to exactly one worker, and the same global batches to any number of them."""

from __future__ import annotations

import random

import pytest
import torch

from hora.data import BatchSlice, Dealt
from hora.data.ledger import Streamed, mix, order

SIZES = (1, 2, 3, 4, 8)


def portions(ledger: Dealt | Streamed) -> list[BatchSlice]:
    return list(iter(ledger.take, None))


def cases(count: int) -> list[tuple[int, int, bool]]:
    draw = random.Random(0)
    edges = [(0, 1, False), (0, 4, True), (1, 1, False), (1, 100, False), (1, 100, True), (7, 8, False), (8, 8, True)]
    return edges + [(draw.randrange(200), draw.randrange(1, 40), draw.random() < 0.5) for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_every_sample_is_dealt_exactly_once(size: int) -> None:
    for num_samples, global_batch, drop_last in cases(100):
        dealt: list[int] = []
        for rank in range(size):
            for part in portions(Dealt(num_samples, global_batch, rank=rank, size=size, drop_last=drop_last)):
                first = part.start + part.offset
                dealt += range(first, first + part.mine)
        end = num_samples - num_samples % global_batch if drop_last else num_samples
        assert sorted(dealt) == list(range(end))


@pytest.mark.parametrize("size", SIZES)
def test_the_kth_global_batch_is_the_same_for_any_number_of_workers(size: int) -> None:
    for num_samples, global_batch, drop_last in cases(100):
        alone = portions(Dealt(num_samples, global_batch, drop_last=drop_last))
        together = [
            portions(Dealt(num_samples, global_batch, rank=rank, size=size, drop_last=drop_last))
            for rank in range(size)
        ]
        for whole, *parts in zip(alone, *together, strict=True):
            assert {(part.batch, part.start, part.total) for part in parts} == {(whole.batch, whole.start, whole.mine)}
            position = 0
            for part in parts:
                assert part.offset == position
                position += part.mine
            assert position == whole.mine


@pytest.mark.parametrize("size", SIZES)
def test_parts_differ_by_at_most_one_and_the_absent_come_last(size: int) -> None:
    for total in range(40):
        parts = [BatchSlice.deal(0, 0, total, rank, size) for rank in range(size)]
        mine = [part.mine for part in parts]
        assert max(mine) - min(mine) <= 1
        assert mine == sorted(mine, reverse=True)
        assert {part.present for part in parts} == {sum(count > 0 for count in mine)}
        assert {part.whole for part in parts} == {all(mine)}


def test_num_batches_counts_the_short_one_unless_it_is_dropped() -> None:
    assert Dealt(10, 4).num_batches == 3
    assert Dealt(10, 4, drop_last=True).num_batches == 2
    assert Dealt(8, 4).num_batches == Dealt(8, 4, drop_last=True).num_batches == 2
    assert Dealt(0, 4).num_batches == Dealt(3, 4, drop_last=True).num_batches == 0
    assert Dealt(0, 4).take() is None


def test_beginning_at_a_batch_deals_exactly_the_rest() -> None:
    for num_samples, global_batch, drop_last in cases(50):
        whole = portions(Dealt(num_samples, global_batch, rank=1, size=3, drop_last=drop_last))
        for begin in range(len(whole) + 1):
            rest = Dealt(num_samples, global_batch, rank=1, size=3, drop_last=drop_last, begin=begin)
            assert rest.view().num_done == begin
            assert portions(rest) == whole[begin:]


def test_beginning_beyond_the_end_names_both_numbers_and_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"batch 4 .* has only 3: restore with the dataset and the global batch size"):
        Dealt(10, 4, begin=4)


def test_the_view_says_done_leased_pending_and_what_is_held() -> None:
    ledger = Dealt(10, 4, rank=1, size=2)
    first, second = ledger.take(), ledger.take()
    assert first is not None and second is not None
    ledger.done(first)
    view = ledger.view()
    assert (view.num_done, view.num_leased, view.num_pending) == (1, 1, 1)
    assert (view.samples_done, view.num_samples) == (4, 10)
    assert view.held == (second,)
    assert str(view) == (
        "all workers: 1 of 3 batches done, 1 leased, 1 pending; 4 of 10 samples done\n"
        "rank 1 of 2 holds 2 samples, of batch 1"
    )


def test_the_view_of_a_finished_epoch_has_everything_done() -> None:
    ledger = Dealt(10, 4, drop_last=True)
    for part in portions(ledger):
        ledger.done(part)
    assert str(ledger.view()) == (
        "all workers: 2 of 2 batches done, 0 leased, 0 pending; 8 of 8 samples done\nrank 0 of 1 holds nothing"
    )


def test_done_twice_is_done_once() -> None:
    ledger = Dealt(10, 4)
    part = ledger.take()
    assert part is not None
    ledger.done(part)
    ledger.done(part)
    assert ledger.view().num_done == 1


def test_release_gives_back_what_was_taken_and_not_done() -> None:
    ledger = Dealt(10, 4)
    first, second, third = portions(ledger)
    ledger.done(first)
    ledger.release()
    view = ledger.view()
    assert (view.num_done, view.num_leased, view.num_pending, view.samples_done) == (1, 0, 2, 4)
    assert portions(ledger) == [second, third]


def test_a_streamed_ledger_deals_what_comes_and_does_not_know_the_end() -> None:
    ledger = Streamed(iter([4, 4, 1]), 4, rank=1, size=2)
    parts = portions(ledger)
    assert [(part.batch, part.start, part.mine, part.total) for part in parts] == [
        (0, 0, 2, 4),
        (1, 4, 2, 4),
        (2, 8, 0, 1),
    ]
    ledger.done(parts[0])
    view = ledger.view()
    assert (view.num_done, view.num_leased, view.num_pending, view.num_samples) == (1, 2, None, None)
    assert "1 batches done, 2 leased, the length of the stream is not known; 4 samples done" in str(view)


def test_a_streamed_ledger_passes_over_what_is_done() -> None:
    whole = portions(Streamed(iter([4, 4, 1]), 4))
    for begin in range(4):
        ledger = Streamed(iter([4, 4, 1]), 4, begin=begin)
        assert portions(ledger) == whole[begin:]
        assert ledger.view().samples_done == sum([4, 4, 1][:begin])
    with pytest.raises(ValueError, match=r"batch 4 of the stream, .* ended after 3: restore with the stream"):
        Streamed(iter([4, 4, 1]), 4, begin=4).take()


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = {}
    for seed in (-1, 0, 1, 2**63):
        for epoch in range(4):
            torch.manual_seed(seed % 7 + epoch)
            drawn = order(50, True, seed, epoch)
            torch.manual_seed(99)
            assert torch.equal(drawn, order(50, True, seed, epoch))
            assert drawn.dtype == torch.int64
            assert sorted(drawn.tolist()) == list(range(50))
            orders[seed, epoch] = tuple(drawn.tolist())
    assert len(set(orders.values())) == len(orders)


def test_the_order_without_shuffle_is_the_datasets() -> None:
    assert order(5, False, 3, 4).tolist() == [0, 1, 2, 3, 4]
    assert order(0, True, 0, 0).tolist() == order(0, False, 0, 0).tolist() == []


def test_drawing_an_order_leaves_the_users_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    order(100, True, 0, 0)
    assert torch.equal(torch.rand(3), expected)


def test_mixing_keeps_neighbours_apart() -> None:
    seeds = [mix(seed, epoch) & 0xFFFFFFFF for seed in range(50) for epoch in range(50)]  # torch looks at 32 bits
    assert len(set(seeds)) == len(seeds)
    assert mix(1, 2) != mix(2, 1)
    assert mix(1, 11) != mix(11, 1) != mix(111)
    assert mix(0, 0) == mix(0, 0)
