"""The engine's own all-reduce: NCCL or Gloo through torch.distributed, MPI through mpi4py.

What it sends and in which order is the engine's business, also by host: NCCL has a hierarchy of its own. Its messages
carry no stamp of ours, and given different shapes it may return wrong sums or end the process, so the ranks meet at a
barrier of ours first, which does carry it. CUDA tensors go through NCCL where every rank has a GPU of its own, and by
way of the host where ranks share one, which NCCL refuses, or where it does not know the operation.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import moves
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
        _on_gpu(group, flat, operation, by_host=all_reduce)
    else:
        _by_engine(group, flat, operation, "auto")


def by_gpu(
    group: Group,
    flat: torch.Tensor,
    operation: Operation,
    by_host: Callable[[Group, torch.Tensor, Operation], None],
) -> None:
    """A vector on the GPU that may go either way: through NCCL, or through the host and there as `by_host` does it."""
    if group.size > 1:
        _on_gpu(group, flat, operation, by_host)


def _on_gpu(
    group: Group,
    flat: torch.Tensor,
    operation: Operation,
    by_host: Callable[[Group, torch.Tensor, Operation], None],
) -> None:
    known = operation.name in NCCL_OPERATIONS and flat.dtype in NCCL_DTYPES
    if known and _own_gpus(group, flat.device):
        _by_engine(group, flat, operation, "nccl")
    else:
        host = flat.cpu()
        by_host(group, host, operation)
        flat.copy_(host)


def _by_engine(group: Group, flat: torch.Tensor, operation: Operation, backend: str) -> None:
    from ..transport.engine import EngineTransport

    moves.barrier(group)
    engine = group.engine(backend)
    assert isinstance(engine, EngineTransport)
    engine.all_reduce(flat, operation.name)


def _own_gpus(group: Group, device: torch.device) -> bool:
    """Whether every rank of the group uses another GPU; all ranks ask in the same call, and once."""
    if group.own_gpus is None:
        name = str(torch.cuda.get_device_properties(device).uuid).encode()
        names = moves.all_gather(group, torch.tensor([zlib.crc32(name)]))
        group.own_gpus = len({int(name) for name in names}) == group.size
        if group.rank == 0 and group.size > 1:
            way = "NCCL" if group.own_gpus else "the host: ranks share a GPU, which NCCL refuses"
            log.info("CUDA tensors are reduced through %s", way)
    return group.own_gpus
