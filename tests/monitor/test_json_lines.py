from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import stat

import pytest

from hora.monitor.json_lines import JsonLines
from hora.monitor.metrics_log import LoggedRow
from hora.monitor.status import RunEvent


def logged(at_step: int, **values: float) -> LoggedRow:
    return LoggedRow(1, at_step, 2, 0.5, 64, 0, values)


def no_warning(text: str) -> None:
    raise AssertionError(text)


def read(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_events_are_lines_that_can_be_followed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(str(path), no_warning)
    lines.write([logged(3, loss=1.5, accuracy=0.25)])
    assert read(path) == [
        {"step": 3, "count": 2, "at": 0.5, "samples": 64, "epoch": 0, "rank": 1, "loss": 1.5, "accuracy": 0.25}
    ]
    lines.write([], [RunEvent(number=1, at=2.0, step=4, kind="died", who="rank 0", text='kill\n"ed"')])
    assert read(path)[1] == {"event": "died", "step": 4, "at": 2.0, "who": "rank 0", "text": 'kill\n"ed"'}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines.close()
    lines.write([logged(9, loss=1.0)])
    assert len(read(path)) == 2


def test_what_is_not_finite_becomes_null(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(str(path), no_warning).write([logged(1, loss=math.nan, top=math.inf)])
    [line] = read(path)
    assert line["loss"] is None and line["top"] is None


def test_names_of_ours_are_not_overwritten(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(str(path), no_warning).write([logged(1, step=99.0, event=1.0, **{"a\nb": 2.0})])
    [line] = read(path)
    assert line["step"] == 1 and line["value/step"] == 99.0 and line["value/event"] == 1.0 and line["a\nb"] == 2.0
    assert "event" not in line


def test_another_run_in_the_directory_begins_anew(tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other)
    JsonLines(str(path), no_warning).write([logged(1, loss=1.0)])
    assert len(read(path)) == 1 and other.read_text() == "mine"
    JsonLines(str(path), no_warning).write([logged(2, loss=1.0)])
    assert [line["step"] for line in read(path)] == [2]


def test_a_full_disk_is_told_once_and_leaves_whole_lines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, warnings, room = tmp_path / "metrics.jsonl", [], [250]
    lines = JsonLines(str(path), warnings.append)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", full)
    for step in range(10):
        lines.write([logged(step, loss=1.0)])
    monkeypatch.undo()
    assert warnings == [f"{path} cannot be written: No space left on device; the run continues without it"]
    assert [line["step"] for line in read(path)] == list(range(len(read(path)))) and 1 <= len(read(path)) < 10
    assert path.read_text().endswith("}\n")


def test_no_directory_is_told_once(tmp_path: pathlib.Path) -> None:
    warnings: list[str] = []
    lines = JsonLines(str(tmp_path / "nowhere" / "metrics.jsonl"), warnings.append)
    lines.write([logged(1, loss=1.0)])
    assert len(warnings) == 1
