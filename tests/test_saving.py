"""Checkpoints: what was saved goes on as if nothing had happened, on any number of workers."""

from __future__ import annotations

import logging
import os
import pathlib
import re
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import shard
from hora.errors import HoraError
from hora.training import checkpointing
from workers import CLOSE, data, mse, net, state

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Saver:
    """One rank: trains to a step, saves, restores."""

    def __init__(
        self, group: Group, strategy: str = "shared", optimizer: str = "adamw", model: Any = None, **cut: Any
    ) -> None:
        self.group = group
        self.strategy = strategy
        self.one = trainings.training(group, strategy)
        self.model = model if model is not None else net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.one.prepare(self.model, self.optimizer, self.scheduler)
        early = cut.pop("early", True)
        self.cut = {"global_batch": 6, "shuffle": True, "seed": 4, **cut}
        self.loader = self.one.adopt(shard(data(50), self.one, **self.cut)) if early else None
        self.epochs: list[int] = []

    def train(self, steps: int, epochs: int = 20) -> Saver:
        assert self.loader is not None
        for epoch in self.one.epochs(epochs):
            self.epochs.append(epoch)
            for x, y, _ in self.loader:
                mse(self.model, x, y).backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                if self.one.step >= steps:
                    return self
        return self

    def save(self, folder: object, keep: int = 2) -> str:
        return checkpointing.save(self.one, self.group, str(folder), self.strategy, keep)

    def restore(self, folder: object) -> int | None:
        return checkpointing.restore(self.one, self.group, str(folder))


def on(size: int, work: Any, **options: Any) -> list[Any]:
    return ranks.run(size, work, **options)


def trained(size: int, steps: int, strategy: str = "shared", optimizer: str = "adamw") -> torch.Tensor:
    return on(size, lambda group: state(Saver(group, strategy, optimizer).train(steps).model))[0]


def halves(
    folder: pathlib.Path, first: tuple[int, str], second: tuple[int, str], optimizer: str = "adamw", middle: int = 50
) -> list[tuple[torch.Tensor, list[int]]]:
    """`middle` steps on the first, the rest of 100 on the second: (size, strategy) each."""
    on(first[0], lambda group: Saver(group, first[1], optimizer).train(middle).save(folder))

    def rest(group: Group) -> tuple[torch.Tensor, list[int]]:
        saver = Saver(group, second[1], optimizer)
        assert saver.restore(folder) == middle and saver.one.step == middle
        saver.train(100)
        return state(saver.model), saver.epochs

    return on(second[0], rest)


@pytest.mark.cases(2)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
@pytest.mark.parametrize("middle", [50, 45])
def test_twice_50_steps_with_a_restore_between_are_100_bit_for_bit(
    tmp_path: pathlib.Path, strategy: str, optimizer: str, middle: int
) -> None:
    """9 batches an epoch: step 45 ends one, step 50 is inside of the next. With a scheduler and shuffled data."""
    wanted = trained(3, 100, strategy, optimizer)
    for found, epochs in halves(tmp_path, (3, strategy), (3, strategy), optimizer, middle):
        assert found.equal(wanted)
        assert epochs == [*range(4 if middle == 45 else 5, 12)]  # what follows the loop of epoch 4 is still to come


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "shared"), (1, "shared")),
        ((2, "shared"), (3, "ring")),
        ((2, "ring"), (4, "shared")),
        ((1, "shared"), (2, "shared")),
        ((2, "shared:update=sharded"), (2, "shared")),
        ((2, "shared"), (3, "shared:update=sharded")),
        ((3, "shared:update=sharded"), (2, "ring:update=sharded")),
        ((2, "ring:update=sharded"), (1, "shared")),
    ],
)
def test_a_checkpoint_goes_on_under_another_number_of_workers_and_another_update(
    tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    wanted = trained(1, 100)
    for found, _ in halves(tmp_path, first, second):
        torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE)


