"""RunReader: read-only access to a run database (database.py), while it is written or long after.

The file is opened for each call and closed again, so a reader never blocks the writer, and a new run that starts in the
same directory is read from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ..monitor.status import RunEvent, RunStatus
from .database import APPLICATION, SCHEMA
from .json_file import decode

BUSY_S = 2.0
ANSWER_S = 2.0  # deadline of one call: a crafted file must not keep its reader busy
_INSTRUCTIONS = 10_000  # of SQLite's virtual machine, between two checks of the deadline
_SCHEMA_OBJECTS = {
    *(("table", name) for name in ("facts", "curves", "points", "events", "histograms")),
    ("index", "changes"),
}
_POINT = "start, steps, at, samples, mean, low, high, last, count"
_EVENT = "number, at, step, kind, who, text"


class RunReader:
    """Each call returns a consistent snapshot. Thread-safe.

    ValueError, here and from every call, if there is no run database at `path`, if it is of another version, or if it
    cannot be read; the message says what to do.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        with self._open():
            pass

    def version(self) -> int:
        """The number of the newest write."""
        with self._open() as connection:
            return _version(connection)

    def status(self) -> RunStatus:
        """The run at the newest write; a logged value that is not finite is NaN."""
        now = self.get("now")
        if not isinstance(now, dict):
            return RunStatus()
        values = now.get("values")
        if isinstance(values, dict):
            now["values"] = {name: math.nan if value is None else value for name, value in values.items()}
        try:
            return msgspec.convert(now, RunStatus, strict=False, str_keys=True)
        except msgspec.ValidationError as error:
            raise self._damaged(error) from None

    def get(self, key: str) -> Any:
        """The JSON value of now, summary, config, end or version; None if it was not written yet."""
        with self._open() as connection:
            row = connection.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
            return decode(row[0]) if row is not None else None

    def curves(self, after: int = 0) -> tuple[int, dict[str, dict[str, Any]]]:
        """The newest version, and by name what changed after write `after`: {"width", "whole", "points"}. Points are
        lists in the order of CurvePoint's fields, None for NaN. A whole curve replaces all earlier points."""
        with self._open() as connection:
            version = _version(connection)
            if after > version:
                after = 0  # `after` is of an earlier run
            found: dict[str, dict[str, Any]] = {}
            for name, width, written in connection.execute("SELECT name, width, version FROM curves ORDER BY name"):
                found[name] = {"width": width, "whole": written > after, "points": []}
            for name, curve in found.items():
                if curve["whole"]:
                    query = f"SELECT {_POINT} FROM points WHERE curve = ? ORDER BY start"
                    curve["points"] = [list(row) for row in connection.execute(query, (name,))]
            query = f"SELECT curve, {_POINT} FROM points INDEXED BY changes WHERE version > ? ORDER BY curve, start"
            if not all(curve["whole"] for curve in found.values()):
                for name, *point in connection.execute(query, (after,)):
                    if name in found and not found[name]["whole"]:
                        found[name]["points"].append(point)
        return version, {name: curve for name, curve in found.items() if curve["whole"] or curve["points"]}

    def events(self, after: int = 0) -> list[RunEvent]:
        """The events with a number above `after`, oldest first."""
        query = f"SELECT {_EVENT} FROM events WHERE number > ? ORDER BY number"
        with self._open() as connection:
            rows = connection.execute(query, (after,)).fetchall()
        return [RunEvent(**dict(zip(_EVENT.split(", "), row, strict=True))) for row in rows]

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """By name, oldest first: {"step", "at", "low", "high", "counts"}."""
        found: dict[str, list[dict[str, Any]]] = {}
        with self._open() as connection:
            rows = connection.execute("SELECT name, step, at, low, high, counts FROM histograms ORDER BY name, step")
            for name, step, at, low, high, counts in rows:
                histogram = {"step": step, "at": at, "low": low, "high": high, "counts": decode(counts)}
                found.setdefault(name, []).append(histogram)
        return found

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection with a consistent view of the database."""
        if not os.path.isfile(self.path):
            raise ValueError(f"there is no run database at {self.path}: it was not written, or it was deleted")
        with self._explained():
            connection = self._connect()
        try:
            with self._explained():
                connection.execute("BEGIN")
                (application,) = connection.execute("PRAGMA application_id").fetchone()
                (schema,) = connection.execute("PRAGMA user_version").fetchone()
                objects = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
            self._check(application, schema, all(_is_ours(*each) for each in objects))
            with self._explained():
                yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, TypeError, ValueError, OverflowError, RecursionError) as error:
            late = "interrupted" in str(error)
            raise self._damaged(f"it takes longer than {ANSWER_S:g} s" if late else error) from None

    def _connect(self) -> sqlite3.Connection:
        """Read-only. Where this user cannot write, the write-ahead log of a killed run is ignored."""
        uri = pathlib.Path(self.path).as_uri()
        deadline = time.monotonic() + ANSWER_S
        for mode in ("mode=ro", "mode=ro&immutable=1"):
            connection = sqlite3.connect(f"{uri}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _INSTRUCTIONS)
            try:
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                return connection
            except sqlite3.Error as error:
                connection.close()
                retry = isinstance(error, sqlite3.OperationalError) and not os.access(
                    os.path.dirname(self.path), os.W_OK
                )
                if "immutable" in mode or not retry:
                    raise
        raise AssertionError

    def _check(self, application: int, schema: int, is_ours: bool) -> None:
        """A database with other objects than our tables is rejected: a view could contain any query."""
        if application != APPLICATION or (schema == SCHEMA and not is_ours):
            raise ValueError(f"{self.path} is not a Hora run database: delete it, or give another directory")
        if schema != SCHEMA:
            raise ValueError(
                f"{self.path} was written by another version of Hora (schema {schema}, this one reads {SCHEMA}): "
                "open it with that version, or delete the directory"
            )

    def _damaged(self, error: object) -> ValueError:
        return ValueError(
            f"the run database {self.path} cannot be read: {error}; if this persists, delete the directory"
        )


def _is_ours(kind: str, name: str, sql: str | None) -> bool:
    automatic = kind == "index" and sql is None and name.startswith("sqlite_autoindex_")
    return automatic or ((kind, name) in _SCHEMA_OBJECTS and not str(sql).upper().startswith("CREATE VIRTUAL"))


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM facts WHERE key = 'version'").fetchone()
    return int(row[0]) if row is not None else 0
