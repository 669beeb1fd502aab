"""Checkpoints of local SGD and DiLoCo: a run that saves and goes on, and one that is restored from it, are one run."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import shard
from hora.training import checkpointing
from rounds import SMALL, assert_same, even
from trainings import batch, building, loss_of, mlp, parameters_of
from workers import data, mse, net, state

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


class Saver:
    """One rank: trains to a step, saves, restores. 9 batches an epoch, the last of 2 samples."""

    def __init__(
        self, group: Group, strategy: str, optimizer: str = "adamw", model: Any = None, count: int = 50
    ) -> None:
        self.group = group
        self.strategy = strategy
        self.one = trainings.training(group, strategy)
        self.model = model if model is not None else net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.one.prepare(self.model, self.optimizer, self.scheduler)
        self.loader = self.one.adopt(shard(data(count), self.one, global_batch=6, shuffle=True, seed=4))

    def train(self, steps: int, saves: Any = ()) -> Saver:
        """`saves`: after which steps, and where to; inside of the loop, or after it where it ends there."""
        for _ in self.one.epochs(20):
            for x, y, _ in self.loader:
                mse(self.model, x, y).backward()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                if self.one.step % 9:
                    self._save_if(saves)
                if self.one.step >= steps:
                    return self
            self._save_if(saves)
        return self

    def _save_if(self, saves: Any) -> None:
        for step, folder in saves:
            if self.one.step == step:
                self.save(folder)

    def save(self, folder: object) -> str:
        return checkpointing.save(self.one, self.group, str(folder), self.strategy, 2)

    def restore(self, folder: object) -> int | None:
        return checkpointing.restore(self.one, self.group, str(folder))


STRATEGIES = ["local:every=4", "local:every=4,state=average", "local:every=4,state=reset", "local:every=4,warmup=12",
              "local:every=2/5@9", "diloco:every=4", "diloco:every=6,fragments=3", "diloco:every=5,overlap=2",
              "diloco:every=6,fragments=2,overlap=1", "diloco:every=4,wire=int8", "local:every=4,via=ps",
              "diloco:every=4,wire=bf16,fragments=2"]  # fmt: skip


@pytest.mark.cases(10)
@pytest.mark.parametrize(
    ("strategy", "optimizer", "middle"),
    [*((strategy, "adamw", middle) for strategy in STRATEGIES for middle in (10, 18)),
     ("local:every=4", "momentum", 8), ("diloco:every=4", "momentum", 10)],
)  # fmt: skip
def test_what_was_restored_goes_on_bit_for_bit_as_what_had_saved(
    tmp_path: pathlib.Path, strategy: str, optimizer: str, middle: int
) -> None:
    """Saved in the middle of a round, at its end, after an epoch's last step; with a scheduler, where one of three
    workers has no samples in the last batch of an epoch."""
    wanted = ranks.run(3, lambda g: state(Saver(g, strategy, optimizer).train(23, [(middle, tmp_path)]).model))

    def rest(group: Group) -> torch.Tensor:
        saver = Saver(group, strategy, optimizer)
        assert saver.restore(tmp_path) == middle and saver.one.step == middle
        return state(saver.train(23).model)

    for found in ranks.run(3, rest):
        assert found.equal(wanted[0])


@pytest.mark.parametrize("strategy", ["local:every=4", "diloco:every=6,fragments=3", "diloco:every=5,overlap=2"])
def test_a_restore_into_a_run_under_way_forgets_what_that_had_done(tmp_path: pathlib.Path, strategy: str) -> None:
    """Goes to step 13, then back to 10, inside open rounds and with an exchange in flight."""
    wanted = ranks.run(2, lambda g: state(Saver(g, strategy).train(26, [(10, tmp_path)]).model))

    def again(group: Group) -> torch.Tensor:
        saver = Saver(group, strategy).train(13)
        assert saver.restore(tmp_path) == 10
        return state(saver.train(26).model)

    for found in ranks.run(2, again):
        assert found.equal(wanted[0])


@pytest.mark.parametrize("strategy", ["diloco:every=5,overlap=3", "local:every=5"])
def test_plain_loops_may_restore_while_an_exchange_is_in_flight(tmp_path: pathlib.Path, strategy: str) -> None:
    """Without job.shard nothing closes the round before."""

    def script(group: Group, restore: bool) -> list[torch.Tensor]:
        one, model = trainings.training(group, strategy), mlp(SMALL)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one.prepare(model, optimizer)
        steps = [*range(11)]
        if restore:
            steps = [20, 21, 22, 23, 24, 25, *range(7, 11)]
        for number, step in enumerate(steps):
            if restore and number == 6:
                assert checkpointing.restore(one, group, str(tmp_path)) == 7
            optimizer.zero_grad()
            loss_of(model, even(2)(group.rank, step)).backward()
            optimizer.step()
            if not restore and step == 6:
                checkpointing.save(one, group, str(tmp_path), strategy, 2)
        one.depart()
        return parameters_of(model)

    wanted = ranks.run(2, lambda g: script(g, False))
    found = ranks.run(2, lambda g: script(g, True))
    assert all(a.equal(b) for mine in found for a, b in zip(mine, wanted[0], strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, "ring"), (3, "local:every=4")),
        ((3, "local:every=4"), (2, "ring")),
        ((2, "ring"), (2, "diloco:every=4,fragments=2")),
        ((3, "diloco:every=4,overlap=2"), (2, "shared:update=sharded")),
        ((2, "diloco:every=4"), (4, "diloco:every=6,wire=int8,fragments=2")),
        ((2, "local:every=3"), (1, "diloco:every=4")),
        ((1, "local:every=3"), (3, "local:every=3,warmup=20")),
        ((2, "local:every=3,via=ps"), (3, "local:every=5")),
        ((2, "local:every=3"), (2, "ps:mode=sync")),
        ((2, "ps:mode=sync"), (2, "local:every=3,via=ps/2")),
        ((2, "diloco:every=4"), (2, "local:every=4,via=ps,barrier=false")),
        ((2, "local:every=4,via=ps,barrier=false"), (2, "diloco:every=4")),
    ],
)
def test_a_checkpoint_goes_on_under_another_strategy_and_number_of_workers(
    tmp_path: pathlib.Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    """What was saved is what all have after the restore; then they train, and agree at the end of the loop."""

    def begin(group: Group) -> tuple[torch.Tensor, Any]:
        saver = Saver(group, first[1]).train(10)
        saver.save(tmp_path)
        kept = saver.optimizer.state.get(saver.model[0].weight, {}).get("exp_avg")
        return state(saver.model), None if kept is None or "sharded" in first[1] else kept.clone()

    saved = ranks.run(first[0], begin)

    def rest(group: Group) -> tuple[torch.Tensor, torch.Tensor, Any]:
        saver = Saver(group, second[1])
        assert saver.restore(tmp_path) == 10
        now = state(saver.model)
        kept = saver.optimizer.state.get(saver.model[0].weight, {}).get("exp_avg")
        kept = None if kept is None or "sharded" in second[1] else kept.clone()
        saver.train(27)
        if "barrier" not in second[1]:
            saver.one.depart()
        return now, state(saver.model), kept

    found = ranks.run(second[0], rest)
    for now, last, kept in found:
        assert now.equal(saved[0][0]) and not last.equal(now) and bool(torch.isfinite(last).all())
        if kept is not None and saved[0][1] is not None:
            assert kept.equal(saved[0][1])
        if "barrier" not in second[1]:
            assert last.equal(found[0][1])


def test_the_warm_up_of_a_restored_run_is_over_where_it_was(tmp_path: pathlib.Path) -> None:
    """Step 10 of a warm-up of 6: the restored run trains alone at once, and in rounds of the stage that holds there."""

    def script(group: Group) -> tuple[bool, int]:
        saver = Saver(group, "local:every=2/5@9,warmup=6")
        saver.restore(tmp_path)
        return saver.one.sync.warming_up, saver.one.sync._round.interval

    ranks.run(2, lambda g: Saver(g, "local:every=2/5@9,warmup=6").train(10).save(tmp_path))
    assert ranks.run(2, script) == [(False, 5)] * 2
    assert ranks.run(2, lambda g: Saver(g, "local:every=3,warmup=14").restore(tmp_path)) == [10, 10]


def test_saving_closes_the_round_and_all_go_on_from_one_point(tmp_path: pathlib.Path) -> None:
    """With state=keep that is true of the optimizers' states too."""

    def script(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        saver = Saver(group, "local:every=100").train(5)
        saver.train(7, [(6, tmp_path)])
        return (
            state(saver.model),
            saver.optimizer.state[saver.model[0].weight]["exp_avg"].clone(),
            saver.one.sync.rounds,
        )

    def restored(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        saver = Saver(group, "local:every=100")
        saver.restore(tmp_path)
        return state(saver.model), saver.optimizer.state[saver.model[0].weight]["exp_avg"].clone()

    first, second = ranks.run(2, script)
    one, other = ranks.run(2, restored)
    assert one[0].equal(other[0]) and one[1].equal(other[1])
    assert first[2] == second[2] >= 1, "the save closed a round that had a hundred steps"


def test_buffers_are_saved_as_they_were_averaged(tmp_path: pathlib.Path) -> None:
    def build() -> torch.nn.Module:
        with building():
            return torch.nn.Sequential(
                torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
            ).double()  # fmt: skip

    def rows(saver: Saver) -> list[torch.Tensor]:
        return [state(saver.model), *(buffer.clone() for buffer in saver.model.buffers())]

    for strategy in ("local:every=4", "diloco:every=4,overlap=2"):
        folder = tmp_path / strategy.replace(":", "-")
        wanted = ranks.run(
            2, lambda g, s=strategy, f=folder: rows(Saver(g, s, model=build(), count=54).train(17, [(7, f)]))
        )

        def rest(group: Group, s: str = strategy, f: pathlib.Path = folder) -> list[torch.Tensor]:
            saver = Saver(group, s, model=build(), count=54)
            assert saver.restore(f) == 7
            return rows(saver.train(17))

        found = ranks.run(2, rest)
        for mine in found:
            assert all(a.equal(b) for a, b in zip(mine, wanted[0], strict=True)), strategy


def test_a_snapshot_while_rounds_are_open_is_whole_and_the_same_everywhere() -> None:
    def script(group: Group) -> tuple[list[torch.Tensor], int]:
        one, model = trainings.training(group, "diloco:every=6,fragments=3"), mlp(SMALL)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        one.prepare(model, optimizer)
        for step in range(9):
            optimizer.zero_grad()
            loss_of(model, batch(step)[group.rank :: 2]).backward()
            optimizer.step()
        snapshot = one.sync.snapshot()
        assert {f"point:{name}" for name in snapshot.parameters} <= snapshot.extra.keys()
        assert {f"momentum:{name}" for name in snapshot.parameters} <= snapshot.extra.keys()
        kept = [value["momentum_buffer"] for value in snapshot.states[0].values()]
        return [*(t.clone() for t in snapshot.parameters.values()), *kept, *snapshot.extra.values()], one.sync.rounds

    found = ranks.run(2, script)
    assert_same([tensors for tensors, _ in found], found[0][0])
    assert [rounds for _, rounds in found] == [2, 2]
