from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from hora.monitor.messages import HistogramReport
from hora.monitor.run_state import RunState
from hora.runs import reader as reader_module
from hora.runs.database import APPLICATION, SCHEMA, RunDatabase
from hora.runs.reader import RunReader
from reports import row, server, server_report, worker, worker_report


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "memory.sqlite")


def no_warning(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def database(path: str) -> Iterator[RunDatabase]:
    database = RunDatabase(path, no_warning)
    yield database
    database.close()


def train(run_state: RunState, begin: int, end: int, **fields: object) -> None:
    for step in range(begin, end):
        run_state.on_report(
            worker(0), worker_report(step, rows=[row(step, loss=1.0 / (step + 1))], **fields), step * 0.1
        )
    run_state.tick(end * 0.1)


def test_what_is_written_is_read_back(database: RunDatabase, path: str) -> None:
    run_state = RunState(run="r", size=2, strategy="ring")
    train(run_state, 1, 11, peers={1: 500}, rounds=3)
    run_state.on_report(server(0), server_report(lags={3: 4}), 1.0)
    run_state.on_event("died", "rank 1 (host a, pid 101)", "killed <b>", 1.1)
    database.put("config", {"command": ["train.py", "bad \udc80"], "size": 2})
    database.write(run_state)
    reader = RunReader(path)
    assert reader.version() == 1
    assert reader.status() == run_state.status(run_state.updated_at)
    assert reader.status().workers[0].peers and reader.status().lags == {3: 4}
    assert reader.events() == list(run_state.event_log.events)
    assert reader.get("config") == {"command": ["train.py", "bad ?"], "size": 2}
    assert reader.get("summary") == run_state.status(run_state.updated_at).summary()
    assert reader.get("nothing") is None
    version, curves = reader.curves()
    assert version == 1 and list(curves) == sorted(run_state.curves)
    for name, curve in run_state.curves.items():
        told = curves[name]
        assert told["width"] == curve.width and told["whole"] is True
        assert told["points"] == [
            [p.start, p.steps, p.at, p.samples, p.mean, p.low, p.high, p.last, p.count] for p in curve.points
        ]


def test_a_reader_is_told_only_what_changed(database: RunDatabase, path: str) -> None:
    run_state, reader = RunState(), RunReader(path)
    assert reader.version() == 0 and reader.curves() == (0, {})
    train(run_state, 1, 101)
    database.write(run_state)
    version, whole = reader.curves()
    assert len(whole["value/loss"]["points"]) == 100
    assert reader.curves(after=version) == (1, {})
    train(run_state, 101, 103)
    database.write(run_state)
    version, changed = reader.curves(after=version)
    assert version == 2
    assert [point[0] for point in changed["value/loss"]["points"]] == [101, 102]
    assert changed["value/loss"]["whole"] is False
    database.write(run_state)
    assert reader.curves(after=2) == (3, {})
    assert [point[0] for point in reader.curves(after=1)[1]["value/loss"]["points"]] == [101, 102]


def test_a_curve_that_was_rewritten_is_told_as_a_whole(database: RunDatabase, path: str) -> None:
    run_state, reader = RunState(), RunReader(path)
    train(run_state, 0, 1024)
    database.write(run_state)
    train(run_state, 1024, 1025)
    database.write(run_state)
    told = reader.curves(after=1)[1]["value/loss"]
    assert told["whole"] is True and told["width"] == 2 and len(told["points"]) == 513
    assert sum(point[-1] for point in told["points"]) == 1025
    assert told["points"] == reader.curves()[1]["value/loss"]["points"]


def test_a_restored_run_forgets_what_came_after(database: RunDatabase, path: str) -> None:
    run_state, reader = RunState(), RunReader(path)
    train(run_state, 1, 21)
    database.write(run_state)
    train(run_state, 11, 13)
    database.write(run_state)
    told = reader.curves(after=1)[1]["value/loss"]
    assert told["whole"] and [point[0] for point in told["points"]] == list(range(1, 13))


def test_a_version_from_another_run_is_no_version(database: RunDatabase, path: str) -> None:
    run_state = RunState()
    train(run_state, 1, 3)
    database.write(run_state)
    assert len(RunReader(path).curves(after=1000)[1]["value/loss"]["points"]) == 2


def test_a_curve_that_is_gone_is_gone(database: RunDatabase, path: str) -> None:
    run_state = RunState()
    train(run_state, 1, 3)
    database.write(run_state)
    del run_state.curves["rank/0/compute"]
    database.write(run_state)
    assert "rank/0/compute" not in RunReader(path).curves()[1]
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM points WHERE curve = 'rank/0/compute'").fetchone() == (0,)


def test_nan_is_null_and_comes_back_as_nan(database: RunDatabase, path: str) -> None:
    run_state = RunState()
    run_state.on_report(worker(0), worker_report(1, rows=[row(1, loss=math.nan, big=math.inf)]), 1.0)
    database.write(run_state)
    reader = RunReader(path)
    assert reader.curves()[1]["value/loss"]["points"][0][4:] == [None, None, None, None, 0]
    assert math.isnan(reader.status().values["loss"])
    assert reader.get("now")["values"] == {"loss": None, "big": None}
    assert reader.get("summary")["values"] == {"loss": None, "big": None}


def test_hostile_names_are_only_names(database: RunDatabase, path: str) -> None:
    name = "'; DROP TABLE points; --\0\u202e</script>"
    run_state = RunState()
    run_state.on_report(worker(0), worker_report(1, rows=[row(1, **{name: 1.0})]), 1.0)
    database.write(run_state)
    assert list(RunReader(path).status().values) == [name]
    assert f"value/{name}" in RunReader(path).curves()[1]


def test_events_and_histograms_are_the_newest(database: RunDatabase, path: str) -> None:
    run_state = RunState()
    for turn in range(12):
        for number in range(100):
            run_state.on_event("stop", "", str(turn * 100 + number), 1.0)
        for step in range(turn * 10, turn * 10 + 10):
            shown = [HistogramReport("w", step, 1000.0, -1.0, 1.0, [step, 2])]
            run_state.on_report(worker(0), worker_report(step, histograms=shown), step * 0.1)
        database.write(run_state)
    reader = RunReader(path)
    events = reader.events()
    assert len(events) == 500 and events[-1].text == "1199"
    assert [event.text for event in reader.events(after=events[-3].number)] == ["1198", "1199"]
    histograms = reader.histograms()["w"]
    assert [each["step"] for each in histograms] == list(range(70, 120))
    assert histograms[-1] == {"step": 119, "at": pytest.approx(11.9), "low": -1.0, "high": 1.0, "counts": [119, 2]}


def test_it_is_this_users_alone(database: RunDatabase, path: str) -> None:
    database.write(RunState())
    for name in os.listdir(os.path.dirname(path)):
        assert stat.S_IMODE(os.stat(os.path.join(os.path.dirname(path), name)).st_mode) == 0o600


def test_a_closed_memory_is_one_file_that_a_copy_of_reads_the_same(tmp_path: pathlib.Path, path: str) -> None:
    database, run_state = RunDatabase(path, no_warning), RunState()
    train(run_state, 1, 50)
    database.write(run_state)
    database.close()
    database.write(run_state)  # nothing more
    assert os.listdir(tmp_path) == ["memory.sqlite"]
    copy = tmp_path / "past runs #1 100%?"
    copy.mkdir()
    (copy / "memory.sqlite").write_bytes(pathlib.Path(path).read_bytes())
    assert RunReader(str(copy / "memory.sqlite")).curves() == RunReader(path).curves()


def test_a_killed_writers_memory_can_be_read(tmp_path: pathlib.Path, path: str) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from reports import row, worker_report, worker
from hora.monitor.run_state import RunState
from hora.runs.database import RunDatabase
run_state, database = RunState(), RunDatabase({path!r}, print)
for step in range(1, 30):
    run_state.on_report(worker(0), worker_report(step, rows=[row(step, loss=1.0)]), step * 0.1)
    database.write(run_state)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=50).returncode == -9
    assert os.path.exists(f"{path}-wal")
    assert len(RunReader(path).curves()[1]["value/loss"]["points"]) == 29
    RunDatabase(path, no_warning).close()  # and replaced by the next run
    assert RunReader(path).curves() == (0, {}) and os.listdir(tmp_path) == ["memory.sqlite"]


