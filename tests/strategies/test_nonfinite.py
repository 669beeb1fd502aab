"""A gradient that is not finite is named, with rank and parameter, on every worker; or its step is left out on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainings import FAMILY, batch, building, fail, loss_of, mlp, parameters_of, part, same

ALGORITHMS = (*FAMILY, "tree", "halving", "star", "auto")
family = pytest.mark.parametrize("strategy", FAMILY)


def poison(one: Any, x: torch.Tensor, bad: bool, value: float = float("nan")) -> torch.Tensor:
    """The last rank's samples, or of the whole batch the last one, are bad."""
    x = x.clone()
    if bad and one.rank == one.size - 1:
        x[-1, 0] = value
    return x


def script(one: Any, value: float = float("nan"), width: int = 24, when: int = 1) -> list[torch.Tensor]:
    model = mlp(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    one.prepare(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        before = parameters_of(model)
        x = poison(one, part(one, batch(step)), step == when, value)
        # ReLU lets the bad sample reach the first layer only
        torch.relu(model[0](x)).sum(1).mean().backward()
        if one.size == 1 and step == when:
            continue
        optimizer.step()
        if step == when:
            assert all(torch.equal(a, b) for a, b in zip(before, parameters_of(model), strict=True))
    return parameters_of(model)


@pytest.mark.parametrize("strategy", ALGORITHMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rank_and_parameter_are_named_on_every_rank(strategy: str, value: float) -> None:
    for said in fail(lambda one: script(one, value), strategy, 3):
        assert said.startswith("HoraError: the gradient of 0.weight on rank 2")
        assert "is not finite" in said and "The step was not taken" in said
        assert "rank 0" not in said.split("is not finite")[0] and "0.bias" not in said


@family
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_it_is_named_over_every_transport(strategy: str, transport: str) -> None:
    if transport == "tcp" and strategy.startswith("shared"):
        strategy = strategy.replace("shared", "auto", 1)
    for said in fail(script, strategy, 2, transport):
        assert "the gradient of 0.weight on rank 1" in said


@family
def test_in_a_sliced_parameter_it_is_named_too(strategy: str) -> None:
    for said in fail(lambda one: script(one, width=1500), strategy, 2):
        assert "the gradient of 0.weight on rank 1" in said
        assert "rank 0" not in said.split("is not finite")[0]


@pytest.mark.parametrize("strategy", ALGORITHMS)
@pytest.mark.parametrize("when", [0, 1])
def test_skip_leaves_that_step_out_on_every_worker_and_training_goes_on(strategy: str, when: int) -> None:
    same(lambda one: script(one, when=when), strategy, 3, on_nonfinite="skip")


@family
def test_a_large_but_finite_gradient_is_nobodys_fault(strategy: str) -> None:
    """Its sum over a bucket overflows, its elements do not."""

    def large(one: Any) -> list[torch.Tensor]:
        with building():
            model = torch.nn.Linear(64, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
        one.prepare(model, optimizer)
        model(torch.ones(4, 64))
        (model.weight.sum() * 1e38).backward()
        optimizer.step()
        return parameters_of(model)

    same(large, strategy, rtol=1e-5, atol=1e-6)


def scaled(one: Any, kind: str, clip: bool, layout: torch.memory_format, where: int) -> list[torch.Tensor]:
    with building():
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.Flatten(),
            torch.nn.Linear(64 * 4, 3)
        ).double().to(memory_format=layout)  # fmt: skip
    make: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "fused": lambda: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    }
    optimizer = make[kind]()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    one.prepare(model, optimizer, scaler=scaler)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        x = part(one, batch(step, 12, 3 * 36).view(12, 3, 6, 6)).clone()
        if step == 2 and one.rank in (where, 0) and (one.size == 1 or one.rank == where):
            x[0, 0, 0, 0] = float("inf")
        loss = model(x.contiguous(memory_format=layout)).square().mean()
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            one.clip(model.parameters(), 0.5, 2.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [256.0, 256.0, 128.0, 128.0, 128.0, 256.0]
    return [*parameters_of(model), torch.tensor(scales)]


@family
@pytest.mark.parametrize("kind", ["sgd", "fused"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_that_overflows_on_one_worker_is_skipped_on_all(
    strategy: str, kind: str, clip: bool, layout: torch.memory_format
) -> None:
    """And the scale backs off equally, as in one process."""
    for where in (0, 1):
        same(lambda one, where=where: scaled(one, kind, clip, layout, where), strategy, rtol=1e-5, atol=1e-7)


@family
def test_half_precision_with_a_scaler_trains(strategy: str) -> None:
    def script(one: Any) -> list[torch.Tensor]:
        model = mlp(150).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        one.prepare(model, optimizer, scaler=scaler)
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, part(one, batch(step)).float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameters_of(model)

    same(script, strategy, rtol=0.01, atol=0.005)
