"""RunConfig: the options of `hora run`, with their help texts; checked before any process is started.

`hora.cli.run` derives the command line from the fields of RunConfig: a field with `option` metadata becomes an option
named after it.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import field
from typing import Any

from hora.errors import did_you_mean
from hora.http.serve_config import ServeConfig
from hora.strategies import Strategy, known

from ..rendezvous.environment import COLOCATED, NAMES
from ..runs.run_directory import NAME_PATTERN
from .hosts.host_spec import HostSpec

MAX_RANKS = 1024  # processes of one run, servers included
LOOPBACK = "127.0.0.1"
PROCESSES, STRATEGY, HOSTS, SERVING, OUTPUT = "Processes", "Strategy", "Hosts", "Serving", "Output and records"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """How a field appears on the command line. `default` says in words what happens without the option."""

    group: str
    text: str
    example: str
    default: str = ""
    flag: str = ""  # where it is not --field-name
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    envvar: str | None = None

    @property
    def help(self) -> str:
        return f"{self.text} E.g. {self.example}." + (f" Default: {self.default}." if self.default else "")


def option(group: str, text: str, example: str, **more: Any) -> dict[str, OptionSpec]:
    """Metadata of a dataclass field that is an option of `hora run`."""
    return {"option": OptionSpec(group=group, text=text, example=example, **more)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. `command` is the script (or, with `module`, the module) and its arguments.

    An option that is None is left to the script or to a default. With `join` the run's own settings apply, and options
    that would contradict them are refused. Raises ValueError with a one-line message if an option is wrong.
    """

    # fmt: off
    command: tuple[str, ...]
    size: int = field(default=1, metadata=option(
        PROCESSES, "Number of worker processes (ranks).", "-n 4", flag="-n",
        default="1; with --hosts, the number of slots that the hosts have",
    ))
    servers: int | str | None = field(default=None, metadata=option(
        PROCESSES, "Number of parameter servers, for strategies that use them; or colocated: inside the worker "
        "processes.", "--servers 2, --servers colocated", metavar="S",
        default="measured on this machine and explained in one line; if the script itself chooses ps, colocated",
    ))
    join: str | None = field(default=None, metadata=option(
        PROCESSES, "Add N workers (-n) to a live run whose strategy is elastic: ps:mode=async, ps:mode=ssp or "
        "local:via=ps,barrier=false. The run's own strategy and servers apply.", "--join mnist-3", metavar="RUN",
    ))
    fork: bool = field(default=True, metadata=option(
        PROCESSES, "Start every rank as a new interpreter that imports torch itself.", "--no-fork",
        flag="--no-fork", default="one process per host imports torch once and forks the ranks; --python implies "
        "--no-fork",
    ))
    module: bool = field(default=False, metadata=option(
        PROCESSES, "SCRIPT is a module, as for python -m.", "-m package.train", flag="-m",
    ))
    strategy: Strategy | None = field(default=None, metadata=option(
        STRATEGY, "How workers synchronise: NAME or NAME:option=value. Overrides the script's own.",
        "--strategy ring, --strategy auto:deterministic=true", metavar="TEXT",
    ))
    max_steps: int | None = field(default=None, metadata=option(
        STRATEGY, "Stop all workers after N optimizer steps.", "--max-steps 100", metavar="N",
    ))
    timeout_s: float | None = field(default=None, metadata=option(
        STRATEGY, "How long a rank waits for a live but slow peer before it fails.", "--timeout-s 600",
        metavar="SECONDS",
    ))
    hosts: tuple[HostSpec, ...] = field(default=(), metadata=option(
        HOSTS, "Hosts reached by ssh, with the number of ranks on each. Ranks fill them in order. The same folder, "
        "Python and packages must exist there.", "--hosts a:2,b:2, --hosts user@a,b -n 4", metavar="LIST",
    ))
    engine: str | None = field(default=None, metadata=option(
        HOSTS, "Let a cluster place the processes. Uses the Ray cluster at RAY_ADDRESS or on this machine, and "
        "starts one for this run if there is none. Needs the ray package.", "--engine ray -n 8", choices=("ray",),
    ))
    gpus: float | None = field(default=None, metadata=option(
        HOSTS, "With --engine ray: GPUs per worker.", "--gpus 1", metavar="G",
        default="1 if the cluster has enough, else 0",
    ))
    ssh: str = field(default="ssh", metadata=option(
        HOSTS, "Command that reaches a host.", '--ssh "ssh -p 2222 -i key"', metavar="COMMAND",
        envvar="HORA_SSH", default="ssh, or the environment variable HORA_SSH",
    ))
    python: str | None = field(default=None, metadata=option(
        HOSTS, "Python interpreter on the hosts.", "--python /opt/venv/bin/python", metavar="PATH",
        default="the path of the interpreter that runs this command",
    ))
    interface: str | None = field(default=None, metadata=option(
        HOSTS, "Network between the hosts.", "--interface eth1, --interface 10.0.0.0/24", metavar="NAME|NETWORK",
        default="the one by which they reach this machine; a line says which",
    ))
    bind: str = field(default=LOOPBACK, metadata=option(
        HOSTS, "Address on which the coordinator listens.", "--bind 10.0.0.5", metavar="ADDR",
        default=f"{LOOPBACK}, reachable from this machine only",
    ))
    env: tuple[tuple[str, str], ...] = field(default=(), metadata=option(
        HOSTS, "Environment variable for all ranks; repeatable.", "--env NCCL_DEBUG=INFO", metavar="NAME=VALUE",
        multiple=True,
    ))
    forward: tuple[str, ...] = field(default=(), metadata=option(
        HOSTS, "Environment variable to copy from here to the hosts, * matches any end; repeatable.",
        "--forward 'WANDB_*'", metavar="NAME", multiple=True,
        default="PATH, PYTHONPATH, VIRTUAL_ENV, LD_LIBRARY_PATH, and all that begin with OMP_, MKL_, CUDA_, NCCL_, "
        "GLOO_, TORCH_ or HORA_",
    ))
    serve: ServeConfig | None = field(default=None, metadata=option(
        SERVING, "Answer predictions over HTTP while training; then: curl -d '{\"inputs\": [[1, 2]]}' "
        "127.0.0.1:8000/predict. Without HOST only this machine can connect; port 0 picks a free one.",
        "--serve 8000, --serve 0.0.0.0:8000", metavar="[HOST:]PORT",
    ))
    name: str | None = field(default=None, metadata=option(
        OUTPUT, "Name of the run.", "--name mnist-3", metavar="RUN", default="date, time and a random suffix",
    ))
    run_dir: str | None = field(default=None, metadata=option(
        OUTPUT, "Directory of the run's records; with --join, that of the joined run.",
        "--run-dir runs/mnist-3", metavar="DIR", default="~/.local/state/hora/runs/NAME",
    ))
    log_dir: str | None = field(default=None, metadata=option(
        OUTPUT, "Also write each process's output, byte for byte, to DIR/rank-0.out, rank-0.err, server-0.out, "
        "predictor.out and so on.", "--log-dir logs", metavar="DIR",
    ))
    progress: str = field(default="auto", metadata=option(
        OUTPUT, "How the terminal shows the values given to job.log: auto (a live panel on a terminal, plain "
        "lines elsewhere), plain or off.", "--progress plain", choices=("auto", "plain", "off"), default="auto",
    ))
    color: str = field(default="auto", metadata=option(
        OUTPUT, "Colour the ranks' prefixes. auto: on a terminal, unless NO_COLOR is set.", "--color never",
        choices=("auto", "always", "never"), default="auto",
    ))
    dashboard: int | str | None = field(default=None, metadata=option(
        OUTPUT, "Port of the run's dashboard on this machine, or off. If it is taken, the next free one.",
        "--dashboard 9000, --dashboard off", metavar="PORT|off", envvar="HORA_DASHBOARD",
        default="8320, or the environment variable HORA_DASHBOARD",
    ))
    trace: str | None = field(default=None, metadata=option(
        OUTPUT, "Write a timeline of all ranks for ui.perfetto.dev: forward, backward, each bucket's transfer, "
        "waiting, server updates. hora trace FILE --summary describes it in words.",
        "--trace run.json, --trace run.json.gz", metavar="FILE",
    ))
    tensorboard: str | None = field(default=None, metadata=option(
        OUTPUT, "Also write the values given to job.log as TensorBoard event files. Needs the tensorboard "
        "package.", "--tensorboard tb", metavar="DIR",
    ))
    # fmt: on

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
                f"--name {self.name!r} is not a valid name: up to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit"
            )
        if self.color not in ("auto", "always", "never"):
            raise ValueError(f"--color {self.color!r} is unknown; there are: auto, always, never")
        self._check_records()
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
                raise ValueError(f"{flag} with --join {self.join}: the run has its own; leave it out")

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
            raise ValueError(f"--servers {self.servers}: {chosen}; strategies with servers: {', '.join(able)}")
        if isinstance(self.servers, int) and self.size + self.servers > MAX_RANKS:
            raise ValueError(
                f"-n {self.size} and --servers {self.servers} are {self.size + self.servers} processes; the limit is "
                f"{MAX_RANKS}"
            )

    def _check_records(self) -> None:
        if self.progress not in ("auto", "panel", "plain", "off"):
            raise ValueError(f"--progress {self.progress!r} is unknown; there are: auto, plain, off")
        port = self.dashboard
        if port not in (None, "off") and not (isinstance(port, int) and 0 <= port <= 65535):
            raise ValueError(
                f"--dashboard takes a port from 0 to 65535, or off, not {str(port)!r}; e.g. --dashboard 8320"
            )
        for flag, path in (("--trace", self.trace), ("--tensorboard", self.tensorboard)):
            folder = os.path.dirname(os.path.abspath(path)) if path else ""
            if path and not os.path.isdir(folder):
                raise ValueError(f"{flag} {path}: there is no folder {folder}; create it first")
            if path and not os.access(folder, os.W_OK | os.X_OK):
                raise ValueError(f"{flag} {path}: folder {folder} is not writable; choose another")
        if self.trace and os.path.isdir(self.trace):
            raise ValueError(f"--trace {self.trace} is a folder; give a file in it, e.g. --trace {self.trace}/run.json")

    def _check_hosts(self) -> None:
        for name, _ in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"--env takes NAME=VALUE, not {name!r}; e.g. --env NCCL_DEBUG=INFO")
            if name in NAMES:
                raise ValueError(f"--env {name}: the launcher sets this variable itself; leave it out")
        if self.gpus is not None and (self.engine is None or not 0 <= self.gpus < float("inf")):
            how = "takes a number of 0 or more" if self.engine else "does nothing without --engine ray"
            raise ValueError(f"--gpus {self.gpus:g} {how}; e.g. --engine ray --gpus 1")
        if self.hosts and self.engine is not None:
            raise ValueError(f"--hosts with --engine {self.engine}: the engine chooses the hosts; leave one out")
        if self.engine is not None and self.python is not None:
            raise ValueError(f"--python with --engine {self.engine}: Ray's workers have their own; leave it out")
        if self.hosts or self.engine is not None:
            if self.join is not None:
                raise ValueError("--join with other hosts: workers can only join from this machine")
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
                f"--serve-from newest: strategy {self.strategy.name!r} has no rounds, so no worker is ahead of the "
                f"others; strategies with rounds: {', '.join(able) or 'none'}"
            )

    def argv(self) -> list[str]:
        """Command line of one rank."""
        return [sys.executable, *(["-m"] if self.module else []), *self.command]


def _check_script(path: str) -> None:
    if os.path.exists(path):
        return
    folder = os.path.dirname(path) or "."
    try:
        there = [name for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    except OSError:
        raise ValueError(f"there is no script {path!r}: the folder {folder!r} does not exist") from None
    listed = f"there are: {', '.join(there[:8])}{', …' if len(there) > 8 else ''}" if there else "no .py file is there"
    raise ValueError(f"there is no script {path!r}; {did_you_mean(os.path.basename(path), there).strip() or listed}")


def check_module(name: str) -> None:
    """Looks for the module as `python -m` will, without importing it: a parent package may import torch. Raises
    ValueError if it is not found."""
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
        raise ValueError(f"there is no module {name!r} on the path from {os.getcwd()}; for a script leave out -m")
    if spec.submodule_search_locations is not None and _find_inside(spec, f"{name}.__main__") is None:
        raise ValueError(f"module {name!r} is a package without __main__; give one of its modules, e.g. {name}.train")


def _find_inside(package: importlib.machinery.ModuleSpec | None, name: str) -> importlib.machinery.ModuleSpec | None:
    locations: Iterable[str] | None = package.submodule_search_locations if package else None
    return importlib.machinery.PathFinder.find_spec(name, list(locations)) if locations is not None else None
