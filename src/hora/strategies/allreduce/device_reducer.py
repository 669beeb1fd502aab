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


@dataclasses.dataclass(frozen=True)
class _Slot:
    vector: DeviceVector
    views: list[torch.Tensor]  # by segment, in the parameter's shape and strides


class Record:
    """What an exchange leaves: the sum of all workers' status rows, and the verdict, on their way to the host."""

    def __init__(self, total: torch.Tensor, verdict: torch.Tensor, backward_ended: torch.cuda.Event) -> None:
        """Enqueues the copy to the host. The last number of `total` is not 0 if a worker's verdict was not."""
        self._backward_ended = backward_ended
        self.verdict = torch.maximum(verdict, (total[-1] > 0).float())  # on the device
        self._row = torch.empty(len(total), dtype=torch.float64, pin_memory=True)
        self._row.copy_(total, non_blocking=True)
        self._arrived = torch.cuda.Event(enable_timing=True)
        self._arrived.record()

    @property
    def arrived(self) -> bool:
        return self._arrived.query()

    def read(self, check: Callable[[], None]) -> tuple[list[float], bool]:
        """Blocks until it is here: the sum of the rows, and whether the exchange left what must not be used."""
        while not self._arrived.query():
            check()
            time.sleep(POLL_S)
        *row, verdict = self._row.tolist()
        return row, bool(verdict)

    def exposed_s(self) -> float:
        """What the exchange took after the end of backward; to be called after `read`."""
        return max(0.0, self._backward_ended.elapsed_time(self._arrived) / 1e3)


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
        self._parameters = parameters
        self._text = f"the gradients of a backward, in buckets {zlib.crc32(repr(buckets).encode()):08x}"
        self._stream = torch.cuda.Stream(comm.device, priority=-1)
        self._beside = torch.cuda.stream(self._stream)
        self._packed = torch.cuda.Event()
        self._status: DeviceVector | None = None
        self._buffers: DeviceVector | None = None
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

    def broadcast(self, buffers: Sequence[torch.Tensor]) -> None:
        """These become rank 0's. They are small: their bytes travel in one vector."""
        if not buffers:
            return
        flats = [buffer.detach().contiguous().view(-1).view(torch.uint8) for buffer in buffers]
        sizes = [len(flat) for flat in flats]
        if self._buffers is None or len(self._buffers.mine) != sum(sizes):
            self._buffers = self.comm.allocate([VectorSpec(torch.uint8, _edges(sum(sizes), self.group.size))])[0]
        with torch.no_grad():
            torch.cat(flats, out=self._buffers.mine)
            training = torch.cuda.current_stream(self.comm.device)
            self._stream.wait_stream(training)
            with self._beside:
                self.comm.broadcast(self._buffers)
            training.wait_stream(self._stream)
            if self.group.rank != 0:
                for buffer, flat in zip(buffers, self._buffers.mine.split(sizes), strict=True):
                    buffer.copy_(flat.clone().view(buffer.dtype).view(buffer.shape))

    def conclude(self, row: Sequence[float]) -> Record:
        """Ends the exchange with this worker's status. What the training stream does from now on comes after it."""
        if self._status is None:
            spec = VectorSpec(torch.float64, _edges(len(row) + 1, self.group.size))
            self._status = self.comm.allocate([spec])[0]
            self._rows.extend(torch.empty(len(row), dtype=torch.float64, pin_memory=True) for _ in range(ROWS))
        self._rows.rotate()
        mine, status = self._rows[0], self._status.mine
        mine.copy_(torch.tensor(row, dtype=torch.float64))
        training = torch.cuda.current_stream(self.comm.device)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record(training)
        with self._beside:
            verdict = self.comm.verdict()
            status[:-1].copy_(mine, non_blocking=True)
            status[-1:].copy_(verdict.view(1))
            self.comm.reduce(self._status, mean=False)
            record = Record(status, verdict, ended)
            self.comm.end()
        training.wait_stream(self._stream)
        record.verdict.record_stream(training)
        return record

    def nonfinite_grads(self) -> NonfiniteGrads:
        return []  # the verdict says it, later

    def shown(self, peer: int) -> int:
        return 0

    def close(self) -> None:
        """Collective. Gradients that are views of the buckets become the user's own."""
        for bucket, slot in zip(self.buckets, self._slots, strict=True):
            for segment, view in zip(bucket.segments, slot.views, strict=True):
                parameter = self._parameters[segment.index]
                if parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr():
                    parameter.grad = parameter.grad.clone()
        vectors = [slot.vector for slot in self._slots]
        self._slots = []
        vectors += [vector for vector in (self._status, self._buffers) if vector is not None]
        self._status = self._buffers = None
        self.comm.release(vectors)


def _edges(numel: int, size: int) -> list[int]:
    return [shard.start for shard in even_shards(numel, size)] + [numel]


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
