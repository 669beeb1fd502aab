"""Claim `coordinator`: what decides, and what a real run asks of its coordinator, in messages.

Reports go by the clock, so nothing here looks at their bytes.
"""

from __future__ import annotations

from typing import Any

import pytest

from hora_benchmarks.claims import coordinator
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

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
        (0.002, 0.004, "holds: of the tensors' bytes it carries"),
        (0.002, 0.04, "only if the strategy is ring: "),
        (0.02, 0.04, "fails: of the tensors' bytes it carries"),
    ],
)
def test_the_verdict_looks_at_large_models_with_metrics(ring: float, local: float, said: str) -> None:
    verdict = coordinator.judge(story(ring, local))
    assert "so by design, not a finding" in verdict.more and len(verdict.text) <= MAX_TEXT
    figures = f"{100 * ring:.2g} % under ring, {100 * local:.2g} % under local:every=8; the bar is 1 %"
    assert str(verdict).startswith(said) and figures in verdict.text


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({2: 5200, 4: 16500, 8: 54500}, "Set-up grows nearly with the square of the workers (to the power of 1.7): "),
        ({2: 5000, 4: 13000}, "Set-up grows faster than the workers (to the power of 1.4): "),
        ({2: 5000, 8: 20000}, "Set-up grows no faster than the workers (to the power of 1.0): "),
    ],
)
def test_how_set_up_grows_is_computed(sizes: dict[int, int], said: str) -> None:
    met = [
        row("ring", 0.001, workers=workers, meeting={"bytes": num_bytes, "by_kind": {"join": [workers, 600]}})
        for workers, num_bytes in sizes.items()
    ]
    assert said in coordinator.judge(met).more
    assert "Set-up" not in coordinator.judge(met[:1]).more


def test_reports_are_told_to_go_by_the_clock() -> None:
    long = row("ring", 0.002, params=10_000_000)
    long["repeats"] = [{**repeat, "seconds": 4.0, "by_kind": {"report": [20, 40_000]}} for repeat in long["repeats"]]
    more = coordinator.judge([row("ring", 0.002), long]).more
    assert "1.2 a second from each process" in more  # 10 reports in 2 s, 20 in 4 s, of four processes
    assert "1800 bytes in a step of 200 ms and 4000 bytes in a step of 400 ms" in more


def test_it_fails_where_somebody_began_without_the_coordinator() -> None:
    alone = row("ring", 0.001, meeting={"bytes": 0, "by_kind": {}})
    assert str(coordinator.judge([alone])).startswith("fails: not all processes met through it")


def test_the_table_tells_reports_from_samples() -> None:
    told = coordinator.table(story(0.002, 0.004))
    assert {len(line) for line in told.lines} == {len(told.headings)}
    name, requests, met, passed, reports, samples, tensors, share, step = told.lines[2]
    assert (name, requests, met) == ("ring, 4 × 1 M", "14", "5.0")
    assert (passed, reports, samples) == ("2000 (2000 to 2000)", "1800", "200")
    assert (tensors, share, step) == ("1.00", "0.2 %", "200 (200 to 200)")
    assert told.lines[-1][0].endswith("no metrics") and "join 4, put 10" in told.note
    assert "3 turns of 10 steps" in told.repeats and told.headings[1:3] == ["set-up: requests", "set-up: kB"]


def test_the_figure_is_drawn_from_the_rows() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn = figures.Figure()
    coordinator.draw(story(0.002, 0.004), drawn)
    assert len(drawn.axes) == 3


@pytest.mark.full
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