def test_the_global_batch_stays_that_of_the_run_when_batch_size_is_per_worker(tmp_path: pathlib.Path) -> None:
    def first(group: Group) -> None:
        one = Saver(group, global_batch=None, batch_size=3)
        one.train(5).save(tmp_path)

    def second(group: Group) -> tuple[int, float]:
        saver = Saver(group, global_batch=None, batch_size=3)
        saver.restore(tmp_path)
        return saver.loader.global_batch, saver.loader.batch_size  # type: ignore[union-attr]

    on(2, first)
    assert on(3, second) == [(6, 2)] * 3


@pytest.mark.parametrize("early", [True, False])
def test_restore_may_come_before_or_after_shard(tmp_path: pathlib.Path, early: bool) -> None:
    wanted = trained(2, 20)
    on(2, lambda group: Saver(group).train(12).save(tmp_path))

    def second(group: Group) -> torch.Tensor:
        saver = Saver(group, early=early)
        assert saver.restore(tmp_path) == 12
        if not early:
            saver.loader = saver.one.adopt(shard(data(50), saver.one, **saver.cut))
        return state(saver.train(20).model)

    assert all(found.equal(wanted) for found in on(2, second))


@pytest.mark.parametrize("when", ["before the evaluation", "after the evaluation", "inside"])
def test_a_loader_for_evaluation_that_was_made_first_does_not_decide_where_the_run_goes_on(
    tmp_path: pathlib.Path, when: str
) -> None:
    def work(group: Group, save: bool) -> tuple[torch.Tensor, list[int]]:
        one, model = trainings.training(group), net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        test = one.adopt(shard(data(7), one, global_batch=4))
        loader = one.adopt(shard(data(20), one, global_batch=4, shuffle=True))
        saver = checkpointing.save if save else None
        if not save:
            checkpointing.restore(one, group, str(tmp_path))
        epochs = []
        for epoch in one.epochs(4):
            epochs.append(epoch)
            for number, (x, y, _) in enumerate(loader):
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if saver and epoch == 2 and number == 2 and when == "inside":
                    saver(one, group, str(tmp_path), "shared", 2)
            if saver and epoch == 2 and when == "before the evaluation":
                saver(one, group, str(tmp_path), "shared", 2)
            if epoch % 2 == 0:
                with torch.no_grad():
                    assert sum(len(x) for x, _, _ in test) in (3, 4)
            if saver and epoch == 2 and when == "after the evaluation":
                saver(one, group, str(tmp_path), "shared", 2)
        return state(model), epochs

    wanted, _ = on(2, lambda group: work(group, True))[0]
    for found, epochs in on(2, lambda group: work(group, False)):
        assert found.equal(wanted)
        assert epochs == ([2, 3] if when == "inside" else [3])


def test_a_finished_run_that_is_restored_has_nothing_to_do(tmp_path: pathlib.Path) -> None:
    on(2, lambda group: Saver(group).train(10**9, epochs=2).save(tmp_path))

    def again(group: Group) -> list[int]:
        saver = Saver(group)
        assert saver.restore(tmp_path) == 18
        return saver.train(10**9, epochs=2).epochs

    assert on(2, again) == [[], []]


def test_an_empty_directory_has_nothing_to_restore(tmp_path: pathlib.Path) -> None:
    assert on(2, lambda group: Saver(group).restore(tmp_path)) == [None, None]
    assert on(2, lambda group: Saver(group).restore(tmp_path / "nowhere")) == [None, None]


def test_a_damaged_newest_gives_way_to_the_older_one_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def first(group: Group) -> None:
        saver = Saver(group)
        saver.train(3).save(tmp_path)
        saver.train(6).save(tmp_path)

    on(2, first)
    file = tmp_path / "step-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with caplog.at_level(logging.WARNING):
        assert on(2, lambda group: Saver(group).restore(tmp_path)) == [3, 3]
    assert sum("step-6 is damaged" in record.getMessage() for record in caplog.records) == 1


