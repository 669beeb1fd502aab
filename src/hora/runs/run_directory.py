"""The directory of a run: written by its launcher (RunDirectory), read by every other process (RunRecord).

run.json        the resolved configuration, with host, pid and versions
control         while the run is live: address of its coordinator, and the token; readable by this user only
memory.sqlite   the run database, see database.py
end.json        the outcome
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
from typing import TYPE_CHECKING, Any

from .json_file import open_regular, read_object

if TYPE_CHECKING:
    from .reader import RunReader

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CONTROL = "control"
DATABASE = "memory.sqlite"


class RunDirectory:
    """Creates the directory with mode 0700 and locks it while the run is live; ValueError if a live run holds it.

    A directory that cannot be written costs the run its record and nothing else: `warn` is called once.
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
            os.close(self._fd)  # not self.close(), which would remove the live run's `control`
            raise ValueError(
                f"a run is live in {self.path}; choose another --name or --run-dir, or wait until it ends"
            ) from None
        except OSError:
            pass  # a file system without locks: two runs of one name are not detected there

    @property
    def control_path(self) -> str | None:
        """Path of `control`, for the reaper to remove; None if there is no directory."""
        return os.path.join(self.path, CONTROL) if self._fd is not None else None

    def begin(self, facts: dict[str, object]) -> None:
        """Write run.json: `facts`, the time and the versions. Only now are the files of an earlier run removed."""
        self._remove("end.json")
        self._remove(CONTROL)
        self._write("run.json", {"name": self.name, **facts, "started": _now(), "versions": versions()})

    def open_control(self, *, run: str, address: tuple[str, int], token: bytes) -> None:
        """Write `control`, by which other processes of this user find the coordinator and authenticate."""
        self._write(CONTROL, {"run": run, "host": address[0], "port": address[1], "token": token.hex()})

    def end(self, facts: dict[str, object]) -> None:
        """Remove `control` and write end.json."""
        self._remove(CONTROL)
        self._write("end.json", {**facts, "ended": _now()})

    def close(self) -> None:
        """Remove `control` and release the lock."""
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
        self._warn(f"the run directory {self.path} cannot be written: {error.strerror}; the run continues without it")
        self.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run's directory as it was when it was read. `config` is run.json, `end` is end.json if it exists; `live`: the
    launcher is alive."""

    name: str
    path: str
    config: dict[str, Any]
    end: dict[str, Any] | None
    live: bool

    @property
    def database_path(self) -> str:
        return os.path.join(self.path, DATABASE)

    @property
    def database_id(self) -> tuple[int, int] | None:
        """Device and inode of the run database; a new run in the same directory has another one. None without one."""
        try:
            info = os.lstat(self.database_path)
        except OSError:
            return None
        return (info.st_dev, info.st_ino) if stat.S_ISREG(info.st_mode) else None

    def reader(self) -> RunReader | None:
        """The run database; None if there is none. ValueError if it is damaged or of another version."""
        from .reader import RunReader

        return RunReader(self.database_path) if self.database_id is not None else None

    def control(self) -> tuple[tuple[str, int], bytes]:
        """Address and token of the coordinator of a live run; ValueError if other users can read or write the file."""
        path = os.path.join(self.path, CONTROL)
        try:
            with open_regular(path) as file:
                info = os.fstat(file.fileno())
                if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
                    owner = f"uid {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}"
                    raise ValueError(
                        f"{path} is not private to this user ({owner}), so it is not used: chmod 600 {path}"
                    )
                control = json.load(file)
            return (str(control["host"]), int(control["port"])), bytes.fromhex(control["token"])
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"run {self.name!r} cannot be reached through {path}: {error}") from None


def find(name: str, directory: str | None = None) -> RunRecord:
    """The run of that name, or the one in `directory`; ValueError names the live runs if there is none."""
    path = os.path.abspath(directory) if directory else os.path.join(home(), name)
    is_folder_name = name not in ("", ".", "..") and os.sep not in name and "\0" not in name
    config = _config(path) if directory or is_folder_name else None
    if config is None:
        where = f" in {path}" if directory else ""
        raise ValueError(f"there is no run {name!r}{where}; {live_runs()}")
    if directory and config.get("name") != name:
        raise ValueError(f"the run in {path} is {config.get('name')!r}, not {name!r}")
    return _record(path, config, name)


def look_up(run: str) -> RunRecord:
    """A run by its name, or by the path of its directory; ValueError suggests the nearest name."""
    path = os.path.abspath(os.path.expanduser(run))
    config = _config(path)
    if os.sep in run or run in (".", ".."):
        if config is None:
            raise ValueError(f"there is no run in {path}: the directory of a run has a run.json")
        return _record(path, config)
    try:
        return find(run)
    except ValueError:
        if config is not None:
            return _record(path, config)
        with contextlib.suppress(OSError):
            if near := difflib.get_close_matches(run, {*os.listdir(home())} - {run}, n=1):
                raise ValueError(f"there is no run {run!r}; did you mean {near[0]!r}?") from None
        raise


def all_runs(directories: Iterable[str] = ()) -> Iterator[RunRecord]:
    """Every run in home() and in `directories`, newest first; each record is read when the iterator reaches it."""
    paths = [os.path.abspath(directory) for directory in directories]
    with contextlib.suppress(OSError):
        paths += [entry.path for entry in os.scandir(home()) if entry.is_dir()]
    configs = ((path, _config(path)) for path in dict.fromkeys(paths))
    found = [(_started_at(config), path, config) for path, config in configs if config is not None]
    for _, path, config in sorted(found, key=lambda run: run[:2], reverse=True):
        yield _record(path, config)


def live_runs() -> str:
    """The runs that can be joined or asked now, as a phrase."""
    with contextlib.suppress(OSError):
        names = [name for name in sorted(os.listdir(home())) if os.path.exists(os.path.join(home(), name, CONTROL))]
        if names:
            return f"live runs: {', '.join(names)}"
    return "no run is live"


def is_live(path: str) -> bool:
    """Whether a launcher holds the lock of this directory; on a file system without locks, whether `control` exists."""
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
    """The directory that holds the directories of runs started without --run-dir."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "hora", "runs")


def versions() -> dict[str, str | None]:
    """From package metadata: importing torch would cost the launcher seconds."""
    found: dict[str, str | None] = {}
    for package in ("hora", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _config(path: str) -> dict[str, Any] | None:
    return read_object(os.path.join(path, "run.json"))


def _record(path: str, config: dict[str, Any], name: str = "") -> RunRecord:
    end = read_object(os.path.join(path, "end.json"))
    name = name or str(config.get("name") or os.path.basename(path))
    return RunRecord(name=name, path=path, config=config, end=end, live=is_live(path))


def _started_at(config: dict[str, Any]) -> float:
    """Seconds since 1970; 0 if unknown."""
    try:
        return datetime.datetime.fromisoformat(str(config.get("started"))).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
