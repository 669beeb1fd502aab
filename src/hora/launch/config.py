"""RunConfig: what `hora run` was asked to do, checked before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable

from hora.http.serve_config import ServeConfig
from hora.strategies import Strategy, known

from ..rendezvous.environment import COLOCATED, NAMES
from ..runs.run_directory import NAME_PATTERN
from .hosts.host import HostSpec

MAX_RANKS = 1024  # processes of one run, servers included
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run on this machine. `command` is the script (or, with `module`, the module) and then its arguments.

    `servers` is a number, `colocated`, or None: a strategy that uses servers then gets a number by default. `join`
    names a run that `size` more workers join; what is that run's own to say cannot be given. ValueError, in one line,
    says what is wrong and what exists. What is None is left to the script or to a default.
    """

    command: tuple[str, ...]
    module: bool = False
    size: int = 1
    servers: int | str | None = None
    strategy: Strategy | None = None
    timeout_s: float | None = None
    max_steps: int | None = None
    bind: str = LOOPBACK
    name: str | None = None
    run_dir: str | None = None
    log_dir: str | None = None
    color: str = "auto"
    join: str | None = None
    serve: ServeConfig | None = None
    progress: str = "auto"
    dashboard: int | str | None = None  # a port, off, or None: one that is free
    trace: str | None = None
    tensorboard: str | None = None
    hosts: tuple[HostSpec, ...] = ()  # other machines, with their slots settled; none: this one
    ssh: str = "ssh"
    python: str | None = None  # the interpreter on the hosts; None: the same path as here
    env: tuple[tuple[str, str], ...] = ()
    forward: tuple[str, ...] = ()
    interface: str | None = None
    engine: str | None = None  # what places the processes on other machines, if it is not ssh: ray
    fork: bool = True  # ranks are forked from one process per host; else each is started as an interpreter
    gpus: float | None = None  # of each worker, for the engine; None: one if there are enough

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("no script was given; e.g. hora run -n 4 train.py, or hora run -n 4 -m package.train")
        if not 1 <= self.size <= MAX_RANKS:
            raise ValueError(f"-n takes a number of ranks from 1 to {MAX_RANKS}, not {self.size}; e.g. -n 4")
        if self.join is not None:
            self._check_join()
        self._check_servers()
        self._check_serve()
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ValueError(
                f"--timeout-s takes a number of seconds above 0, not {self.timeout_s:g}; e.g. --timeout-s 120"
            )
        if self.name is not None and not NAME_PATTERN.fullmatch(self.name):
            raise ValueError(
                f"--name {self.name!r} will not do: up to 64 of A-Z a-z 0-9 . _ -, the first a letter or a digit"
            )
        if self.color not in ("auto", "always", "never"):
            raise ValueError(f"--color {self.color!r} is unknown; there are: auto, always, never")
        self._check_watching()
        self._check_hosts()
        if self.module:
            check_module(self.command[0])
        else:
            _check_script(self.command[0])

    def _check_join(self) -> None:
        given = {
            "--strategy": self.strategy,
            "--servers": self.servers,
            "--name": self.name,
            "--timeout-s": self.timeout_s,
            "--max-steps": self.max_steps,
            "--bind": None if self.bind == LOOPBACK else self.bind,
            "--serve": self.serve,
            "--trace": self.trace,
            "--tensorboard": self.tensorboard,
        }
        for flag, value in given.items():
            if value is not None:
                raise ValueError(f"{flag} with --join {self.join}: the run's own counts; leave it out")

    def _check_servers(self) -> None:
        if self.servers is None:
            return
        if self.servers != COLOCATED and (not isinstance(self.servers, int) or self.servers < 1):
            raise ValueError(
                f"--servers takes a whole number of at least 1, or {COLOCATED}, not {str(self.servers)!r}; "
                "e.g. --servers 2"
            )
        if not (self.strategy and self.strategy.uses_servers):
            able = [name for name, kind in known().items() if kind.may_use_servers]
            chosen = f"strategy {self.strategy.name!r} uses none" if self.strategy else "no --strategy was given"
            raise ValueError(f"--servers {self.servers}: {chosen}; with servers there are: {', '.join(able)}")
        if isinstance(self.servers, int) and self.size + self.servers > MAX_RANKS:
            raise ValueError(
                f"-n {self.size} and --servers {self.servers} are {self.size + self.servers} processes; a run has "
                f"{MAX_RANKS} at most"
            )

    def _check_watching(self) -> None:
        if self.progress not in ("auto", "panel", "plain", "off"):
            raise ValueError(f"--progress {self.progress!r} is unknown; there are: auto, plain, off")
        for flag, path in (("--trace", self.trace), ("--tensorboard", self.tensorboard)):
            folder = os.path.dirname(os.path.abspath(path)) if path else ""
            if path and not os.path.isdir(folder):
                raise ValueError(f"{flag} {path}: there is no folder {folder}; make it first")
            if path and not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(f"{flag} {path}: the folder {folder} cannot be written; choose another")
        if self.trace and os.path.isdir(self.trace):
            raise ValueError(f"--trace {self.trace} is a folder; name a file in it, e.g. --trace {self.trace}/run.json")

    def _check_hosts(self) -> None:
        for name, _ in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"--env takes NAME=VALUE, not {name!r}; e.g. --env NCCL_DEBUG=INFO")
            if name in NAMES:
                raise ValueError(f"--env {name}: that is the launcher's own to say; leave it out")
        if self.gpus is not None and (self.engine is None or not 0 <= self.gpus < float("inf")):
            how = "takes a number of 0 or more" if self.engine else "does nothing without --engine ray"
            raise ValueError(f"--gpus {self.gpus:g} {how}; e.g. --engine ray --gpus 1")
        if self.hosts and self.engine is not None:
            raise ValueError(f"--hosts with --engine {self.engine}: either you name the hosts or the engine finds them")
        if self.engine is not None and self.python is not None:
            raise ValueError(f"--python with --engine {self.engine}: its own workers' Python is taken; leave it out")
        if self.hosts or self.engine is not None:
            if self.join is not None:
                raise ValueError("--join with other hosts: workers join from the machine that the command runs on")
            return
        given = {"--interface": self.interface, "--python": self.python, "--forward": self.forward}
        for flag, value in given.items():
            if value:
                raise ValueError(f"{flag} does nothing without --hosts, --hostfile or --engine; e.g. --hosts a:2,b:2")

    def _check_serve(self) -> None:
        if self.serve is None or self.serve.source != "newest" or self.strategy is None:
            return
        if self.strategy.unit != "round":
            able = [name for name, kind in known().items() if kind.unit == "round"]
            raise ValueError(
                f"--serve-from newest: strategy {self.strategy.name!r} has no rounds, within which a worker could be "
                f"ahead of the others; with rounds there are: {', '.join(able) or 'none'}"
            )

    def argv(self) -> list[str]:
        """The command line of one rank."""
        return [sys.executable, *(["-m"] if self.module else []), *self.command]


