"""The uneven-data promise: any dataset size, batch size and number of workers; nobody hangs, every sample counts once.

Data and models are in float64; "equal to one process" means within 1e-9, since sums come in another order.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import shard
from workers import CLOSE, Worker, alone, assert_alike, data, mse, net, state, workers

STRATEGIES = [
    "shared", "ring", "tree", "halving", "star", "auto",
    "shared:update=sharded", "ring:update=sharded", "shared:overlap=false",
]  # fmt: skip


@pytest.mark.cases(8)
@pytest.mark.parametrize("seed", range(20))
def test_any_size_any_batch_any_number_of_workers_trains_as_one_process_does(seed: int) -> None:
    """20 x 10 random cases."""
    dice = random.Random(seed)
    for _ in range(10):
        size, count, epochs = dice.randint(2, 5), dice.choice([0, 1, 2, 3, dice.randint(4, 40)]), dice.randint(1, 2)
        strategy, batch = dice.choice(STRATEGIES), dice.randint(1, 12)
        cut = {"global_batch": batch, "shuffle": dice.random() < 0.5, "seed": dice.randint(0, 9)}
        case = f"{size} workers, {count} samples, {strategy}, {cut}"
        options: dict[str, Any] = {**cut, "optimizer": dice.choice(["momentum", "adamw"]), "schedule": True}
        found = workers(size, strategy, lambda w, epochs=epochs: w.epochs(epochs), count, **options)
        wanted = alone(lambda w, epochs=epochs: w.epochs(epochs), count, **options)
        assert sorted(n for w in found for n in w.seen) == sorted([*range(count)] * epochs), case
        assert found[0].one.step == epochs * -(-count // batch), case
        if "sharded" not in strategy:
            for one, other in zip(found[0].grads, wanted.grads, strict=True):
                assert torch.allclose(one, other, rtol=0, atol=CLOSE), f"{case}: not the mean over the global batch"
        try:
            assert_alike(found, wanted)
        except AssertionError as error:
            raise AssertionError(case) from error


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_fewer_samples_than_workers_and_batches_in_which_somebody_is_always_absent(strategy: str, count: int) -> None:
    options: dict[str, Any] = {"global_batch": 2, "optimizer": "adamw", "schedule": True}
    found = workers(4, strategy, lambda w: w.epochs(2), count, **options)
    assert_alike(found, alone(lambda w: w.epochs(2), count, **options))
    assert found[3].seen == [] and sorted(n for w in found for n in w.seen) == sorted([*range(count)] * 2)


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
def test_batch_size_is_per_worker_and_drop_last_drops_the_uneven_batch(strategy: str) -> None:
    found = workers(3, strategy, lambda w: w.epochs(2), 20, batch_size=3, drop_last=True)
    assert found[0].one.step == 4 and sorted(n for w in found for n in w.seen) == sorted([*range(18)] * 2)
    assert_alike(found, alone(lambda w: w.epochs(2), 20, global_batch=9, drop_last=True))


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
def test_a_learning_rate_changed_by_hand_reaches_absent_workers(strategy: str) -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                worker.optimizer.param_groups[0]["lr"] = 0.1 / (1 + worker.one.step)
                mse(worker.model, x, y).backward()
                worker.step()
                worker.optimizer.param_groups[0]["weight_decay"] = 0.01 * number

    found = workers(3, strategy, work, 14, global_batch=4)
    assert_alike(found, alone(work, 14, global_batch=4))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded", "ring:update=sharded"])
def test_clipping_is_that_of_one_process_also_with_absent_workers(strategy: str, norm_type: float) -> None:
    norms: list[float] = []
    most = 2.0 if norm_type == 2.0 else 0.9

    def work(worker: Worker) -> None:
        mine = []
        for _ in worker.one.epochs(2):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                mine.append(float(worker.one.clip(worker.model.parameters(), most, norm_type)))
                worker.step()
        if worker.one.rank == 0:
            norms[:] = mine

    found = workers(3, strategy, work, 13, global_batch=4)
    several = list(norms)
    assert_alike(found, alone(work, 13, global_batch=4))
    assert several == pytest.approx(norms, abs=1e-6) and min(norms) < most < max(norms)


def test_torchs_own_clipping_is_that_of_one_process_also_with_absent_workers() -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for x, y, _ in worker.loader:
                mse(worker.model, x, y).backward()
                torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 0.3)
                for parameter in worker.model.parameters():
                    parameter.grad.add_(0.01)  # type: ignore[union-attr]
                worker.step()

    found = workers(4, "shared", work, 13, global_batch=3)
    assert_alike(found, alone(work, 13, global_batch=3))


@pytest.mark.parametrize("strategy", ["shared", "ring", "ring:overlap=false", "shared:update=sharded"])
@pytest.mark.parametrize("count", [14, 17, 18, 22])
def test_accumulation_across_batches_with_absent_workers_counts_every_sample_once(strategy: str, count: int) -> None:
    """Two global batches of 4 to a step; the last one is of 1 or 2 samples, after a full one or at a step's start."""

    def work(worker: Worker) -> None:
        loader, one = worker.loader, worker.one
        for _ in one.epochs(2):
            for number, (x, y, _) in enumerate(loader):
                last = number % 2 == 1 or number == len(loader) - 1
                if last:
                    mse(worker.model, x, y).backward()
                    worker.step()
                else:
                    with one.accumulate():
                        mse(worker.model, x, y).backward()

    found = workers(3, strategy, work, count, global_batch=4)
    assert_alike(found, alone(work, count, global_batch=4))


