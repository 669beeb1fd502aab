"""Identity: what tells a rank who it is in the run, and the token by which it proves that it belongs to it."""

from __future__ import annotations

import os
import tempfile

from .config import LOOPBACK, RunConfig

NAMES = (
    "HORA_RUN",
    "HORA_ROLE",
    "HORA_RANK",
    "HORA_SIZE",
    "HORA_LOCAL_RANK",
    "HORA_LOCAL_SIZE",
    "HORA_CONTROL",
    "HORA_TOKEN_FD",
    "HORA_STRATEGY",
    "HORA_TIMEOUT_S",
    "HORA_MAX_STEPS",
    "HORA_BIND",
    "HORA_PID",
    "HORA_SCRATCH",
)


def environment(
    config: RunConfig, run_id: str, address: tuple[str, int], scratch: str, rank: int, token_fd: int
) -> dict[str, str]:
    """The environment of one rank: ours, and its identity.

    An inherited identity is dropped: it belongs to the run that this launcher may itself be a part of. Each rank gets
    its share of the cores unless the user set OMP_NUM_THREADS. The token itself is never in here.
    """
    env = {key: value for key, value in os.environ.items() if key not in NAMES}
    env.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // config.size)))
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env |= {
        "HORA_RUN": run_id,
        "HORA_ROLE": "worker",
        "HORA_RANK": str(rank),
        "HORA_SIZE": str(config.size),
        "HORA_LOCAL_RANK": str(rank),
        "HORA_LOCAL_SIZE": str(config.size),
        "HORA_CONTROL": f"{address[0]}:{address[1]}",
        "HORA_TOKEN_FD": str(token_fd),
        "HORA_SCRATCH": scratch,
        "PYTHONUNBUFFERED": "1",
    }
    if config.bind != LOOPBACK:
        env["HORA_BIND"] = config.bind
    if config.strategy is not None:
        env["HORA_STRATEGY"] = config.strategy.spell()
    if config.timeout_s is not None:
        env["HORA_TIMEOUT_S"] = f"{config.timeout_s:g}"
    if config.max_steps is not None:
        env["HORA_MAX_STEPS"] = str(config.max_steps)
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


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
