"""The demo is what a newcomer sees first: it must end well and show what it promises."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hora import demo


@pytest.mark.timeout(120)
def test_the_demo_trains_under_every_strategy_and_all_learn_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hora.launch.cli", "demo"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["auto", *demo.STRATEGIES]
    workers = [int(row[1]) for row in rows]
    assert workers[0] == 1 and set(workers[1:]) in ({2}, {4})
    for row in rows:
        assert float(row[2]) > 0 and float(row[3]) < 0.5 and float(row[4].rstrip("%")) > 90
        assert 0 <= float(row[5].rstrip("%")) <= 100 and re.fullmatch(r"\d+ MB", row[7])
    assert int(rows[0][6].replace(",", "")) == 0 and all(int(row[6].replace(",", "")) > 0 for row in rows[1:])
    losses = [float(row[3]) for row in rows]
    assert max(losses) - min(losses) <= 0.02 * max(losses)
    assert "steps" in done.stdout and "examples/gpt.py" in done.stdout


def test_a_run_that_fails_is_named_and_the_demo_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STRATEGIES", ())
    assert demo.main(epochs=-1) == 1
    err = capfd.readouterr().err
    assert "hora demo: auto with 1 ended with exit code 1" in err and "Error" in err