def test_accumulation_without_accumulate_is_that_of_one_process_also_with_absent_workers() -> None:
    def work(worker: Worker) -> None:
        for _ in worker.one.epochs(2):
            for number, (x, y, _) in enumerate(worker.loader):
                mse(worker.model, x, y).backward()
                if number % 2 == 1:
                    worker.step()
            worker.optimizer.zero_grad()

    assert_alike(workers(3, "shared", work, 10, global_batch=2), alone(work, 10, global_batch=2))


@pytest.mark.parametrize("kind", ["sequential", "multistep", "cosine", "onecycle", "plateau", "chained", "lambda"])
def test_any_scheduler_given_to_prepare_is_stepped_along_on_absent_workers(kind: str) -> None:
    lr = torch.optim.lr_scheduler

    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm, decay = lr.LinearLR(optimizer, 0.5, 1.0, 3), lr.ExponentialLR(optimizer, 0.9)
        return {
            "sequential": lambda: lr.SequentialLR(optimizer, [warm, decay], [3]),
            "multistep": lambda: lr.MultiStepLR(optimizer, [2, 4], 0.5),
            "cosine": lambda: lr.CosineAnnealingWarmRestarts(optimizer, 3),
            "onecycle": lambda: lr.OneCycleLR(optimizer, 0.1, total_steps=30),
            "plateau": lambda: lr.ReduceLROnPlateau(optimizer, patience=1),
            "chained": lambda: lr.ChainedScheduler([warm, decay]),
            "lambda": lambda: lr.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        }[kind]()

    def rank(group: Group) -> tuple[list[float], torch.Tensor]:
        one, model = trainings.training(group, "shared"), net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = make(optimizer)
        one.prepare(model, optimizer, scheduler)
        loader = one.adopt(shard(data(7), one, global_batch=3))
        rates = []
        for _ in one.epochs(3):
            for x, y, _ in loader:
                mse(model, x, y).backward()
                optimizer.step()
                scheduler.step(*([1.0] if kind == "plateau" else []))
                optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates, state(model)

    (wanted, parameters), *_ = ranks.run(1, rank)
    for rates, mine in ranks.run(3, rank):
        assert rates == wanted
        torch.testing.assert_close(mine, parameters, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_an_evaluation_with_absent_workers_does_nothing_together(mode: str) -> None:
    """Only rank 0 evaluates, and nobody waits for anybody; then they train on."""

    def work(worker: Worker) -> None:
        worker.epochs(1)
        if worker.one.rank == 0:
            test = worker.one.adopt(shard(data(7), worker.one, global_batch=2))
            worker.model.train(mode != "eval")
            context = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
            with context():
                found = [number for x, _, numbers in test for number in (worker.model(x), numbers.tolist())[1]]
            assert found == [0, 2, 4, 6]
            worker.model.train()
        worker.epochs(1)

    found = workers(3, "shared", work, 7, global_batch=2)
    assert_alike(found)
    assert found[0].one.step == 8


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
def test_an_evaluation_inside_the_training_loop_disturbs_no_step(strategy: str) -> None:
    """Its loader has batches in which workers are absent, and so has the training's."""

    def work(worker: Worker) -> None:
        test = worker.one.adopt(shard(data(5), worker.one, global_batch=2))
        for _ in worker.one.epochs(2):
            for x, y, _ in worker.loader:
                worker.model.eval()
                for inputs, _, _ in test:
                    worker.model(inputs)
                worker.model.train()
                mse(worker.model, x, y).backward()
                with torch.no_grad():
                    for inputs, _, _ in test:
                        worker.model(inputs)
                worker.step()

    found = workers(3, strategy, work, 10, global_batch=3)
    assert_alike(found, alone(work, 10, global_batch=3))


@pytest.mark.parametrize("count", [12, 13])
def test_a_model_put_into_train_inside_the_loop_and_left_in_eval_trains_as_one_process_does(count: int) -> None:
    def work(worker: Worker) -> None:
        worker.model.eval()
        for _ in worker.one.epochs(2):
            for x, y, _ in worker.loader:
                worker.model.train()
                mse(worker.model, x, y).backward()
                worker.step()
                worker.model.eval()

    assert_alike(workers(3, "shared", work, count, global_batch=4), alone(work, count, global_batch=4))


def test_training_in_a_loop_that_began_as_an_evaluation_names_the_way_out_where_workers_are_absent() -> None:
    def work(group: Group) -> None:
        worker = Worker(group, "shared", 3, global_batch=2)
        worker.model.eval()
        worker.epochs(1)

    errors = ranks.failures(3, work, timeout_s=1.0)
    assert "call model.train() before the loop" in str(errors[0]) and "call model.train() before" in str(errors[1])


@pytest.mark.parametrize("strategy", ["shared", "ring", "shared:update=sharded"])
@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("who", [{0, 1}, {0}, {1}])
def test_a_break_in_a_batch_with_absent_workers_leaves_nobody_behind(strategy: str, place: str, who: set[int]) -> None:
    """Batches of 2 for 3 workers: rank 2 is always absent. `place` is where in the body of batch 2."""

    def work(worker: Worker) -> None:
        epochs = 0
        for _ in worker.one.epochs(3):
            epochs += 1
            for number, (x, y, _) in enumerate(worker.loader):
                mine = number == 2 and worker.one.rank in who
                if mine and place == "before":
                    break
                mse(worker.model, x, y).backward()
                if mine and place == "between":
                    worker.optimizer.zero_grad()
                    break
                worker.step()
                if mine and place == "after":
                    break
        assert worker.one._group.all_reduce(torch.ones(1)).item() == 3
        worker.seen = [epochs]

    found = workers(3, strategy, work, 9, global_batch=2)
    assert_alike(found)
    per_epoch = 3 if place == "after" else 2
    if who == {0, 1}:
        assert found[0].one.step == 3 * per_epoch and all(worker.seen == [3] for worker in found)
    else:
        assert found[0].one.step in (2, 3) and found[0].one.stopped()
