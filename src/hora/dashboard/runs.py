"""Runs: which there are in the home directory and beside it, and what is known of each without its memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..runs import run_directory
from ..runs.json_file import MAX_BYTES, decoded, opened, read
from ..runs.reader import RunReader
from ..runs.run_directory import DATABASE, NAME_PATTERN

MAX_RUNS = 500  # in the list: the newest


class RunNotFound(LookupError):
    """There is no such run; the sentence says what to do."""


class StoredRun(NamedTuple):
    """A run's directory. `live`: its launcher lives, as far as its lock tells."""

    name: str
    path: str
    config: dict[str, Any]
    end: dict[str, Any] | None
    live: bool

    @property
    def memory(self) -> str:
        return os.path.join(self.path, DATABASE)

    @property
    def mark(self) -> tuple[int, int] | None:
        """Which file its memory is: a run of the same name that begins anew has another. None: there is none."""
        try:
            facts = os.lstat(self.memory)
        except OSError:
            return None
        return (facts.st_dev, facts.st_ino) if stat.S_ISREG(facts.st_mode) else None

    def read(self) -> RunReader | None:
        """Its memory; None if it has none. ValueError if it is of another version, or damaged."""
        return RunReader(self.memory) if self.mark is not None else None


class StoredRuns:
    """The runs in `home`, and those of `others`, wherever these lie. Names out of URLs never lead out of `home`.

    Thread-safe: it keeps nothing but what it read of runs that have ended."""

    def __init__(self, home: str, others: Mapping[str, str] | None = None) -> None:
        self.home = home
        self._others = dict(others or {})
        self._read: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}

    def find(self, name: str) -> StoredRun:
        """The run of that name; Missing if there is none."""
        run = self._look(name) if NAME_PATTERN.fullmatch(name) else None
        if run is None:
            raise RunNotFound(f"there is no run {name[:64]!r} in {self.home}; the list of runs says which there are")
        return run

    def all(self) -> list[StoredRun]:
        """Live ones first, then the newest; MAX_RUNS at most."""
        try:
            names = {entry.name for entry in os.scandir(self.home) if NAME_PATTERN.fullmatch(entry.name)}
        except OSError:
            names = set()
        found = [run for run in map(self._look, names | self._others.keys()) if run is not None]
        found.sort(key=lambda run: (run.live, str(run.config.get("started", "")), run.name), reverse=True)
        return found[:MAX_RUNS]

    def _look(self, name: str) -> StoredRun | None:
        other = self._others.get(name)
        path = other or os.path.join(self.home, name)
        if other is None and not _is_folder(path):
            return None
        begun = self._json(os.path.join(path, "run.json"))
        if begun is None and (other is None or not os.path.isdir(other)):
            return None
        ended = self._json(os.path.join(path, "end.json"))
        live = ended is None and (begun is None or _is_live(name, path, begun))
        return StoredRun(name=name, path=path, config=begun or {}, end=ended, live=live)

    def _json(self, path: str) -> dict[str, Any] | None:
        """What a file says, read again only when it was written again."""
        try:
            with opened(path) as file:
                facts = os.fstat(file.fileno())
                mark = (facts.st_ino, facts.st_mtime_ns)
                known = self._read.get(path)
                if known is not None and known[0] == mark:
                    return known[1]
                told = decoded(file.read(MAX_BYTES))
        except (OSError, ValueError):
            return None
        if not isinstance(told, dict):
            return None
        if len(self._read) > 4 * MAX_RUNS:
            self._read.clear()
        self._read[path] = (mark, told)
        return told


def named(directory: str) -> str:
    """The name of the run in a directory that was given by hand; ValueError if there is none."""
    path = os.path.abspath(directory)
    name = (read(os.path.join(path, "run.json")) or {}).get("name")
    if not name and os.path.exists(os.path.join(path, DATABASE)):
        name = os.path.basename(path)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"there is no run in {path}: it has no run.json; give the directory that hora run printed")
    return name


def _is_folder(path: str) -> bool:
    """A folder itself, and no link to one elsewhere."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_live(name: str, path: str, begun: dict[str, Any]) -> bool:
    try:
        return run_directory.find(str(begun.get("name", name)), path).live
    except ValueError:
        return False
