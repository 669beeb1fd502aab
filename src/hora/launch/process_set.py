"""Identity: what tells a rank who it is in the run, and the token by which it proves that it belongs to it."""

from __future__ import annotations

import dataclasses
import os
import tempfile

from ..net.machine import num_cores
from ..rendezvous.environment import NAMES
from .config import LOOPBACK, RunConfig

TRACE = "trace"  # the folder of the spans within the scratch

OF_INTERPRETER = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1")}

Seat = tuple[str, int]  # a role, and a number within it


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSet:
    """Whom one launcher starts, and what they are told of the run: the workers that it began with, and its servers."""

    size: int
    servers: int | str | None = None  # a number, colocated, or not told
    first: int = 0  # the rank of the first worker that this launcher starts
    workers: int
    serves: bool = False  # with a predictor

    @property
    def joins(self) -> bool:
        return self.first >= self.size

    @property
    def num_servers(self) -> int:
        """Server processes of the run."""
        return self.servers if isinstance(self.servers, int) else 0

    @property
    def seats(self) -> list[Seat]:
        """The processes to start, in order. Who joins a run finds its servers there."""
        servers = 0 if self.joins else self.num_servers
        workers = range(self.first, self.first + self.workers)
        seats = [("worker", rank) for rank in workers] + [("server", rank) for rank in range(servers)]
        return seats + [("predictor", 0)] * self.serves

    @property
    def num_processes(self) -> int:
        """Of the whole run, as far as this launcher knows."""
        return self.size + self.num_servers + (self.workers if self.joins else 0)


def common_environment(config: RunConfig, crew: ProcessSet, run_id: str) -> dict[str, str]:
    """What all processes of the run on this machine have: our own environment, and the mark of the run.

    An inherited identity is dropped: it belongs to the run that this launcher may itself be a part of. Each process
    gets its share of the cores unless the user set OMP_NUM_THREADS.
    """
    env = {key: value for key, value in os.environ.items() if key not in NAMES} | dict(config.env)
    return {**env, "OMP_NUM_THREADS": threads(config, crew.num_processes), **OF_INTERPRETER, "HORA_RUN": run_id}


def threads(config: RunConfig, num_processes: int) -> str:
    """How many each process computes with: what the user said, or its share of the cores."""
    given = (os.environ | dict(config.env)).get("OMP_NUM_THREADS")
    return given or str(max(1, num_cores() // num_processes))


def environment(
    config: RunConfig, crew: ProcessSet, run_id: str, address: tuple[str, int], scratch: str, seat: Seat
) -> dict[str, str]:
    """The environment of one rank, server or predictor on this machine. The token itself is never in here."""
    env = common_environment(config, crew, run_id)
    env |= identity(config, crew, address, seat, seat[1], crew.size)
    env["HORA_SCRATCH"] = scratch
    if config.bind != LOOPBACK:
        env["HORA_BIND"] = config.bind
    if config.trace is not None:
        env["HORA_TRACE"] = os.path.join(scratch, TRACE)
    return env


def identity(
    config: RunConfig, crew: ProcessSet, address: tuple[str, int], seat: Seat, local_rank: int, local_size: int
) -> dict[str, str]:
    """Who a process is in the run, wherever it is started: what is the same whoever starts it."""
    role, rank = seat
    env = {
        "HORA_ROLE": role,
        "HORA_RANK": str(rank),
        "HORA_SIZE": str(crew.size),
        "HORA_LOCAL_RANK": str(local_rank),
        "HORA_LOCAL_SIZE": str(local_size),
        "HORA_CONTROL": f"{address[0]}:{address[1]}",
    }
    if crew.servers is not None:
        env["HORA_SERVERS"] = str(crew.servers)
    if crew.joins:
        env["HORA_JOINED"] = "1"
    if config.strategy is not None:
        env["HORA_STRATEGY"] = config.strategy.spell()
    if config.timeout_s is not None:
        env["HORA_TIMEOUT_S"] = f"{config.timeout_s:g}"
    if config.max_steps is not None:
        env["HORA_MAX_STEPS"] = str(config.max_steps)
    if config.serve is not None:
        env["HORA_SERVE"] = config.serve.to_json()
    if os.environ.get("HORA_WATCH") != "off":  # for those who measure what watching costs
        env["HORA_WATCH"] = "1"
    env["HORA_PROGRESS"] = config.progress
    return env


def token_descriptor(token: bytes) -> int:
    """A descriptor to inherit that holds the token's bytes, to be read from its start and closed.

    Each rank gets one of its own: a read moves the position, which all heirs of one descriptor share.
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