def test_all_damaged_is_an_error_on_every_rank(tmp_path: pathlib.Path) -> None:
    on(2, lambda group: Saver(group).train(3).save(tmp_path))
    (tmp_path / "step-3" / "manifest.json").write_text("{}")
    errors = ranks.failures(2, lambda group: Saver(group).restore(tmp_path))
    assert all(isinstance(error, HoraError) and "is valid" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 2, dtype=torch.float64)), "shape|another model"),
        (lambda: torch.nn.Sequential(*net(), torch.nn.Linear(2, 2, dtype=torch.float64)), "has no 3.weight"),
        (lambda: torch.nn.Sequential(net()), "has no 0.0.weight"),
        (lambda: torch.nn.Sequential(*net(), torch.nn.BatchNorm1d(2, affine=False, dtype=torch.float64)), "has no 3"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path: pathlib.Path, other: Any, said: str) -> None:
    on(2, lambda group: Saver(group).train(3).save(tmp_path))

    def second(group: Group) -> None:
        model = other()
        saver = Saver(group, model=model)
        before = state(model)
        try:
            saver.restore(tmp_path)
        finally:
            assert state(model).equal(before), "half of the checkpoint was taken over"

    for error in ranks.failures(2, second):
        assert isinstance(error, HoraError), error
        assert re.search(said, str(error)), error


def test_save_and_restore_before_prepare_say_what_comes_first(tmp_path: pathlib.Path) -> None:
    def work(group: Group) -> None:
        one = trainings.training(group)
        with pytest.raises(HoraError, match=r"job.save\(\) comes after job.prepare\(\)"):
            checkpointing.save(one, group, str(tmp_path), "shared", 2)
        with pytest.raises(HoraError, match=r"job.restore\(\) comes after job.prepare\(\)"):
            checkpointing.restore(one, group, str(tmp_path))

    on(2, work)


def test_a_worker_that_does_not_save_is_named(tmp_path: pathlib.Path) -> None:
    def work(group: Group) -> None:
        saver = Saver(group).train(3)
        if group.rank != 1:
            saver.save(tmp_path)

    errors = ranks.failures(3, work, timeout_s=1.0)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert "rank 1" in str(error) and "job.save" in str(error)
    assert not os.listdir(tmp_path)


def test_values_that_are_not_finite_are_not_saved_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    def work(group: Group) -> None:
        saver = Saver(group).train(2)
        kept = saver.model[0].weight.detach().clone()
        with torch.no_grad():
            saver.model[0].weight[0, 0] = float("nan")
        with pytest.raises(HoraError, match=r"1 of 20 values of '0.weight' .* are not finite") as caught:
            saver.save(tmp_path)
        assert str(caught.value).startswith("no checkpoint of step 2: ") and "\n" not in str(caught.value)
        with torch.no_grad():
            saver.model[0].weight.copy_(kept)
        saver.train(4).save(tmp_path)

    on(2, work)
    assert os.listdir(tmp_path) == ["step-4"]


@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_a_mask_of_minus_infinity_in_a_buffer_is_saved_and_restored(tmp_path: pathlib.Path, strategy: str) -> None:
    def model() -> torch.nn.Module:
        made = net()
        made.register_buffer("mask", torch.full((3, 3), float("-inf"), dtype=torch.float64).triu(1))
        return made

    on(2, lambda group: Saver(group, strategy, model=model()).train(3).save(tmp_path))

    def second(group: Group) -> torch.Tensor:
        saver = Saver(group, strategy, model=model())
        saver.model.mask.zero_()
        assert saver.restore(tmp_path) == 3
        return saver.model.mask.clone()

    for mask in on(2, second):
        assert mask.equal(torch.full((3, 3), float("-inf"), dtype=torch.float64).triu(1))


