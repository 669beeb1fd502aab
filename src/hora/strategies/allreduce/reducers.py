"""Reducers: how the gradients of a bucket are averaged over the workers. Buckets are launched in order; the means are
there after `finish`.

SharedMemoryReducer     through shared memory on one host. With as many workers as cores the training thread does the
                        work itself, as soon as its peers have arrived. With cores to spare a thread of its own does.
CollectiveReducer       by the group's collectives, on the group's thread, while the training thread computes.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import math
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...collectives.group import Group
from ...collectives.shared_reduction import SharedReduction, VectorLayout
from ...compression.compressed_sum import CompressedSum
from ...compression.compressor import Compressor
from ...compression.powersgd import Matrix
from ...monitor import spans
from ...monitor.spans import COMMUNICATION, TRAINING
from ...parameters.buckets import Bucket
from ...transport.task_thread import TaskHandle, TaskThread
from ..common.sync import CommStats

NonfiniteGrads = list[tuple[int, int]]  # (rank, parameter)

MAX_COPIES = 4  # bounds the memory of buckets in flight, whatever the model's size


class Reducer(abc.ABC):
    """`views` are the flat gradients of a bucket's segments; the mean lands in them, in place.

    With `keep` every worker gets all of it, without only its own segments.
    """

    def __init__(self, group: Group, buckets: Sequence[Bucket], keep: bool, traffic: CommStats) -> None:
        self.group = group
        self.buckets = buckets
        self.keep = keep
        self.traffic = traffic

    @abc.abstractmethod
    def open(self) -> None:
        """A new exchange begins."""

    @abc.abstractmethod
    def launch(self, bucket: Bucket, views: Sequence[torch.Tensor], scale: float) -> None:
        """`scale` is the weight of this worker's gradient in the sum."""

    @abc.abstractmethod
    def finish(self) -> None: ...

    @abc.abstractmethod
    def nonfinite_grads(self) -> NonfiniteGrads:
        """(rank, parameter) of gradients that were not finite, as far as this worker can tell; after `finish`."""

    @abc.abstractmethod
    def shown(self, peer: int) -> int:
        """How many bytes a peer has read of this worker's shared memory; sent bytes do not count."""

    def compress(self, wire: Compressor, matrices: Callable[[Bucket], Sequence[Matrix]]) -> None:
        """From now on gradients are compressed between hosts; `matrices` are those in a bucket."""

    def settle(self, counts: bool) -> None:
        """`counts`: the step of the last exchange is taken, so the error feedback of compression moves on."""

    def forget(self) -> None:
        """Drops the error feedback of compression."""

    def close(self) -> None:
        """No exchange comes after this."""

    def _launched(self, bucket: Bucket, begin: float) -> None:
        """A span of the training thread's part of a launch."""
        spans.add(TRAINING, "launch", spans.since(begin), bucket=bucket.number)

    def _arrived(self, bucket: Bucket, begin: float, end: float, work_s: float) -> None:
        """A span from launch to arrival; `work_s` is what other threads than the training thread worked on it."""
        num_bytes, work_us = bucket.numel * bucket.dtype.itemsize, round(work_s * 1e6, 1)
        spans.add(
            COMMUNICATION, f"bucket {bucket.number}", spans.since(begin), spans.since(end),
            bucket=bucket.number, bytes=num_bytes, work_us=work_us,
        )  # fmt: skip


