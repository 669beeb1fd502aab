"""`hora bench quality`: the same samples for all, rounds as long as they should be, and a table that compares."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

from hora.cli import main
from hora.runs import exit_codes
from hora_benchmarks.bench import quality, quality_rank


def row(strategy: str, task: str = "gpt", **changed: object) -> quality.Row:
    point = {"samples": 100, "losses": [2.0, 2.2], "accuracies": [0.9, 0.92]}
    given = {"task": task, "strategy": strategy, "workers": 2, "lr": 0.01, "seeds": [0, 1], "rounds": 4}
    return quality.Row(**{**given, "sent_bytes": 1e6, "curve": [point], **changed})  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("task", "strategy", "rounds", "share"),
    [
        ("digits", "local:every=8", 8, 1 / 8),
        ("gpt", "diloco:every=32,outer_momentum=0.6", 2, 1 / 32),
    ],
)
def test_a_quick_run_compares_with_the_ring(
    task: str,
    strategy: str,
    rounds: int,
    share: float,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quality, "STRATEGIES", ("ring", strategy))
    there, picture = tmp_path / "out.jsonl", tmp_path / "out.png"
    arguments = ["bench", "quality", "--quick", "--task", task, "--json", str(there), "--plot", str(picture)]
    assert main.main(arguments) == exit_codes.OK
    ring, other = (json.loads(line) for line in there.read_text().splitlines())
    assert (ring["strategy"], ring["rounds"]) == ("ring", quality.QUICK_STEPS)
    assert (other["strategy"], other["rounds"]) == (strategy, rounds)
    assert other["sent_bytes"] == pytest.approx(share * ring["sent_bytes"], rel=0.02)
    samples = quality.QUICK_STEPS * quality_rank.TASKS[task].global_batch
    assert ring["curve"][-1]["samples"] == other["curve"][-1]["samples"] == samples
    assert all(0 < loss < 5 for line in (ring, other) for point in line["curve"] for loss in point["losses"])
    out, _ = capfd.readouterr()
    assert f"{task}, 2 workers, after {samples:,} samples" in out and strategy in out and " cores, Python " in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_fails_is_told_with_its_last_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("raise RuntimeError('out of luck')\n")
    monkeypatch.setattr(quality, "WORKER", (str(script),))
    monkeypatch.setattr(quality, "STRATEGIES", ("ring",))
    assert quality.main(2, ("digits",), quick=True) == exit_codes.SCRIPT_FAILED
    _, err = capfd.readouterr()
    assert "hora bench: digits under ring with 2 ended with exit code 1:" in err and "RuntimeError: out of luck" in err


def test_the_order_has_every_sample_once_before_any_comes_again() -> None:
    found = quality_rank.order(10, 25, seed=3)
    assert sorted(found[:10].tolist()) == sorted(found[10:20].tolist()) == list(range(10))
    assert len(found) == 25 and found[:10].tolist() != found[10:20].tolist()
    assert torch.equal(found, quality_rank.order(10, 25, seed=3))


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    factors = [quality_rank.rate(step, 100) for step in range(100)]
    assert factors[0] < 0.25 and max(factors) > 0.98 and factors[-1] < 0.001
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_nothing_that_is_trained_on_is_held_out() -> None:
    text = quality_rank.Text()
    assert text._windows.max() >= text._held_out.max() >= 0
    train, held_out = len(text._windows), len(text._held_out)
    assert held_out == pytest.approx(0.1 * (train + held_out), rel=0.01)


def test_every_row_has_a_learning_rate_that_the_sweep_tries() -> None:
    for task, rates in quality.RATES.items():
        assert set(quality.BEST[task]) == set(quality.STRATEGIES)
        assert set(quality.BEST[task].values()) <= set(rates)
    assert len(list(quality._runs(("digits", "gpt"), True))) == 2 * 4 * len(quality.STRATEGIES)


def test_what_is_said_of_a_row() -> None:
    ring, other = row("ring"), row("diloco", curve=[{"samples": 1, "losses": [2.1, 2.205], "accuracies": [0.89, 0.91]}])
    assert quality.value_text(ring) == "2.100 (2.000 to 2.200)"
    assert quality.difference_text(other, ring) == "+2.5%"
    assert quality.outer_text("ring") == "" and quality.outer_text("diloco") == "0.7, 0.9"
    ring, other = (row(each.strategy, "digits", curve=each.curve) for each in (ring, other))
    assert quality.value_text(ring) == "91.0% (90.0% to 92.0%)"
    assert quality.difference_text(other, ring) == "-1.0 points"


def test_seeds_have_no_effect_on_a_sweep_and_so_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "quality", "--sweep", "--seeds", "3"]) == exit_codes.USAGE
    assert "leave --seeds out" in capsys.readouterr().err
