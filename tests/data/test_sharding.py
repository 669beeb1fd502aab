"""A torch DataLoader is taken over with its options; what cannot be dealt is refused with the way out."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from callbacks import Count, Numbers, Recorder, SingleWorkerCallbacks, flat, global_batches, ranks
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from hora.data import shard


def samples(loader: Any) -> list[int]:
    return [number for batch in loader for number in batch.tolist()]


def test_a_plain_loader_is_dealt_in_its_order() -> None:
    loaders = ranks(2, lambda: DataLoader(Numbers(10), batch_size=2))
    assert loaders[0].global_batch == 4
    assert not loaders[0].shuffle
    assert global_batches(loaders) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_shuffling_loader_is_shuffled_by_seed_and_epoch() -> None:
    ours = shard(Numbers(10), SingleWorkerCallbacks(), batch_size=2, shuffle=True, seed=4)
    theirs = shard(DataLoader(Numbers(10), batch_size=2, shuffle=True), SingleWorkerCallbacks(), seed=4)
    assert theirs.shuffle
    assert [samples(ours), samples(ours)] == [samples(theirs), samples(theirs)]


def test_shuffle_can_be_chosen_over_the_loaders() -> None:
    shuffling = DataLoader(Numbers(10), batch_size=2, shuffle=True)
    assert samples(shard(shuffling, SingleWorkerCallbacks(), shuffle=False)) == list(range(10))
    plain = shard(DataLoader(Numbers(10), batch_size=2), SingleWorkerCallbacks(), shuffle=True)
    assert samples(plain) == samples(shard(shuffling, SingleWorkerCallbacks()))


def test_global_batch_can_be_chosen_over_the_loaders() -> None:
    loaders = ranks(2, lambda: DataLoader(Numbers(10), batch_size=2), global_batch=5)
    assert [len(batch) for batch in global_batches(loaders)] == [5, 5]


def test_drop_last_and_collate_come_along() -> None:
    loader = shard(DataLoader(Numbers(5), batch_size=2, drop_last=True, collate_fn=tuple), SingleWorkerCallbacks())
    assert list(loader) == [(0, 1), (2, 3)]
    assert len(loader) == 2


def greet(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.greeted = worker + 10  # type: ignore[union-attr]


class Greeted(Numbers):
    greeted = -1

    def __getitem__(self, index: int) -> Any:
        return index, self.greeted


def test_every_option_of_the_processes_comes_along() -> None:
    theirs = DataLoader(
        Greeted(8),
        batch_size=2,
        num_workers=2,
        timeout=30,
        worker_init_fn=greet,
        multiprocessing_context="fork",
        prefetch_factor=1,
        persistent_workers=True,
    )
    loader = shard(theirs, SingleWorkerCallbacks())
    inner = loader._source._loader  # type: ignore[attr-defined]
    for name in ("num_workers", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers", "pin_memory"):
        assert getattr(inner, name) == getattr(theirs, name)
    assert inner.multiprocessing_context.get_start_method() == "fork"
    assert [worker.tolist() for _, worker in loader] == [[10, 10], [11, 11], [10, 10], [11, 11]]
    children = {child.pid for child in multiprocessing.active_children()}
    assert len(children) == 2
    for _ in loader:
        break
    assert [index.tolist() for index, _ in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {child.pid for child in multiprocessing.active_children()} == children
    del loader, inner
    assert multiprocessing.active_children() == []


def test_the_options_of_this_process_come_along() -> None:
    theirs = DataLoader(Numbers(4), batch_size=2, pin_memory=True)
    inner = shard(theirs, SingleWorkerCallbacks())._source._loader  # type: ignore[attr-defined]
    assert inner.pin_memory
    assert inner.dataset is theirs.dataset


def test_a_sampler_over_something_smaller_counts_its_own_samples() -> None:
    assert samples(shard(DataLoader(Numbers(10), sampler=SequentialSampler(range(4))), SingleWorkerCallbacks())) == [
        0,
        1,
        2,
        3,
    ]
    shuffled = shard(DataLoader(Numbers(10), sampler=RandomSampler(range(4))), SingleWorkerCallbacks())
    assert len(shuffled) == 4
    assert sorted(samples(shuffled)) == [0, 1, 2, 3]


def test_torchs_own_batch_sampler_is_understood() -> None:
    batches = BatchSampler(SequentialSampler(range(5)), batch_size=2, drop_last=True)
    loader = shard(DataLoader(Numbers(5), batch_sampler=batches), SingleWorkerCallbacks())
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler([1.0] * 20, 20),
    "replacement": lambda: RandomSampler(range(20), replacement=True),
    "fewer": lambda: RandomSampler(range(20), num_samples=7),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6]),
    "list": lambda: [5, 3, 5, 0, 19, 7, 1],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_other_sampler_is_drawn_on_rank_0_and_dealt(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hora.data"):
        loaders = ranks(3, lambda: DataLoader(Numbers(20), batch_size=2, sampler=SAMPLERS[name]()))
    assert [record.message for record in caplog.records] == [
        f"{type(SAMPLERS[name]()).__name__}: rank 0 draws the samples of every epoch for all workers"
    ]
    board = loaders[0]._callbacks._board  # type: ignore[attr-defined]
    for epoch in range(2):
        batches = global_batches(loaders)
        assert flat(batches) == board[epoch].tolist()
        assert len(batches) == len(loaders[0]) == len(loaders[2])
    if name != "list":
        assert board[0].tolist() != board[1].tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_goes_on_with_the_same_draw(num_workers: int) -> None:
    def make() -> list[Any]:
        return ranks(
            2,
            lambda: DataLoader(Numbers(20), 3, sampler=WeightedRandomSampler([1.0] * 20, 20), num_workers=num_workers),
        )

    stopped, resumed = make(), make()
    for loader in stopped:
        loader._callbacks.stop_before = 1
    first = global_batches(stopped)
    drawn = stopped[0]._callbacks._board[0].tolist()
    for loader, other in zip(resumed, stopped, strict=True):
        state = json.loads(json.dumps(other.state()))
        assert state == {"epoch": 0, "batch": 1, "order": drawn}
        loader.load(state)
        assert loader.state() == state
    assert flat(first + global_batches(resumed)) == drawn
    assert resumed[0]._callbacks._board == []
    assert resumed[0].state() == {"epoch": 1, "batch": 0}
    assert flat(global_batches(resumed)) == resumed[0]._callbacks._board[0].tolist() != drawn


def test_a_draw_and_a_loader_without_a_sampler_do_not_fit() -> None:
    plain = shard(Numbers(5), SingleWorkerCallbacks(), batch_size=1)
    with pytest.raises(ValueError, match="saved from a loader with a sampler; this loader has none"):
        plain.load({"epoch": 0, "batch": 1, "order": [1, 0]})
    drawing = shard(DataLoader(Numbers(5), sampler=[1, 0]), SingleWorkerCallbacks())
    with pytest.raises(ValueError, match="saved from a loader without a sampler; this loader has one"):
        drawing.load({"epoch": 0, "batch": 1})
    drawing.load({"epoch": 1, "batch": 0})


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class EndlessWithLength(Endless):
    def __len__(self) -> int:
        return 4


class Mine(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield [0]


def refuse(data: Any, words: str, callbacks: Any = None, **options: Any) -> None:
    with pytest.raises(ValueError, match=words):
        shard(data, callbacks or SingleWorkerCallbacks(), **options)


def test_one_batch_size_is_asked_for() -> None:
    refuse(Numbers(4), r"either batch_size, per worker, or global_batch.* neither was given, so say job\.shard")
    refuse(Numbers(4), r"either batch_size.* both were given, so say job\.shard", batch_size=2, global_batch=4)


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_batch_sizes_are_whole_numbers(value: Any) -> None:
    refuse(Numbers(4), r"batch_size=.*: give a whole number, 1 or more", batch_size=value)
    refuse(Numbers(4), r"global_batch=.*: give a whole number, 1 or more", global_batch=value)


def test_other_numbers_are_whole_too() -> None:
    refuse(Numbers(4), r"num_workers=-1: give a whole number, 0 or more", batch_size=1, num_workers=-1)
    refuse(Numbers(4), r"seed=None: give a whole number$", batch_size=1, seed=None)


def test_options_that_a_loader_has_are_not_given_twice() -> None:
    loader = DataLoader(Numbers(4), batch_size=2)
    refuse(loader, "a DataLoader and batch_size, num_workers too: set that in", batch_size=0, num_workers=1)
    refuse(
        loader,
        "a DataLoader and drop_last, collate_fn, pin_memory too",
        drop_last=True,
        collate_fn=list,
        pin_memory=True,
    )


def test_what_hora_cannot_deal_is_refused_with_the_way_out() -> None:
    sampler: Any = DistributedSampler(Numbers(4), num_replicas=2, rank=0)
    refuse(DataLoader(Numbers(4), sampler=sampler), "DistributedSampler, but Hora divides the samples itself: give the")
    nested = BatchSampler(sampler, 2, False)
    refuse(DataLoader(Numbers(4), batch_sampler=nested), "DistributedSampler, but Hora divides the samples itself")
    refuse(DataLoader(Numbers(4), batch_sampler=Mine()), r"batch_sampler of its own \(Mine\).*: give it batch_size")
    refuse(DataLoader(Numbers(4), batch_size=None), "batch_size=None.*: give it a batch_size")
    refuse(DataLoader(Count(4), batch_size=None), "batch_size=None.*: give it a batch_size")
    refuse(DataLoader(Numbers(4), sampler=Endless()), "Endless does not say how many samples .*: give it a __len__")
    refuse(DataLoader(Numbers(4), sampler=[1]), "shuffle=True has no effect .* list draws: leave one", shuffle=True)
    refuse((number for number in range(4)), "the samples of a generator: give a dataset with __len__", batch_size=1)
    refuse(shard([1], SingleWorkerCallbacks(), batch_size=1), "the samples of a Shard: give a dataset", batch_size=1)
    refuse(DataLoader(Numbers(4), num_workers=1, in_order=False), "in_order=False would mix the .*: leave it out")


def test_a_sampler_must_keep_its_word() -> None:
    callbacks = Recorder()
    loader = shard(DataLoader(Numbers(4), sampler=EndlessWithLength()), callbacks)
    with pytest.raises(
        ValueError, match=r"EndlessWithLength gives more samples than the 4 of its len\(\): both must be"
    ):
        list(loader)
    assert callbacks.calls[-1] == ("leave", False)
    names: Any = ["a", "b"]
    with pytest.raises(ValueError, match="list yields samples that are not integers: it must yield indices"):
        list(shard(DataLoader(Numbers(4), sampler=names), SingleWorkerCallbacks()))