class SharedMemoryReducer(Reducer):
    def __init__(
        self, group: Group, buckets: Sequence[Bucket], keep: bool, traffic: CommStats, *, use_thread: bool = False
    ) -> None:
        """`use_thread`: a thread of its own does the work; for a machine with cores to spare."""
        super().__init__(group, buckets, keep, traffic)
        forms = [
            VectorLayout(
                bucket.dtype, bucket.numel, tuple((s.owner, s.offset, s.stop - s.start) for s in bucket.segments)
            )
            for bucket in buckets
        ]
        self._mailbox = SharedReduction(group, forms, keep)
        # Buckets of another set of parameters have another fingerprint, so ranks that train different ones are noticed.
        self._text = f"the gradients of a backward, in buckets {zlib.crc32(repr(buckets).encode()):08x}"
        self._task_thread = (
            TaskThread("hora-reducer", on_idle=self._mailbox.finish, stop_on_error=True) if use_thread else None
        )
        me = group.rank
        self._bytes = [
            bucket.dtype.itemsize * sum(s.stop - s.start for s in bucket.segments if keep or s.owner != me)
            for bucket in buckets
        ]
        self._owned = [[0] * group.size for _ in buckets]  # bytes, by bucket and owner
        for bucket, owned in zip(buckets, self._owned, strict=True):
            for s in bucket.segments:
                owned[s.owner] += bucket.dtype.itemsize * (s.stop - s.start)
        self._num_launches = [0] * len(buckets)
        self._times: dict[int, list[float]] = {}  # by bucket: when it was launched, and posted
        if spans.on:
            self._mailbox.on_done = self._note_done
            self._mailbox.on_waited = self._note_wait if self._task_thread is None else None

    def open(self) -> None:
        self.group.begin_call(self._text)
        self.group.transport.background = self._task_thread is not None

    def launch(self, bucket: Bucket, views: Sequence[torch.Tensor], scale: float) -> None:
        begin = time.perf_counter()
        self.traffic.sent_bytes += self._bytes[bucket.number]
        self._num_launches[bucket.number] += 1
        if spans.on:
            self._times[bucket.number] = [begin]
        if self._task_thread is not None:
            self._task_thread.submit(functools.partial(self._deliver, bucket, views, scale))
        else:
            with self.group.part_of_call():
                self._deliver(bucket, views, scale)
                self._mailbox.advance()
            self.traffic.spend(begin)
        if spans.on:
            self._launched(bucket, begin)

    def finish(self) -> None:
        begin = time.perf_counter()
        with self.group.part_of_call(), self.group.wait_scope:
            if self._task_thread is not None:
                self.traffic.comm_s += self._task_thread.join()
                self.group.transport.background = False
            else:
                self._mailbox.finish()
                self.traffic.comm_s += time.perf_counter() - begin
        self.traffic.exposed_s += time.perf_counter() - begin
        if spans.on:
            name = "exchange" if self._task_thread is None else "waiting"
            spans.add(TRAINING, name, spans.since(begin), what="gradients")

    def shown(self, peer: int) -> int:
        """Its shards of my vectors and, where all get the whole mean, my shards of the result."""
        me = self.group.rank
        return sum(
            count * (owned[peer] + self.keep * owned[me])
            for count, owned in zip(self._num_launches, self._owned, strict=True)
        )

    def nonfinite_grads(self) -> NonfiniteGrads:
        found = []
        for number, shard in self._mailbox.nonfinite_shards():
            for rank in self._mailbox.nonfinite_ranks(number, shard):
                found.append((rank, self.buckets[number].segments[shard].index))
        return found

    def close(self) -> None:
        if self._task_thread is not None:
            self._task_thread.close()

    def _deliver(self, bucket: Bucket, views: Sequence[torch.Tensor], scale: float) -> None:
        if spans.on and bucket.number in self._times:
            self._times[bucket.number].append(time.perf_counter())
        self._mailbox.post(bucket.number, views, scale)

    def _note_done(self, number: int) -> None:
        if spans.on and len(times := self._times.pop(number, [])) == 2:
            now = time.perf_counter()
            self._arrived(self.buckets[number], times[0], now, now - times[1] if self._task_thread is not None else 0.0)

    @staticmethod
    def _note_wait(begin: float, end: float) -> None:
        if spans.on:
            spans.add(TRAINING, "waiting", spans.since(begin), spans.since(end), what="gradients")


@dataclasses.dataclass(slots=True)
class InFlightBucket:
    """`copy`: the vector that the segments were copied into, if they were."""

    bucket: Bucket
    views: Sequence[torch.Tensor]
    handle: TaskHandle
    launched: float
    copy: torch.Tensor | None


