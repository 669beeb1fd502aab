"""Stopping together: whoever asks or breaks out, all workers end after the same step and nobody waits in vain."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import shard
from workers import Worker, alone, assert_alike, data, mse, net, workers

WAYS = [("shared", "memory"), ("ring", "memory"), ("shared:update=sharded", "memory"), ("ring", "tcp")]


def still_works(worker: Worker) -> None:
    """The job's own group outlives the gradients'."""
    assert worker.one._group.all_reduce(torch.ones(1)).item() == worker.one.size
    worker.one.sync.snapshot()  # type: ignore[union-attr]


# -- asking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "transport"), WAYS)
@pytest.mark.parametrize("who", [{0}, {2}, {0, 1, 2}])
@pytest.mark.parametrize("place", ["before", "between"])
def test_stop_from_any_worker_ends_all_after_the_same_step(
    strategy: str, transport: str, who: set[int], place: str
) -> None:
    """12 samples, batches of 3: four steps an epoch; asked for in the third batch of the first."""

    def work(worker: Worker) -> None:
        batches = 0
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mine = batches == 2 and worker.one.rank in who
                if mine and place == "before":
                    worker.one.stop("enough")
                mse(worker.model, x, y).backward()
                if mine and place == "between":
                    worker.one.stop("enough")
                worker.step()
                batches += 1
        assert worker.one.stopped()
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3, transport=transport)
    assert_alike(found)
    assert found[0].one.step == (3 if place == "before" else 4)


@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_stop_in_the_last_batch_of_an_epoch_ends_all_in_the_next(strategy: str) -> None:
    def work(worker: Worker) -> None:
        for epoch in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if epoch == 0 and number == 3 and worker.one.rank == 1:
                    worker.one.stop("enough")
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 5 and all(worker.one.stopped() for worker in found)


def test_stop_in_the_very_last_batch_changes_nothing() -> None:
    def work(worker: Worker) -> None:
        worker.epochs(1)
        worker.one.stop("too late")
        still_works(worker)

    found = workers(3, "shared", work, 12, global_batch=3)
    assert_alike(found, alone(lambda w: w.epochs(1), 12, global_batch=3))


@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_stop_in_a_batch_with_absent_workers_ends_them_too(strategy: str) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                if worker.one.step == 2 and worker.one.rank == 1:
                    worker.one.stop("enough")
                mse(worker.model, x, y).backward()
                worker.step()
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=2)
    assert_alike(found)
    assert found[0].one.step == 3


def test_stop_while_accumulating_ends_all_after_the_step_that_is_being_accumulated() -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                if number == 0 and worker.one.rank == 1:
                    worker.one.stop("enough")
                if number % 2 == 0:
                    with worker.one.accumulate():
                        mse(worker.model, x, y).backward()
                else:
                    mse(worker.model, x, y).backward()
                    worker.step()

    found = workers(2, "shared", work, 12, global_batch=2)
    assert_alike(found)
    assert found[0].one.step == 1


def test_alone_stop_ends_the_loop_after_the_batch_under_way() -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                worker.step()
                if worker.one.step == 3:
                    worker.one.stop("enough")

    assert alone(work, 12, global_batch=2).one.step == 3


@pytest.mark.parametrize("size", [1, 3])
def test_max_steps_ends_all_and_an_evaluation_afterwards_runs_to_its_end(size: int) -> None:
    def work(worker: Worker) -> None:
        worker.one.max_steps = 5
        test = worker.one.adopt(shard(data(7), worker.one, global_batch=2))
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                worker.step()
            worker.model.eval()
            worker.seen += [number for _, _, numbers in test for number in numbers.tolist()]
            worker.model.train()

    found = workers(size, "shared", work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 5 and sorted(n for w in found for n in w.seen) == sorted([*range(7)] * 2)


def test_the_reason_is_said_once_and_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(3):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                worker.step()
                worker.one.stop("enough")
        assert worker.one.stopped() and worker.one.stopped()

    with caplog.at_level(logging.WARNING):
        workers(3, "shared", work, 12, global_batch=3)
    assert [record.getMessage() for record in caplog.records] == ["stopped after step 2: as the test wants it"]


# -- breaking out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "transport"), WAYS)
@pytest.mark.parametrize("breaker", [0, 1, 2])
@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("batch", [0, 2, 3])
def test_a_worker_that_breaks_out_stops_the_others_after_the_same_step(
    strategy: str, transport: str, breaker: int, place: str, batch: int
) -> None:
    """Batch 0 is before the first step, batch 3 the last of the epoch."""

    def work(worker: Worker) -> None:
        broke = False
        for _ in worker.one.epochs(3):
            for number, (x, y, _) in enumerate(worker.loader):
                mine = number == batch and worker.one.rank == breaker
                if mine and place == "before":
                    broke = True
                    break
                mse(worker.model, x, y).backward()
                if mine and place == "between":
                    broke = True
                    break
                worker.step()
                if mine and place == "after":
                    broke = True
                    break
            if broke:
                break
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3, transport=transport)
    assert_alike(found)
    assert found[0].one.step in ({"before": [batch], "between": [batch, batch + 1], "after": [batch + 1]}[place])


@pytest.mark.parametrize(("strategy", "transport"), WAYS)
def test_a_worker_that_breaks_while_the_others_accumulate_stops_them_too(strategy: str, transport: str) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                if number == 2 and worker.one.rank == 1:
                    break
                if number % 2 == 0:
                    with worker.one.accumulate():
                        mse(worker.model, x, y).backward()
                else:
                    mse(worker.model, x, y).backward()
                    worker.step()
            if worker.one.rank == 1:
                break
        worker.optimizer.zero_grad()
        still_works(worker)

    found = workers(3, strategy, work, 18, global_batch=3, transport=transport)
    assert_alike(found)
    assert found[0].one.step == 1


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_all_break_after_the_same_batch_and_train_on_in_the_next_epoch(strategy: str, place: str) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(4):
            for number, (x, y, _) in enumerate(worker.loader):
                if number == 2 and place == "before":
                    break
                mse(worker.model, x, y).backward()
                if number == 2 and place == "between":
                    worker.optimizer.zero_grad()
                    break
                worker.step()
                if number == 2 and place == "after":
                    break
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3)
    assert_alike(found, alone(work, 12, global_batch=3))
    assert found[0].one.step == 4 * (3 if place == "after" else 2)


@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_only_one_worker_breaks_and_goes_on_with_its_next_epoch(strategy: str) -> None:
    def work(worker: Worker) -> None:
        for epoch in worker.one.epochs(4):
            for number, (x, y, _) in enumerate(worker.loader):
                if epoch == 1 and number == 2 and worker.one.rank == 1:
                    break
                mse(worker.model, x, y).backward()
                worker.step()
        still_works(worker)

    found = workers(3, strategy, work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 6 and all(worker.one.stopped() for worker in found)


def test_a_return_out_of_the_loop_is_a_break() -> None:
    def inner(worker: Worker) -> None:
        for _ in worker.one.epochs(4):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                worker.step()
                if number == 1 and worker.one.rank == 2:
                    return

    def work(worker: Worker) -> None:
        inner(worker)
        still_works(worker)

    found = workers(3, "shared", work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 2


def test_an_exception_that_the_script_catches_outside_of_the_loop_is_a_break() -> None:
    def inner(worker: Worker) -> None:
        for number, (x, y, _) in enumerate(worker.loader):
            if number == 2 and worker.one.rank == 1:
                raise RuntimeError("bad sample")
            mse(worker.model, x, y).backward()
            worker.step()

    def work(worker: Worker) -> None:
        try:
            inner(worker)
        except RuntimeError as error:
            assert str(error) == "bad sample"
        still_works(worker)

    found = workers(3, "shared", work, 12, global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 2


def test_a_worker_that_breaks_before_its_step_still_ends_with_the_others_parameters() -> None:
    """The others take that step before they can know; here even the whole rest of the epoch is over for them."""

    def work(worker: Worker) -> None:
        for number, (x, y, _) in enumerate(worker.loader):
            mse(worker.model, x, y).backward()
            if number == 3 and worker.one.rank == 0:
                break
            worker.step()
        still_works(worker)

    for _ in range(5):
        found = workers(3, "shared", work, 12, global_batch=3)
        assert_alike(found)


# -- two loaders -----------------------------------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize("counts", [(12, 12), (12, 9), (9, 12), (13, 12), (12, 13), (13, 13), (10, 7), (7, 10)])
@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_a_zip_of_two_loaders_trains_and_ends_together(strategy: str, counts: tuple[int, int]) -> None:
    """The second loader's samples weigh: they were yielded last."""

    def work(worker: Worker) -> None:
        other = worker.one.adopt(shard(data(counts[1]), worker.one, global_batch=3))
        for _ in worker.one.epochs(2):
            for (x, y, _), (x2, y2, _) in zip(worker.loader, other, strict=False):
                if len(x) == len(x2):
                    (mse(worker.model, x, y) + mse(worker.model, x2, y2)).backward()
                else:
                    mse(worker.model, x2, y2).backward()
                worker.step()
        still_works(worker)

    found = workers(3, strategy, work, counts[0], global_batch=3)
    assert_alike(found)
    assert found[0].one.step == 2 * min(-(-counts[0] // 3), -(-counts[1] // 3))


def test_two_optimizers_and_two_backwards_stop_together() -> None:
    def rank(group: Group) -> tuple[int, torch.Tensor]:
        one = trainings.training(group, "shared")
        one.stop_reason = lambda: "as the test wants it"
        nets = [net(), net()]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
        one.prepare(nets, optimizers)
        loader = one.adopt(shard(data(12), one, global_batch=3))
        for _ in one.epochs(3):
            for number, (x, y, _) in enumerate(loader):
                for model, optimizer in zip(nets, optimizers, strict=True):
                    mse(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if number == 1 and one.rank == 1:
                    break
            if one.rank == 1:
                break
        assert group.all_reduce(torch.ones(1)).item() == 3
        return one.step, torch.cat([p.detach().reshape(-1) for model in nets for p in model.parameters()])

    found: list[Any] = ranks.run(3, rank)
    assert [step for step, _ in found] == [2, 2, 2]
    assert all(state.equal(found[0][1]) for _, state in found)


def test_a_scaler_survives_that_the_others_left() -> None:
    def rank(group: Group) -> int:
        one, model = trainings.training(group, "shared"), net()
        one.stop_reason = lambda: "as the test wants it"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        one.prepare(model, optimizer, scaler=scaler)
        loader = one.adopt(shard(data(12), one, global_batch=3))
        for _ in one.epochs(3):
            for number, (x, y, _) in enumerate(loader):
                if number == 2 and one.rank == 1:
                    break
                scaler.scale(mse(model, x, y)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if one.rank == 1:
                break
        return one.step

    assert ranks.run(3, rank) == [2, 2, 2]
