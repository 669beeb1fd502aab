"""NcclComm: through NCCL, where every rank has a GPU of its own. NCCL chooses algorithm and links."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed

from ..group import Group
from .base import DeviceComm, DeviceVector, VectorSpec


class NcclComm(DeviceComm):
    name = "nccl"
    bucket_bytes = 25 << 20  # DDP's

    def __init__(self, group: Group, device: torch.device) -> None:
        dist: Any = torch.distributed

        self._word = torch.zeros(1, dtype=torch.int32).pin_memory()
        super().__init__(group, device)
        backend: Any = group.engine("nccl").backend
        self._nccl = backend.process_group
        self._from_first = dist.BroadcastOptions()
        self._mean = dist.AllreduceOptions()
        self._mean.reduceOp = dist.ReduceOp.AVG if group.size > 1 else dist.ReduceOp.SUM  # whose copy costs time
        self._sum = dist.AllreduceOptions()
        self._sum.reduceOp = dist.ReduceOp.SUM
        self._mean_shard = dist.ReduceScatterOptions()
        self._mean_shard.reduceOp = dist.ReduceOp.AVG
        self._sums = torch.zeros(1, device=device)
        self._num_sums = 0

    def allocate(self, specs: Sequence[VectorSpec]) -> list[DeviceVector]:
        self._sums = torch.zeros(max(len(self._sums), len(specs)), device=self.device)
        return [
            DeviceVector(torch.zeros(spec.edges[-1], dtype=spec.dtype, device=self.device), spec.edges)
            for spec in specs
        ]

    def begin(self) -> None:
        self._num_sums = 0

    def reduce(self, vector: DeviceVector, mean: bool = True) -> None:
        self._nccl.allreduce([vector.mine], self._mean if mean else self._sum).wait()
        self._note_sum(vector.mine)

    def reduce_scatter(self, vector: DeviceVector) -> None:
        shard = vector.shards[self.group.rank]
        self._nccl._reduce_scatter_base(shard, vector.mine, self._mean_shard).wait()
        self._note_sum(shard)

    def all_gather(self, vector: DeviceVector) -> None:
        self._nccl._allgather_base(vector.mine, vector.shards[self.group.rank]).wait()

    def broadcast(self, vector: DeviceVector) -> None:
        self._nccl.broadcast([vector.mine], self._from_first).wait()

    def _note_sum(self, values: torch.Tensor) -> None:
        """A sum is not finite if an element is not; it takes one pass and no memory."""
        if self._num_sums < len(self._sums):  # not of what comes after the verdict
            torch.sum(values, 0, dtype=torch.float32, out=self._sums[self._num_sums])
            self._num_sums += 1

    def _bad(self) -> torch.Tensor:
        return torch.isfinite(self._sums[: self._num_sums]).all().logical_not().float()

    def release(self, vectors: Sequence[DeviceVector]) -> None:
        """Nothing to do: the memory is torch's."""

    @property
    def _abort_address(self) -> int:
        return self._word.data_ptr()

    def _release_streams(self) -> None:
        """NCCL's abort waits until its kernels have ended."""
        threading.Thread(target=self._nccl.abort, name="hora-nccl-abort", daemon=True).start()
