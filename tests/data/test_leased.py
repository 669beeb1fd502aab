"""Workers that do not step together: blocks are leased, every sample is done once, workers wait only at the end."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from callbacks import Count, Numbers, Recorder
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from hora.coordinator import InProcessCoordinator, Member
from hora.data import BatchSlice, DataService, LeasedBlock, Shard, shard
from hora.data.ledger import order
from hora.errors import HoraError, PeerLost
from hora.rendezvous.context import RunContext

TOKEN = b"t" * 32


class LeasedCallbacks(Recorder):
    """A worker's callbacks that knows which epoch it is in, and of how many."""

    def __init__(self, rank: int, size: int, num_epochs: int) -> None:
        super().__init__(rank, size)
        self.num_epochs = num_epochs
        self.stop = False
        self.portions: list[BatchSlice] = []
        self.waits: list[bool] = []

    def stopped(self, loader: Shard) -> bool:
        return self.stop

    def begin(self, loader: Shard, portion: BatchSlice) -> None:
        super().begin(loader, portion)
        self.portions.append(portion)

    def last(self) -> bool:
        return self.now is None or self.now == self.num_epochs - 1


class Worker:
    """One worker in a thread: `work(worker)` is its script."""

    def __init__(
        self, hub: InProcessCoordinator, rank: int, size: int, num_epochs: int = 1, leased: bool = True
    ) -> None:
        self.rank = rank
        self.callbacks = LeasedCallbacks(rank, size, num_epochs)
        self.control = hub.connect()
        self.seen: list[tuple[int | None, int]] = []  # epoch of the loop, sample
        self.error: BaseException | None = None
        self.service = DataService(
            RunContext(control=self.control, rank=rank, token=TOKEN, timeout_s=20.0),
            leased=leased,
            last=self.callbacks.last,
            idle=self.callbacks.waits.append,
        )

    def start(self, work: Callable[[Worker], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Worker], None]) -> None:
        try:
            self.control.join(Member("worker", self.rank, "here", 1))
            work(self)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(40)
        assert not self._thread.is_alive(), f"rank {self.rank} hangs"
        if self.error is not None:
            raise self.error

    def shard(self, data: Any, **options: Any) -> Shard:
        return shard(data, self.callbacks, service=self.service, **{"batch_size": 2, **options})

    def train(self, loader: Shard, each: Callable[[], None] = lambda: None) -> None:
        for epoch in range(self.callbacks.num_epochs):
            self.callbacks.now = epoch
            for batch in loader:
                each()
                self.seen += [(epoch, number) for number in batch.tolist()]


def run(size: int, work: Callable[[Worker], None], num_epochs: int = 1, leased: bool = True) -> list[Worker]:
    hub = InProcessCoordinator(size)
    workers = [Worker(hub, rank, size, num_epochs, leased) for rank in range(size)]
    for worker in workers:
        worker.start(work)
    for worker in workers:
        worker.join()
    return workers


def seen(workers: list[Worker]) -> list[int]:
    return sorted(number for worker in workers for _, number in worker.seen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fast_and_slow_workers_do_every_sample_once(num_workers: int) -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(61), shuffle=True, num_workers=num_workers)
        worker.train(loader, lambda: time.sleep(0.05 * worker.rank))

    workers = run(2, work, num_epochs=2)
    assert seen(workers) == sorted(list(range(61)) * 2)
    counts = [len(worker.seen) for worker in workers]
    assert counts[0] > 1.5 * counts[1] > 0
    assert multiprocessing.active_children() == []


def test_a_block_is_a_stretch_of_the_epochs_order_and_weighs_one() -> None:
    (worker,) = run(1, lambda worker: worker.train(worker.shard(Numbers(7), shuffle=True, seed=3), lambda: None))
    assert [number for _, number in worker.seen] == order(7, True, 3, 0).tolist()
    assert [(p.batch, p.start, p.mine, p.total) for p in worker.callbacks.portions] == [
        (0, 0, 2, 2), (1, 2, 2, 2), (2, 4, 2, 2), (3, 6, 1, 1),
    ]  # fmt: skip
    assert all(
        p.whole and p.weight == 1 and p.size == 1 and isinstance(p, LeasedBlock) for p in worker.callbacks.portions
    )
    assert BatchSlice.deal(0, 0, 5, 0, 2).weight == pytest.approx(3 * 2 / 5)


def test_length_batch_size_and_drop_last() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(9), batch_size=None, global_batch=5, drop_last=True)
        assert (len(loader), loader.batch_size) == (2, 2)  # 4 blocks of 2 for 2 workers
        worker.train(loader)

    assert seen(run(2, work)) == list(range(8))