def test_an_open_reader_goes_on_to_the_next_run_in_the_directory(path: str) -> None:
    run_state = RunState(run="first")
    train(run_state, 1, 10)
    first = RunDatabase(path, no_warning)
    first.write(run_state)
    reader = RunReader(path)
    assert reader.status().run == "first"
    first.close()
    second = RunDatabase(path, no_warning)
    second.write(RunState(run="second"))
    assert reader.status().run == "second" and reader.curves()[1] == {}
    second.close()


# -- reader while it is written --------------------------------------------------------------------------------------

CHECKER = """
import sys
from hora.runs.reader import RunReader
reader, versions, version, points = RunReader(sys.argv[1]), set(), 0, {}
print("ready", flush=True)
while True:
    before = version
    version, curves = reader.curves(after=version)
    versions.add(version)
    for name, told in curves.items():
        kept = {} if told["whole"] else points.get(name, {})
        kept.update({point[0]: point for point in told["points"]})
        points[name] = kept
        width = told["width"]
        assert all(start % width == 0 for start in kept), (name, width)
        starts = sorted(kept)
        if name == "value/loss":
            assert starts == list(range(starts[0], starts[-1] + width, width)), (width, starts)
    if "value/loss" in points:
        # each write adds 100 steps: a part of one would show in the sums
        assert sum(point[-1] for point in points["value/loss"].values()) == 100 * version, version
    assert reader.status().step in (0, 100 * version - 1) or reader.version() > version
    if version == int(sys.argv[2]):
        break
print(len(versions))
"""


