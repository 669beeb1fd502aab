"""EarlyStopping, scale_lr and clip_grad_norm_, in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hora
from hora.job import job as job_module


@pytest.fixture(autouse=True)
def job() -> Iterator[hora.Job]:
    yield hora.init()
    if job_module._current is not None:
        job_module._current.close()


def test_patience_counts_calls_without_an_improvement(job: hora.Job) -> None:
    stopping = hora.EarlyStopping(patience=2)
    assert [stopping(value) for value in (3.0, 2.0, 2.5, 1.9, 1.9, torch.tensor(2.0))] == [False] * 5 + [True]
    assert job.stopped and stopping.reason == "no better than 1.9 for 2 calls"


def test_a_target_is_reached_from_either_side(job: hora.Job) -> None:
    stopping = hora.EarlyStopping(target=0.5)
    assert [stopping(0.6), stopping(0.5)] == [False, True] and job.stopped
    stopping = hora.EarlyStopping(target=0.97, mode="max", patience=5)
    assert [stopping(0.9), stopping(0.98)] == [False, True]


def test_min_delta_is_what_an_improvement_must_be(job: hora.Job) -> None:
    stopping = hora.EarlyStopping(patience=1, mode="max", min_delta=0.1)
    assert [stopping(0.5), stopping(0.65), stopping(0.7)] == [False, False, True]


def test_nan_is_no_improvement_and_no_best(job: hora.Job) -> None:
    stopping = hora.EarlyStopping(patience=2)
    assert [stopping(float("nan")), stopping(1.0), stopping(float("nan")), stopping(float("nan"))] == [False] * 3 + [
        True
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "needs patience= or target="),
        ({"patience": 0}, "patience takes 1 or more, not 0"),
        ({"patience": 1, "mode": "less"}, "mode 'less' is unknown; there are: min, max"),
        ({"patience": 1, "min_delta": -1.0}, "min_delta takes 0 or more"),
    ],
)
def test_bad_arguments_say_what_is_taken(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        hora.EarlyStopping(**given)


def test_the_linear_rule_climbs_over_the_warm_up() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = hora.scale_lr(optimizer, factor=4, warmup_steps=3)
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    for bad in ({"factor": 0}, {"factor": float("inf")}, {"warmup_steps": -1}):
        with pytest.raises(ValueError, match=r"scale_lr: .* takes"):
            hora.scale_lr(optimizer, **bad)  # type: ignore[arg-type]


def test_clipping_before_prepare_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert hora.clip_grad_norm_(parameter, 3.0).item() == 6
    assert parameter.grad.tolist() == pytest.approx([1.5] * 4, abs=1e-5)
