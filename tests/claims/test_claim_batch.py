"""The linear learning-rate rule: what the verdict is made of, and that workers make the batch of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hora.bench.launched import launched
from hora.claims import batch

FACTORS = (1, 4, 32)
BASE = 0.95
STAYS, FALLS = {4: 0.0, 32: 0.0}, {4: 0.05, 32: 0.2}
FOR_A_WHILE = {4: 0.005, 32: 0.2}


def rows(lost: Mapping[str, Mapping[int, float]]) -> list[dict[str, Any]]:
    """Two seeds, whose accuracies spread around BASE less what is lost."""
    found: list[dict[str, Any]] = [{"kind": "grid", "lr": 0.01, "seeds": [100], "accuracies": [0.9]}]
    for factor in FACTORS:
        for arm in batch.ARMS if factor > 1 else (batch.WITHOUT,):
            middle = BASE - lost.get(arm, STAYS).get(factor, 0.0)
            found.append(
                {
                    "kind": "run", "arm": arm, "factor": factor, "batch": 8 * factor, "workers": 1, "peak_lr": 0.01,
                    "steps": 320 // factor, "warmup_steps": 1, "epochs": 3, "seeds": [0, 1],
                    "accuracies": [middle - 0.002, middle + 0.002], "train_losses": [0.1, None],
                }
            )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("ruled", "without", "word"),
    [
        (STAYS, FALLS, "holds"),
        (FOR_A_WHILE, FALLS, "only if"),
        (FOR_A_WHILE, FOR_A_WHILE, "fails"),
        (STAYS, STAYS, "fails"),
        (FALLS, STAYS, "fails"),
    ],
)
def test_every_verdict_can_come_out(ruled: dict[int, float], without: dict[int, float], word: str) -> None:
    verdict = batch.judge(rows({batch.RULE: ruled, batch.WITHOUT: without}))
    assert verdict.word == word


def test_only_if_names_the_greatest_batch_that_keeps() -> None:
    verdict = batch.judge(rows({batch.RULE: FOR_A_WHILE, batch.WITHOUT: FALLS}))
    assert verdict.text.startswith("the batch grows no more than × 4")


def test_a_batch_that_recovers_behind_one_that_fell_does_not_count() -> None:
    assert batch.reach(rows({batch.RULE: {4: 0.02, 32: 0.0}}), batch.RULE) == 1


def test_the_rate_grows_as_each_way_says() -> None:
    grown = {arm: batch.rate(arm, 0.01, 16, 20) for arm in batch.ARMS}
    assert {arm: (factor, warmup) for arm, (_, factor, warmup) in grown.items()} == {
        "same": (1, 0), "at once": (16, 0), "warm-up": (16, 2), "root": (4, 2),
    }  # fmt: skip


@pytest.mark.timeout(240)
def test_two_workers_make_the_batch_of_one_process() -> None:
    """The reason why batches beyond the number of cores may be made by larger ones per worker."""
    spec = {"rates": [(0.01, 2.0, 0.5), (0.01, 2.0, 0.0)], "seeds": [0], "epochs": 1, "exact": True}
    two, one = (
        launched(batch.WORKER, json.dumps({**spec, "batch": 250 // size}), size=size, strategy="ring")
        for size in (2, 1)
    )
    assert two["steps"] == one["steps"] == 6
    assert [rate["warmup_steps"] for rate in one["rates"]] == [3, 0]
    torch.testing.assert_close(
        *(torch.tensor(each["parameters"], dtype=torch.float64) for each in (two, one)), rtol=1e-9, atol=1e-12
    )


def test_the_table_has_a_line_for_every_batch() -> None:
    table = batch.table(rows({batch.WITHOUT: FALLS}))
    assert [cells[0] for cells in table.lines] == ["× 1", "× 4", "× 32"]
    assert all(len(cells) == len(table.headings) for cells in table.lines)


def test_learning_rates_that_tie_are_named() -> None:
    ones = rows({})
    assert "on 1 other seeds. " in batch.table(ones).note
    tied = [
        {"kind": "grid", "lr": lr, "seeds": [100, 101], "accuracies": accuracies}
        for lr, accuracies in ((0.005, [0.9, 0.9]), (0.01, [0.1 + 0.2 + 0.6, 0.9]), (0.02, [0.8, 0.95]))
    ]
    assert batch.best_rates(tied) == [0.005, 0.01]
    note = batch.table([*tied, *ones[1:]]).note
    assert "on 2 other seeds, where 0.005 and 0.01 tied and the smallest was taken. " in note


def test_it_can_be_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    batch.draw(rows({batch.WITHOUT: FALLS, "at once": {4: 0.0, 32: 0.85}}), figure)
    assert len(figure.axes) == 2
