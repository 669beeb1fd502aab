"""A loader gives every worker its part, calls its callbacks, and resumes from a saved state."""

from __future__ import annotations

import gc
import json
import multiprocessing
import random
from typing import Any

import pytest
import torch
from callbacks import Numbers, Recorder, SingleWorkerCallbacks, flat, global_batches, ranks
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hora.data import shard


@pytest.mark.parametrize("shuffle", [False, True])
def test_global_batches_are_the_same_on_any_number_of_workers(shuffle: bool) -> None:
    draw = random.Random(1)
    for _ in range(15):
        num_samples, global_batch = draw.randrange(60), draw.randrange(1, 20)
        alone = global_batches(ranks(1, lambda n=num_samples: Numbers(n), global_batch=global_batch, shuffle=shuffle))
        assert sorted(flat(alone)) == list(range(num_samples))
        for size in (2, 3, 4, 8):
            loaders = ranks(size, lambda n=num_samples: Numbers(n), global_batch=global_batch, shuffle=shuffle)
            assert global_batches(loaders) == alone
            assert {len(loader) for loader in loaders} == {len(alone)}


def test_batch_size_is_per_worker_and_global_batch_is_the_truth() -> None:
    loaders = ranks(3, lambda: Numbers(20), batch_size=4)
    assert {(loader.batch_size, loader.global_batch) for loader in loaders} == {(4, 12)}
    assert [len(batch) for batch in global_batches(loaders)] == [12, 8]
    assert ranks(3, lambda: Numbers(20), global_batch=10)[0].batch_size == pytest.approx(10 / 3)
    assert isinstance(ranks(2, lambda: Numbers(20), global_batch=10)[0].batch_size, int)


def test_epochs_differ_with_shuffle_and_repeat_with_the_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = shard(Numbers(30), SingleWorkerCallbacks(), batch_size=30, shuffle=True, seed=seed)
        return [next(iter(list(loader))).tolist() for _ in range(3)]

    first = epochs(0)
    assert first == epochs(0)
    assert first != epochs(1)
    assert first[0] != first[1] != first[2]


def test_the_epoch_of_the_job_beats_the_loaders_own_count() -> None:
    callbacks = Recorder()
    loader = shard(Numbers(30), callbacks, batch_size=30, shuffle=True)
    own = [[batch.tolist() for batch in loader] for _ in range(3)]
    callbacks.now = 1
    assert [batch.tolist() for batch in loader] == own[1]
    assert [batch.tolist() for batch in loader] == own[1]
    callbacks.now = None
    assert [batch.tolist() for batch in loader] == own[2]


def test_a_batch_is_what_torch_would_give() -> None:
    data = TensorDataset(torch.arange(10.0).reshape(5, 2), torch.arange(5))
    for ours, theirs in zip(
        shard(data, SingleWorkerCallbacks(), batch_size=2), DataLoader(data, batch_size=2), strict=True
    ):
        assert type(ours) is type(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("data", [[1.0, 2.0, 3.0], torch.tensor([1.0, 2.0, 3.0]), (1.0, 2.0, 3.0)])
def test_anything_with_a_length_and_items_is_a_dataset(data: Any) -> None:
    assert torch.cat(list(shard(data, SingleWorkerCallbacks(), batch_size=2))).tolist() == [1.0, 2.0, 3.0]


def test_collate_and_drop_last_are_the_users() -> None:
    loader = shard(Numbers(5), SingleWorkerCallbacks(), batch_size=2, drop_last=True, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3)]
    assert len(loader) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_without_samples_is_an_epoch_without_batches(num_workers: int) -> None:
    callbacks = Recorder()
    loader = shard([], callbacks, batch_size=2, num_workers=num_workers)
    assert len(loader) == 0
    assert list(loader) == []
    assert callbacks.verbs() == ["enter", "leave"]
    assert loader.state() == {"epoch": 1, "batch": 0}


def test_a_dataset_that_grows_counts_from_the_next_epoch() -> None:
    data = Numbers(4)
    loader = shard(data, SingleWorkerCallbacks(), batch_size=2)
    seen = []
    for batch in loader:
        data.length = 6
        seen += batch.tolist()
    assert seen == [0, 1, 2, 3]
    assert len(loader) == 3
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_seat_hears_everything_in_order() -> None:
    callbacks = Recorder()
    loader = shard(Numbers(3), callbacks, batch_size=2)
    for _ in loader:
        callbacks.calls.append(("user", None))
    assert callbacks.calls == [
        ("enter", loader),
        ("begin", 0),
        ("user", None),
        ("finish", 0),
        ("begin", 1),
        ("user", None),
        ("finish", 1),
        ("leave", True),
    ]