def test_buffers_that_are_not_saved_with_the_model_are_neither_here(tmp_path: pathlib.Path) -> None:
    """register_buffer(persistent=False): a cache that code may remake at any size."""

    def model(length: int) -> torch.nn.Module:
        made = net()
        made.register_buffer("cache", torch.ones(length), persistent=False)
        return made

    on(2, lambda group: Saver(group, model=model(3)).train(3).save(tmp_path))
    assert on(2, lambda group: Saver(group, model=model(5)).restore(tmp_path)) == [3, 3]


def test_keep_says_how_many_stay(tmp_path: pathlib.Path) -> None:
    def work(group: Group) -> None:
        saver = Saver(group)
        for step in range(1, 6):
            saver.train(step).save(tmp_path, keep=3)
        with pytest.raises(HoraError, match="at least 2 checkpoints are kept"):
            saver.save(tmp_path, keep=1)

    on(2, work)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4", "step-5"]


def test_a_disk_error_is_one_sentence_on_every_rank_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def work(group: Group) -> int:
        saver = Saver(group).train(2)
        with pytest.raises(HoraError, match="could not be written: Not a directory") as caught:
            saver.save(tmp_path / "file" / "below")
        assert str(caught.value).startswith("no checkpoint of step 2: ") and "\n" not in str(caught.value)
        return saver.train(4).one.step

    assert on(3, work) == [4, 4, 4]


def test_a_state_that_no_checkpoint_can_hold_is_named_on_every_rank(tmp_path: pathlib.Path) -> None:
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"odd": object()}

    def work(group: Group) -> None:
        one, model = trainings.training(group), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer, Odd(optimizer, lambda step: 1.0))
        with pytest.raises(HoraError, match="odd has type object, which a checkpoint cannot hold"):
            checkpointing.save(one, group, str(tmp_path), "shared", 2)
        assert group.all_reduce(torch.ones(1)).item() == group.size

    on(2, work)


def test_several_models_and_optimizers_are_saved_together(tmp_path: pathlib.Path) -> None:
    def make(group: Group) -> tuple[Any, list[Any], list[Any]]:
        one, models = trainings.training(group), [net(), net()]
        optimizers = [OPTIMIZERS["adamw"](models[0].parameters()), OPTIMIZERS["momentum"](models[1].parameters())]
        one.prepare(models, optimizers)
        return one, models, optimizers

    def first(group: Group) -> list[torch.Tensor]:
        one, models, optimizers = make(group)
        for x, y, _ in one.adopt(shard(data(12), one, global_batch=4)):
            for model, optimizer in zip(models, optimizers, strict=True):
                mse(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        checkpointing.save(one, group, str(tmp_path), "shared", 2)
        return [state(model) for model in models] + [optimizers[1].state_dict()["state"][0]["momentum_buffer"]]

    def second(group: Group) -> list[torch.Tensor]:
        one, models, optimizers = make(group)
        assert checkpointing.restore(one, group, str(tmp_path)) == 3
        return [state(model) for model in models] + [optimizers[1].state_dict()["state"][0]["momentum_buffer"]]

    wanted = on(2, first)[0]
    for found in on(2, second):
        assert all(mine.equal(other) for mine, other in zip(found, wanted, strict=True))


def test_a_worker_that_saves_while_the_others_train_stops_them_instead_of_waiting(tmp_path: pathlib.Path) -> None:
    """Rank 1 breaks out of loops that are not job.epochs, in the last batch of an epoch: only its save tells."""

    def work(group: Group) -> tuple[int, torch.Tensor]:
        saver = Saver(group, global_batch=10)
        saver.one.stop_reason = lambda: "as the test wants it"
        assert saver.loader is not None
        for _ in range(3):
            for number, (x, y, _) in enumerate(saver.loader):
                mse(saver.model, x, y).backward()
                saver.optimizer.step()
                saver.optimizer.zero_grad()
                if number == 4 and group.rank == 1:
                    break
            if group.rank == 1:
                break
        saver.save(tmp_path)
        return saver.one.step, state(saver.model)

    found = on(3, work)
    assert [step for step, _ in found] == [5, 5, 5] and all(mine.equal(found[0][1]) for _, mine in found)
