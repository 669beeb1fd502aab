"""RunCatalogue: the runs that the dashboard shows, and the list of them as JSON."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Mapping
from typing import Any

import msgspec

from ..http.errors import HttpError
from ..runs import exit_codes
from ..runs.digest import digest
from ..runs.json_file import read_object
from ..runs.run_directory import DATABASE, NAME_PATTERN, RunRecord, is_live

MAX_RUNS = 500  # in the list: the newest
STOPPED = (exit_codes.INTERRUPTED, exit_codes.OUTPUT_CLOSED, exit_codes.TERMINATED)
SUMMARY_KEYS = ("seconds", "samples", "samples_per_s", "steps", "values", "workers")

encode = msgspec.json.Encoder().encode


class RunNotFound(HttpError):
    """There is no run of that name."""


class RunCatalogue:
    """The runs in `home`, and `others` by name and directory. Names from URLs never lead out of `home`. Thread-safe."""

    def __init__(self, home: str, others: Mapping[str, str] | None = None) -> None:
        self.home = home
        self._others = dict(others or {})

    def find(self, name: str) -> RunRecord:
        """The run of that name, or RunNotFound."""
        run = self._read(name) if NAME_PATTERN.fullmatch(name) else None
        if run is None:
            raise RunNotFound(f"there is no run {name[:64]!r} in {self.home}; see the list of runs", 404)
        return run

    def all(self) -> list[RunRecord]:
        """Live runs first, then the newest; at most MAX_RUNS."""
        try:
            names = {entry.name for entry in os.scandir(self.home) if NAME_PATTERN.fullmatch(entry.name)}
        except OSError:
            names = set()
        found = [run for run in map(self._read, names | self._others.keys()) if run is not None]
        found.sort(key=lambda run: (run.live, str(run.config.get("started", "")), run.name), reverse=True)
        return found[:MAX_RUNS]

    def _read(self, name: str) -> RunRecord | None:
        other = self._others.get(name)
        path = other or os.path.join(self.home, name)
        if not (os.path.isdir(path) if other else _is_folder(path)):
            return None
        config, end = (_read_json(os.path.join(path, file)) for file in ("run.json", "end.json"))
        if config is None and other is None:
            return None
        live = end is None and (config is None or is_live(path))
        return RunRecord(name=name, path=path, config=config or {}, end=end, live=live)


def name_of(directory: str) -> str:
    """The name of the run in this directory; ValueError if there is none."""
    path = os.path.abspath(directory)
    name = (read_object(os.path.join(path, "run.json")) or {}).get("name")
    if not name and os.path.exists(os.path.join(path, DATABASE)):
        name = os.path.basename(path)
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"there is no run in {path}: it has no run.json; give the directory that hora run printed")
    return name


def listing(catalogue: RunCatalogue) -> bytes:
    """All runs as JSON. Only the databases of live runs, and of runs that left no summary, are queried."""
    return encode({"home": catalogue.home, "runs": [_encoded_line(run) for run in catalogue.all()]})


def state_of(run: RunRecord, status: str) -> str:
    """starting, running, ended, stopped, failed, or lost: the launcher was killed. `status` is the state in the run
    database."""
    if run.live:
        return status if status in ("starting", "running", "ended") else "starting"
    if run.end is None:
        return "ended" if status == "ended" else "lost"
    code = run.end.get("code")
    return "ended" if code in (exit_codes.OK, None) else "stopped" if code in STOPPED else "failed"


def _encoded_line(run: RunRecord) -> msgspec.Raw:
    """A damaged run affects its own line only."""
    try:
        return msgspec.Raw(encode(_line(run)))
    except Exception as error:
        why = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        line = {
            "name": run.name,
            "live": run.live,
            "state": state_of(run, ""),
            "remembered": run.database_id is not None,
        }
        return msgspec.Raw(encode({**line, "problem": f"this run cannot be shown: {why}"}))


def _line(run: RunRecord) -> dict[str, Any]:
    config, end, known = run.config, run.end or {}, digest(run)
    status, summary, problem = known.status, known.summary, known.problem
    if status is not None:  # no end.json yet: the newest values and the current speed, not the means over the run
        summary = {**msgspec.structs.asdict(status), "steps": status.step, "workers": status.size}
    elif not problem:
        try:
            run.reader()
        except ValueError as error:
            problem = str(error)
    return {
        "name": run.name, "live": run.live, "started": config.get("started"), "ended": end.get("ended"),
        "strategy": known.strategy or None, "size": config.get("size"), "servers": config.get("servers"),
        "command": config.get("command"), "host": config.get("host"), "code": end.get("code"),
        "cause": end.get("cause"), "seconds": end.get("seconds"), "problem": problem,
        "remembered": run.database_id is not None, "state": state_of(run, status.state if status else ""),
        **{key: summary[key] for key in SUMMARY_KEYS if summary.get(key) is not None},
    }  # fmt: skip


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return _cached(path, info.st_ino, info.st_mtime_ns, info.st_size)


@functools.lru_cache(4 * MAX_RUNS)
def _cached(path: str, *version: int) -> dict[str, Any] | None:
    return read_object(path)


def _is_folder(path: str) -> bool:
    """A directory itself, not a link to one elsewhere."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
