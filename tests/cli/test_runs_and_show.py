"""`hora runs` and `hora show`: what is known of runs, live and past, from their records and their memories."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from hora.cli import runs, show
from hora.cli.main import hora as command_line
from hora.coordinator.messages import Member
from hora.monitor.messages import MetricsRow, Notice, WorkerReport
from hora.monitor.run_state import RunState
from hora.runs import run_directory
from hora.runs.database import RunDatabase
from hora.runs.digest import digest
from hora.runs.run_directory import RunDirectory

SUMMARY = {
    "samples": 6400, "seconds": 12.5, "samples_per_s": 640.0, "steps": 100, "bytes_per_step": 4.2e6, "hidden": 0.83,
    "slowest": "rank 1 (host a, pid 7)", "checkpoints": 2, "skipped": 1, "rounds": None, "workers": 4,
    "values": {"accuracy": 0.5, "loss": 0.25},
}  # fmt: skip


def remember(path: Path, *, name: str = "loss", steps: int = 20, finite: bool = True) -> None:
    """A memory as a run of so many steps leaves it."""
    run_state = RunState(run="x", size=1, strategy="ring")
    rows = [
        MetricsRow(step, step * 0.1, 1, {name: 1.0 / step if finite or step % 2 else math.nan})
        for step in range(1, steps + 1)
    ]
    notices = [Notice(steps, steps * 0.1, "checkpoint", "\x1b[31mckpt\x1b[0m/step-20")]
    work = WorkerReport(
        sent_at=steps * 0.1, step=steps, steps=steps, seconds=steps * 0.1, exposed_s=0.0, comm_s=0.0, sent_bytes=0,
        samples=64 * steps, computes=[0.1], rows=rows, notices=notices,
    )  # fmt: skip
    run_state.on_report(Member("worker", 0, "a", 7), work, steps * 0.1)
    run_state.tick(steps * 0.1)
    memory = RunDatabase(str(path / run_directory.DATABASE), warn=pytest.fail)
    memory.write(run_state)
    memory.close()


Make = Callable[..., RunDirectory]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(
        run_directory, "_now", _later([f"2026-11-0{day}T1{day}:00:00.000+00:00" for day in range(1, 10)])
    )
    return tmp_path / "state"


def _later(times: list[str]) -> Callable[[], str]:
    given = iter(times)
    return lambda: next(given, times[-1])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Leaves a run's record: one that lives, if it has no code."""
    alive: list[RunDirectory] = []

    def make(
        name: str, *, code: int | None = 0, directory: str | None = None, end: Any = None, **facts: Any
    ) -> RunDirectory:
        record = RunDirectory(directory=directory, name=name, warn=pytest.fail)
        known = {"command": ["train.py", "--lr", "1 2"], "module": False, "size": 4, "strategy": "ring", "cwd": "/w"}
        record.begin({**known, "host": "a", "pid": 7, "servers": None, **facts})
        if code is None:
            alive.append(record)
        else:
            record.end({"code": code, "cause": "", "seconds": 12.5, "strategy": "ring", **(end or {})})
            record.close()
        return record

    yield make
    for record in alive:
        record.close()


