"""A Sync may be unbound and bound again at any step boundary: a new generation of members does that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.strategies.common.step_status import StepStatus
from hora.strategies.common.sync import LoopEvent

STEPS = 6


def parameters_after(
    size: int, strategy: str, transport: str, rebind_at: int | None, in_turns: bool = False
) -> list[list[torch.Tensor]]:
    """Every rank's parameters. `in_turns`: one rank after the other takes its step, so that two runs have the same
    bits where each step is applied at once."""
    net = trainings.net()  # here: the seed is the process's, and ranks are threads

    def work(group: Any) -> list[torch.Tensor]:
        one = trainings.training(group, strategy)
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        one.prepare(model, optimizer)
        group.barrier()  # all have read rank 0's parameters
        for step in range(STEPS):
            if step == rebind_at:
                one.sync.unbind()  # type: ignore[union-attr]
                one.sync.bind(group)  # type: ignore[union-attr]
            generator = torch.Generator().manual_seed(100 * step + group.rank)
            for rank in range(size if in_turns else 1):
                if rank == group.rank or not in_turns:
                    model(torch.randn(4, 6, generator=generator)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if in_turns:
                    group.barrier()
        one.sync.join(LoopEvent.FINISHED)  # type: ignore[union-attr]
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
        ("local:every=2,via=ps/2", "memory"),
        ("local:every=2,via=ps/1tcp", "memory"),
        ("diloco:every=2", "memory"),  # outer momentum
    ],
)
def test_a_sync_that_is_bound_again_between_two_steps_trains_on_as_before(
    strategy: str, transport: str, rebind_at: int
) -> None:
    if strategy.startswith(("local", "diloco")):
        rebind_at = 2 * (rebind_at // 2)  # where a round has ended
    expected = parameters_after(2, strategy, transport, None)
    found = parameters_after(2, strategy, transport, rebind_at)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("rebind_at", [1, 4])
@pytest.mark.parametrize(
    "strategy",
    [
        "ps/1",
        "ps/2tcp",  # ranks of one host push one gradient
        "ps:clip_norm=0.1,wire=int8/2tcp",  # residuals of error feedback
        "ps:mode=async/2",
        "ps:mode=async,prefetch=true/1",
        "ps:mode=async,prefetch=true,wire=topk,topk=0.2/1tcp",
        "ps:mode=async,correct=dc/2",  # a private copy of what each worker read last
        "ps:mode=ssp,staleness=1/2",
        "ps:mode=ssp,staleness=1/1tcp",
    ],
)
def test_servers_go_on_with_workers_that_are_bound_again(strategy: str, rebind_at: int) -> None:
    """Their parameters, optimizer state and clocks hold, and what each worker has of them."""
    in_turns = "mode=" in strategy
    size = 1 if "prefetch" in strategy else 3  # its pushes may be applied after the turn
    expected = parameters_after(size, strategy, "memory", None, in_turns)
    found = parameters_after(size, strategy, "memory", rebind_at, in_turns)
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
