"""Reads the launcher's environment variables into a ProcessIdentity. No other module reads who this process is.

Launchers are tried in this order, the innermost first: Hora's own, torchrun, mpirun, a Slurm step. Without any of them
the process is a run of its own. The environment never overrides an argument.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping

from ..http.serve_config import ServeConfig
from .context import ProcessIdentity

COLOCATED = "colocated"  # servers run in the workers' processes
# The variables by which a launcher identifies a process. They are never passed on to another run.
NAMES = (
    "HORA_RUN", "HORA_ROLE", "HORA_RANK", "HORA_SIZE", "HORA_SERVERS", "HORA_JOINED", "HORA_LOCAL_RANK",
    "HORA_LOCAL_SIZE", "HORA_CONTROL", "HORA_TOKEN_FD", "HORA_STRATEGY", "HORA_TIMEOUT_S", "HORA_MAX_STEPS",
    "HORA_BIND", "HORA_SERVE", "HORA_WATCH", "HORA_PROGRESS", "HORA_TRACE", "HORA_PID", "HORA_SCRATCH", "HORA_HOST",
)  # fmt: skip
PID = "HORA_PID"  # the process that has taken the rank; its children inherit the variable


def read(environ: Mapping[str, str] | None = None) -> ProcessIdentity:
    """ValueError names the variable that is wrong."""
    env = os.environ if environ is None else environ
    if _serves_checkpoint(env):  # `hora serve`, also inside another launcher
        return _with_settings(ProcessIdentity(role="predictor"), env)
    for look in (_hora, _torchrun, _mpirun, _slurm):
        found = look(env)
        if found is not None:
            identity = _with_settings(found, env)
            _check_rank(identity)
            return identity if identity.launcher == "hora" else _split_servers(identity)
    return _with_settings(ProcessIdentity(), env)


def _serves_checkpoint(env: Mapping[str, str]) -> bool:
    return bool(env.get("HORA_SERVE")) and bool(ServeConfig.from_json(env["HORA_SERVE"]).checkpoint)


def _check_rank(identity: ProcessIdentity) -> None:
    """ValueError if the rank is not below the number of processes of its role; workers that joined may exceed it."""
    if identity.role == "server" and identity.servers is None:
        raise ValueError("HORA_ROLE is server, but HORA_SERVERS does not say how many servers there are")
    role = "rank" if identity.role == "worker" else identity.role
    count = {"predictor": 1, "server": identity.servers}.get(role, None if identity.joined else identity.size)
    if identity.rank < 0 or (count is not None and identity.rank >= count):
        among = "" if count is None else f" of {count}"
        raise ValueError(f"{identity.launcher} gave {role} {identity.rank}{among}; {role}s count from 0")


def _split_servers(identity: ProcessIdentity) -> ProcessIdentity:
    """Under a launcher that knows no servers its last `servers` ranks are the servers."""
    servers, total = identity.servers or 0, identity.size
    if servers >= total:
        raise ValueError(
            f"HORA_SERVERS={servers} of {total} rank{'s' if total > 1 else ''} leaves no worker: let "
            f"{identity.launcher} start more, or use HORA_SERVERS={COLOCATED}"
        )
    workers = total - servers
    if identity.rank < workers:
        return dataclasses.replace(identity, size=workers)
    return dataclasses.replace(identity, role="server", rank=identity.rank - workers, size=workers)


def owner_of_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """The pid of the process that has this environment's rank already, if any."""
    text = (os.environ if environ is None else environ).get(PID, "")
    return int(text) if text.isdigit() else None


def take_rank() -> None:
    """Marks the environment, so that children of this process do not take its rank again."""
    os.environ[PID] = str(os.getpid())


def _hora(env: Mapping[str, str]) -> ProcessIdentity | None:
    if "HORA_RANK" not in env:
        return None
    size = _int(env, "HORA_SIZE")
    return ProcessIdentity(
        launcher="hora",
        role=env.get("HORA_ROLE", "worker"),
        rank=_int(env, "HORA_RANK"),
        size=size,
        joined=env.get("HORA_JOINED", "") == "1",
        local_rank=_int(env, "HORA_LOCAL_RANK", 0),
        local_size=_int(env, "HORA_LOCAL_SIZE", size),
        job=env.get("HORA_RUN", ""),
        address=env.get("HORA_CONTROL", ""),
        scratch=env.get("HORA_SCRATCH", ""),
        token_fd=_int(env, "HORA_TOKEN_FD") if "HORA_TOKEN_FD" in env else None,
    )


