from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hora.launch import monitor as module
from hora.launch.monitor import MAX_WAITING, RunMonitor
from hora.monitor.messages import HistogramReport, encode
from hora.runs.database import APPLICATION, RunDatabase
from hora.runs.reader import RunReader
from reports import row, server, server_report, worker, worker_report


class Said:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.words: list[str] = []


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def watch(tmp_path: pathlib.Path, said: Said) -> Iterator[Callable[..., RunMonitor]]:
    """Makes watchers of a run directory, the test's own if none is named, and closes them."""
    made: list[RunMonitor] = []

    def make(directory: str | None = str(tmp_path), **named: str) -> RunMonitor:
        facts = {"command": ["train.py"]}
        made.append(
            RunMonitor(directory, "r", 2, "ring", facts, said.warnings.append, said.words.append, **named)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for each in made:
        each.close({})


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_heard_is_shown_and_kept(watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, said: Said) -> None:
    watcher = watch()
    assert watcher.status().state == "starting" and watcher.directory == str(tmp_path)
    for step in range(1, 11):
        for rank in (0, 1):
            watcher.on_report(worker(rank), encode(worker_report(step, rows=[row(step, loss=float(step))])))
    watcher.on_report(server(0), encode(server_report()))
    watcher.on_event("joined", "rank 2 (host b, pid 9)", "")
    watcher.update(algorithm="shared", serving="http://127.0.0.1:8000")
    until(lambda: watcher.status().step == 10)
    shown = watcher.status()
    assert (shown.run, shown.size, shown.strategy, shown.algorithm) == ("r", 2, "ring", "shared")
    assert (shown.samples, shown.values, len(shown.workers)) == (160, {"loss": 10.0}, 3)
    reader = RunReader(str(tmp_path / "memory.sqlite"))
    until(lambda: reader.status().step == 10)
    assert reader.get("config") == {"command": ["train.py"]}
    summary = watcher.close({"code": 0, "cause": "all 2 ranks ended well"})
    assert summary["samples"] == 160 and summary["workers"] == 3
    assert reader.status().state == "ended"
    assert reader.get("summary") == summary
    assert reader.get("end") == {"code": 0, "cause": "all 2 ranks ended well"}
    assert [event.kind for event in reader.events()] == ["joined", "end"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "loss" in line]) == 20
    assert [line["event"] for line in lines if "event" in line] == ["joined", "end"]
    assert sorted(os.listdir(tmp_path)) == ["memory.sqlite", "metrics.jsonl"]
    assert said.warnings == []


def test_everything_that_was_told_before_close_is_kept(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path
) -> None:
    watcher = watch()
    for step in range(1, 1001):
        watcher.on_report(worker(0), encode(worker_report(step)))
    assert watcher.close({})["samples"] == 8000
    watcher.on_report(worker(0), encode(worker_report(1001)))
    assert watcher.close({})["samples"] == 8000
    assert RunReader(str(tmp_path / "memory.sqlite")).status().samples == 8000


def test_a_straggler_is_said(watch: Callable[..., RunMonitor], said: Said) -> None:
    watcher = watch()
    for step in range(1, 11):
        watcher.on_report(worker(0), encode(worker_report(step, computes=[0.1])))
        watcher.on_report(worker(1), encode(worker_report(step, computes=[0.4])))
    until(lambda: bool(said.words))
    assert said.words == ["rank 1 (host a, pid 101) is slow: 400 ms of compute per step, the others 100 ms"]


def test_what_is_said_and_warned_while_it_closes_is_told_before_it_has(
    watch: Callable[..., RunMonitor], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "EVERY_S", 60.0)  # so that nothing is looked at before the end
    watcher = watch()
    for step in range(1, 11):
        watcher.on_report(worker(0), encode(worker_report(step, computes=[0.1], rows=[row(step, loss=1.0)])))
        watcher.on_report(worker(1), encode(worker_report(step, computes=[0.4])))
    assert said.words == said.warnings == []
    with monkeypatch.context() as patched:
        patched.setattr("hora.monitor.json_lines.os.write", full)
        watcher.close({})
    assert said.words == ["rank 1 (host a, pid 101) is slow: 400 ms of compute per step, the others 100 ms"]
    assert len(said.warnings) == 1 and "No space left on device" in said.warnings[0]


