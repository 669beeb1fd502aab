"""The engine's own all-reduce: NCCL or Gloo through torch.distributed, MPI through mpi4py.

What it sends and in which order is the engine's business. Its messages carry no stamp of ours, and given different
shapes it may return wrong sums or end the process, so the ranks meet at a barrier of ours first, which does carry it.
CUDA tensors go through NCCL where every rank has a GPU of its own, and by way of the host where ranks share one, which
NCCL refuses.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from . import moves
from .reduction import Operation

if TYPE_CHECKING:
    from .base import Group


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    from ..transport.engine import EngineTransport

    moves.barrier(group)
    if flat.is_cuda and not _own_gpus(group, flat.device):
        host = flat.cpu()
        all_reduce(group, host, operation)
        flat.copy_(host)
        return
    engine = group.engine("nccl" if flat.is_cuda else "auto")
    assert isinstance(engine, EngineTransport)
    engine.all_reduce(flat, operation.name)


def _own_gpus(group: Group, device: torch.device) -> bool:
    """Whether every rank of the group uses another GPU; all ranks ask in the same call, and once."""
    if group.own_gpus is None:
        name = str(torch.cuda.get_device_properties(device).uuid).encode()
        names = moves.all_gather(group, torch.tensor([zlib.crc32(name)]))
        group.own_gpus = len({int(name) for name in names}) == group.size
    return group.own_gpus
