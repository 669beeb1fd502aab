"""Which DeviceComm the ranks of a group use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from ...errors import HoraError
from .. import engine
from ..group import Group
from .base import DeviceComm, VectorSpec
from .ipc import IpcComm
from .nccl import NcclComm

log = logging.getLogger(__name__)

PROBE_ELEMENTS = 4 << 20
PROBES = 3


def open_comm(group: Group, device: torch.device, algorithm: str) -> DeviceComm | None:
    """Collective: None, on all ranks, if there is no way for them to reduce on their devices.

    "shared" reads peers' memory; "ring" and "engine" are NCCL; "auto" is the faster one. Ranks that share a GPU, which
    NCCL refuses, read each other's memory under "ring" too."""
    nccl = algorithm in ("auto", "ring", "engine") and engine.own_gpus(group, device)
    if algorithm == "engine" or (algorithm == "ring" and nccl):
        return NcclComm(group, device) if nccl else None
    ipc = _open_ipc(group, device) if algorithm in ("auto", "ring", "shared") else None
    if not nccl or ipc is None:
        return ipc or (NcclComm(group, device) if nccl else None)
    other = NcclComm(group, device)
    times = torch.tensor([_probe(ipc), _probe(other)], dtype=torch.float64)
    group.all_reduce(times, "max", "star", name="probe of device memory")
    chosen, left = (ipc, other) if times[0] <= times[1] else (other, ipc)
    left.close()
    if group.rank == 0:
        log.info("16 MB: CUDA IPC %.3f ms, NCCL %.3f ms; gradients go by %s", *(times * 1e3).tolist(), chosen.name)
    return chosen


def _open_ipc(group: Group, device: torch.device) -> IpcComm | None:
    """Collective."""
    if group.num_hosts > 1 or not group.transport.shares_memory:
        return None
    if not _on_all(group, lambda: IpcComm.check(device)):
        return None
    made: list[IpcComm] = []
    if _on_all(group, lambda: made.append(IpcComm(group, device))):
        return made[0]
    for comm in made:
        comm.close()
    return None


def _on_all(group: Group, attempt: Callable[[], None]) -> bool:
    """Collective: whether the attempt went well on every rank."""
    problem = ""
    try:
        attempt()
    except (HoraError, OSError) as refusal:
        group.transport.check()
        problem = str(refusal)
        log.info("%s: CUDA IPC is not available: %s", group.transport.name_of(group.rank), problem)
    fine = torch.tensor([float(not problem)])
    group.all_reduce(fine, "min", "star", name="CUDA IPC is available")
    return bool(fine)


def _probe(comm: DeviceComm) -> float:
    """Seconds of a reduction, the best of a few."""
    size = comm.group.size
    edges = [PROBE_ELEMENTS * rank // size for rank in range(size + 1)]
    vectors = comm.allocate([VectorSpec(torch.float32, edges)])
    best = float("inf")
    for _ in range(PROBES + 1):
        torch.cuda.synchronize(comm.device)
        begin = time.perf_counter()
        comm.begin()
        comm.reduce(vectors[0])
        comm.end()
        torch.cuda.synchronize(comm.device)
        best = min(best, time.perf_counter() - begin)
    comm.release(vectors)
    return best
