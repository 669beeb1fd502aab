"""`hora.init()`: reads who this process is, reaches the coordinator, joins the run and makes the Job."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import Any

import torch

from .. import strategies
from ..coordinator import CoordinatorClient
from ..errors import HoraError
from ..launch.forkserver import interpreter
from ..monitor import spans
from ..net.machine import num_cores
from ..rendezvous import environment
from ..rendezvous.context import TIMEOUT_S, ProcessIdentity
from ..rendezvous.rendezvous import rendezvous
from ..strategies import Auto, Strategy
from ..world import World, single_process_world
from . import exit_hooks, job
from .job import Job

log = logging.getLogger(__name__)

_CHILD = (
    "hora.init() was called in a child of the process that is this rank (pid {pid}), a DataLoader worker perhaps: "
    "call it once, in the main process, under if __name__ == '__main__':"
)


def init(
    strategy: str | Strategy | None = None,
    *,
    on_nonfinite: str | None = None,
    transport: str = "auto",
    timeout_s: float | None = None,
) -> Job:
    """Joins the run; blocks until all ranks have joined. Without a launcher the process is a run of its own.

    `strategy` is the script's default, as text ("ring") or as a dataclass (hora.Ring()); the command line overrides it.
    `on_nonfinite` says what a NaN or an infinity in a gradient does: 'raise', naming rank and parameter, or 'skip' that
    step on every worker; without it: raise, or skip when a scaler was given to `prepare`. `transport` is auto, shm, tcp
    or engine. `timeout_s` is how long a rank that is alive but slow is waited for. A second call returns the same job.
    """
    if job._current is not None:
        if job._current.pid != os.getpid():
            raise HoraError(_CHILD.format(pid=job._current.pid))
        return job._current
    owner = environment.owner_of_rank()
    if owner is not None and owner != os.getpid():
        raise HoraError(_CHILD.format(pid=owner))
    identity = environment.read()
    if on_nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"on_nonfinite={on_nonfinite!r} is unknown; there are: raise, skip")
    chosen = _choose(strategy, identity)
    if identity.trace and identity.role != "predictor":
        spans.open(identity.trace, identity.role, identity.rank, identity.host)
    limit = identity.timeout_s or timeout_s or TIMEOUT_S
    context = rendezvous(identity, timeout_s=limit, shared=transport in ("auto", "shm"))
    reply = context.control.join(context.member, _versions(), limit, context.size, context.servers or 0)
    if context.role != "worker" or context.joined:  # it takes no part in the workers' collectives
        world = single_process_world(context.member, limit)
    else:
        world = World(
            context,
            tuple(m for m in reply.members if m.role == "worker"),
            reply.generation,
            transport=transport,
            algorithm=chosen.algorithm,
            backend=chosen.backend,
            deterministic=chosen.deterministic,
        )
    is_first = context.role == "worker" and context.rank == 0
    if is_first:
        context.control.put("strategy", chosen.spell().encode())
    made = job._current = Job(context, world, chosen, on_nonfinite)
    if context.joined:
        made.training.begin_at(context.control.newest_epoch() or 0)
    _label_records(context)
    if is_first:
        _warn(context)
    if context.launcher != "alone":
        environment.take_rank()
        if os.path.isdir(context.scratch):  # the launcher deletes it: sockets of DataLoader workers go there
            multiprocessing.current_process()._config.setdefault("tempdir", context.scratch)  # type: ignore[attr-defined]
    if context.service is not None:
        os.register_at_fork(after_in_child=context.service.forget)
    if isinstance(context.control, CoordinatorClient) and context.launcher != "hora":
        context.control.hosted_by = reply.members[0]
        context.control.on_lost = made._on_coordinator_lost
    exit_hooks.install(made)
    return made


def _choose(strategy: str | Strategy | None, identity: ProcessIdentity) -> Strategy:
    """The command line's strategy, else the script's; ValueError if it does not fit the run."""
    given = strategies.parse(strategy) if isinstance(strategy, str) else strategy
    chosen = given or Auto() if identity.strategy is None else strategies.parse(identity.strategy)
    if given is not None and given != chosen and identity.rank == 0:
        log.warning("strategy: %s from the command line, not %s from the script", chosen.spell(), given.spell())
    if chosen.uses_servers and identity.rate_bytes_per_s is not None:
        raise ValueError("HORA_RATE_BYTES_PER_S limits what workers send to each other; it has no effect on servers")
    if identity.servers and not chosen.uses_servers:
        able = ", ".join(name for name, kind in strategies.known().items() if kind.may_use_servers)
        raise ValueError(f"HORA_SERVERS={identity.servers}: strategy {chosen.name!r} uses none; with servers: {able}")
    return chosen


def _versions() -> str:
    """What must be the same on all hosts."""
    from .. import __version__

    torch_version = torch.__version__.partition("+")[0]  # builds for other devices are compatible
    return f"hora {__version__}, python {sys.version_info.major}.{sys.version_info.minor}, torch {torch_version}"


def _label_records(identity: ProcessIdentity) -> None:
    """Adds role and rank to every record of `logging`: %(hora_role)s and %(hora_rank)s in a format."""
    before = logging.getLogRecordFactory()
    before = getattr(before, "unlabelled", before)  # of an earlier job of this process

    def labelled(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = before(*args, **kwargs)
        record.hora_role, record.hora_rank = identity.role, identity.rank
        return record

    labelled.unlabelled = before  # type: ignore[attr-defined]
    logging.setLogRecordFactory(labelled)


def _warn(identity: ProcessIdentity) -> None:
    """Of more workers than cores, unless they have GPUs, and of variables that the script has set too late."""
    cores = num_cores()
    if identity.local_size > cores and not os.path.exists("/dev/nvidia0"):
        log.warning(
            "%d workers share %d cores of %s, so they take turns: -n %d is as fast, --hosts adds machines",
            identity.local_size, cores, identity.host, cores,
        )  # fmt: skip
    if late := interpreter.changed_too_late():
        log.warning(
            "the script sets %s, which has no effect: torch is imported before ranks are forked. Set it with "
            "hora run --env %s=%s, or start interpreters with hora run --no-fork",
            " and ".join(late), late[0], os.environ.get(late[0], ""),
        )  # fmt: skip