def test_a_worker_without_samples_is_absent_while_training_only() -> None:
    callbacks = Recorder(rank=2, size=3)
    loader = shard(Numbers(8), callbacks, global_batch=3)
    assert torch.cat(list(loader)).tolist() == [2, 5]
    assert callbacks.calls[-2:] == [("absent", 2), ("leave", True)]
    callbacks.trains = False
    callbacks.calls.clear()
    assert torch.cat(list(loader)).tolist() == [2, 5]
    assert "absent" not in callbacks.verbs()
    assert loader.view().num_done == 3


def test_a_worker_that_never_has_samples_is_absent_in_every_batch() -> None:
    callbacks = Recorder(rank=3, size=4)
    assert list(shard(Numbers(6), callbacks, global_batch=3)) == []
    assert callbacks.verbs() == ["enter", "absent", "absent", "leave"]


def test_break_leaves_at_once() -> None:
    callbacks = Recorder()
    for _ in shard(Numbers(6), callbacks, batch_size=2):
        break
    assert callbacks.calls[1:] == [("begin", 0), ("leave", False)]


def test_an_exception_of_the_users_leaves_at_once_even_while_its_traceback_lives() -> None:
    callbacks = Recorder()
    with pytest.raises(RuntimeError, match="mine") as caught:
        for _ in shard(Numbers(6), callbacks, batch_size=2):
            raise RuntimeError("mine")
    assert caught.value.__traceback__ is not None
    assert callbacks.calls[-1] == ("leave", False)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_of_the_dataset_reaches_the_user(num_workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise KeyError("sample 3 is broken")
            return index

    callbacks = Recorder()
    loader = shard(Broken(6), callbacks, batch_size=2, num_workers=num_workers)
    with pytest.raises(KeyError, match="sample 3 is broken"):
        list(loader)
    assert callbacks.calls[-1] == ("leave", False)
    assert loader.state() == {"epoch": 0, "batch": 1}
    assert multiprocessing.active_children() == []


def test_stopping_ends_the_loop_before_the_next_batch() -> None:
    callbacks = Recorder()
    callbacks.stop_before = 2
    loader = shard(Numbers(10), callbacks, batch_size=2)
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]
    assert callbacks.calls[-1] == ("leave", True)
    assert loader.state() == {"epoch": 0, "batch": 2}
    view = loader.view()
    assert (view.num_done, view.num_leased, view.num_pending) == (2, 0, 3)


def test_two_loops_are_two_epochs_and_a_break_ends_one() -> None:
    loader = shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2, shuffle=True)
    assert loader.state() == {"epoch": 0, "batch": 0}
    list(loader)
    assert loader.state() == {"epoch": 1, "batch": 0}
    for _ in loader:
        break
    assert loader.state() == {"epoch": 1, "batch": 0}
    list(loader)
    assert loader.state() == {"epoch": 3, "batch": 0}


def test_two_iterations_at_once_are_refused_with_the_way_out() -> None:
    loader = shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2)
    with pytest.raises(ValueError, match=r"being iterated already: finish that loop, .* or make a second loader"):
        list(zip(loader, loader, strict=True))
    first = iter(loader)
    next(first)
    with pytest.raises(ValueError, match="being iterated already"):
        next(iter(loader))
    first.close()
    assert len(list(loader)) == 3


def test_an_abandoned_iteration_is_closed_first() -> None:
    class Holder:
        pass

    callbacks = Recorder()
    loader = shard(Numbers(6), callbacks, batch_size=2)
    gc.disable()
    try:
        holder = Holder()
        holder.me, holder.iterator = holder, iter(loader)  # type: ignore[attr-defined]
        next(holder.iterator)  # type: ignore[attr-defined]
        del holder
        assert callbacks.verbs() == ["enter", "begin"]
        assert len(list(loader)) == 3
    finally:
        gc.enable()
    assert callbacks.verbs()[:4] == ["enter", "begin", "leave", "enter"]


def test_the_state_counts_batches_that_are_done() -> None:
    loader = shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2)
    states = [loader.state() for _ in loader]
    assert states == [{"epoch": 0, "batch": 0}, {"epoch": 0, "batch": 1}, {"epoch": 0, "batch": 2}]


def test_a_batch_whose_step_is_over_can_be_counted_before_the_user_comes_back() -> None:
    class Eager(Recorder):
        def begin(self, loader: Any, portion: Any) -> None:
            super().begin(loader, portion)
            self.portion = portion

    callbacks = Eager()
    loader = shard(Numbers(6), callbacks, batch_size=2)
    for _ in loader:
        assert loader.ledger is not None
        loader.ledger.done(callbacks.portion)
        break
    assert loader.state() == {"epoch": 0, "batch": 1}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_resuming_in_mid_epoch_gives_exactly_the_remaining_samples(size: int, num_workers: int) -> None:
    def make() -> list[Any]:
        return ranks(size, lambda: Numbers(23), global_batch=5, shuffle=True, seed=7, num_workers=num_workers)

    first, whole = (global_batches(loaders) for loaders in [make()] * 2)
    assert first != whole
    for loader in (stopped := make()):
        list(loader)
        loader._callbacks.stop_before = 2
        list(loader)
    resumed = make()
    for loader, other in zip(resumed, stopped, strict=True):
        loader.load(json.loads(json.dumps(other.state())))
        assert loader.state() == {"epoch": 1, "batch": 2}
        assert loader.view().num_done == 2
    assert global_batches(resumed) == whole[2:]
    assert {loader.state()["epoch"] for loader in resumed} == {2}


