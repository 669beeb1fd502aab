"""DeviceReducer: the gradients of a bucket are averaged on the GPU, beside backward, and the host waits for nothing.

    training stream   backward … pack bucket 0 … backward … pack bucket 1 … end of backward    step
                                      │                          │                 ▲
    side stream                       └─ reduce bucket 0 ────────┴─ reduce 1 ─ status ─ verdict ── copy to the host

A gradient is copied into its bucket when it is complete, and from then on `p.grad` is a view of the bucket, as with
DDP's `gradient_as_bucket_view`. The reduction is in place: a worker's own gradient is not kept.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import zlib
from collections.abc import Callable, Sequence

import torch

from ...collectives.device import DeviceComm, DeviceVector
from ...collectives.device.base import VectorSpec
from ...collectives.group import Group
from ...parameters.buckets import Bucket
from ...parameters.shards import even_shards
from ..common.sync import CommStats
from .reducers import NonfiniteGrads, Reducer

POLL_S = 20e-6
ROWS = 4  # status rows whose copies to the device may be under way: more than exchanges that are not read

LEAST_BYTES, MOST_BYTES = 25 << 20, 256 << 20  # of a bucket


@dataclasses.dataclass(frozen=True)
class _Slot:
    vector: DeviceVector
    views: list[torch.Tensor]  # by segment, in the parameter's shape and strides


class Record:
    """What an exchange leaves: the mean of all workers' status rows, and the verdict, on their way to the host."""

    def __init__(self, verdict: torch.Tensor, width: int) -> None:
        self.verdict = verdict  # on the device
        self.began = time.monotonic()
        self._row = torch.empty(width + 1, dtype=torch.float64, pin_memory=True)
        self._arrived = torch.cuda.Event(enable_timing=True)

    def fill(self, status: torch.Tensor) -> None:
        """Enqueues the copies to the host."""
        self._row[:-1].copy_(status, non_blocking=True)
        self._row[-1:].copy_(self.verdict.view(1), non_blocking=True)
        self._arrived.record()

    @property
    def arrived(self) -> bool:
        return self._arrived.query()

    def read(self, check: Callable[[], None]) -> tuple[list[float], bool]:
        """Blocks until it is here: the mean row, and whether the exchange left something that must not be used."""
        while not self._arrived.query():
            check()
            time.sleep(POLL_S)
        *row, verdict = self._row.tolist()
        return row, bool(verdict)

    def seconds_after(self, event: torch.cuda.Event) -> float:
        """From the event until it was here; to be called after `read`."""
        return max(0.0, event.elapsed_time(self._arrived) / 1e3)


class DeviceReducer(Reducer):
    """`views` of `launch` are gradients, or None for one that is missing. `conclude` takes the place of `finish`."""

    def __init__(
        self,
        group: Group,
        buckets: Sequence[Bucket],
        keep: bool,
        traffic: CommStats,
        comm: DeviceComm,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        super().__init__(group, buckets, keep, traffic)
        self.comm = comm
        self.newest: Record | None = None  # of the last exchange
        self._text = f"the gradients of a backward, in buckets {zlib.crc32(repr(buckets).encode()):08x}"
        self._stream = torch.cuda.Stream(comm.device, priority=-1)
        self._beside = torch.cuda.stream(self._stream)
        self._packed = torch.cuda.Event()
        self._width = 0
        self._status: DeviceVector | None = None
        self._rows: collections.deque[torch.Tensor] = collections.deque()
        specs = [VectorSpec(bucket.dtype, _edges(bucket.numel, group.size)) for bucket in buckets]
        vectors = comm.allocate(specs)
        self._slots = [
            _Slot(vector, [_view(vector.mine, each.offset, parameters[each.index]) for each in bucket.segments])
            for bucket, vector in zip(buckets, vectors, strict=True)
        ]

    def open(self) -> None:
        self.group.begin_call(self._text)
        with self._beside:
            self.comm.begin()

    def launch(self, bucket: Bucket, views: Sequence[torch.Tensor | None], scale: float) -> None:
        slot = self._slots[bucket.number]
        sources, targets = [], []
        for view, grad in zip(slot.views, views, strict=True):
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr():
                sources.append(grad)
                targets.append(view)
        with torch.no_grad():
            if sources:
                torch._foreach_copy_(targets, sources)
            if scale * self.group.size != 1.0:
                slot.vector.mine.mul_(scale * self.group.size)
        self._packed.record(torch.cuda.current_stream(self.comm.device))
        self._stream.wait_event(self._packed)
        with self._beside:
            self.comm.reduce(slot.vector)
        self.traffic.sent_bytes += slot.vector.mine.nbytes * 2 * (self.group.size - 1) // self.group.size

    def views(self, bucket: Bucket) -> list[torch.Tensor]:
        """What the gradients of the bucket become."""
        return self._slots[bucket.number].views

    def finish(self) -> None:
        """Nothing is waited for."""

    def conclude(self, row: Sequence[float]) -> Record:
        """Ends the exchange with this worker's status. What the training stream does from now on comes after it."""
        if self._status is None:
            self._width = len(row)
            self._status = self.comm.allocate([VectorSpec(torch.float64, _edges(len(row), self.group.size))])[0]
            self._rows.extend(torch.empty(len(row), dtype=torch.float64, pin_memory=True) for _ in range(ROWS))
        self._rows.rotate()
        mine, status = self._rows[0], self._status.mine
        mine.copy_(torch.tensor(row, dtype=torch.float64))
        training = torch.cuda.current_stream(self.comm.device)
        with self._beside:
            status.copy_(mine, non_blocking=True)
            self.comm.reduce(self._status)
            record = self.newest = Record(self.comm.finish(), self._width)
            record.fill(status)
        training.wait_stream(self._stream)
        record.verdict.record_stream(training)
        return record

    def nonfinite_grads(self) -> NonfiniteGrads:
        return []  # the verdict says it, later

    def shown(self, peer: int) -> int:
        return 0

    def close(self) -> None:
        if self.comm.cause is None:
            self.comm.release([slot.vector for slot in self._slots])
            if self._status is not None:
                self.comm.release([self._status])


def bucket_bytes(comm: DeviceComm, total_bytes: int) -> int:
    """Of a model whose gradients have `total_bytes`."""
    return min(MOST_BYTES, max(LEAST_BYTES, total_bytes // comm.most_buckets))


def _edges(numel: int, size: int) -> list[int]:
    return [shard.start for shard in even_shards(numel, size)] + [numel]


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
