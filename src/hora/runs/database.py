"""RunDatabase: what is recorded of a run, as SQLite in its directory; read with RunReader (reader.py).

    facts       by key, as JSON: now, summary, config, end, and `version`, the number of the newest write
    curves      by name: the width of its points, and the write that last replaced the whole curve
    points      of the curves, each with the write that changed it
    events      the newest, by number
    histograms  the newest of each name

Each write is one transaction and contains only what changed; a reader sees all of it or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable

import msgspec

from ..monitor.event_log import MAX_EVENTS
from ..monitor.metrics_log import MAX_HISTOGRAMS
from ..monitor.run_state import RunState
from ..monitor.status import RunStatus
from .json_file import jsonable

SCHEMA = 1
APPLICATION = 0x486F7261  # "Hora"
BUSY_S = 1.0  # how long a write waits for a reader, where the file system supports no write-ahead log
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
    "INSERT INTO facts VALUES ('version', '0')",
)


class RunDatabase:
    """The writer, for one thread. It replaces the database of an earlier run at `path`.

    ValueError if the file at `path` is of another version or not a run database. A disk that fails costs the run its
    database and nothing else: `warn` is called once.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        check(path)
        self.path = path
        self._warn = warn
        self._version = self._event = self._histogram = 0
        self._curves: set[str] = set()
        self._facts: dict[str, str] = {}
        self._connection: sqlite3.Connection | None = None
        try:
            self._connection = _create(path)
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    @property
    def failed(self) -> bool:
        return self._connection is None

    def put(self, key: str, value: object) -> None:
        """Set a fact, with the next write. NaN and values that JSON cannot express become null or text."""
        builtins = jsonable(msgspec.to_builtins(value, enc_hook=str, str_keys=True))
        self._facts[key] = json.dumps(builtins, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")

    def write(self, run_state: RunState, status: RunStatus | None = None) -> None:
        """Write all that changed since the last write; `status` is run_state.status() of this moment, if known."""
        if self._connection is None:
            return
        status = status or run_state.status(run_state.updated_at)
        self.put("summary", status.summary())
        version = self._version + 1
        facts = {**self._facts, "now": msgspec.json.encode(status).decode(), "version": str(version)}
        self._facts = {}
        try:
            with self._connection as connection:
                connection.execute("BEGIN IMMEDIATE")
                self._write_curves(connection, run_state, version)
                self._write_events(connection, run_state)
                self._write_histograms(connection, run_state)
                connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)
        else:
            self._version = version

    def close(self) -> None:
        """Leaves a single file, without -wal and -shm, unless a reader has it open at this moment."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("PRAGMA journal_mode = DELETE")
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _write_curves(self, connection: sqlite3.Connection, run_state: RunState, version: int) -> None:
        rows: list[tuple[object, ...]] = []
        replaced: list[tuple[str, int, int]] = []
        for name, curve in run_state.curves.items():
            whole, points = curve.take_changes()
            if whole:
                replaced.append((name, curve.width, version))
            rows += [(name, *msgspec.structs.astuple(point), version) for point in points]  # NaN becomes NULL
        gone = [(name,) for name in self._curves - run_state.curves.keys()]
        self._curves = set(run_state.curves)
        connection.executemany("DELETE FROM points WHERE curve = ?", [*gone, *((name,) for name, _, _ in replaced)])
        connection.executemany("DELETE FROM curves WHERE name = ?", gone)
        connection.executemany("INSERT OR REPLACE INTO curves VALUES (?, ?, ?)", replaced)
        connection.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _write_events(self, connection: sqlite3.Connection, run_state: RunState) -> None:
        events = [msgspec.structs.astuple(event) for event in run_state.event_log.events if event.number > self._event]
        if events:
            self._event = events[-1][0]
            connection.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?)", events)
            connection.execute("DELETE FROM events WHERE number <= ?", (self._event - MAX_EVENTS,))

    def _write_histograms(self, connection: sqlite3.Connection, run_state: RunState) -> None:
        self._histogram, histograms = run_state.metrics.histograms(self._histogram)
        rows = [(h.name, h.step, h.at, h.low, h.high, json.dumps(h.counts)) for h in histograms]
        connection.executemany("INSERT OR REPLACE INTO histograms VALUES (?, ?, ?, ?, ?, ?)", rows)
        connection.executemany(
            "DELETE FROM histograms WHERE name = ? AND step NOT IN"
            " (SELECT step FROM histograms WHERE name = ? ORDER BY at DESC LIMIT ?)",
            [(name, name, MAX_HISTOGRAMS) for name in {histogram.name for histogram in histograms}],
        )

    def _give_up(self, error: Exception) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()
        cause = (error.strerror if isinstance(error, OSError) else None) or error
        self._warn(f"the run database {self.path} cannot be written: {cause}; the run continues without it")


def check(path: str) -> None:
    """ValueError if the file at `path` must not be replaced: another version's database, or another kind of file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            header = file.read(100)
    except OSError:
        return  # no file, or one that the first write will report
    if not header:
        return
    schema, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
    if len(header) < 100 or not header.startswith(_HEADER) or application != APPLICATION:
        raise ValueError(f"{path} is not a Hora run database: move it away, or choose another --run-dir or --name")
    if schema != SCHEMA:
        raise ValueError(
            f"{path} was written by another version of Hora (schema {schema}, this one writes {SCHEMA}): "
            "choose another --run-dir or --name, or delete the directory"
        )


def _create(path: str) -> sqlite3.Connection:
    """An empty database with mode 0600; with a write-ahead log, so that readers do not block, where the disk allows."""
    for journal in ("WAL", "TRUNCATE"):
        _replace_file(path)
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


def _replace_file(path: str) -> None:
    """Replace the file at `path` by an empty database; a reader sees the old one or the new one, never a part. The old
    file is removed before: its write-ahead log must not lie beside the new one."""
    new = f"{path}.new"
    _remove(new, "-journal")
    try:
        os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("BEGIN")
            for statement in _TABLES:
                connection.execute(statement)
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
