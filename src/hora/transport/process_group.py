"""torch.distributed's default process group over the workers of a run, for what torch itself does between processes.

Pipelines, tensor parallelism and FSDP of torch ask for that group. Here it comes without addresses: rank 0's store
listens where Hora does, its port travels over the coordinator, and Gloo and NCCL use that network interface too. Like
the engines' (engine.py), these links carry no token of ours. Hora does not see what is sent over them: when a peer is
lost, torch's own call raises, or waits until the launcher ends it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..coordinator import CoordinatorConnection
from ..errors import Mismatch
from ..net import interface
from .base import GroupSpec
from .engine import meet_in_store, name_interface, run_checked

log = logging.getLogger(__name__)

Agree = Callable[[str, str], list[str]]


class TorchGroup:
    """Opening it is collective. `agree(key, word)` gives every rank's word to all; `check` raises if a rank is lost.

    `attempt` counts how often all have tried: what was said in an earlier one, which failed, is not heard in this."""

    def __init__(
        self,
        spec: GroupSpec,
        control: CoordinatorConnection,
        bind: str,
        backend: str | None,
        device: torch.device,
        agree: Agree,
        check: Callable[[], None],
        attempt: int = 0,
    ) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            raise ValueError(
                "job.process_group() opens torch's default process group, and there is one already: call it instead of "
                "torch.distributed.init_process_group"
            )
        self.backend = backend
        key = f"{spec.name}/torch{attempt}"
        _compare(agree(f"{key}/backend", backend or ""))
        chosen = backend or _fitting(agree(f"{key}/gpu", _gpu(device)))
        if spec.rank == 0 and spec.size > 1:
            log.warning("torch's own links (%s) are not authenticated: keep them inside a trusted network", chosen)
        _name_interfaces(bind)
        limit = datetime.timedelta(seconds=spec.timeout_s)

        def open_group() -> None:
            store = meet_in_store(key, spec, control, bind, limit)
            dist.init_process_group(chosen, store=store, rank=spec.rank, world_size=spec.size, timeout=limit)

        hook = sys.excepthook
        run_checked(open_group, check)
        sys.excepthook = hook  # torch's, which says the rank again, would swallow the last words of a rank that ends
        assert dist.group.WORLD is not None
        self.group: Any = dist.group.WORLD

    def broken_by(self, error: BaseException) -> bool:
        """Whether this is what torch says when a link of the group, or of one made out of it, broke."""
        import torch.distributed as dist

        return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))

    def close(self) -> None:
        """Also after the user's own destroy_process_group."""
        import torch.distributed as dist

        if dist.group.WORLD is self.group:
            with contextlib.suppress(Exception):  # whoever was lost is known already
                dist.destroy_process_group()


def _compare(named: list[str]) -> None:
    """Mismatch, the same on every rank, if two have named different backends, or one none: they would never meet."""
    for rank, name in enumerate(named):
        if name != named[0]:
            here, there = (f"({word!r})" if word else "()" for word in (named[0], name))
            raise Mismatch(
                f"rank 0 called job.process_group{here} and rank {rank} job.process_group{there}: all must name the "
                "same backend, or none"
            )


def _gpu(device: torch.device) -> str:
    """The GPU's own name; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _fitting(gpus: list[str]) -> str:
    """The backends for tensors on the CPU and on GPUs, the same on every rank."""
    if not all(gpus):
        return "gloo"
    twins = [(gpus.index(gpu), rank) for rank, gpu in enumerate(gpus) if gpus.index(gpu) < rank]
    if twins:
        raise ValueError(
            f"job.process_group(): ranks {twins[0][0]} and {twins[0][1]} share a GPU, and NCCL refuses to connect "
            "those: give each its own, or stay on the CPU with job.process_group('gloo')"
        )
    return "cpu:gloo,cuda:nccl"


def _name_interfaces(bind: str) -> None:
    """Gloo and NCCL pick an interface by their own lights; ours is the one that this run's address lies on."""
    if found := interface.name_of(bind):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    name_interface(bind)