def invoke(command: Any, *arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_runs_are_listed_newest_first_with_what_is_known(make: Make) -> None:
    make("old", code=1)
    make("told", end={"summary": SUMMARY})
    record = make("alive", code=None, strategy=None)
    remember(Path(record.path))
    lines = invoke(runs.runs).output.splitlines()
    assert [line[2:].split()[0] for line in lines] == ["run", "alive", "told", "old"]
    assert lines[0].split() == ["run", "started", "state", "strategy", "workers", "steps", "loss", "samples/s", "time"]
    assert lines[1].startswith("● ") and "running" in lines[1] and "0.05" in lines[1].split()
    assert re.search(r"ended well +ring +4 +100 +0\.25 +640 +12\.5 s$", lines[2])
    assert re.search(r"failed +ring +4 +12\.5 s$", lines[3])


def test_so_many_as_are_asked_for_and_the_rest_is_counted(make: Make) -> None:
    for index in range(4):
        make(f"run-{index}")
    assert invoke(runs.runs, "-n", "2").output.splitlines()[-1] == "… 2 more: hora runs --all"
    assert len(invoke(runs.runs, "-n", "2", "--all").output.splitlines()) == 5


def test_no_runs_is_one_sentence(state: Path) -> None:
    done = invoke(runs.runs)
    assert done.exit_code == 0 and done.output.startswith(f"no runs in {state}")


def test_runs_elsewhere_are_listed_when_they_are_named(make: Make, tmp_path: Path) -> None:
    make("far", directory=str(tmp_path / "far"))
    assert "far" not in invoke(runs.runs).output.split()
    assert "far" in invoke(runs.runs, "--run-dir", str(tmp_path / "far")).output.split()


def test_runs_as_json_say_the_same_and_null_for_what_is_no_number(make: Make) -> None:
    make("told", end={"summary": {**SUMMARY, "values": {"loss": math.nan}}})
    (run,) = json.loads(invoke(runs.runs, "--json").output)
    assert (run["name"], run["live"], run["state"], run["workers"]) == ("told", False, "ended well", 4)
    assert run["summary"]["samples_per_s"] == 640.0 and run["summary"]["values"] == {"loss": None}
    assert run["started"].startswith("2026-11-01T") and run["command"] == ["train.py", "--lr", "1 2"]


def test_each_end_has_its_word_and_one_without_a_word_is_lost(make: Make) -> None:
    words = {
        0: "ended well",
        1: "failed",
        3: "rank killed",
        130: "interrupted",
        141: "output closed",
        143: "terminated",
    }
    for code, word in words.items():
        make(f"code-{code}", code=code)
        assert digest(run_directory.find(f"code-{code}")).state == word
    make("silent", code=None).close()
    assert digest(run_directory.find("silent")).state == "broken off"


def test_records_that_are_no_records_do_no_harm(make: Make, state: Path) -> None:
    make("good", end={"summary": "none", "seconds": "many"})
    for index, text in enumerate(("", "[]", "{}", '{"size": "four", "command": 3, "started": 7}')):
        folder = state / "hora" / "runs" / f"bad-{index}"
        folder.mkdir()
        (folder / "run.json").write_text(text)
    names = [line[2:].split()[0] for line in invoke(runs.runs).output.splitlines()]
    assert names == ["run", "good", "bad-3", "bad-2"]


def test_show_tells_the_record_the_summary_and_the_last_events(make: Make) -> None:
    record = make("told", end={"summary": SUMMARY})
    remember(Path(record.path))
    lines = invoke(show.show, "told").output.splitlines()
    told = dict(line.split("  ", 1) for line in lines)
    assert told["run"].strip() == "told" and told["command"].strip() == "train.py --lr '1 2'"
    assert re.fullmatch(rf" *{re.escape(record.path)}/memory.sqlite \([\d.]+ kB\)", told["memory"])
    text = "\n".join(lines)
    assert "summary   100 steps, 6,400 samples in 10.0 s (12.5 s from start to end): 640 samples/s\n" in text
    assert "\n          loss 0.25, accuracy 0.5; 2 checkpoints written; 1 step skipped\n" in text
    assert "events    2.0 s, step 20: checkpoint ckpt/step-20" in text and "\x1b" not in text


def test_show_takes_the_path_of_a_directory(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("far", directory=str(tmp_path / "runs" / "here"))
    wanted = invoke(show.show, "far", "--run-dir", str(tmp_path / "runs" / "here")).output
    assert wanted.startswith("run       far\n")
    assert invoke(show.show, str(tmp_path / "runs" / "here")).output == wanted
    monkeypatch.chdir(tmp_path / "runs")
    assert invoke(show.show, "here").output == wanted and invoke(show.show, "./here").output == wanted
    assert "there is no run in " in invoke(show.show, "./nowhere").output


def test_show_as_json_has_events_and_the_records(make: Make) -> None:
    record = make("told", end={"summary": SUMMARY})
    remember(Path(record.path))
    told = json.loads(invoke(show.show, "told", "--json").output)
    assert told["events"][-1]["kind"] == "checkpoint" and told["memory"] == os.path.join(
        record.path, run_directory.DATABASE
    )
    assert told["record"]["end"]["code"] == 0 and told["record"]["run"]["host"] == "a"
    assert invoke(show.show, "told", "--json", "--data").exit_code == 2


def test_a_mistyped_name_gets_the_right_one(make: Make) -> None:
    make("mnist-3")
    assert "there is no run 'mnits-3'; did you mean 'mnist-3'?" in invoke(show.show, "mnits-3").output
    assert "there is no run 'zebra'; no run is live" in invoke(show.show, "zebra").output
    assert "there is no run in" in invoke(show.show, "../mnist-3").output


def test_a_memory_of_another_version_is_said_and_the_rest_is_shown(make: Make) -> None:
    import sqlite3

    record = make("old", end={})
    remember(Path(record.path))
    with sqlite3.connect(os.path.join(record.path, run_directory.DATABASE)) as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    assert "old" in invoke(runs.runs).output
    shown = invoke(show.show, "old")
    assert shown.exit_code == 0 and "state     ended well" in shown.output
    assert "was written by another version of Hora (schema 7, this one reads 1)" in shown.output
    Path(record.path, run_directory.DATABASE).write_text("no database")
    assert "memory" in invoke(show.show, "old").output


def test_hostile_records_cannot_write_to_the_terminal(make: Make) -> None:
    make("evil", strategy="ring\x1b]0;title\x07", end={"summary": {**SUMMARY, "values": {"\x1b[2Jloss\n": 1.0}}})
    for command in (runs.runs, show.show):
        output = invoke(command, *(["evil"] if command is show.show else [])).output
        assert "\x1b" not in output and "\x07" not in output


def test_none_of_these_commands_imports_torch(make: Make) -> None:
    for name in ("a", "b"):
        remember(Path(make(name, end={}).path))
    code = (
        "import sys, hora.cli.main\nfrom hora.cli import compare, runs, show\nfrom click.testing import CliRunner\n"
        "for words in (['a'], ['a', '--json']): assert CliRunner().invoke(show.show, words).exit_code == 0\n"
        "assert CliRunner().invoke(runs.runs, []).exit_code == 0\n"
        "done = CliRunner().invoke(compare.compare, ['a', 'b']); assert done.exit_code == 0, done.output\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=run_directory.home(), timeout=60)


def test_the_commands_are_part_of_the_command_line() -> None:
    assert {"runs", "show", "compare"} <= set(command_line.list_commands(click.Context(command_line)))