def _torchrun(env: Mapping[str, str]) -> ProcessIdentity | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise ValueError("RANK is set but not MASTER_ADDR and MASTER_PORT: set both to the address of rank 0")
    size = _int(env, "WORLD_SIZE")
    local_size = size if env["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1") else 0  # if it is set by hand
    return ProcessIdentity(
        launcher="torchrun",
        rank=_int(env, "RANK"),
        size=size,
        local_rank=_int(env, "LOCAL_RANK", 0),
        local_size=_int(env, "LOCAL_WORLD_SIZE", local_size),
        job=f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        address=f"{env['MASTER_ADDR']}:{_int(env, 'MASTER_PORT')}",
    )


def _mpirun(env: Mapping[str, str]) -> ProcessIdentity | None:
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    size = _int(env, "OMPI_COMM_WORLD_SIZE")
    return ProcessIdentity(
        launcher="mpirun",
        rank=_int(env, "OMPI_COMM_WORLD_RANK"),
        size=size,
        local_rank=_int(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        local_size=_int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size),
        job="mpi-" + env.get("PMIX_NAMESPACE", env.get("OMPI_MCA_ess_base_jobid", str(os.getppid()))),
    )


def _slurm(env: Mapping[str, str]) -> ProcessIdentity | None:
    # Only inside a step: the shell of salloc and the script of sbatch are no tasks of the job.
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or "SLURM_STEP_NUM_TASKS" not in env:
        return None
    size = _int(env, "SLURM_STEP_NUM_TASKS")
    nodes = _int(env, "SLURM_STEP_NUM_NODES", 1)
    return ProcessIdentity(
        launcher="slurm",
        rank=_int(env, "SLURM_PROCID"),
        size=size,
        local_rank=_int(env, "SLURM_LOCALID", 0),
        local_size=size if nodes == 1 else 0,
        job=f"slurm-{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}",
        address=env.get("SLURM_STEP_NODELIST", env.get("SLURM_NODELIST", "")),
    )


def _with_settings(identity: ProcessIdentity, env: Mapping[str, str]) -> ProcessIdentity:
    """Adds what a user may set under any launcher."""
    servers, colocated = _servers(env, identity.launcher)
    return dataclasses.replace(
        identity,
        servers=servers,
        colocated=colocated,
        strategy=env.get("HORA_STRATEGY"),
        timeout_s=_positive(env, "HORA_TIMEOUT_S", "seconds"),
        rate_bytes_per_s=_positive(env, "HORA_RATE_BYTES_PER_S", "bytes per second"),
        max_steps=_int(env, "HORA_MAX_STEPS") if "HORA_MAX_STEPS" in env else None,
        host=env.get("HORA_HOST") or identity.host,
        bind=env.get("HORA_BIND", ""),
        interface=env.get("HORA_INTERFACE", ""),
        token_file=env.get("HORA_TOKEN_FILE", ""),
        history=env.get("HORA_HISTORY", ""),
        trace=env.get("HORA_TRACE", ""),
        watched=env.get("HORA_WATCH") == "1" and identity.launcher == "hora",
        progress=env.get("HORA_PROGRESS", "plain"),
        serve=ServeConfig.from_json(env["HORA_SERVE"]) if env.get("HORA_SERVE") else None,
    )


def _servers(env: Mapping[str, str], launcher: str) -> tuple[int | None, bool]:
    """The number of server processes (None: not set), and whether servers run in the workers' processes."""
    text = env.get("HORA_SERVERS")
    if text is None or text == COLOCATED:
        return None, text == COLOCATED
    if launcher == "alone":
        raise ValueError(f"HORA_SERVERS={text}: without a launcher use HORA_SERVERS={COLOCATED}")
    servers = int(text) if text.isdecimal() else 0
    if servers < 1:
        raise ValueError(f"HORA_SERVERS takes a number of servers, 1 or more, or {COLOCATED}, not {text!r}")
    return servers, False


def _positive(env: Mapping[str, str], name: str, unit: str) -> float | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{name} takes a number of {unit}, not {text!r}")
    return value


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set, though its launcher's other variables are")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} takes a whole number, not {text!r}") from None
