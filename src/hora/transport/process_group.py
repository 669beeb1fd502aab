"""torch.distributed's default process group over the workers of a run, for what torch itself does between processes.

Pipelines, tensor parallelism and FSDP of torch use that group. Here it needs no addresses: rank 0's store listens where
Hora does, its port is published through the coordinator, and Gloo and NCCL use that network interface too. As those of
the engine (engine.py), these connections carry no token of ours. Hora does not see what is sent over them: when a peer
is lost, torch's own call raises, or waits until the launcher ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
from typing import Any

import torch

from ..errors import Mismatch
from ..net import interface
from .base import GroupSpec
from .context import TransportContext
from .engine import open_store, run_checked, set_nccl_interface

log = logging.getLogger(__name__)


class TorchGroup:
    """Opening it is collective. `attempt` counts how often all have tried: it separates this one from those that
    failed."""

    def __init__(
        self, context: TransportContext, spec: GroupSpec, backend: str | None, device: torch.device, attempt: int = 0
    ) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            raise ValueError(
                "job.process_group() opens torch's default process group, and there is one already: call it instead of "
                "torch.distributed.init_process_group"
            )
        self.backend = backend
        key = f"{spec.name}/torch{attempt}"
        _compare(context.gather(spec, f"{key}/backend", backend or ""))
        chosen = backend or _choose(context.gather(spec, f"{key}/gpu", _gpu(device)))
        if spec.rank == 0 and spec.size > 1:
            log.warning("torch's own connections (%s) are not authenticated: use them in a trusted network", chosen)
        if found := interface.name_of(context.run.bind):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        set_nccl_interface(context.run.bind)
        limit = datetime.timedelta(seconds=spec.timeout_s)

        def open_group() -> None:
            store = open_store(key, spec, context.run.control, context.run.bind, limit)
            dist.init_process_group(chosen, store=store, rank=spec.rank, world_size=spec.size, timeout=limit)

        hook = sys.excepthook
        run_checked(open_group, lambda: context.check(None))
        sys.excepthook = hook  # torch's prefixes the rank, and would swallow the last lines of a rank that ends
        assert dist.group.WORLD is not None
        self.group: Any = dist.group.WORLD

    def broken_by(self, error: BaseException) -> bool:
        """Whether torch raises this when a connection of the group, or of one made out of it, breaks."""
        import torch.distributed as dist

        return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))

    def close(self) -> None:
        """Also after the user's own destroy_process_group."""
        import torch.distributed as dist

        if dist.group.WORLD is self.group:
            with contextlib.suppress(Exception):  # a lost rank is known already
                dist.destroy_process_group()


def _compare(named: list[str]) -> None:
    """Mismatch, the same on every rank, if two have named different backends, or one none: they would never meet."""
    for rank, name in enumerate(named):
        if name != named[0]:
            here, there = (f"({backend!r})" if backend else "()" for backend in (named[0], name))
            raise Mismatch(
                f"rank 0 called job.process_group{here} and rank {rank} job.process_group{there}: all must name the "
                "same backend, or none"
            )


def _gpu(device: torch.device) -> str:
    """The GPU's unique name; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _choose(gpus: list[str]) -> str:
    """The backends for tensors on the CPU and on GPUs, the same on every rank."""
    if not all(gpus):
        return "gloo"
    for rank, gpu in enumerate(gpus):
        if gpus.index(gpu) < rank:
            raise ValueError(
                f"job.process_group(): ranks {gpus.index(gpu)} and {rank} share a GPU, and NCCL refuses to connect "
                "those: give each its own, or stay on the CPU with job.process_group('gloo')"
            )
    return "cpu:gloo,cuda:nccl"
