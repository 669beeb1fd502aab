"""Claim `coordinator`: what decides, and what a real run asks of its coordinator, in messages.

Reports go by the clock, so nothing here looks at their bytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from hora.claims import coordinator
from hora.claims.claim import Row

METRICS_OFF = False


def row(strategy: str, share: float, workers: int = 4, params: int = 1_000_000, **more: Any) -> Row:
    """One whose coordinator carries that share of 10 MB of tensors in 10 steps; a tenth of it samples."""
    num_bytes = round(share * 10_000_000)
    by_kind = {"report": [10, num_bytes - num_bytes // 10], "take": [1, num_bytes // 10]}
    passed = {"bytes": num_bytes, "by_kind": by_kind, "tensor_bytes": 10_000_000, "seconds": 2.0}
    return {
        "strategy": strategy, "workers": workers, "servers": 0, "params": params, "metrics": True, "steps": 10,
        "meeting": {"bytes": 5000, "by_kind": {"join": [workers, 600], "put": [10, 4400]}},
        "leaving": {"bytes": 500, "by_kind": {"leave": [workers, 500]}}, "repeats": [passed] * 3, **more,
    }  # fmt: skip


def story(ring: float, local: float) -> list[Row]:
    small = [row("ring", 0.5, params=100_000), row("local:every=8", 0.5, params=100_000)]
    large = [row("ring", ring), row("ring", ring / 2, workers=8), row("local:every=8", local)]
    return [*small, *large, row("ring", 0.9, metrics=METRICS_OFF)]


@pytest.mark.parametrize(
    ("ring", "local", "said"),
    [
        (0.002, 0.004, "holds: the coordinator's share"),
        (0.002, 0.04, "only if the strategy is ring: "),
        (0.02, 0.04, "fails: the coordinator's share"),
    ],
)
def test_the_verdict_looks_at_large_models_with_metrics(ring: float, local: float, said: str) -> None:
    found = str(coordinator.judge(story(ring, local)))
    assert "so by design, not a finding" in found
    assert found.startswith(said) and f"ring {100 * ring:.2g} %, local:every=8 {100 * local:.2g} %" in found


def test_it_fails_where_somebody_began_without_the_coordinator() -> None:
    alone = row("ring", 0.001, meeting={"bytes": 0, "by_kind": {}})
    assert str(coordinator.judge([alone])).startswith("fails: not everybody met through it")


def test_the_table_tells_reports_from_samples() -> None:
    told = coordinator.table(story(0.002, 0.004))
    assert {len(line) for line in told.lines} == {len(told.headings)}
    name, met, passed, reports, samples, tensors, share, step = told.lines[2]
    assert (name, met) == ("ring, 4 × 1 M", "14, 5.0 kB")
    assert (passed, reports, samples) == ("2000 (2000 to 2000)", "1800", "200")
    assert (tensors, share, step) == ("1.00", "0.2 %", "200 (200 to 200)")
    assert told.lines[-1][0].endswith("no metrics") and "join 4, put 10" in told.note
    assert "3 turns of 10 steps" in told.note


def test_the_figure_is_drawn_from_the_rows() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn = figures.Figure()
    coordinator.draw(story(0.002, 0.004), drawn)
    assert len(drawn.axes) == 3


@pytest.mark.timeout(240)  # several processes import torch on whatever cores there are
def test_without_metrics_the_ring_s_steps_ask_nothing_of_the_coordinator() -> None:
    (found,) = coordinator.measured(["ring"], 2, 10_000, METRICS_OFF, steps=4, rounds=1)
    assert coordinator.joined(found) == 2
    (passed,) = found["repeats"]
    assert passed["by_kind"].keys() <= {"tell"}  # a rank that waits long for another says so
    assert passed["bytes"] == sum(num_bytes for _, num_bytes in passed["by_kind"].values())
    width = round(10_000 / 75)
    num_bytes = 4 * (75 * width + 10)
    assert passed["tensor_bytes"] >= 4 * 2 * num_bytes  # 4 steps: each of 2 ranks gives 2(n−1)/n of the gradients
    assert found["leaving"]["by_kind"]["leave"][0] == 2
