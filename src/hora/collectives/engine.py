"""The "engine" all-reduce: NCCL or Gloo through torch.distributed, MPI through mpi4py.

The engine decides what it sends and in which order, also by host: NCCL has a hierarchy of its own. Its messages carry
no fingerprint of ours, and given different shapes it may return wrong sums or end the process, so a barrier of ours,
which does carry it, comes first. CUDA tensors go through NCCL where every rank has a GPU of its own. They go through
the host where ranks share a GPU, which NCCL refuses, or where NCCL does not support the operation.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import primitives
from .reduction import Operation

if TYPE_CHECKING:
    from .group import Group

log = logging.getLogger(__name__)

NCCL_OPERATIONS = ("sum", "mean", "prod", "min", "max")
NCCL_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    if flat.is_cuda:
        all_reduce_cuda(group, flat, operation, on_cpu=all_reduce)
    else:
        _by_engine(group, flat, operation, "auto")


def all_reduce_cuda(
    group: Group,
    flat: torch.Tensor,
    operation: Operation,
    on_cpu: Callable[[Group, torch.Tensor, Operation], None],
) -> None:
    """A CUDA vector through NCCL, or through the host and there by `on_cpu`."""
    if group.size == 1:
        return
    if operation.name in NCCL_OPERATIONS and flat.dtype in NCCL_DTYPES and own_gpus(group, flat.device):
        _by_engine(group, flat, operation, "nccl")
    else:
        host = flat.cpu()
        on_cpu(group, host, operation)
        flat.copy_(host)


def _by_engine(group: Group, flat: torch.Tensor, operation: Operation, backend: str) -> None:
    primitives.barrier(group)
    group.engine(backend).all_reduce(flat, operation.name)


def own_gpus(group: Group, device: torch.device) -> bool:
    """Whether every rank of the group uses another GPU; compared once, by all ranks in the same call."""
    if group.own_gpus is None:
        # Ranks with different NCCL_HOSTID are on different hosts to NCCL, which then does not refuse a shared GPU.
        host = os.environ.get("NCCL_HOSTID", "")
        name = f"{torch.cuda.get_device_properties(device).uuid} {host}".encode()
        names = primitives.all_gather(group, torch.tensor([zlib.crc32(name)]))
        group.own_gpus = len({int(name) for name in names}) == group.size
        if group.rank == 0 and group.size > 1:
            way = "NCCL" if group.own_gpus else "the host, because ranks share a GPU, which NCCL refuses"
            log.info("CUDA tensors are reduced through %s", way)
    return group.own_gpus
