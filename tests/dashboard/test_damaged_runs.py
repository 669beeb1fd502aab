"""Directories that no run of ours has left: each may spoil its own line, and no other."""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fake_runs import FakeRun
from pages import Page, shown

from hora.dashboard import catalogue
from hora.runs import json_file, run_directory
from hora.runs.run_directory import DATABASE, RunRecord


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """With a run that is as runs are; it has to be told of whatever lies beside it."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home = tmp_path / "hora" / "runs"
    story = FakeRun(home, "good")
    story.go(4)
    story.end()
    yield home


@pytest.fixture
def page(home: pathlib.Path) -> Iterator[Page]:
    with shown(home) as page:
        yield page


def listed(page: Page) -> dict[str, dict[str, object]]:
    page.get("/metrics")
    runs = {run["name"]: run for run in page.get("/api/runs")["runs"]}
    assert runs["good"]["steps"] == 4 and not runs["good"]["problem"]
    return runs


def test_a_path_with_odd_bytes_is_shown(page: Page, home: pathlib.Path) -> None:
    (home / "odd").mkdir()
    script = os.fsdecode(b"caf\xe9.py")
    begun = {"name": "odd", "command": [script], "started": "2026-01-01T00:00:00+00:00", script: 1}
    (home / "odd" / "run.json").write_text(json.dumps(begun))
    assert "\\udce9" in (home / "odd" / "run.json").read_text()
    assert listed(page)["odd"]["command"] == ["caf?.py"]
    assert page.get("/api/runs/odd")["run"]["caf?.py"] == 1
    assert [found.config["command"] for found in run_directory.all_runs() if found.name == "odd"] == [["caf?.py"]]


@pytest.mark.parametrize("end", [{"summary": {"steps": 10**40}}, {"cause": "\ud800"}, {"summary": [1], "code": {}},
                                 {"strategy": ["\udfff"], "seconds": 1e999}])  # fmt: skip
def test_an_end_of_anything_is_told(page: Page, home: pathlib.Path, end: dict[str, object]) -> None:
    (home / "odd").mkdir()
    (home / "odd" / "run.json").write_text('{"name": "odd"}')
    (home / "odd" / "end.json").write_text(json.dumps(end))
    assert "odd" in listed(page) and page.get("/api/runs/odd")["name"] == "odd"


@pytest.mark.parametrize(
    "now", ["[" * 200_000, '{"a":' * 200_000, '{"run": "\\udce9"}', "5" * 500, "null", '{"step": []}']
)
def test_a_now_of_anything_spoils_its_own_line(page: Page, home: pathlib.Path, now: str) -> None:
    story = FakeRun(home, "odd")
    story.go(4)
    story.leave()
    story.database.close()
    with sqlite3.connect(story.path / DATABASE) as database:
        database.execute("UPDATE facts SET value = ? WHERE key = 'now'", (now,))
    line, told = listed(page)["odd"], page.get("/api/runs/odd")
    assert line["state"] == told["state"] == "lost"
    if len(now) > 1000 or "step" in now:
        assert "cannot be read" in line["problem"] and "cannot be read" in told["problem"]


@pytest.mark.parametrize("wrong", ["UPDATE histograms SET counts = '[[['", "UPDATE histograms SET counts = x'00'",
                                   "UPDATE facts SET value = x'ff' WHERE key = 'summary'",
                                   "UPDATE events SET text = cast(x'ff' AS TEXT)",
                                   "UPDATE facts SET value = 'x' WHERE key = 'version'"])  # fmt: skip
def test_a_memory_of_anything_says_what_is_wrong(page: Page, home: pathlib.Path, wrong: str) -> None:
    story = FakeRun(home, "odd")
    story.go(20)
    story.end()
    with sqlite3.connect(story.path / DATABASE) as database:
        database.execute(wrong)
    listed(page)
    assert "cannot be read" in page.get("/api/runs/odd")["problem"]


def test_whatever_a_line_raises_is_its_problem(home: pathlib.Path, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "odd").mkdir()
    (home / "odd" / "run.json").write_text('{"name": "odd"}')
    line = catalogue._line

    def failing(run: RunRecord) -> dict[str, object]:
        if run.name == "odd":
            raise KeyError("\udce9")
        return line(run)

    monkeypatch.setattr(catalogue, "_line", failing)
    assert "KeyError" in str(listed(page)["odd"]["problem"])


def test_pipes_links_and_huge_files_hold_up_nobody(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name in ("pipe", "piped-end", "huge", "link"):
        (home / name).mkdir()
    os.mkfifo(home / "pipe" / "run.json")
    (home / "piped-end" / "run.json").write_text('{"name": "piped-end"}')
    os.mkfifo(home / "piped-end" / "end.json")
    (home / "huge" / "run.json").write_text('{"name": "huge"}' + " " * json_file.MAX_BYTES)
    (home / "link" / "run.json").symlink_to(home / "good" / "run.json")
    said = {}
    for words in (["runs"], ["show", "pipe"], ["show", "piped-end"]):
        command = [sys.executable, "-c", "from hora.cli.main import main; raise SystemExit(main())", *words]
        said[words[-1]] = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert "good" in said["runs"].stdout and "piped-end" in said["runs"].stdout and "huge" not in said["runs"].stdout
    assert said["pipe"].returncode == 2 and "there is no run 'pipe'" in said["pipe"].stderr
    assert "mean 'pipe'" not in said["pipe"].stderr
    assert said["piped-end"].returncode == 0
    with shown(home) as page:
        assert {"good", "piped-end"} == listed(page).keys()
