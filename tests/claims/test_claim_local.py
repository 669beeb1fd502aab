"""Claim 8: what rows say of quality, bytes and oscillation; and that bytes are exact."""

from __future__ import annotations

from typing import Any

import pytest

from hora.claims import local
from hora.claims.local import CLAIM

STEPS = 128


def row(
    strategy: str, task: str = "digits", worse: float = 0.0, swing: float = 0.1, **changed: object
) -> dict[str, Any]:
    """One that is worse than the ring by so many points of accuracy, or per cent of the loss."""
    found: dict[str, Any] = {"task": task, "strategy": strategy, "workers": 4, "lr": 0.002, "steps": STEPS}
    found["accuracies"] = [0.95 - worse / 100, 0.97 - worse / 100]
    found["losses"] = [1.0 + worse / 100, 1.0 + worse / 100]
    found["rounds"] = STEPS // max(1, local.interval(found))
    found["sent_bytes"] = 1000.0 * found["rounds"]
    found["curve"] = [
        {"samples": 60 * step, "averaged": [0.5 + swing * (step % 2)] * 2, "own": [0.6 + 2 * swing * (step % 2)] * 2}
        for step in range(6)
    ]
    return {**found, **changed}


def rows(task: str = "digits", **worse: float) -> list[dict[str, Any]]:
    """Ring, Local SGD and DiLoCo, where hH is how much worse Local SGD with this H is."""
    ones = [row(f"local:every={every}", task, worse.get(f"h{every}", 0.0)) for every in local.INTERVALS]
    return [row("ring", task), *ones, row(local.DILOCO.format(32), task)]


def test_it_holds_if_every_interval_is_within_the_band_on_every_task() -> None:
    verdict = CLAIM.judge([*rows(h64=0.9), *rows("gpt", h32=2.9)])
    assert verdict.word == "holds"
    assert "1.6% of the ring's at H = 64" in verdict.text and "digits at worst -0.9 points" in verdict.text


@pytest.mark.parametrize(("task", "worse"), [("digits", {"h16": 1.1}), ("gpt", {"h16": 3.1, "h64": 4.0})])
def test_it_holds_only_up_to_the_interval_before_the_first_that_is_worse(task: str, worse: dict[str, float]) -> None:
    verdict = CLAIM.judge(rows(task, **worse))
    assert verdict.word == "only if" and verdict.text.startswith("H ≤ 8")


def test_the_hardest_task_decides() -> None:
    verdict = CLAIM.judge([*rows(), *rows("gpt", h4=5.0)])
    assert verdict.text.startswith("H ≤ 2 (digits 64; gpt 2): ")


def test_the_verdict_says_where_other_seeds_might_decide_otherwise() -> None:
    ones = rows(h16=1.2, h32=1.1)
    ones[5]["accuracies"] = [0.95 - 0.006, 0.97 - 0.018]  # H = 16: 0.6 and 1.8 points worse
    assert CLAIM.judge(ones).text.startswith("H ≤ 8 (digits 8, within the seeds' scatter at H = 16): ")
    ones[4]["accuracies"] = [0.95 - 0.012, 0.97]  # H = 8: 1.2 and none
    assert CLAIM.judge(ones).text.startswith("H ≤ 8 (digits 8, within the seeds' scatter at H = 8, 16): ")


def test_the_verdict_says_that_there_is_one_seed() -> None:
    ones = rows("gpt")
    for one in ones:
        one["losses"] = one["losses"][:1]
    assert CLAIM.judge(ones).text.startswith("the same quality up to H = 64 (gpt 64, one seed): bytes fall")


def test_it_fails_if_the_first_longer_round_is_worse() -> None:
    assert CLAIM.judge(rows(h2=2.0)).word == "fails"


def test_it_fails_if_bytes_do_not_fall() -> None:
    ones = rows()
    ones[-2]["sent_bytes"] *= 1.5
    verdict = CLAIM.judge(ones)
    assert verdict.word == "fails" and verdict.text.startswith("bytes do not fall as 1/H: local:every=64")


def test_a_round_that_the_end_closes_counts() -> None:
    ring, other = (
        row(strategy, steps=100, sent_bytes=sent) for strategy, sent in (("ring", 100.0), ("local:every=64", 2.0))
    )
    assert local.is_exact(other, ring)


def test_oscillation_leaves_a_steady_fall_out() -> None:
    falling = row("ring", curve=[{"averaged": [1 - step / 10]} for step in range(10)])
    assert local.oscillation(falling) == pytest.approx([0.0])
    assert local.oscillation(row("ring", swing=0.1)) == pytest.approx([0.1, 0.1])


def test_the_verdict_says_less_or_more() -> None:
    ring, calm, wild = row("ring"), row("local:every=1", swing=0.05), row("local:every=64", swing=0.2)
    text = CLAIM.judge([ring, calm, wild]).text
    assert "less at H = 1 (0.50 to 0.50 times), more at H = 64 (2.00 to 2.00 times)" in text
    assert "one worker's own up to 4.0 times" in text


def test_table_and_figure() -> None:
    ones = [*rows(h64=3.0), *rows("gpt")]
    told = CLAIM.table(ones)
    assert len(told.lines) == len(ones) and {len(line) for line in told.lines} == {len(told.headings)}
    assert "digits: 4 workers, 128 steps, learning rate 0.002, 2 seeds" in told.note
    matplotlib = pytest.importorskip("matplotlib.figure")
    CLAIM.draw(ones, matplotlib.Figure(figsize=CLAIM.figure_size, layout="constrained"))


@pytest.mark.timeout(240)
def test_bytes_are_an_hth_of_the_rings_and_looks_do_not_count() -> None:
    ring, other = (local.run("digits", strategy, 2, 36, 1) for strategy in ("ring", "local:every=4"))
    assert (ring["rounds"], other["rounds"]) == (36, 9)
    assert other["sent_bytes"] * 4 == ring["sent_bytes"]
    assert len(ring["curve"]) == len(other["curve"]) == 5
    assert all(point["averaged"] == point["own"] for point in ring["curve"])
