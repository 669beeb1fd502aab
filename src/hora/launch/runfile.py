"""RunFile: the directory in which a run is found by its name while it lives, and looked up afterwards.

run.json    what was run: the resolved configuration, host, pid, versions
control     while the run lives: where its coordinator listens, and the token; readable by this user only
end.json    how it ended
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.metadata
import json
import os
import secrets
from collections.abc import Callable

CONTROL = "control"


class RunFile:
    """The run's directory, made 0700 and locked while the run lives; ValueError when a live run has that directory.

    A directory that cannot be written costs the run its record and nothing else: `warn` is told once.
    """

    def __init__(self, *, directory: str | None, name: str | None, warn: Callable[[str], None]) -> None:
        self.name = name or f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self.path = os.path.abspath(directory) if directory else os.path.join(_home(), self.name)
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
        self._remove("end.json")
        self._remove(CONTROL)

    @property
    def control_path(self) -> str | None:
        """Where `control` lies, for the guardian to remove; None when there is no directory."""
        return os.path.join(self.path, CONTROL) if self._fd is not None else None

    def begin(self, facts: dict[str, object]) -> None:
        """Writes run.json: `facts`, the time and the versions."""
        self._write("run.json", {"name": self.name, **facts, "started": _now(), "versions": _versions()})

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


def _home() -> str:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(state, "hora", "runs")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")


def _versions() -> dict[str, str | None]:
    """Read from the packages' metadata: importing torch would cost the launcher seconds."""
    versions: dict[str, str | None] = {}
    for package in ("hora", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
