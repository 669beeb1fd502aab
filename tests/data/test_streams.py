"""A stream is read by every worker, and each keeps its part of every global batch."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from callbacks import Count, Recorder, SingleWorkerCallbacks, SizedCount, flat, global_batches, ranks
from torch.utils.data import DataLoader, IterableDataset

from hora.data import shard


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_kth_global_batch_is_the_next_samples_of_the_stream(size: int) -> None:
    draw = random.Random(2)
    for _ in range(10):
        length, global_batch = draw.randrange(50), draw.randrange(1, 12)
        loaders = ranks(size, lambda n=length: Count(n), global_batch=global_batch)
        expected = [list(range(length))[k : k + global_batch] for k in range(0, length, global_batch)]
        assert global_batches(loaders) == expected


def test_a_loader_around_a_stream_brings_its_options() -> None:
    loaders = ranks(2, lambda: DataLoader(Count(11), batch_size=2, drop_last=True, num_workers=1))
    assert global_batches(loaders) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert multiprocessing.active_children() == []
    tuples = shard(DataLoader(Count(3), batch_size=2, collate_fn=tuple), SingleWorkerCallbacks())
    assert list(tuples) == [(0, 1), (2,)]


def test_the_short_last_batch_is_dealt_like_any_other() -> None:
    all_callbacks = [Recorder(rank, 3) for rank in range(3)]
    seen = [torch.cat(list(shard(Count(8), callbacks, global_batch=6))).tolist() for callbacks in all_callbacks]
    assert seen == [[0, 1, 6], [2, 3, 7], [4, 5]]
    assert all_callbacks[2].calls[-2:] == [("absent", 1), ("leave", True)]


def test_nobody_knows_the_length_unless_the_stream_does() -> None:
    with pytest.raises(TypeError, match="batches of a Count is not known before it was read: give it a __len__"):
        len(shard(Count(8), SingleWorkerCallbacks(), batch_size=2))
    assert len(shard(SizedCount(9), SingleWorkerCallbacks(), batch_size=2)) == 5
    assert len(shard(SizedCount(9), SingleWorkerCallbacks(), batch_size=2, drop_last=True)) == 4


def test_an_empty_stream_is_an_epoch_without_batches() -> None:
    callbacks = Recorder()
    loader = shard(Count(0), callbacks, batch_size=2)
    assert list(loader) == []
    assert callbacks.verbs() == ["enter", "leave"]
    assert loader.state() == {"epoch": 1, "batch": 0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resuming_passes_over_what_is_done(num_workers: int) -> None:
    def make() -> list[Any]:
        return ranks(2, lambda: Count(11), global_batch=4, num_workers=num_workers)

    stopped, resumed = make(), make()
    for loader in stopped:
        loader._callbacks.stop_before = 2
    first = global_batches(stopped)
    assert multiprocessing.active_children() == []
    for loader, other in zip(resumed, stopped, strict=True):
        state = json.loads(json.dumps(other.state()))
        assert state == {"epoch": 0, "batch": 2}
        loader.load(state)
        assert (loader.view().num_done, loader.view().samples_done) == (2, 8)
    assert flat(first + global_batches(resumed)) == list(range(11))
    assert global_batches(resumed)[0] == [0, 1, 2, 3]


def test_a_stream_shorter_than_its_state_is_refused() -> None:
    loader = shard(Count(3), SingleWorkerCallbacks(), batch_size=2)
    loader.load({"epoch": 0, "batch": 5})
    with pytest.raises(ValueError, match="resumes at batch 5 of the stream, but it ended after 2"):
        list(loader)


def test_break_lets_go_of_the_reading_process() -> None:
    callbacks = Recorder()
    loader = shard(Count(100), callbacks, batch_size=2, num_workers=1)
    for _ in loader:
        assert len(multiprocessing.active_children()) == 1
        break
    assert callbacks.calls[-1] == ("leave", False)
    assert multiprocessing.active_children() == []
    assert loader.state() == {"epoch": 0, "batch": 0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_of_the_stream_reaches_the_user(num_workers: int) -> None:
    class Broken(Count):
        def __iter__(self) -> Iterator[int]:
            yield from range(3)
            raise KeyError("the stream is broken")

    callbacks = Recorder()
    with pytest.raises(KeyError, match="the stream is broken"):
        list(shard(Broken(9), callbacks, batch_size=2, num_workers=num_workers))
    assert callbacks.calls[-1] == ("leave", False)
    assert multiprocessing.active_children() == []


def test_the_stream_is_read_once_per_epoch() -> None:
    data = Count(6)
    loader = shard(data, SingleWorkerCallbacks(), batch_size=2)
    list(loader)
    list(loader)
    assert data.times_read == 2


def test_a_kept_process_reads_the_next_epoch() -> None:
    loader = shard(DataLoader(Count(5), batch_size=2, num_workers=1, persistent_workers=True), SingleWorkerCallbacks())
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4]
    assert len(multiprocessing.active_children()) == 1
    del loader
    assert multiprocessing.active_children() == []


class Shuffled(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())


def test_a_stream_shuffled_in_its_process_is_the_same_on_every_worker() -> None:
    loaders = ranks(3, Shuffled, global_batch=6, num_workers=1)
    first, second = flat(global_batches(loaders)), flat(global_batches(loaders))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_what_a_stream_cannot_do_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ValueError, match=r"shuffle=True cannot reorder a stream \(Count\): shuffle inside its __iter__"
    ):
        shard(Count(4), SingleWorkerCallbacks(), batch_size=2, shuffle=True)
    for several in (DataLoader(Count(4), batch_size=2, num_workers=2), Count(4)):
        options: Any = {} if isinstance(several, DataLoader) else {"batch_size": 2, "num_workers": 2}
        with pytest.raises(ValueError, match=r"would read the stream .* once per process: give num_workers=1, or 0"):
            shard(several, SingleWorkerCallbacks(), **options)


def test_the_view_of_a_stream_does_not_pretend_to_know_the_end() -> None:
    loader = shard(Count(5), SingleWorkerCallbacks(), batch_size=2)
    list(loader)
    assert "3 batches done, 0 leased, the length of the stream is not known; 5 samples done" in str(loader.view())
