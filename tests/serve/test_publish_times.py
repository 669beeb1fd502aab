"""When a worker's parameters are shown: whole, after every optimizer's part of a step, and when a round is closed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.data import shard
from hora.training import Training
from trainings import batch, loss_of, mlp, samples, training


class Shown:
    """Stands where the publisher does: what the parameters were whenever they might be shown."""

    def __init__(self, one: Training, models: Sequence[torch.nn.Module]) -> None:
        self.steps: list[int] = []
        self.sums: list[list[float]] = []
        self._one, self._models = one, models
        one.show = self.show

    def show(self, at_once: bool) -> None:
        self.steps.append(self._one.step)
        self.sums.append([float(sum(p.detach().double().sum() for p in model.parameters())) for model in self._models])


def sum_of(model: torch.nn.Module) -> float:
    return float(sum(p.detach().double().sum() for p in model.parameters()))


@pytest.mark.parametrize("strategy", ["ring", "local:every=1"])
def test_with_several_optimizers_a_step_is_shown_when_the_last_has_stepped(strategy: str) -> None:
    def work(group: Group) -> None:
        one, models = training(group, strategy), [mlp(seed=1), mlp(seed=2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        one.prepare(models, optimizers)
        shown = Shown(one, models)
        for step in range(1, 4):
            for model in models:
                loss_of(model, batch(step)).backward()
            optimizers[0].step()
            assert shown.steps[-1:] != [step], "the second has not stepped yet"
            optimizers[1].step()
            assert shown.steps[-1:] == [step] and shown.sums[-1] == [sum_of(model) for model in models]
            for optimizer in optimizers:
                optimizer.zero_grad()
        one.close()

    ranks.run(2, work)


def test_an_optimizer_that_does_not_step_is_waited_for_until_the_next_forward() -> None:
    def work(group: Group) -> None:
        one, models = training(group, "ring"), [mlp(seed=1), mlp(seed=2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        one.prepare(models, optimizers)
        shown = Shown(one, models)
        loss_of(models[0], batch(0)).backward()
        optimizers[0].step()
        with torch.no_grad():
            models[0](batch(0))
        assert shown.steps == []
        loss_of(models[0], batch(1)).backward()
        assert shown.steps == [1]
        one.close()

    ranks.run(1, work)


def test_whenever_a_round_is_closed_outside_of_a_step_its_average_is_shown() -> None:
    def work(group: Group) -> list[tuple[int, float]]:
        one, model = training(group, "local:every=100"), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        averages: list[tuple[int, float]] = []

        def show(at_once: bool) -> None:
            assert one.sync is not None
            if one.sync.rounds and not one.sync.local_steps:
                averages.append((one.sync.rounds, sum_of(model)))

        one.show = show
        for _ in range(2):
            for x, _y in one.adopt(shard(samples(24), one, global_batch=12)):
                loss_of(model, x.double()).backward()
                optimizer.step()
                optimizer.zero_grad()
        one.close()
        return averages

    mine, others = ranks.run(2, work)
    assert mine == others and {number for number, _ in mine} == {1, 2}