def test_reports_that_cannot_be_read_are_counted_and_nothing_breaks(
    watch: Callable[..., RunMonitor], said: Said
) -> None:
    watcher = watch()
    body = encode(worker_report(1))
    bad = [b"", b"\xc1", body[:-3], b"\x93\x01\x02\x03", encode({"type": "work"}), os.urandom(500), b"\x81" * 3000]
    bad += [body.replace(b"work", b"wurk"), encode({"type": "work", "step": "x"}), encode(worker_report(-1))]
    for each in bad:
        watcher.on_report(worker(0), each)
    watcher.on_report(worker(-3), body)
    watcher.on_report(worker(0), body)
    until(lambda: watcher.status().step == 1)
    assert watcher.status().lost_reports == len(bad) + 1
    assert watcher.status().samples == 8 and said.warnings == []


def test_a_full_queue_drops_and_counts(
    watch: Callable[..., RunMonitor], monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    held, go = threading.Event(), threading.Event()
    write = RunDatabase.write

    def slow(self: RunDatabase, *rest: object) -> None:
        held.set()
        go.wait(20)
        write(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(RunDatabase, "write", slow)
    watcher = watch()
    watcher.on_report(worker(0), encode(worker_report(1)))
    assert held.wait(20)
    for step in range(MAX_WAITING + 100):
        watcher.on_report(worker(0), encode(worker_report(step + 2)))
    assert watcher.num_queued == MAX_WAITING
    go.set()
    until(lambda: watcher.num_queued == 0)
    summary = watcher.close({})
    assert watcher.status().lost_reports == 100 and summary["samples"] == 8 * (MAX_WAITING + 1)


def test_large_reports_do_not_pile_up(watch: Callable[..., RunMonitor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 1000)
    monkeypatch.setattr(module, "EVERY_S", 5.0)
    watcher = watch()
    for _ in range(3):
        watcher.on_report(worker(0), bytes(400))
    assert watcher.num_queued == 2


def test_another_versions_memory_is_refused_before_the_run(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path
) -> None:
    with sqlite3.connect(tmp_path / "memory.sqlite") as connection:
        connection.execute("CREATE TABLE facts (x)")
        connection.execute("PRAGMA user_version = 7")
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.close()
    before = threading.active_count()
    with pytest.raises(ValueError, match=r"another version of Hora \(schema 7.*choose another --run-dir"):
        watch()
    assert threading.active_count() == before and os.listdir(tmp_path) == ["memory.sqlite"]


def test_two_runs_after_each_other_in_one_directory(watch: Callable[..., RunMonitor], tmp_path: pathlib.Path) -> None:
    first = watch()
    for step in range(1, 6):
        first.on_report(worker(0), encode(worker_report(step, rows=[row(step, loss=1.0)])))
    first.close({"code": 1})
    second = watch()
    second.on_report(worker(0), encode(worker_report(1, rows=[row(1, accuracy=1.0)])))
    second.close({})
    reader = RunReader(str(tmp_path / "memory.sqlite"))
    assert reader.status().samples == 8 and "value/loss" not in reader.curves()[1] and reader.get("end") == {}
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_without_a_directory_the_memory_is_a_temporary_one(watch: Callable[..., RunMonitor], said: Said) -> None:
    watcher = watch(None)
    watcher.on_report(worker(0), encode(worker_report(1)))
    reader = RunReader(os.path.join(watcher.directory, "memory.sqlite"))
    until(lambda: reader.status().step == 1)
    assert os.listdir(watcher.directory)[0].startswith("memory.sqlite")
    assert watcher.close({})["samples"] == 8
    assert not os.path.exists(watcher.directory) and said.warnings == []


def test_a_directory_that_cannot_be_written_costs_one_warning(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, said: Said
) -> None:
    (tmp_path / "precious").touch()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a read-only directory can only be mounted by root")
    try:
        watcher = watch()
        watcher.on_report(worker(0), encode(worker_report(1, rows=[row(1, loss=1.0)])))
        assert watcher.directory != str(tmp_path)
        assert watcher.close({})["samples"] == 8
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    [warning] = said.warnings
    assert "Read-only file system; the run continues without it" in warning
    assert os.listdir(tmp_path) == ["precious"] and not os.path.exists(watcher.directory)


def test_no_disk_at_all_costs_one_warning_and_removes_nothing(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "precious").touch()

    def full(path: str) -> sqlite3.Connection:
        raise OSError(28, "No space left on device")

    def none(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hora.runs.database._create", full)
    monkeypatch.setattr(module.tempfile, "mkdtemp", none)
    watcher = watch()
    watcher.on_report(worker(0), encode(worker_report(1)))
    assert watcher.close({})["samples"] == 8
    assert len(said.warnings) == 1 and os.listdir(tmp_path) == ["precious"]


def test_a_disk_that_fills_up_costs_one_warning(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    try:
        watcher = watch()
        step = 0
        while not said.warnings and step < 100_000:
            rows = [row(step + k, **{f"n{n}": 1.0 for n in range(20)}) for k in range(50)]
            step += 50
            watcher.on_report(worker(0), encode(worker_report(step, rows=rows)))
            time.sleep(0.002)
        for _ in range(20):
            watcher.on_report(worker(0), encode(worker_report(step, rows=rows)))
        until(lambda: watcher.num_queued == 0)
        assert watcher.close({})["steps"] == step
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
    [warning] = said.warnings
    assert warning.endswith("the run continues without it")


def test_a_disk_that_hangs_holds_nobody_up(
    watch: Callable[..., RunMonitor], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()

    def hang(self: RunDatabase, *_: object) -> None:
        held.set()
        go.wait(20)

    monkeypatch.setattr(RunDatabase, "write", hang)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    watcher = watch()
    watcher.on_report(worker(0), encode(worker_report(1)))
    assert held.wait(20)
    watcher.on_report(worker(0), encode(worker_report(2)))
    summary = watcher.close({})
    assert summary["samples"] == 8 and not go.is_set()
    assert len(said.warnings) == 1 and "does not answer" in said.warnings[0]
    go.set()


def test_closing_is_bounded_and_the_thread_is_no_reason_to_stay(watch: Callable[..., RunMonitor]) -> None:
    assert module.CLOSE_S <= 3
    watch()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "hora-monitor")


def test_a_mistake_of_ours_is_said_once_and_the_run_goes_on(
    watch: Callable[..., RunMonitor], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object, at: float) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(module.RunState, "tick", broken)
    watcher = watch()
    until(lambda: bool(said.warnings))
    watcher.on_report(worker(0), encode(worker_report(1)))
    assert watcher.close({})["samples"] == 0
    [warning] = said.warnings
    assert "oops" in warning and "the run goes on" in warning


def test_tensorboard_files_are_written_where_they_are_wanted(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, said: Said
) -> None:
    pytest.importorskip("tensorboard.compat.proto.event_pb2")
    watcher = watch(tensorboard_dir=str(tmp_path / "run_state"))
    shown = [HistogramReport("w", 1, 1000.0, 0.0, 1.0, [1])]
    watcher.on_report(worker(0), encode(worker_report(1, rows=[row(1, loss=1.0)], histograms=shown)))
    watcher.close({})
    [name] = os.listdir(tmp_path / "run_state")
    assert os.path.getsize(tmp_path / "run_state" / name) > 100 and said.warnings == []
    assert list(RunReader(str(tmp_path / "memory.sqlite")).histograms()) == ["w"]


def test_tensorboard_without_its_package_is_refused_before_the_run(
    watch: Callable[..., RunMonitor], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hora.monitor.tensorboard._installed", lambda: False)
    with pytest.raises(ValueError, match="pip install"):
        watch(tensorboard_dir=str(tmp_path / "run_state"))
    assert os.listdir(tmp_path) == []


def test_watching_needs_no_torch() -> None:
    script = "import sys, hora.launch.monitor, hora.runs.reader; print({'torch', 'tensorboard'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout == "set()\n", done.stderr
