"""RunFile: the directory in which a run is found by its name while it lives, and looked up afterwards.

run.json        what was run: the resolved configuration, host, pid, versions
control         while the run lives: where its coordinator listens, and the token; readable by this user only
memory.sqlite   what it shows of itself, written by hora.monitor
end.json        how it ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import importlib.metadata
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .json_file import opened
from .json_file import read as _read

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONTROL = "control"
DATABASE = "memory.sqlite"


class RunDirectory:
    """The run's directory, made 0700 and locked while the run lives; ValueError when a live run has that directory.

    A directory that cannot be written costs the run its record and nothing else: `warn` is told once.
    """

    def __init__(self, *, directory: str | None, name: str | None, warn: Callable[[str], None]) -> None:
        self.name = name or f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self.path = os.path.abspath(directory) if directory else os.path.join(home(), self.name)
        self._warn = warn
        self._fd: int | None = None
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._give_up(error)
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)  # and not self.close(), which would remove the other run's `control`
            raise ValueError(
                f"a run is going on in {self.path}; choose another --name or --run-dir, or wait for its end"
            ) from None
        except OSError:
            pass  # a file system without locks: two runs of one name are then the user's to avoid

    @property
    def control_path(self) -> str | None:
        """Where `control` lies, for the guardian to remove; None when there is no directory."""
        return os.path.join(self.path, CONTROL) if self._fd is not None else None

    def begin(self, facts: dict[str, object]) -> None:
        """Writes run.json: `facts`, the time and the versions. What an earlier run has left goes only now."""
        self._remove("end.json")
        self._remove(CONTROL)
        self._write("run.json", {"name": self.name, **facts, "started": _now(), "versions": versions()})

    def open_control(self, *, run: str, address: tuple[str, int], token: bytes) -> None:
        """Writes `control`, so that others of this user find the run and prove that they may."""
        self._write(CONTROL, {"run": run, "host": address[0], "port": address[1], "token": token.hex()})

    def end(self, facts: dict[str, object]) -> None:
        """Removes `control` and writes end.json."""
        self._remove(CONTROL)
        self._write("end.json", {**facts, "ended": _now()})

    def close(self) -> None:
        """Removes `control` and gives the directory free for another run."""
        if self._fd is not None:
            self._remove(CONTROL)
            os.close(self._fd)
            self._fd = None

    def _write(self, name: str, facts: dict[str, object]) -> None:
        if self._fd is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._remove(name)
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=self._fd), "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=2)
                file.write("\n")
        except OSError as error:
            self._give_up(error)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)

    def _give_up(self, error: OSError) -> None:
        self._warn(f"the run directory {self.path} cannot be written: {error.strerror}; the run goes on without it")
        self.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run's directory as others read it: what was run, how it ended if it has, and whether its launcher lives."""

    name: str
    path: str
    config: dict[str, Any]
    end: dict[str, Any] | None
    live: bool

    def control(self) -> tuple[tuple[str, int], bytes]:
        """Where a live run's coordinator listens, and the token. ValueError if others could have read or written it."""
        path = os.path.join(self.path, CONTROL)
        try:
            with opened(path) as file:
                facts = os.fstat(file.fileno())
                if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
                    whose = f"uid {facts.st_uid}, mode {stat.S_IMODE(facts.st_mode):04o}"
                    raise ValueError(f"{path} is not this user's alone ({whose}), so it is not used: chmod 600 {path}")
                told = json.load(file)
            return (str(told["host"]), int(told["port"])), bytes.fromhex(told["token"])
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as problem:
            raise ValueError(f"run {self.name!r} cannot be reached through {path}: {problem}") from None


def find(name: str, directory: str | None = None) -> RunRecord:
    """The run of that name, or the one in `directory`; ValueError names the live runs if there is none."""
    path = os.path.abspath(directory) if directory else os.path.join(home(), name)
    begun = _read(os.path.join(path, "run.json")) if directory or _plain(name) else None
    if begun is None:
        where = f" in {path}" if directory else ""
        raise ValueError(f"there is no run {name!r}{where}; {live_runs()}")
    if directory and begun.get("name") != name:
        raise ValueError(f"the run in {path} is {begun.get('name')!r}, not {name!r}")
    return RunRecord(name=name, path=path, config=begun, end=_read(os.path.join(path, "end.json")), live=_is_live(path))


def look_up(run: str) -> RunRecord:
    """A run by its name, or by the path of its directory; ValueError says what may have been meant."""
    path = os.path.abspath(os.path.expanduser(run))
    if os.sep in run or run in (".", ".."):
        begun = _read(os.path.join(path, "run.json"))
        if begun is None:
            raise ValueError(f"there is no run in {path}: a run's directory holds run.json")
        return _found(path, begun)
    try:
        return find(run)
    except ValueError:
        begun = _read(os.path.join(path, "run.json"))
        if begun is not None:
            return _found(path, begun)
        with contextlib.suppress(OSError):
            near = difflib.get_close_matches(run, {*os.listdir(home())} - {run}, n=1)
            if near:
                raise ValueError(f"there is no run {run!r}; did you mean {near[0]!r}?") from None
        raise


def all_runs(directories: Iterable[str] = ()) -> Iterator[RunRecord]:
    """Every run in its usual place and in `directories`, the newest first; each is looked at as it is asked for."""
    paths = [os.path.abspath(directory) for directory in directories]
    with contextlib.suppress(OSError):
        paths += [entry.path for entry in os.scandir(home()) if entry.is_dir()]
    records = ((path, _read(os.path.join(path, "run.json"))) for path in dict.fromkeys(paths))
    known = [(started(begun), path, begun) for path, begun in records if begun is not None]
    for _, path, begun in sorted(known, key=lambda each: each[:2], reverse=True):
        yield _found(path, begun)


def started(begun: dict[str, Any]) -> float:
    """When, in seconds since 1970; 0 if that is not known."""
    try:
        return datetime.datetime.fromisoformat(str(begun.get("started"))).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _found(path: str, begun: dict[str, Any]) -> RunRecord:
    name = str(begun.get("name") or os.path.basename(path))
    return RunRecord(name=name, path=path, config=begun, end=_read(os.path.join(path, "end.json")), live=_is_live(path))


def live_runs() -> str:
    """The runs that can be joined or asked now, in words."""
    with contextlib.suppress(OSError):
        folders = sorted(os.listdir(home()))
        names = [name for name in folders if os.path.exists(os.path.join(home(), name, CONTROL))]
        if names:
            return f"live runs: {', '.join(names)}"
    return "no run is live"


def _plain(name: str) -> bool:
    """Whether this is the name of a folder, and no way out of ours."""
    return name not in ("", ".", "..") and os.sep not in name and "\0" not in name


def _is_live(path: str) -> bool:
    """Whether a launcher holds the directory's lock. Where there are no locks, `control` tells."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return os.path.exists(os.path.join(path, CONTROL))
    finally:
        os.close(fd)


def home() -> str:
    """Where runs are kept that were not told where."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "hora", "runs")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def versions() -> dict[str, str | None]:
    """Read from the packages' metadata: importing torch would cost the launcher seconds."""
    versions: dict[str, str | None] = {}
    for package in ("hora", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