def test_one_request_per_batch_and_done_goes_with_it() -> None:
    hub = InProcessCoordinator(1)
    worker = Worker(hub, 0, 1)
    asked: list[str] = []
    handle = hub.handle

    def count(number: int, request: Any) -> None:
        asked.append(type(request).__name__)
        handle(number, request)

    hub.handle = count  # type: ignore[method-assign]
    worker.start(lambda worker: worker.train(worker.shard(Numbers(6))))
    worker.join()
    assert asked == ["Join"] + ["TakeBlock"] * 4


def test_what_a_slow_worker_has_not_begun_is_taken_over() -> None:
    gate = threading.Event()

    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(20), num_workers=1 if worker.rank == 0 else 0)
        if worker.rank == 0:
            for batch in loader:
                worker.seen += [(0, number) for number in batch.tolist()]
                started.set()
                assert gate.wait(30)
        else:
            assert started.wait(30)
            threading.Timer(0.5, gate.set).start()
            worker.train(loader)

    started = threading.Event()
    workers = run(2, work)
    assert seen(workers) == list(range(20))
    assert len(workers[0].seen) == 2  # what it had begun; two more batches were read for it in vain
    assert workers[1].callbacks.waits == [True, False]


def test_a_dead_workers_block_is_done_by_another_who_waits_for_it_in_the_last_epoch() -> None:
    hub = InProcessCoordinator(2)
    workers = [Worker(hub, rank, 2) for rank in range(2)]
    holding = threading.Event()

    def die(worker: Worker) -> None:
        iterator = iter(worker.shard(Numbers(10)))
        next(iterator)
        holding.set()
        worker.seen.append(iterator)  # type: ignore[arg-type]  # never finished

    def work(worker: Worker) -> None:
        assert holding.wait(10)
        threading.Timer(0.3, hub.died, (0, "killed")).start()
        worker.train(worker.shard(Numbers(10)))

    workers[0].start(die)
    workers[1].start(work)
    workers[1].join()
    assert sorted(number for _, number in workers[1].seen) == list(range(10))
    assert workers[1].callbacks.waits == [True, False]


def test_what_dies_in_an_earlier_epoch_is_read_by_that_epochs_order() -> None:
    hub = InProcessCoordinator(2)
    workers = [Worker(hub, rank, 2, num_epochs=2) for rank in range(2)]
    holding = threading.Event()
    lost: list[int] = []

    def die(worker: Worker) -> None:
        worker.callbacks.now = 0
        iterator = iter(worker.shard(Numbers(12), shuffle=True))
        lost.extend(next(iterator).tolist())
        holding.set()
        worker.seen.append(iterator)  # type: ignore[arg-type]

    def work(worker: Worker) -> None:
        assert holding.wait(10)
        loader = worker.shard(Numbers(12), shuffle=True)
        worker.callbacks.now = 0
        worker.seen += [(0, number) for batch in loader for number in batch.tolist()]
        assert worker.callbacks.waits == []  # it is not the last epoch: nobody idles
        hub.died(0, "killed")
        worker.callbacks.now = 1
        worker.seen += [(1, number) for batch in loader for number in batch.tolist()]

    workers[0].start(die)
    workers[1].start(work)
    workers[1].join()
    first, second = ([n for epoch, n in workers[1].seen if epoch == which] for which in (0, 1))
    assert sorted(first + lost) == list(range(12))
    assert second[:2] == lost
    assert second[2:] == order(12, True, 0, 1).tolist()


def test_a_stop_ends_the_wait_and_the_epoch_is_not_over() -> None:
    hub = InProcessCoordinator(2)
    workers = [Worker(hub, rank, 2) for rank in range(2)]
    holding, over = threading.Event(), threading.Event()

    def hold(worker: Worker) -> None:
        for _ in worker.shard(Numbers(4)):
            holding.set()
            assert over.wait(20)
            break

    def work(worker: Worker) -> None:
        assert holding.wait(10)
        threading.Timer(0.2, setattr, (worker.callbacks, "stop", True)).start()
        loader = worker.shard(Numbers(4))
        worker.train(loader)
        assert loader.state() == {"epoch": 0, "batch": 0, "done": [[0, [[2, 4]]]]}
        over.set()

    for worker, script in zip(workers, (hold, work), strict=True):
        worker.start(script)
    for worker in workers:
        worker.join()
    assert workers[1].callbacks.waits == [True, False]


