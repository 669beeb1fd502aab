"""`hora compare`: a table of runs, a picture of one logged value, and what is said where something is missing."""

from __future__ import annotations

import builtins
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hora.cli import compare
from hora.cli.compare import Comparison, picture, smooth
from hora.coordinator.messages import Member
from hora.monitor.messages import MetricsRow, WorkerReport
from hora.monitor.run_state import RunState
from hora.runs import run_directory
from hora.runs.database import RunDatabase
from hora.runs.run_directory import RunDirectory

PNG = b"\x89PNG\r\n\x1a\n"
Make = Callable[..., str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Leaves a run that has logged these names over so many steps; without names, one that kept no memory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def make(name: str, *names: str, steps: int = 40, strategy: str = "ring") -> str:
        record = RunDirectory(directory=None, name=name, warn=pytest.fail)
        record.begin({"command": ["t.py"], "size": 2, "strategy": strategy, "cwd": "/", "host": "a", "pid": 1})
        end: dict[str, Any] = {"code": 0, "seconds": 4.0}
        if names:
            run_state = RunState(run=name, size=2, strategy=strategy)
            chance = random.Random(name)
            for first in range(1, steps + 1, 20):
                last, at = first + 19, (first + 19) * 0.1
                rows = [
                    MetricsRow(s, s * 0.1, 1, dict.fromkeys(names, 1 / s + chance.random()))
                    for s in range(first, last + 1)
                ]
                work = WorkerReport(
                    sent_at=at, step=last, steps=20, seconds=2.0, exposed_s=0.0, comm_s=0.0, sent_bytes=0, samples=1280,
                    computes=[0.1], rows=rows,
                )  # fmt: skip
                run_state.on_report(Member("worker", 0, "a", 7), work, at)
            memory = RunDatabase(os.path.join(record.path, run_directory.DATABASE), warn=pytest.fail)
            memory.write(run_state)
            memory.close()
            end["summary"] = run_state.status(run_state.updated_at).summary()
        record.end(end)
        record.close()
        return record.path

    return make


@pytest.fixture
def sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing, for those tests that do not look at the picture: matplotlib takes its time."""
    monkeypatch.setattr("hora.cli.compare.picture", lambda comparison, path: Path(path).write_bytes(PNG))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(compare.compare, arguments)


def test_a_table_and_a_picture_in_the_current_directory(make: Make) -> None:
    make("a", "loss")
    make("b", "loss", strategy="ps:mode=async", steps=80)
    done = invoke("a", "b")
    lines = done.output.splitlines()
    assert done.exit_code == 0
    heads = [
        "run",
        "state",
        "strategy",
        "workers",
        "steps",
        "samples",
        "time",
        "samples/s",
        "loss",
        "lowest",
        "highest",
    ]
    assert lines[0].split() == heads
    assert lines[1].startswith("a ") and " ring " in lines[1] and " 2,560 " in lines[1]
    assert lines[2].startswith("b ") and " ps:mode=async " in lines[2] and " 5,120 " in lines[2]
    assert lines[3] == "loss over samples and over time: compare-a-b.png"
    assert Path("compare-a-b.png").read_bytes().startswith(PNG)


def test_curves_hold_samples_time_and_means_of_each_run(make: Make) -> None:
    make("a", "loss")
    make("b", "loss", steps=80)
    comparison = Comparison([run_directory.find("a"), run_directory.find("b")])
    assert list(comparison.curves) == ["a", "b"] and comparison.notes == []
    curve = comparison.curves["b"]
    assert len(curve.mean) == 80 and curve.samples[-1] == 5120 and curve.seconds[-1] == pytest.approx(8.0)
    assert all(low <= mean <= high for low, mean, high in zip(curve.low, curve.mean, curve.high, strict=True))


def test_a_run_is_named_by_its_path_too(make: Make, sketch: None) -> None:
    make("a", "loss")
    path = make("b", "loss")
    assert invoke("a", path).exit_code == 0


def test_what_only_some_have_logged_is_said(make: Make, sketch: None) -> None:
    make("a", "loss", "accuracy")
    make("b", "loss")
    done = invoke("a", "b")
    assert "logged by some runs only: accuracy (a)" in done.output
    done = invoke("a", "b", "--value", "accuracy", "--png", "x.png")
    assert "b has not logged accuracy; it has logged: loss" in done.output
    assert done.exit_code == 0 and Path("x.png").read_bytes().startswith(PNG)


def test_without_a_loss_it_is_what_all_have(make: Make, sketch: None) -> None:
    make("a", "accuracy", "reward")
    make("b", "reward")
    assert "reward over samples" in invoke("a", "b").output


def test_a_mistyped_value_gets_the_right_one(make: Make) -> None:
    make("a", "accuracy", "loss")
    make("b", "loss")
    done = invoke("a", "b", "--value", "acuracy")
    assert done.exit_code == 2
    assert (
        "none of these runs has logged 'acuracy'; did you mean 'accuracy'? they have logged: accuracy, loss"
        in done.output
    )


def test_a_run_without_a_memory_is_in_the_table_and_said(make: Make, sketch: None) -> None:
    make("a", "loss")
    path = make("old")
    done = invoke("a", "old")
    assert done.exit_code == 0 and done.output.splitlines()[2].startswith("old  ended well")
    assert f"old has no run database, so no curves: {path}" in done.output
    done = invoke("old", make("older"))
    assert "none of these runs has logged a value" in done.output and not Path("compare-old-older.png").exists()


def test_one_run_is_not_enough_and_a_mistyped_one_is_told(make: Make) -> None:
    make("mnist-3", "loss")
    for names in ((), ("mnist-3",), ("mnist-3", "mnist-3")):
        done = invoke(*names)
        assert done.exit_code == 2 and "at least two different runs" in done.output
    assert "did you mean 'mnist-3'?" in invoke("mnist-3", "mnist3").output


def test_without_matplotlib_there_is_the_table_and_one_sentence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a", "loss")
    make("b", "loss")
    real = builtins.__import__

    def no_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    done = invoke("a", "b")
    assert done.exit_code == 0
    assert done.output.splitlines()[-1] == "no picture: matplotlib is not installed; pip install 'hora[plot]'"
    assert invoke("a", "b", "--png", "x.png").exit_code == 1, "what was asked for was not done"


def test_a_picture_that_cannot_be_written_is_one_sentence(make: Make) -> None:
    make("a", "loss")
    make("b", "loss")
    done = invoke("a", "b", "--png", "nowhere/x.png")
    assert done.exit_code == 1 and "nowhere/x.png cannot be written: No such file or directory" in done.output
    assert invoke("a", "b", "--png", "x.jpg").exit_code == 2


def test_names_that_look_like_formulas_or_escapes_are_drawn_as_they_are(make: Make, tmp_path: Path) -> None:
    hostile = "_$\\frac{\x1b[2J"
    make("a", hostile)
    make("b", hostile)
    comparison = Comparison([run_directory.find("a"), run_directory.find("b")])
    assert "\x1b" not in comparison.table()
    picture(comparison, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def test_smoothing_keeps_the_length_and_leaves_out_what_is_no_number() -> None:
    assert smooth([1.0, 5.0]) == [1.0, 5.0]
    assert smooth([]) == []
    told = smooth([float(index % 2) for index in range(400)])
    assert len(told) == 400 and all(0.4 < value < 0.6 for value in told[50:-50])
    assert all(math.isfinite(value) for value in smooth([math.nan, *[1.0] * 97, math.nan]))
