"""DeviceSync: exchanges whose outcome is read a step late train, stop and refuse steps as others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ranks
import trainings
from host_device import on_host
from trainings import batch, loss_of, mlp, parameters_of, part, same, uneven

__all__ = ["on_host"]
pytestmark = pytest.mark.usefixtures("on_host")

STEPS = 5


def optimizer_of(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return trainings.OPTIMIZERS[kind](model.parameters())


def plain_loop(kind: str, model_of: Any = mlp, clip: bool = False, micro: int = 1) -> Any:
    def script(one: Any) -> list[torch.Tensor]:
        model = model_of()
        optimizer = optimizer_of(kind, model)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            for number in range(micro):
                loss = loss_of(model, part(one, batch(step * micro + number)))
                if number < micro - 1:
                    with one.accumulate():
                        loss.backward()
                else:
                    loss.backward()
            if clip:
                one.clip(model.parameters(), 0.5, 2.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return parameters_of(model)

    return script


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_trains_as_one_process(kind: str, size: int) -> None:
    same(plain_loop(kind), "onhost", size, rtol=1e-9)


def test_clipping_and_accumulation_work_as_in_one_process() -> None:
    same(plain_loop("adamw", clip=True, micro=3), "onhost", rtol=1e-9)


def test_uneven_weights_are_known_in_the_step_itself() -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            loss_of(model, uneven(one, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    same(script, "onhost", 3)


def test_a_gradient_that_one_worker_lacks_counts_as_zero() -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = torch.nn.ModuleList([mlp(), mlp(seed=1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            whole = batch(step)
            loss = loss_of(model[0], part(one, whole))
            if one.rank == 0 and step % 2:  # the second model sees the first half only
                loss = loss + loss_of(model[1], whole[:6]) * (1 if one.size == 1 else 2)
            loss.backward()
            assert one.size > 1 or step % 2 or model[1][0].weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        return parameters_of(model)

    same(script, "onhost", rtol=1e-9)


def test_buffers_are_those_of_rank_0() -> None:
    def work(group: Any) -> list[float]:
        one = trainings.training(group, "onhost")
        with trainings.building():
            model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        for step in range(STEPS):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + group.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[1].running_mean.tolist()

    found = ranks.run(2, work)
    assert found[0] == found[1]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_not_finite_changes_nothing_and_is_named(fused: bool) -> None:
    def work(group: Any) -> tuple[str, int, bool]:
        one = trainings.training(group, "onhost")
        with trainings.building():
            model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        one.prepare(model, optimizer)
        kept = None
        for step in range(1, 9):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            if step == 4 and group.rank == 1:
                x[0, 0] = float("nan")
            before = [p.detach().clone() for p in model.parameters()]
            try:
                model(x).square().mean().backward()
                optimizer.step()
            except Exception as error:
                return str(error), step, kept if kept is not None else _equal(before, model)
            if step == 4:
                kept = _equal(before, model)
            optimizer.zero_grad()
        raise AssertionError("no error")

    for text, step, kept in ranks.run(2, work):
        assert "in step 4 is not finite" in text and "The step was not taken" in text
        assert kept, "the step has changed parameters"
        assert step <= 6 if fused else step == 4, "later than one step after it"


def _equal(before: list[torch.Tensor], model: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_do_not_count(fused: bool) -> None:
    def work(group: Any) -> int:
        one = trainings.training(group, "onhost", on_nonfinite="skip")
        with trainings.building():
            model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        one.prepare(model, optimizer)
        for step in range(8):
            x = torch.full((4, 6), float("inf")) if step in (2, 5) and group.rank == 0 else torch.ones(4, 6)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        one.depart()
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        return one.step

    assert ranks.run(2, work) == [6, 6]


@pytest.mark.parametrize("size", [2, 3])
def test_all_stop_after_the_same_step(size: int) -> None:
    def each(one: Any, model: Any) -> None:
        if one.rank == 1 and one.step == 4:
            one.stop("enough")

    def work(group: Any) -> tuple[int, list[torch.Tensor]]:
        one = trainings.training(group, "onhost")
        found = trainings.fit(one, "adamw", each=each)
        return one.step, found

    results = ranks.run(size, work)
    assert len({step for step, _ in results}) == 1
    assert 6 <= results[0][0] <= 8  # the wish goes with exchange 6, and all have read it two exchanges later
    assert all(torch.equal(a, b) for _, found in results for a, b in zip(found, results[0][1], strict=True))


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_worker_that_leaves_ends_the_loop_of_the_others_with_the_same_parameters(leaver: int) -> None:
    def work(group: Any) -> tuple[int, list[torch.Tensor]]:
        one = trainings.training(group, "onhost")
        found = trainings.fit(one, "adamw", steps=6 if group.rank == leaver else 50)
        return one.step, found

    results = ranks.run(2, work)
    assert [step for step, _ in results] == [6, 6]
    assert all(torch.equal(a, b) for _, found in results for a, b in zip(found, results[0][1], strict=True))


def test_gradients_stay_after_the_strategy_is_unbound() -> None:
    def work(group: Any) -> None:
        one = trainings.training(group, "onhost")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one.prepare(model, optimizer)
        loss_of(model, batch(0)).backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert one.sync is not None
        optimizer.step()
        one.sync.unbind()
        assert all(
            torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True) if p.grad is not None
        )

    ranks.run(2, work)