def test_breaking_out_gives_back_what_was_taken() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(8))
        for _ in loader:
            break
        view = loader.view()
        assert (view.num_done, view.num_leased, view.num_pending) == (0, 0, 4)
        assert loader.state() == {"epoch": 0, "batch": 0, "done": [[0, []]]}
        assert len(list(loader)) == 4  # the next epoch

    run(1, work)


def test_a_step_that_was_taken_counts_though_the_loop_is_left() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(8))
        for _ in loader:
            assert loader.ledger is not None
            loader.ledger.done(worker.callbacks.portions[-1])
            loader.ledger.done(worker.callbacks.portions[-1])
            assert loader.view().num_done == 1
            break
        assert loader.view().num_done == 1

    run(1, work)


def test_two_loops_in_one_epoch_are_two_passes() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(8))
        worker.callbacks.now = 0
        for _ in range(2):
            for batch in loader:
                worker.seen += [(0, number) for number in batch.tolist()]

    assert seen(run(2, work)) == sorted(list(range(8)) * 2)


def test_two_phases_of_epochs_over_one_loader_see_every_sample_in_each() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(21), shuffle=True)
        for _ in range(2):
            worker.train(loader, lambda: time.sleep(0.01 * worker.rank))

    assert seen(run(2, work, num_epochs=3)) == sorted(list(range(21)) * 6)


@pytest.mark.parametrize("size", [1, 3])
def test_a_restored_run_does_exactly_the_rest(size: int) -> None:
    states: list[dict[str, Any]] = []

    def first(worker: Worker) -> None:
        worker.callbacks.now = 0
        loader = worker.shard(Numbers(24), shuffle=True, batch_size=None, global_batch=6)
        for batch in loader:
            worker.seen += [(0, number) for number in batch.tolist()]
            if len(worker.seen) == 12:
                break
        worker.callbacks.now = None
        states.append(json.loads(json.dumps(loader.state())))

    def second(worker: Worker) -> None:
        loader = worker.shard(Numbers(24), shuffle=True, batch_size=None, global_batch=6)
        loader.load(states[-1])
        assert loader.state() == states[-1]
        worker.callbacks.now = 0
        assert loader.view().num_done >= 1
        worker.train(loader)

    before = [number for _, number in run(1, first)[0].seen][:-6]  # the batch it broke out of is not done
    assert states[-1]["epoch"] == 0
    done = [n for _, ranges in states[-1]["done"] for a, b in ranges for n in order(24, True, 0, 0)[a:b].tolist()]
    assert sorted(done) == sorted(before)
    assert seen(run(size, second)) == sorted(set(range(24)) - set(done))


def test_a_dealt_state_is_gone_on_with_and_one_that_does_not_fit_is_refused() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(8))
        loader.load({"epoch": 0, "batch": 1})
        worker.train(loader)
        assert [number for _, number in worker.seen] == [2, 3, 4, 5, 6, 7]
        loader.load({"epoch": 3, "batch": 9})
        with pytest.raises(ValueError, match="has only 8: restore with the dataset"):
            worker.callbacks.now = 3
            list(loader)
        with pytest.raises(ValueError, match="is no state of a loader"):
            loader.load({"epoch": 0, "batch": 0, "done": [[0, [1]]]})

    run(1, work)


def test_a_leased_state_can_be_dealt() -> None:
    loader = shard(Numbers(8), Recorder(), batch_size=2)
    loader.load({"epoch": 0, "batch": 1, "done": [[0, [[0, 2], [4, 6]]]]})
    assert torch.cat(list(loader)).tolist() == [2, 3, 4, 5, 6, 7]


def test_evaluations_are_dealt_and_one_who_joined_reads_everything() -> None:
    def work(worker: Worker) -> None:
        worker.callbacks.trains = False
        worker.callbacks.size = 2
        worker.train(worker.shard(Numbers(8)))

    workers = run(3, work)
    assert [[number for _, number in worker.seen] for worker in workers] == [
        [0, 1, 4, 5], [2, 3, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7],
    ]  # fmt: skip


def test_workers_with_different_datasets_are_told() -> None:
    with pytest.raises(HoraError, match=r"rank \d cuts epoch 0 into \d blocks .* do all workers have the same dataset"):
        run(2, lambda worker: worker.train(worker.shard(Numbers(8 + 4 * worker.rank)), lambda: time.sleep(0.2)))


def test_streams_and_samplers_that_draw_are_refused_with_a_way_out() -> None:
    def work(worker: Worker) -> None:
        with pytest.raises(ValueError, match=r"a stream \(Count\) in blocks: give a dataset .*ps:mode=sync"):
            list(worker.shard(Count(4)))
        loader = DataLoader(Numbers(4), batch_size=2, sampler=WeightedRandomSampler([1.0] * 4, 4))
        with pytest.raises(ValueError, match="WeightedRandomSampler draws: leave the sampler out"):
            list(worker.shard(loader, batch_size=None))

    run(1, work)