def test_another_process_reads_whole_writes_while_they_are_made(path: str) -> None:
    writes = 120
    run_state, database = RunState(), RunDatabase(path, no_warning)
    command = [sys.executable, "-c", CHECKER, path, str(writes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
        for number in range(writes):
            train(run_state, 100 * number, 100 * number + 100)
            database.write(run_state)
        out, err = reader.communicate(timeout=50)
    database.close()
    assert reader.returncode == 0, err
    assert run_state.curves["value/loss"].width > 1
    assert int(out) >= 2


def test_threads_share_a_reading(database: RunDatabase, path: str) -> None:
    run_state, reader = RunState(), RunReader(path)
    found: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            found.append(len(reader.curves()[1]))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20):
        train(run_state, 10 * number, 10 * number + 10)
        database.write(run_state)
    stop.set()
    for thread in threads:
        thread.join(20)
    assert found and set(found) <= {0, len(run_state.curves)}


# -- what cannot be written or read -----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_once_and_what_was_written_stays(small_disk: pathlib.Path) -> None:
    warnings = Warnings()
    path = str(small_disk / "memory.sqlite")
    database, run_state = RunDatabase(path, warnings), RunState()
    for number in range(200):
        train(run_state, 10 * number, 10 * number + 10)
        database.write(run_state)
    database.close()
    [warning] = warnings
    assert warning.startswith(f"the run database {path} cannot be written: ")
    assert "full" in warning and warning.endswith("; the run continues without it")
    reader = RunReader(path)
    assert 0 < reader.version() < 200
    assert sum(point[-1] for point in reader.curves()[1]["value/loss"]["points"]) == 10 * reader.version()


def test_a_disk_that_is_full_from_the_start_is_told_once(small_disk: pathlib.Path) -> None:
    with pytest.raises(OSError), open(small_disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    warnings = Warnings()
    database = RunDatabase(str(small_disk / "memory.sqlite"), warnings)
    database.write(RunState())
    database.close()
    assert database.failed and len(warnings) == 1


def test_a_failing_write_is_told_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings()
    database, run_state = RunDatabase(path, warnings), RunState()

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(RunDatabase, "_write_curves", fail)
    for _ in range(3):
        database.write(run_state)
    assert len(warnings) == 1 and "disk I/O error" in warnings[0]


def test_no_directory_is_told_once(tmp_path: pathlib.Path) -> None:
    warnings = Warnings()
    database = RunDatabase(str(tmp_path / "nowhere" / "memory.sqlite"), warnings)
    assert database.failed and len(warnings) == 1 and "No such file" in warnings[0]


def test_where_there_is_no_log_it_is_written_without(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect

    class Poor(sqlite3.Connection):
        def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:  # type: ignore[override]
            if sql == "PRAGMA journal_mode = WAL":
                raise sqlite3.OperationalError("locking protocol")
            return super().execute(sql, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sqlite3, "connect", lambda *args, **named: connect(*args, factory=Poor, **named))
    database, run_state = RunDatabase(path, no_warning), RunState()
    train(run_state, 1, 5)
    database.write(run_state)
    assert not os.path.exists(f"{path}-wal")
    assert len(RunReader(path).curves()[1]["value/loss"]["points"]) == 4
    database.close()


def old_memory(path: str, schema: int, application: int = APPLICATION) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE facts (x)")
        connection.execute(f"PRAGMA user_version = {schema}")
        connection.execute(f"PRAGMA application_id = {application}")
    connection.close()


def test_another_versions_memory_is_refused_and_left_alone(path: str) -> None:
    old_memory(path, 7)
    before = pathlib.Path(path).read_bytes()
    with pytest.raises(ValueError, match=r"another version of Hora \(schema 7, this one reads 1\): open it with that"):
        RunReader(path)
    with pytest.raises(ValueError, match=r"another version of Hora.*choose another --run-dir"):
        RunDatabase(path, no_warning)
    assert pathlib.Path(path).read_bytes() == before


def test_what_is_no_memory_is_refused_and_left_alone(path: str) -> None:
    old_memory(path, SCHEMA, application=0)
    for make in (RunReader, lambda path: RunDatabase(path, no_warning)):
        with pytest.raises(ValueError, match="is not a Hora run database"):
            make(path)
    pathlib.Path(path).write_text("my diary" * 100)
    with pytest.raises(ValueError, match="not a database"):
        RunReader(path)
    with pytest.raises(ValueError, match="is not a Hora run database"):
        RunDatabase(path, no_warning)
    assert pathlib.Path(path).read_text() == "my diary" * 100


def test_an_empty_file_is_replaced_and_a_link_is_not_followed(tmp_path: pathlib.Path, path: str) -> None:
    pathlib.Path(path).touch()
    RunDatabase(path, no_warning).close()
    mine = tmp_path / "mine"
    mine.write_text("precious")
    os.unlink(path)
    os.symlink(mine, path)
    RunDatabase(path, no_warning).close()
    assert mine.read_text() == "precious" and not os.path.islink(path)
    assert RunReader(path).version() == 0


def test_a_memory_that_is_not_there_or_damaged_is_said_so(tmp_path: pathlib.Path, path: str) -> None:
    with pytest.raises(ValueError, match="there is no run database"):
        RunReader(path)
    database, run_state = RunDatabase(path, no_warning), RunState()
    train(run_state, 1, 300)
    database.write(run_state)
    database.close()
    damaged = bytearray(pathlib.Path(path).read_bytes())
    damaged[4096:] = os.urandom(len(damaged) - 4096)
    pathlib.Path(path).write_bytes(damaged)
    with pytest.raises(ValueError, match="cannot be read"):
        RunReader(path).curves()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key, '1' AS value FROM n"


@pytest.mark.parametrize(
    "added",
    [f"DROP TABLE facts; CREATE VIEW facts AS {ENDLESS}", "CREATE VIEW more AS SELECT 1", "CREATE TABLE more (a)",
     "CREATE TRIGGER more AFTER INSERT ON facts BEGIN SELECT 1; END", "CREATE INDEX more ON points (mean)",
     "DROP TABLE events; CREATE VIRTUAL TABLE events USING fts5(text)"],
)  # fmt: skip
def test_what_holds_more_than_our_tables_is_refused(path: str, added: str) -> None:
    RunDatabase(path, no_warning).close()
    assert RunReader(path).version() == 0
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(added)
    with pytest.raises(ValueError, match="is not a Hora run database"):
        RunReader(path)


def test_a_memory_holds_its_reader_no_longer_than_it_may(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database, run_state = RunDatabase(path, no_warning), RunState()
    train(run_state, 1, 900)
    database.write(run_state)
    database.close()
    read = RunReader(path)
    assert read.curves()[1]
    monkeypatch.setattr(reader_module, "_is_ours", lambda *part: True)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"DROP TABLE facts; CREATE VIEW facts AS {ENDLESS}")
    monkeypatch.setattr(reader_module, "ANSWER_S", 0.1)
    with pytest.raises(ValueError, match=r"cannot be read: it takes longer than 0\.1 s"):
        read.get("now")


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_who_may_only_read_can_read_a_killed_runs_memory(tmp_path: pathlib.Path, path: str) -> None:
    database, run_state = RunDatabase(path, no_warning), RunState()
    train(run_state, 1, 30)
    database.write(run_state)
    folder = tmp_path / "left"
    folder.mkdir()
    for name in ("memory.sqlite", "memory.sqlite-wal"):
        (folder / name).write_bytes((tmp_path / name).read_bytes())
        (folder / name).chmod(0o644)
    database.close()
    for each in (folder, *folder.parents):
        if each != pathlib.Path("/") and each.stat().st_uid == 0 and "pytest" in str(each):
            each.chmod(each.stat().st_mode | 0o055)
    script = f"""
import os
from hora.runs.reader import RunReader
os.setgid(65534); os.setuid(65534)
print(RunReader({str(folder / "memory.sqlite")!r}).version())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["memory.sqlite", "memory.sqlite-wal"]