def _check_script(path: str) -> None:
    if os.path.exists(path):
        return
    folder = os.path.dirname(path) or "."
    try:
        there = [name for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    except OSError:
        raise ValueError(f"there is no script {path!r}: the folder {folder!r} does not exist") from None
    raise ValueError(f"there is no script {path!r}; {_what_exists(os.path.basename(path), there)}")


def _what_exists(wanted: str, there: list[str]) -> str:
    close = difflib.get_close_matches(wanted, there, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if not there:
        return "that folder holds no .py file"
    return f"there are: {', '.join(there[:8])}{', …' if len(there) > 8 else ''}"


def check_module(name: str) -> None:
    """Looks for the module as `python -m` will, but imports nothing: a parent package may import torch. ValueError if
    it is not there."""
    parts = name.split(".")
    before = sys.path[:]
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(parts[0]) if parts[0] else None
        for end in range(2, len(parts) + 1):
            spec = _find_inside(spec, ".".join(parts[:end]))
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path[:] = before
    if spec is None:
        raise ValueError(f"there is no module {name!r}, seen from {os.getcwd()}; a script is given without -m")
    if spec.submodule_search_locations is not None and _find_inside(spec, f"{name}.__main__") is None:
        raise ValueError(f"module {name!r} is a package without __main__; name one of its modules, e.g. {name}.train")


def _find_inside(package: importlib.machinery.ModuleSpec | None, name: str) -> importlib.machinery.ModuleSpec | None:
    locations: Iterable[str] | None = package.submodule_search_locations if package else None
    return importlib.machinery.PathFinder.find_spec(name, list(locations)) if locations is not None else None