def test_a_state_at_the_end_of_an_epoch_leaves_nothing_of_it() -> None:
    loader = shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2)
    loader.load({"epoch": 4, "batch": 3})
    assert list(loader) == []
    assert loader.state() == {"epoch": 5, "batch": 0}


def test_a_state_counts_for_its_own_epoch_only() -> None:
    callbacks = Recorder()
    loader = shard(Numbers(6), callbacks, batch_size=2)
    callbacks.now = 2
    loader.load({"epoch": 2, "batch": 1})
    assert torch.cat(list(loader)).tolist() == [2, 3, 4, 5]
    loader.load({"epoch": 2, "batch": 1})
    callbacks.now = 3
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4, 5]


def test_loading_inside_the_loop_counts_for_the_next_one() -> None:
    loader = shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2)
    for _ in loader:
        loader.load({"epoch": 0, "batch": 2})
    assert loader.state() == {"epoch": 0, "batch": 2}
    assert torch.cat(list(loader)).tolist() == [4, 5]


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"epoch": -1, "batch": 0}, {"epoch": 0, "batch": 1.5}, None])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="is no state of a loader: pass what state"):
        shard(Numbers(6), SingleWorkerCallbacks(), batch_size=2).load(state)


def test_a_state_beyond_the_end_is_refused_and_the_loader_left() -> None:
    callbacks = Recorder()
    loader = shard(Numbers(6), callbacks, batch_size=2)
    loader.load({"epoch": 0, "batch": 9})
    with pytest.raises(ValueError, match="resumes at batch 9 of the epoch, but it has only 3"):
        list(loader)
    assert callbacks.calls[-1] == ("leave", False)
    assert len(list(loader)) == 3


def test_the_view_follows_the_loop() -> None:
    loader = shard(Numbers(6), Recorder(1, 2), batch_size=1)
    assert (loader.view().num_done, loader.view().num_pending) == (0, 3)
    for _ in loader:
        assert [portion.batch for portion in loader.view().held] == [0]
        break
    assert loader.view().held == ()
    list(loader)
    assert str(loader.view()).startswith("all workers: 3 of 3 batches done, 0 leased, 0 pending; 6 of 6 samples done")


def test_prefetching_holds_more_than_one_portion() -> None:
    loader = shard(Numbers(20), SingleWorkerCallbacks(), batch_size=2, num_workers=2)
    for _ in loader:
        assert len(loader.view().held) > 1
        assert loader.state() == {"epoch": 0, "batch": 0}
        break


def test_processes_read_the_samples_and_none_is_left() -> None:
    class Where(Numbers):
        def __getitem__(self, index: int) -> Any:
            info = torch.utils.data.get_worker_info()
            return index, -1 if info is None else info.id

    for leave_early in (False, True):
        loader = shard(Where(12), Recorder(1, 2), batch_size=2, num_workers=2)
        seen = []
        for index, worker in loader:
            seen.append((index.tolist(), worker.tolist()))
            if leave_early:
                break
        expected = [([2, 3], [0, 0]), ([6, 7], [1, 1]), ([10, 11], [0, 0])]
        assert seen == expected[: 1 if leave_early else 3]
        assert multiprocessing.active_children() == []


def test_an_absent_worker_with_processes_keeps_in_step() -> None:
    callbacks = Recorder(rank=1, size=2)
    seen = torch.cat(list(shard(Numbers(7), callbacks, global_batch=2, num_workers=2))).tolist()
    assert seen == [1, 3, 5]
    assert [call for call in callbacks.calls if call[0] in ("begin", "absent")] == [
        ("begin", 0),
        ("begin", 1),
        ("begin", 2),
        ("absent", 3),
    ]


def test_loading_leaves_the_users_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    list(shard(Numbers(10), SingleWorkerCallbacks(), batch_size=2, shuffle=True))
    assert torch.equal(torch.rand(4), expected)


class Noise(Dataset[float]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def test_random_numbers_in_processes_follow_seed_epoch_and_rank() -> None:
    def noise(rank: int, seed: int) -> list[list[float]]:
        loader = shard(Noise(), Recorder(rank, 2), batch_size=1, seed=seed, num_workers=1)
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    first = noise(0, 0)
    assert first == noise(0, 0)
    assert first[0] != first[1]
    assert first != noise(1, 0)
    assert first != noise(0, 1)