# -- a dataset that lies with one rank -------------------------------------------------------------------------------


class Pairs(Dataset[Any]):
    """Sample i is a tensor of i, its number, and a name."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), index, f"n{index}"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("leased", [False, True])
def test_a_dataset_that_lies_with_one_rank_is_handed_out(leased: bool, num_workers: int) -> None:
    def work(worker: Worker) -> None:
        data = Pairs() if worker.rank == 0 else None
        loader = worker.shard(data, source=0, shuffle=True, num_workers=num_workers)
        assert len(loader) == 4
        for number, (values, numbers, names) in enumerate(loader):
            assert values.tolist() == [[float(n)] * 3 for n in numbers.tolist()]
            assert list(names) == [f"n{n}" for n in numbers.tolist()]
            worker.seen += [(0, n) for n in numbers.tolist()]
            if number == 0:
                time.sleep(0.1)
        worker.service.close()

    workers = run(3, work, leased=leased)
    assert seen(workers) == list(range(20))
    assert all(worker.seen for worker in workers) or leased


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000, reason="ulimit -n is below 2000 here")
def test_samples_are_handed_out_in_a_process_with_many_open_files() -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        test_a_dataset_that_lies_with_one_rank_is_handed_out(leased=False, num_workers=0)


def test_a_batch_that_cannot_travel_names_its_type() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(8), source=0, collate_fn=lambda samples: object())
        try:
            list(loader)
        finally:
            worker.service.close()

    with pytest.raises(
        HoraError, match=r"rank 0 could not send samples: .*the batch has type object; batches for other"
    ):
        run(2, work, leased=False)


def test_an_error_of_the_dataset_reaches_whoever_asked() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise KeyError(f"sample {index} is broken")

    def work(worker: Worker) -> None:
        loader = worker.shard(Broken(4), source=0)
        if worker.rank == 1:
            with pytest.raises(HoraError, match="rank 0 could not send samples: KeyError: 'sample 2 is broken'"):
                list(loader)
        worker.service.close()

    run(2, work, leased=False)


def test_what_cannot_be_handed_out_is_said_on_every_rank() -> None:
    def work(worker: Worker) -> None:
        with pytest.raises((ValueError, HoraError), match="which a NoneType does not support: give a dataset"):
            worker.shard(None, source=0)

    run(2, work)
    with pytest.raises(ValueError, match="source=5: the run has the ranks 0 to 1"):
        shard(Numbers(4), Recorder(0, 2), batch_size=2, source=5)
    assert len(shard(Numbers(4), Recorder(), batch_size=2, source=0)) == 2


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_source_that_dies_is_named(when: str) -> None:
    hub = InProcessCoordinator(2)
    workers = [Worker(hub, rank, 2, leased=False) for rank in range(2)]
    offered, died = threading.Event(), threading.Event()

    def source(worker: Worker) -> None:
        if when == "between":
            worker.shard(Numbers(20), source=0)
            assert offered.wait(10)
            worker.service.close(linger_s=0)
        hub.died(0, "killed")
        died.set()

    def work(worker: Worker) -> None:
        loader = worker.shard(None, source=0)
        iterator = iter(loader)
        next(iterator)
        offered.set()
        assert died.wait(10)
        next(iterator)

    for worker, script in zip(workers, (source, work), strict=True):
        worker.start(script)
    with pytest.raises(PeerLost, match=r"rank 0.* has ended"):
        workers[1].join()


def test_the_source_stays_until_the_others_have_read() -> None:
    def work(worker: Worker) -> None:
        loader = worker.shard(Numbers(12), source=0)
        worker.train(loader, lambda: time.sleep(0.1 * worker.rank))
        worker.service.close()
        worker.control.leave()

    assert seen(run(2, work, leased=False)) == list(range(12))


def test_counts_of_all_workers_add_up_in_the_views() -> None:
    workers = run(3, lambda worker: worker.train(worker.shard(Numbers(33))), num_epochs=3)
    (view,) = workers[0].control.lease_views()
    assert (view["epoch"], view["num_done"], view["samples_done"]) == (2, 17, 33)
    assert sum(each["num_done"] for each in view["workers"]) == 17
    assert Counter(epoch for worker in workers for epoch, _ in worker.seen) == {0: 33, 1: 33, 2: 33}
