"""Memory: what is kept of a run, in SQLite in its directory. Whoever shows a run, live or past, reads it (reading.py).

    facts       by key, as JSON: now, summary, config, end, and `version`, the number of the newest write
    curves      by name: the width of its points, and the write in which it was last written as a whole
    points      of the curves, each with the write that changed it
    events      the newest, by their numbers
    histograms  the newest of each name

Each write is one transaction and holds only what changed, so a reader sees a whole write or none of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from typing import Any

import msgspec

from ..monitor.curve import CurvePoint
from ..monitor.event_log import MAX_EVENTS
from ..monitor.metrics_log import MAX_HISTOGRAMS
from ..monitor.run_state import RunState
from ..monitor.status import RunStatus

SCHEMA = 1
APPLICATION = 0x486F7261  # "Hora"
BUSY_S = 1.0  # how long a write waits for a reader, where the file system has no write-ahead log
_HEADER = b"SQLite format 3\0"

_TABLES = (
    "CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE curves (name TEXT PRIMARY KEY, width INTEGER, version INTEGER) WITHOUT ROWID",
    "CREATE TABLE points (curve TEXT, start INTEGER, steps INTEGER, at REAL, samples INTEGER, mean REAL, low REAL,"
    " high REAL, last REAL, count INTEGER, version INTEGER, PRIMARY KEY (curve, start)) WITHOUT ROWID",
    "CREATE INDEX changes ON points (version)",
    "CREATE TABLE events (number INTEGER PRIMARY KEY, at REAL, step INTEGER, kind TEXT, who TEXT, text TEXT)",
    "CREATE TABLE histograms (name TEXT, step INTEGER, at REAL, low REAL, high REAL, counts TEXT,"
    " PRIMARY KEY (name, step)) WITHOUT ROWID",
)


class RunDatabase:
    """The writer; one thread at a time. It takes the place of an earlier run's memory at `path`.

    ValueError if what lies there is another version's memory, or none at all. A disk that fails costs the run its
    memory and nothing else: `warn` is told once.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        check(path)
        self.path = path
        self._warn = warn
        self._version = self._event = self._histogram = 0
        self._known: set[str] = set()
        self._facts: dict[str, str] = {}
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = _create(path)
        except (OSError, sqlite3.Error) as problem:
            self._give_up(problem)

    @property
    def failed(self) -> bool:
        return self._connection is None

    def put(self, key: str, value: object) -> None:
        """A fact, from the next write on."""
        self._facts[key] = _json(value)

    def write(self, board: RunState, now: RunStatus | None = None) -> None:
        """All that changed on the board since the last write; `now` is the run at this moment, if it is known."""
        connection = self._connection
        if connection is None:
            return
        now = now or board.status(board.updated_at)
        facts = {**self._facts, "now": msgspec.json.encode(now).decode()}
        facts["summary"] = _json(board.summary(now.seconds))
        self._facts = {}
        version = self._version + 1
        try:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                self._write_curves(connection, board, version)
                self._write_rest(connection, board)
                rows = [*facts.items(), ("version", str(version))]
                connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)
        except (OSError, sqlite3.Error) as problem:
            self._give_up(problem)
        else:
            self._version = version

    def close(self) -> None:
        """Leaves one file that needs no other beside it, unless somebody reads at this moment."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("PRAGMA journal_mode = DELETE")
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _write_curves(self, connection: sqlite3.Connection, board: RunState, version: int) -> None:
        rows: list[tuple[object, ...]] = []
        whole_ones: list[tuple[str, int, int]] = []
        for name, curve in board.curves.items():
            whole, points = curve.take_changes()
            if whole:
                whole_ones.append((name, curve.width, version))
            rows += [_row(name, point, version) for point in points]
        gone = self._known - board.curves.keys()
        self._known = set(board.curves)
        rewritten = [(name,) for name in gone] + [(name,) for name, _, _ in whole_ones]
        connection.executemany("DELETE FROM points WHERE curve = ?", rewritten)
        connection.executemany("DELETE FROM curves WHERE name = ?", [(name,) for name in gone])
        connection.executemany("INSERT OR REPLACE INTO curves VALUES (?, ?, ?)", whole_ones)
        connection.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _write_rest(self, connection: sqlite3.Connection, board: RunState) -> None:
        events = [(e.number, e.at, e.step, e.kind, e.who, e.text) for e in board.events if e.number > self._event]
        if events:
            self._event = events[-1][0]
            connection.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?)", events)
            connection.execute("DELETE FROM events WHERE number <= ?", (self._event - MAX_EVENTS,))
        self._histogram, histograms = board.histograms(self._histogram)
        rows = [(h.name, h.step, h.at, h.low, h.high, json.dumps(h.counts)) for h in histograms]
        connection.executemany("INSERT OR REPLACE INTO histograms VALUES (?, ?, ?, ?, ?, ?)", rows)
        for name in {histogram.name for histogram in histograms}:
            connection.execute(
                "DELETE FROM histograms WHERE name = ? AND step NOT IN"
                " (SELECT step FROM histograms WHERE name = ? ORDER BY at DESC LIMIT ?)",
                (name, name, MAX_HISTOGRAMS),
            )

    def _give_up(self, problem: Exception) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        why = (problem.strerror if isinstance(problem, OSError) else None) or problem
        self._warn(f"the run's memory {self.path} cannot be written: {why}; the run goes on without it")


def check(path: str) -> None:
    """ValueError if another version's memory lies there, or something else that is not ours to replace."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            header = file.read(100)
    except OSError:
        return  # nothing is there; or nothing can be, and then the writing will tell
    if not header:
        return
    whole = len(header) == 100 and header.startswith(_HEADER)
    schema, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if not whole or application != APPLICATION:
        raise ValueError(f"{path} is no memory of a run: move it away, or choose another --run-dir or --name")
    if schema != SCHEMA:
        raise ValueError(
            f"{path} was written by another version of Hora (schema {schema}, this one writes {SCHEMA}): "
            "choose another --run-dir or --name, or delete the directory"
        )


