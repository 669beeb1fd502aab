"""The linear learning-rate rule: what the verdict is made of, and that workers make the batch of one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hora.datasets import digits
from hora.launch.launched import launched
from hora_benchmarks.claims import batch
from hora_benchmarks.claims.claim import MAX_TEXT

pytestmark = pytest.mark.full

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
    assert len(verdict.text) <= MAX_TEXT


def test_only_if_names_the_greatest_batch_that_keeps() -> None:
    verdict = batch.judge(rows({batch.RULE: FOR_A_WHILE, batch.WITHOUT: FALLS}))
    assert verdict.text.startswith("the batch grows no more than × 4")
    assert "at × 32 test accuracy changes by -20.0 ± 0.0 points with the rule" in verdict.text


def scattered(arm: str, factor: int, accuracies: list[float], lost: Mapping[str, Mapping[int, float]]) -> Any:
    """The same rows, but for the accuracies of one run."""
    return [
        {**row, "accuracies": accuracies} if row.get("arm") == arm and row["factor"] == factor else row
        for row in rows(lost)
    ]


def test_verdict_and_table_give_the_same_mean_of_the_seeds_differences() -> None:
    ones = scattered(batch.RULE, 32, [BASE - 0.002 - 0.01, BASE + 0.002 - 0.03], {batch.WITHOUT: FALLS})
    assert batch.gained(ones, batch.RULE)[32] == pytest.approx((-2.0, 1.0))
    assert "changes by -2.0 ± 1.0 points with the rule, by -20.0 ± 0.0 without" in batch.judge(ones).text
    (line,) = [cells for cells in batch.table(ones).lines if cells[0] == "× 32" and "(the rule)" in cells[4]]
    assert line[-1] == "-2.0 ± 1.0" and line[-2].startswith("93.0 (92.2 to 93.8)")


def test_it_is_said_where_other_seeds_might_decide_otherwise() -> None:
    ones = scattered(batch.RULE, 32, [BASE - 0.002 - 0.01, BASE + 0.002 - 0.03], {batch.WITHOUT: FALLS})
    assert "Other seeds might decide otherwise of × 32 with the rule (-2.0 ± 1.0): " in batch.judge(ones).more
    assert "Other seeds" not in batch.judge(rows({batch.WITHOUT: FALLS})).more


def test_it_is_said_how_far_warm_up_made_no_difference() -> None:
    assert batch.judge(rows({})).more == "Warm-up made no difference up to × 32 (at most 0.0 ± 0.0 points)."
    verdict = batch.judge(rows({"at once": FOR_A_WHILE, batch.RULE: {4: 0.005, 32: 0.1}}))
    assert verdict.more == (
        "Warm-up made no difference up to × 4 (at most 0.0 ± 0.0 points). "
        "Against the same rate at once, warm-up changed test accuracy by +10.0 ± 0.0 points at × 32."
    )
    verdict = batch.judge(rows({"at once": {4: 0.005}}))
    assert verdict.more.startswith("Against the same rate at once, warm-up changed test accuracy by +0.5 ± 0.0 points")
    ones = scattered("at once", 32, [BASE - 0.002, BASE + 0.002 - 0.06], {})
    assert "+3.0 ± 3.0 points at × 32, which might be chance." in batch.judge(ones).more


def test_a_batch_that_recovers_behind_one_that_fell_does_not_count() -> None:
    assert batch.reach(rows({batch.RULE: {4: 0.02, 32: 0.0}}), batch.RULE) == 1


def test_the_rate_grows_as_each_way_says() -> None:
    grown = {arm: batch.rate(arm, 0.01, 16, 20) for arm in batch.ARMS}
    assert {arm: (factor, warmup) for arm, (_, factor, warmup) in grown.items()} == {
        "same": (1, 0), "at once": (16, 0), "warm-up": (16, 2), "root": (4, 2),
    }  # fmt: skip


@pytest.mark.full
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


def test_the_table_has_a_line_for_every_batch_and_rate() -> None:
    table = batch.table(rows({batch.WITHOUT: FALLS}))
    assert [cells[0] for cells in table.lines] == ["× 1", *4 * ["× 4"], *4 * ["× 32"]]
    assert all(len(cells) == len(table.headings) for cells in table.lines)
    assert "one is 0.34 points, so the bar of 1 point is 3 images" in table.note
    assert table.repeats.startswith("2 seeds; mean")


def test_the_test_has_as_many_images_as_is_said() -> None:
    assert len(digits()[1]) == batch.IMAGES


def test_learning_rates_that_tie_are_named() -> None:
    ones = rows({})
    assert "on 1 other seed. " in batch.table(ones).note
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
    left, right = figure.axes
    assert left.get_legend() and right.get_legend()
    assert left.get_yscale() == "linear" and "log" in right.get_ylabel()
