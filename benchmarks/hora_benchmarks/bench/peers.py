"""The peers, called as directly as their own users would: no wrapper of ours between the clock and them."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from typing import Any

import torch

from hora.job import Job
from hora.net.tensor_bytes import tensor_bytes
from hora.transport.engine import TorchBackend

Call = Callable[[torch.Tensor], Any]


def gloo(job: Job) -> tuple[Call, Callable[[], None]]:
    """Gloo's all-reduce through a process group, and how to end it: without that it may abort at exit."""
    import torch.distributed as dist

    spec = job.group.transport.spec
    backend = TorchBackend(spec, job._context.control, "gloo", "127.0.0.1")
    group = backend._group
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]
    options.timeout = datetime.timedelta(seconds=600)
    return lambda tensor: group.allreduce([tensor], options).wait(), backend.close


def mpi() -> Call | None:
    """MPI's blocking all-reduce in place. Only for ranks that mpirun started: elsewhere MPI may abort the process."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    comm, in_place, total, kind = MPI.COMM_WORLD, MPI.IN_PLACE, MPI.SUM, MPI.FLOAT
    views: dict[tuple[int, int], Any] = {}

    def call(tensor: torch.Tensor) -> None:
        place = (tensor.data_ptr(), tensor.numel())
        spec = views.get(place)
        if spec is None:
            spec = views[place] = [tensor_bytes(tensor), kind]
        comm.Allreduce(in_place, spec, total)

    return call


def mpi_version() -> str | None:
    """Version text of Open MPI or MPICH, if mpirun and mpi4py are installed."""
    if shutil.which("mpirun") is None:
        return None
    import subprocess

    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return None
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None
