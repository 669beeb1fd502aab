"""Hints: a script that hardly means what it does is told so once, by rank 0, with the remedy."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.collectives import Group
from hora.training import Training
from trainings import batch, loss_of, mlp, part


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "hora.training.hints"]


def wait_for(condition: Callable[[], Any], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def train(batches: Callable[[Training, int], torch.Tensor], size: int = 2, steps: int = 4) -> None:
    def script(group: Group) -> None:
        one, model = trainings.training(group), mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(steps):
            loss_of(model, batches(one, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        group.barrier()

    ranks.run(size, script)


def test_workers_that_train_on_the_same_batches_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(lambda one, step: batch(step), size=3)
        assert wait_for(lambda: said(caplog))
    (line,) = said(caplog)
    assert line.startswith("all 3 workers train on the same batches") and "job.shard(loader)" in line


@pytest.mark.parametrize(
    "batches", [lambda one, step: part(one, batch(step)), lambda one, step: batch(0)], ids=["own", "always one"]
)
def test_workers_with_batches_of_their_own_and_benchmarks_are_not(
    batches: Callable[[Training, int], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(batches)
        time.sleep(0.1)
    assert said(caplog) == []


def test_a_wrapper_of_ddp_around_a_prepared_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with caplog.at_level(logging.WARNING):

            def script(group: Group) -> None:
                one, model = trainings.training(group), mlp()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                one.prepare(model, optimizer)
                wrapped = torch.nn.parallel.DistributedDataParallel(model) if one.rank == 0 else model
                for step in range(3):
                    loss_of(wrapped, part(one, batch(step))).backward()
                    optimizer.step()

            ranks.run(2, script)
    finally:
        dist.destroy_process_group()
    (line,) = said(caplog)
    assert "DistributedDataParallel" in line and "leave the wrapper out" in line


def test_steps_that_the_other_workers_do_not_take_are_refused() -> None:
    """Rank 1 has two more batches than rank 0, in loops of its own: the first is dropped, the second raises."""

    def script(one: Training) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(3 + 2 * one.rank):
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        one.depart(for_good=True)  # as at the script's end
        one.stay()

    errors = trainings.fail(script, "shared")
    assert errors[0] == ""
    assert "HoraError: rank 1: step 5 cannot be taken: " in errors[1] and "Ranks must take the same number" in errors[1]
