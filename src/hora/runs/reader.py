"""Reading: a run's memory as others read it, while it is written or long after. Nothing here writes.

The file is opened for each question and closed again, so a reader never holds up the writer, and a run that begins anew
in the same directory is read from then on.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ..monitor.status import RunEvent, RunStatus
from .database import APPLICATION, SCHEMA
from .json_file import decoded

BUSY_S = 2.0
ANSWER_S = 2.0  # for a question; a memory that makes its reader work longer is none of ours
_EVERY = 10_000  # instructions of SQLite's between two looks at the clock
_OURS = {
    *(("table", name) for name in ("facts", "curves", "points", "events", "histograms")),
    ("index", "changes"),
}
_POINT = "start, steps, at, samples, mean, low, high, last, count"


class RunReader:
    """ValueError if there is no memory at `path`, or one of another version, or it cannot be read; it says what to do.

    Each answer is of one moment. Threads may share it."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        with self._open():
            pass

    def version(self) -> int:
        """The number of the newest write."""
        with self._open() as connection:
            return _version(connection)

    def status(self) -> RunStatus:
        """The run as it was at the newest write; a value that is not finite is NaN."""
        told = self.get("now")
        if not isinstance(told, dict):
            return RunStatus()
        values = told.get("values")
        if isinstance(values, dict):
            told["values"] = {name: math.nan if value is None else value for name, value in values.items()}
        try:
            return msgspec.convert(told, RunStatus, strict=False, str_keys=True)
        except msgspec.ValidationError as problem:
            raise self._damaged(problem) from None

    def get(self, key: str) -> Any:
        """now, summary, config, end or version, out of its JSON; None if it was not written (yet)."""
        with self._open() as connection:
            row = connection.execute("SELECT value FROM facts WHERE key = ?", (key,)).fetchone()
            return decoded(row[0]) if row is not None else None

    def curves(self, after: int = 0) -> tuple[int, dict[str, dict[str, Any]]]:
        """The newest version, and by name what changed after write `after`: {"width", "whole", "points"}. Points are
        lists in the order of Point's fields, None for NaN. Whole ones take the place of all that was told before."""
        with self._open() as connection:
            version = _version(connection)
            if after > version:
                after = 0  # another run's
            found: dict[str, dict[str, Any]] = {}
            for name, width, written in connection.execute("SELECT name, width, version FROM curves ORDER BY name"):
                found[name] = {"width": width, "whole": written > after, "points": []}
            for name, curve in found.items():
                if curve["whole"]:
                    asked = f"SELECT {_POINT} FROM points WHERE curve = ? ORDER BY start"
                    curve["points"] = [list(row) for row in connection.execute(asked, (name,))]
            asked = f"SELECT curve, {_POINT} FROM points INDEXED BY changes WHERE version > ? ORDER BY curve, start"
            if not all(curve["whole"] for curve in found.values()):
                for name, *point in connection.execute(asked, (after,)):
                    if name in found and not found[name]["whole"]:
                        found[name]["points"].append(point)
        return version, {name: curve for name, curve in found.items() if curve["whole"] or curve["points"]}

    def events(self, after: int = 0) -> list[RunEvent]:
        """Those with a number above `after`, the oldest first."""
        asked = "SELECT number, at, step, kind, who, text FROM events WHERE number > ? ORDER BY number"
        with self._open() as connection:
            rows = connection.execute(asked, (after,)).fetchall()
        fields = ("number", "at", "step", "kind", "who", "text")
        return [RunEvent(**dict(zip(fields, row, strict=True))) for row in rows]

    def histograms(self) -> dict[str, list[dict[str, Any]]]:
        """By name, the oldest first: {"step", "at", "low", "high", "counts"}."""
        found: dict[str, list[dict[str, Any]]] = {}
        with self._open() as connection:
            rows = connection.execute("SELECT name, step, at, low, high, counts FROM histograms ORDER BY name, step")
            for name, step, at, low, high, counts in rows:
                told = {"step": step, "at": at, "low": low, "high": high, "counts": decoded(counts)}
                found.setdefault(name, []).append(told)
        return found

    def close(self) -> None:
        """Nothing is open between two questions."""

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection with one moment's view of the memory."""
        if not os.path.isfile(self.path):
            raise ValueError(f"there is no memory of a run at {self.path}: it was not kept, or it was deleted")
        try:
            connection = self._connect()
        except sqlite3.Error as problem:
            raise self._damaged(problem) from None
        try:
            with self._explained():
                connection.execute("BEGIN")
                kind = self._kind(connection)
            self._check(*kind)
            with self._explained():
                yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, TypeError, ValueError, OverflowError, RecursionError) as problem:
            late = "interrupted" in str(problem)
            raise self._damaged(f"it takes longer than {ANSWER_S:g} s" if late else problem) from None

    def _connect(self) -> sqlite3.Connection:
        """Read-only. Where this user cannot write, a killed run's log cannot be read, and is left out."""
        uri = pathlib.Path(self.path).as_uri()
        for mode in ("mode=ro", "mode=ro&immutable=1"):
            connection = sqlite3.connect(f"{uri}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
            connection.set_progress_handler(_too_late(time.monotonic() + ANSWER_S), _EVERY)
            try:
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                return connection
            except sqlite3.OperationalError:
                connection.close()
                if "immutable" in mode or os.access(os.path.dirname(self.path), os.W_OK):
                    raise
            except sqlite3.Error:
                connection.close()
                raise
        raise AssertionError

    def _kind(self, connection: sqlite3.Connection) -> tuple[int, int, bool]:
        """Its application, its schema, and whether it holds more than our tables: a view could be anything."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (schema,) = connection.execute("PRAGMA user_version").fetchone()
        parts = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
        return application, schema, any(not _is_ours(*part) for part in parts)

    def _check(self, application: int, schema: int, odd: bool) -> None:
        if application != APPLICATION or (odd and schema == SCHEMA):
            raise ValueError(f"{self.path} is no memory of a run: delete it, or give another directory")
        if schema != SCHEMA:
            raise ValueError(
                f"{self.path} was written by another version of Hora (schema {schema}, this one reads {SCHEMA}): "
                "open it with that version, or delete the directory"
            )

    def _damaged(self, problem: object) -> ValueError:
        return ValueError(
            f"the run's memory {self.path} cannot be read: {problem}; if it stays so, delete the directory"
        )


def _too_late(end: float) -> Callable[[], bool]:
    return lambda: time.monotonic() > end


def _is_ours(kind: str, name: str, sql: str | None) -> bool:
    own = kind == "index" and sql is None and name.startswith("sqlite_autoindex_")
    return own or ((kind, name) in _OURS and not str(sql).upper().startswith("CREATE VIRTUAL"))


def _version(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM facts WHERE key = 'version'").fetchone()
    return int(row[0]) if row is not None else 0
