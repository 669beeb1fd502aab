"""Claim 11: what is computed, how often and in which order; and the verdicts that rows can have."""

from __future__ import annotations

from typing import Any

import pytest

from hora.launch.launched import launched
from hora_benchmarks.claims import pipeline
from hora_benchmarks.claims.claim import MAX_TEXT

pytestmark = pytest.mark.full

SCRIPT = """
import json, pathlib, sys, torch, hora
from hora_benchmarks.claims import pipeline_rank as rank

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


@pytest.mark.full
def test_every_way_takes_the_step_of_one_process_on_the_whole_batch_and_in_the_order_of_its_schedule(rows: Any) -> None:
    orders = {(row["schedule"], row["micro_batches"]): [" ".join(one) for one in row["order"]] for row in rows}
    assert list(orders) == list(pipeline.WAYS)
    for m in pipeline.MICRO_BATCHES:
        forwards, backwards = (" ".join(f"{kind}{part}" for part in range(m)) for kind in "FB")
        assert orders["gpipe", m] == [f"{forwards} {backwards}"] * 2
    assert orders["1f1b", 2] == ["F0 F1 B0 B1", "F0 B0 F1 B1"]
    assert orders["1f1b", 4] == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert orders["ring", 1] == orders["ddp", 1] == ["F0 B0"] * 2


@pytest.mark.full
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


SLOW = {1: 0.5, 2: 0.6, 4: 0.86, 8: 0.77}


@pytest.mark.parametrize(
    "rows, word, text",
    [
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.75, 8: 0.85}), "holds", "; at best, with 8, idle 11 % at 85 %"),
        (made(BUBBLE, SLOW), "holds", "; at best, with 4, idle 20 % at 86 %; with 8, idle 11 % at 77 %, where comp"),
        (made(BUBBLE, {1: 0.5, 2: 0.7, 4: 0.92, 8: 0.95}), "only if", "is cut into fewer than 4 micro-batches"),
        (made(BUBBLE, {1: 0.5, 2: 0.95, 4: 0.8, 8: 0.95}), "only if", "is cut into fewer than 8 micro-batches"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.7}, 0.06), "only if", "fewer than 8 micro-batches"),
        (made({**BUBBLE, 1: 0.2}, {1: 0.8, 2: 0.8, 4: 0.8, 8: 0.8}), "fails", "already with 1 micro-batch a stage is"),
        (made(BUBBLE, {1: 0.95, 2: 0.95, 4: 0.95, 8: 0.95}), "fails", "95 % of data parallel's speed"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.7}, 0.3), "fails", "a stage never waits too much: with 1 micro"),
        (made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.95}, ddp_step=0.8), "holds", "with 8, idle 11 % at 76 %"),
    ],
)
def test_the_verdict_follows_the_rule(rows: list[dict[str, Any]], word: str, text: str) -> None:
    verdict = pipeline.judge(rows)
    assert verdict.word == word and text in verdict.text, verdict


def again(rows: list[dict[str, Any]], *times: float) -> list[dict[str, Any]]:
    """The same in more rounds, each so many times as long."""
    return [
        row
        | {
            "step_s": [time * row["step_s"][0] for time in times],
            "busy_s": [[time * busy for busy in row["busy_s"][0]] for time in times],
        }
        for row in rows
    ]


def test_the_spread_is_told_and_a_verdict_fits_into_a_row() -> None:
    for rows in (made(BUBBLE, SLOW), made(BUBBLE, {**SLOW, 8: 0.95}), made(BUBBLE, SLOW, 0.3)):
        verdict = pipeline.judge(again(rows, 1.0, 1.25, 0.8))
        assert "at 50 % (40 to 62) of data parallel's speed" in verdict.text
        assert len(verdict.text) <= MAX_TEXT
    assert pipeline.table(again(made(BUBBLE, SLOW), 1.0, 1.25, 0.8)).repeats.startswith("3 rounds, interleaved")


def test_both_rivals_are_named_and_what_the_ring_alone_would_say() -> None:
    same = pipeline.judge(made(BUBBLE, SLOW, ddp_step=0.9)).more
    assert "with the faster data parallel, DDP: 36 samples/s; idle with the ring, 2 %, since what DDP" in same
    assert (
        "the pipeline has 86 % of it with 4 and 77 % of it with 8 micro-batches, and the verdict is the same." in same
    )
    faster = pipeline.judge(made(BUBBLE, {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.95}, ddp_step=0.8))
    assert faster.word == "holds" and "the verdict is another: only if." in faster.more
    alone = pipeline.judge(made(BUBBLE, SLOW, ddp_step=1.1)).more
    assert "with the faster data parallel, ring: 32 samples/s; idle with the ring, 2 %." in alone
    assert "the verdict is" not in alone


def test_it_says_where_twice_the_ring_lies_within_the_spread() -> None:
    rows = made(BUBBLE, SLOW)
    assert "by the medians only" not in pipeline.judge(rows).more
    rows = again(rows, 1.0, 1.0, 1.0)
    ring = next(row for row in rows if row["schedule"] == "ring")
    ring["busy_s"][0] = [0.88, 0.88]
    assert "would be 24 %, above the pipeline's share with 4 and 8 micro-batches: " in pipeline.judge(rows).more


def test_longer_computing_is_not_taken_for_waiting() -> None:
    more = pipeline.judge(made(BUBBLE, SLOW)).more
    assert "With 8 micro-batches computing takes 1156 ms of a step, against 930 with 4: smaller ones compute " in more
    assert "the ranges overlap" not in more
    assert "(the ranges overlap)" in pipeline.judge(again(made(BUBBLE, SLOW), 1.0, 0.5, 2.0)).more
    assert "computing" not in pipeline.judge(made(BUBBLE, {**SLOW, 8: 0.88})).more
