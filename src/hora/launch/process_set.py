"""ProcessSet: the processes that one launcher starts, and the environment variables that tell each its place."""

from __future__ import annotations

import dataclasses
import os
import tempfile

from ..net.machine import num_cores
from ..rendezvous.environment import NAMES
from .config import LOOPBACK, RunConfig
from .process import Slot

TRACE = "trace"  # the folder of trace files within the scratch folder

INTERPRETER_ENV = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSet:
    """`size` is the number of workers that the run began with, `workers` how many this launcher starts."""

    size: int
    servers: int | str | None = None  # a number, colocated, or not given
    first: int = 0  # rank of the first worker that this launcher starts
    workers: int
    serves: bool = False  # with a predictor

    @property
    def joins(self) -> bool:
        """Whether the workers join the run of another launcher."""
        return self.first >= self.size

    @property
    def num_servers(self) -> int:
        """Server processes of the run."""
        return self.servers if isinstance(self.servers, int) else 0

    @property
    def slots(self) -> list[Slot]:
        """The processes to start, in order. Workers that join find the servers running."""
        servers = 0 if self.joins else self.num_servers
        workers = range(self.first, self.first + self.workers)
        slots = [("worker", rank) for rank in workers] + [("server", rank) for rank in range(servers)]
        return slots + [("predictor", 0)] * self.serves

    @property
    def num_processes(self) -> int:
        """Of the whole run, as far as this launcher knows."""
        return self.size + self.num_servers + (self.workers if self.joins else 0)


def common_environment(config: RunConfig, processes: ProcessSet, run_id: str) -> dict[str, str]:
    """The variables of all processes of the run on this machine: the launcher's own, and HORA_RUN.

    An inherited identity is dropped: it belongs to a run that this launcher may itself be a rank of. Each process gets
    its share of the cores unless the user set OMP_NUM_THREADS.
    """
    env = {key: value for key, value in os.environ.items() if key not in NAMES} | dict(config.env)
    return {**env, "OMP_NUM_THREADS": threads(config, processes.num_processes), **INTERPRETER_ENV, "HORA_RUN": run_id}


def threads(config: RunConfig, num_processes: int) -> str:
    """OMP_NUM_THREADS of each process: the user's, or its share of the cores."""
    given = (os.environ | dict(config.env)).get("OMP_NUM_THREADS")
    return given or str(max(1, num_cores() // num_processes))


def environment(
    config: RunConfig, processes: ProcessSet, run_id: str, address: tuple[str, int], scratch: str, slot: Slot
) -> dict[str, str]:
    """The environment of one process on this machine. It never contains the token."""
    env = common_environment(config, processes, run_id)
    env |= identity(config, processes, address, slot, slot[1], processes.size)
    env["HORA_SCRATCH"] = scratch
    if config.bind != LOOPBACK:
        env["HORA_BIND"] = config.bind
    if config.trace is not None:
        env["HORA_TRACE"] = os.path.join(scratch, TRACE)
    return env


def identity(
    config: RunConfig, processes: ProcessSet, address: tuple[str, int], slot: Slot, local_rank: int, local_size: int
) -> dict[str, str]:
    """The variables that tell a process its place in the run, the same for every way of starting it."""
    role, rank = slot
    env: dict[str, str | None] = {
        "HORA_ROLE": role,
        "HORA_RANK": str(rank),
        "HORA_SIZE": str(processes.size),
        "HORA_LOCAL_RANK": str(local_rank),
        "HORA_LOCAL_SIZE": str(local_size),
        "HORA_CONTROL": f"{address[0]}:{address[1]}",
        "HORA_SERVERS": None if processes.servers is None else str(processes.servers),
        "HORA_JOINED": "1" if processes.joins else None,
        "HORA_STRATEGY": config.strategy.spell() if config.strategy else None,
        "HORA_TIMEOUT_S": None if config.timeout_s is None else f"{config.timeout_s:g}",
        "HORA_MAX_STEPS": None if config.max_steps is None else str(config.max_steps),
        "HORA_SERVE": config.serve.to_json() if config.serve else None,
        "HORA_WATCH": None if os.environ.get("HORA_WATCH") == "off" else "1",  # off: to measure the cost of reports
        "HORA_PROGRESS": config.progress,
    }
    return {name: value for name, value in env.items() if value is not None}


def token_descriptor(token: bytes) -> int:
    """A new descriptor that holds the token, to be inherited, read from its start and closed.

    Each process needs its own, since processes that inherit one descriptor share its position.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hora-token", os.MFD_CLOEXEC)
        os.write(fd, token)
    else:
        with tempfile.TemporaryFile(buffering=0) as file:  # it has no name, so nothing is left of it
            file.write(token)
            fd = os.dup(file.fileno())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
