"""What a worker notices of its own training: samples that trained, steps left out, waits that were no work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hora
import ranks
from trainings import batch, loss_of, mlp, part, training


class Recorder:
    def __init__(self) -> None:
        self.notices: list[tuple[str, str]] = []

    def notice(self, kind: str, text: str) -> None:
        self.notices.append((kind, text))

    def begin(self) -> None: ...

    def stepped(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[hora.Job]:
    made = hora.init(request.param, on_nonfinite="skip")
    yield made
    made.close()


def prepared(job: hora.Job) -> tuple[torch.nn.Module, torch.optim.Optimizer, Recorder]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer)
    recorder: Any = Recorder()
    job.training.recorder = recorder
    return model, optimizer, recorder


@pytest.mark.parametrize("job", ["ring"], indirect=True)
def test_an_evaluation_without_no_grad_is_no_training(job: hora.Job) -> None:
    model, optimizer, _ = prepared(job)
    data = torch.ones(12, 2)
    for x in job.shard(data, batch_size=4):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for x in job.shard(torch.ones(40, 2), batch_size=4):
        model(x)
    assert job.training.num_samples == job.training.own_samples == 12


@pytest.mark.parametrize("job", ["local:every=2", "diloco:every=2"], indirect=True)
def test_a_step_that_only_this_worker_leaves_out_is_noticed(job: hora.Job) -> None:
    model, optimizer, recorder = prepared(job)
    for number, x in enumerate(job.shard(torch.ones(8, 2), batch_size=2)):
        (model(x).sum() * (float("nan") if number == 1 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [kind for kind, _ in recorder.notices] == ["skipped"] and "not finite" in recorder.notices[0][1]


def test_steps_that_a_scaler_leaves_out_are_noticed_once_for_all() -> None:
    def work(group: Any) -> list[str]:
        one = training(group, "ring")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        one.prepare(model, optimizer, None, scaler)
        recorder: Any = Recorder()
        one.recorder = recorder
        for step in range(5):
            loss = loss_of(model, part(one, batch(step)))
            scaler.scale(loss * float("inf") if step in (1, 3) and group.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [kind for kind, _ in recorder.notices]

    assert ranks.run(2, work) == [["skipped", "skipped"], []]


@pytest.mark.parametrize("strategy", ["ring:update=sharded", "shared:update=sharded"])
def test_who_waits_before_and_after_a_sharded_step_is_not_at_work(strategy: str) -> None:
    def work(group: Any) -> tuple[float, float]:
        """Seconds in communication, and in all."""
        one = training(group, strategy)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        begin = time.perf_counter()
        for step in range(4):
            loss_of(model, part(one, batch(step))).backward()
            if group.rank == 1:
                time.sleep(0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert one.sync is not None
        return one.sync.traffic.exposed_s, time.perf_counter() - begin

    (fast, _), (slow, all_s) = ranks.run(2, work)
    assert fast > 0.3, "the fast one has waited for four naps"
    assert slow < all_s - 0.3, "the naps of the slow one are no communication"
