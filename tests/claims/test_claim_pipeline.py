"""Claim 11: what is computed, how often and in which order; and the verdicts that rows can have."""

from __future__ import annotations

from typing import Any

import pytest

from hora.bench.launched import launched
from hora.claims import pipeline

SCRIPT = """
import json, pathlib, sys, torch, hora
from hora.claims import pipeline_rank as rank

torch.set_default_dtype(torch.float64)
rank.WIDTH, rank.HEADS, rank.CONTEXT = 16, 2, 8
job = hora.init()
job.process_group("gloo")
whole = rank.DataParallel(0)
whole.inputs, whole.targets = rank.batch()
whole.step()
wanted = dict(zip(("first", "last"), rank.split(whole.model)))[("first", "last")[job.rank]].state_dict()
for schedule, micro_batches in rank.WAYS:
    if schedule in rank.SCHEDULES:
        way = rank.make(schedule, micro_batches, job)
        way.step()
        torch.testing.assert_close(way.model.state_dict(), wanted, rtol=1e-9, atol=1e-12)
ddp = rank.make("ddp", 1, job)
ddp.step()
torch.testing.assert_close(ddp.model.module.state_dict(), whole.model.state_dict(), rtol=1e-9, atol=1e-12)
rank.main(sys.argv[1], "1", "1")
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Any:
    script = tmp_path_factory.mktemp("pipeline") / "equal.py"
    script.write_text(SCRIPT)
    return launched((str(script),), size=2, strategy="ring")


def test_every_way_takes_the_step_of_one_process_on_the_whole_batch_and_in_the_order_of_its_schedule(rows: Any) -> None:
    orders = {(row["schedule"], row["micro_batches"]): [" ".join(one) for one in row["order"]] for row in rows}
    assert list(orders) == list(pipeline.WAYS)
    for m in pipeline.MICRO_BATCHES:
        forwards, backwards = (" ".join(f"{kind}{part}" for part in range(m)) for kind in "FB")
        assert orders["gpipe", m] == [f"{forwards} {backwards}"] * 2
    assert orders["1f1b", 2] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert orders["1f1b", 4] == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert orders["ring", 1] == orders["ddp", 1] == ["F0 B0"] * 2


def test_rows_of_a_run_are_judged_told_and_drawn(rows: Any) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert str(pipeline.judge(rows))
    assert len(pipeline.table(rows).lines) == len(pipeline.WAYS)
    pipeline.draw(rows, figure)
    assert len(figure.axes) == 3


def test_theory_of_the_bubble() -> None:
    assert [pipeline.theory(m) for m in (1, 3, 7)] == [1 / 2, 1 / 4, 1 / 8]
    assert pipeline.theory(8, stages=4) == 3 / 11


def made(
    idles: dict[int, float], speeds: dict[int, float], ring_idle: float = 0.02, ddp_step: float = 1.0
) -> list[dict[str, Any]]:
    """Rows of one round: GPipe and 1F1B alike, with speeds as shares of the ring's."""

    def row(schedule: str, m: int) -> dict[str, Any]:
        split = schedule in pipeline.SCHEDULES
        alone = ddp_step if schedule == "ddp" else 1.0
        step, idle = (1 / speeds[m], idles[m]) if split else (alone, ring_idle)
        return {"schedule": schedule, "micro_batches": m, "step_s": [step], "busy_s": [[step * (1 - idle)] * 2]}

    return [row(*way) for way in pipeline.WAYS]


BUBBLE = {1: 0.5, 2: 0.33, 4: 0.2, 8: 0.11}


@pytest.mark.parametrize(
    "rows, word, text",
    [
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.75, 8: 0.85}), "holds", "with 8 still a stage is idle 11 % of the time"),
        (made(BUBBLE, {1: 0.5, 2: 0.7, 4: 0.92, 8: 0.95}), "only if", "is cut into fewer than 4 micro-batches"),
        (made(BUBBLE, {1: 0.5, 2: 0.95, 4: 0.8, 8: 0.95}), "only if", "is cut into fewer than 8 micro-batches"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.7}, 0.06), "only if", "fewer than 8 micro-batches"),
        (made({**BUBBLE, 1: 0.2}, {1: 0.8, 2: 0.8, 4: 0.8, 8: 0.8}), "fails", "already with 1 micro-batch a stage is"),
        (made(BUBBLE, {1: 0.95, 2: 0.95, 4: 0.95, 8: 0.95}), "fails", "95 % of data parallel's speed"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.7}, 0.3), "fails", "less than 2 times as much as data parallel"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.95}, ddp_step=0.8), "holds", "(the faster data parallel: DDP;"),
    ],
)
def test_the_verdict_follows_the_rule(rows: list[dict[str, Any]], word: str, text: str) -> None:
    verdict = pipeline.judge(rows)
    assert verdict.word == word and text in verdict.text, verdict