class CollectiveReducer(Reducer):
    """A bucket with several segments is first copied into one vector. At most MAX_COPIES are in flight: a worker that
    is so far ahead of the network waits for the oldest."""

    def __init__(
        self, group: Group, buckets: Sequence[Bucket], keep: bool, traffic: CommStats, algorithm: str, overlap: bool
    ) -> None:
        super().__init__(group, buckets, keep, traffic)
        self._algorithm = algorithm
        self._overlap = overlap
        self._copies: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}  # free ones
        self._in_flight: collections.deque[InFlightBucket] = collections.deque()
        self._found: NonfiniteGrads = []
        self._wire: Compressor | None = None
        self._between: dict[int, CompressedSum | None] = {}  # by bucket

    def compress(self, wire: Compressor, matrices: Callable[[Bucket], Sequence[Matrix]]) -> None:
        self._wire = wire
        for bucket in self.buckets:
            self._between[bucket.number] = wire.sum_for(bucket.number, bucket.numel, matrices(bucket))

    def settle(self, counts: bool) -> None:
        if self._wire is not None:
            self._wire.settle(counts)

    def forget(self) -> None:
        if self._wire is not None:
            self._wire.reset()

    def close(self) -> None:
        """The group remembers its calls, and with them the compressed sums: their error feedback is freed."""
        self.forget()

    def open(self) -> None:
        self._found = []
        self._sent = sum(self.group.sent_bytes)

    def launch(self, bucket: Bucket, views: Sequence[torch.Tensor], scale: float) -> None:
        copied = not (bucket.contiguous and self.keep)
        if copied:
            while sum(in_flight.copy is not None for in_flight in self._in_flight) >= MAX_COPIES:
                self._land()
        begin = time.perf_counter()
        n = self.group.size
        copy = self._copy(bucket, views) if copied else None
        flat = views[0] if copy is None else copy[: bucket.numel]
        self._find_nonfinite(bucket, flat, views)  # now: the sum overwrites it
        operation = "mean"
        if bucket.dtype is torch.float16:  # its sum may be too large where its mean is not
            operation = "sum"
            flat.mul_(scale)
        elif scale * n != 1.0:
            flat.mul_(scale * n)
        name = f"bucket {bucket.number}"
        if self.keep:
            between = self._between.get(bucket.number)
            handle = self.group.all_reduce(flat, operation, self._algorithm, name, wait=False, between=between)
        else:
            handle = self.group.reduce_scatter(flat.view(n, -1), operation, name, wait=False, overwrite=True)
        self._in_flight.append(InFlightBucket(bucket, views, handle, begin, copy))
        self.traffic.spend(begin)
        if spans.on:
            self._launched(bucket, begin)
        if not self._overlap:
            self._wait(handle)

    def finish(self) -> None:
        started = spans.clock() if spans.on else 0
        while self._in_flight:
            self._land()
        self.traffic.sent_bytes += sum(self.group.sent_bytes) - self._sent
        if spans.on:
            spans.add(TRAINING, "exchange", started, what="gradients")

    def shown(self, peer: int) -> int:
        return 0

    def nonfinite_grads(self) -> NonfiniteGrads:
        return self._found

    def _copy(self, bucket: Bucket, views: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bucket at the head of a vector that is large enough for any bucket of its dtype and device."""
        kind = (bucket.dtype, bucket.device)
        spare = self._copies.setdefault(kind, [])
        if not spare:
            alike = [other for other in self.buckets if (other.dtype, other.device) == kind]
            most = max(other.numel for other in alike if not (other.contiguous and self.keep))
            spare.append(torch.empty(most, dtype=bucket.dtype, device=bucket.device))
        copy = spare.pop()
        for start, stop in bucket.gaps:
            copy[start:stop].zero_()  # leftovers there must not overflow
        for segment, view in zip(bucket.segments, views, strict=True):
            copy[segment.offset : segment.offset + segment.stop - segment.start].copy_(view)
        return copy

    def _land(self) -> None:
        """Waits for the oldest bucket and copies the mean back. May be called again after an interrupt."""
        in_flight = self._in_flight[0]
        bucket, handle = in_flight.bucket, in_flight.handle
        try:
            result = self._wait(handle)
        except Exception:
            self._discard()
            raise
        self.traffic.comm_s += handle.seconds
        if spans.on:
            self._arrived(bucket, in_flight.launched, handle.ended, handle.seconds)
        if in_flight.copy is None:
            self._in_flight.popleft()
            return
        begin = time.perf_counter()
        base = 0 if self.keep else self.group.rank * bucket.stride
        flat = result.view(-1)
        for segment, view in zip(bucket.segments, in_flight.views, strict=True):
            if self.keep or segment.owner == self.group.rank:
                at = segment.offset - base
                view.copy_(flat[at : at + segment.stop - segment.start])
        self._in_flight.popleft()
        self._copies[bucket.dtype, bucket.device].append(in_flight.copy)
        self.traffic.spend(begin)

    def _discard(self) -> None:
        """One bucket has failed and all after it will: the first error is raised, once."""
        while self._in_flight:
            with contextlib.suppress(Exception):
                self._in_flight.popleft().handle.wait()

    def _wait(self, handle: TaskHandle) -> Any:
        begin = time.perf_counter()
        blocks = spans.on and not handle.done
        with self.group.wait_scope:
            result = handle.wait()
        self.traffic.exposed_s += time.perf_counter() - begin
        if blocks:
            spans.add(TRAINING, "waiting", spans.since(begin), what="gradients")
        return result

    def _find_nonfinite(self, bucket: Bucket, flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        total = flat.sum(dtype=torch.float32 if flat.element_size() < 4 else None)
        if not math.isfinite(total.item()):
            for segment, view in zip(bucket.segments, views, strict=True):
                if not bool(torch.isfinite(view).all()):
                    self._found.append((self.group.rank, segment.index))