def _create(path: str) -> sqlite3.Connection:
    """An empty memory, this user's alone. It has a write-ahead log, so that nobody waits, where the disk allows one."""
    for journal in ("WAL", "TRUNCATE"):
        _place(path)
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {4 << 20}")
            connection.execute("INSERT OR REPLACE INTO facts VALUES ('version', '0')")
            return connection
        except sqlite3.Error:
            connection.close()
            if journal == "TRUNCATE":
                raise
    raise AssertionError


def _place(path: str) -> None:
    """Puts empty tables in the place of what is there, so that a reader never sees a part of either. The old file goes
    first: its log must not lie beside the new one."""
    new = f"{path}.new"
    _remove(new, "-journal")
    try:
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("BEGIN")
            for table in _TABLES:
                connection.execute(table)
            connection.execute("INSERT INTO facts VALUES ('version', '0')")
            connection.execute("COMMIT")
        _remove(path, "-wal", "-shm", "-journal")
        os.rename(new, path)
    except (OSError, sqlite3.Error):
        with contextlib.suppress(OSError):
            _remove(new, "-journal")
        raise


def _remove(path: str, *suffixes: str) -> None:
    for suffix in ("", *suffixes):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + suffix)


def _row(name: str, point: CurvePoint, version: int) -> tuple[Any, ...]:
    """NaN is NULL in SQLite."""
    return (
        name, point.start, point.steps, point.at, point.samples, point.mean, point.low, point.high, point.last,
        point.count, version,
    )  # fmt: skip


def _json(value: object) -> str:
    """What UTF-8 cannot say, in a command perhaps, is replaced; what JSON cannot, becomes text, or null."""
    builtins = msgspec.to_builtins(value, enc_hook=str, str_keys=True)
    return json.dumps(_finite(builtins), ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not -1e999 < value < 1e999 else value
