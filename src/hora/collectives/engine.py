"""The engine's own all-reduce: NCCL or Gloo through torch.distributed, MPI through mpi4py.

What it sends and in which order is the engine's business. Its messages carry no stamp of ours, so the fingerprint
travels on the coordinator's line beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .reduction import Operation

if TYPE_CHECKING:
    from .base import Group


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    from ..transport.engine import EngineTransport

    group.announce()
    engine = group.engine("auto" if flat.is_cpu else "nccl")
    assert isinstance(engine, EngineTransport)
    engine.all_reduce(flat, operation.name)
