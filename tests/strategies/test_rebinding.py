"""A Sync may be unbound and bound again at any step boundary: a new generation of members does that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.strategies.common.step_status import StepStatus

STEPS = 6


def parameters_after(size: int, strategy: str, transport: str, rebind_at: int | None) -> list[list[torch.Tensor]]:
    net = trainings.net()  # here: the seed is the process's, and ranks are threads

    def work(group: Any) -> list[torch.Tensor]:
        one = trainings.training(group, strategy)
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            if step == rebind_at:
                one.sync.unbind()  # type: ignore[union-attr]
                one.sync.bind(group)  # type: ignore[union-attr]
            generator = torch.Generator().manual_seed(100 * step + group.rank)
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    return ranks.run(size, work, transport)


@pytest.mark.parametrize("rebind_at", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "transport"),
    [
        ("ring", "tcp"),
        ("shared", "shm"),
        ("shared:update=sharded", "shm"),
        ("ring:update=sharded", "memory"),
        ("local:every=2", "memory"),
    ],
)
def test_a_sync_that_is_bound_again_between_two_steps_trains_on_as_before(
    strategy: str, transport: str, rebind_at: int
) -> None:
    if strategy.startswith("local"):
        rebind_at = 2 * (rebind_at // 2)  # where a round has ended
    expected = parameters_after(2, strategy, transport, None)
    found = parameters_after(2, strategy, transport, rebind_at)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


def test_a_status_may_be_read_in_the_step_after_it_was_posted() -> None:
    def work(group: Any) -> list[tuple[float, float, list[float]]]:
        found, pending = [], None
        for step in range(3):
            if pending is not None:
                status = pending.read()
                found.append((status.step, status.stop, list(status.holders)))
            mine = StepStatus(step=step, stop=float(group.rank == 1 and step == 1), holders=[1.0, float(group.rank)])
            pending = mine.post(group, "status", late=True)
        assert pending is not None
        assert pending.read().generation == 0
        return found

    assert ranks.run(2, work) == [[(0.0, 0.0, [2.0, 1.0]), (2.0, 1.0, [2.0, 1.0])]] * 2
