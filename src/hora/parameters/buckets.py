"""Buckets of gradients and the hooks on backward that fill them. Each bucket is reduced as soon as it is full.

    backward:   layer 3 ── layer 2 ──────── layer 1 ─────── end
    buckets:    [ 0 ]  [ 1 ][ 2 ]  [ 3 ][ 4 ]      [ 5 ]
                  └ reduced while layer 2 computes …          └ the rest, then the gradients are the mean

`plan` cuts the parameters into buckets. `BackwardHooks` tells its listener which bucket is full. Neither moves a byte.

A bucket holds segments of gradients of one dtype on one device. The order of buckets is that of rank 0's first
backward, so every rank sends them in the same order; a bucket that is full early waits for those before it. What never
came (a layer that this step did not use) is sent at the end. A parameter whose gradient comes in several parts, as
under reentrant checkpoints, counts as complete only at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import types
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from .shards import ParameterShard

FIRST_BYTES = 256 << 10  # a small bucket first: communication begins early


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Elements start to stop of parameter `index`, at `offset` in the bucket; `owner` is the rank that reduces them."""

    index: int
    start: int
    stop: int
    owner: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Segments that are reduced together. Those of one owner are adjacent, in a range of `stride` elements."""

    number: int
    dtype: torch.dtype
    device: torch.device
    segments: tuple[Segment, ...]
    stride: int
    num_owners: int

    @property
    def numel(self) -> int:
        return self.stride * self.num_owners

    @property
    def indices(self) -> list[int]:
        """The parameters that have a segment here."""
        return sorted({segment.index for segment in self.segments})

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges that belong to no gradient: where an owner's segments are shorter than `stride`."""
        ends = [owner * self.stride for owner in range(self.num_owners)]
        for segment in self.segments:
            ends[segment.owner] += segment.stop - segment.start
        return [(end, (owner + 1) * self.stride) for owner, end in enumerate(ends) if end < (owner + 1) * self.stride]

    @property
    def contiguous(self) -> bool:
        """Whether it is one range of one gradient, which is then reduced without a copy."""
        return len(self.segments) == 1


def plan(
    order: Sequence[int],
    parameters: Sequence[torch.Tensor],
    shards: Callable[[int], Sequence[ParameterShard]],
    bucket_bytes: int,
    num_owners: int = 1,
    cut: bool = True,
) -> list[Bucket]:
    """The buckets of these parameters in this order. A parameter larger than a bucket is spread over several; without
    `cut` it makes a large bucket."""
    buckets: list[Bucket] = []
    open_ones: dict[tuple[torch.dtype, torch.device], list[tuple[int, int, int, int]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}

    def close(kind: tuple[torch.dtype, torch.device]) -> None:
        pieces = sorted(open_ones.pop(kind), key=lambda piece: piece[3])  # stable: by owner, then as they came
        filled.pop(kind)
        sizes = [0] * num_owners
        for _, start, stop, owner in pieces:
            sizes[owner] += stop - start
        stride = max(sizes)
        at = [owner * stride for owner in range(num_owners)]
        segments = []
        for index, start, stop, owner in pieces:
            segments.append(Segment(index, start, stop, owner, at[owner]))
            at[owner] += stop - start
        buckets.append(Bucket(len(buckets), *kind, tuple(segments), stride, num_owners))

    for index in order:
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        left = [[shard.start, shard.stop, shard.owner] for shard in shards(index) if shard.stop > shard.start]
        while left:
            limit = bucket_bytes if buckets else min(FIRST_BYTES, bucket_bytes)
            room = max(1, limit // parameter.element_size()) - filled.setdefault(kind, 0)
            pieces = open_ones.setdefault(kind, [])
            if pieces and sum(stop - start for start, stop, _ in left) > room:
                close(kind)  # one that does not fit begins a bucket, so that a large one need not be copied together
                continue
            each = max(1, -(-room // len(left)))
            for shard in left:
                take = min(each, shard[1] - shard[0]) if cut else shard[1] - shard[0]
                pieces.append((index, shard[0], shard[0] + take, shard[2]))
                filled[kind] += take
                shard[0] += take
            left = [shard for shard in left if shard[1] > shard[0]]
            if filled[kind] * parameter.element_size() >= limit:
                close(kind)
    for kind in list(open_ones):
        close(kind)
    return buckets


class BackwardListener(Protocol):
    """Called on the thread that runs backward; its exceptions come out of `backward()`."""

    @property
    def silent(self) -> bool:
        """Inside `job.accumulate()`: buckets are not announced."""

    def bucket_ready(self, bucket: Bucket) -> None:
        """All its gradients of this backward are there, and all buckets before it have been announced."""

    def after_backward(self) -> None:
        """The backward has ended. Buckets that are not `announced` hold parameters that did not come."""


class BackwardHooks:
    """Watches backward passes over `parameters` by PyTorch's own hooks. One thread at a time.

    Until `set_buckets` gives it buckets it records only the order in which gradients come (`order`).
    `torch.autograd.grad`, and a backward that was given `inputs`, count only if a gradient of ours came in it; `passed`
    tells that none did."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], names: Sequence[str], listener: BackwardListener
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.running = False
        self.passed = False
        self.fingerprint = ""  # of the watched parameters: the same on two ranks if they watch the same
        self.num_fires = [0] * len(parameters)  # how often each gradient was ever added to
        self.buckets: list[Bucket] = []
        self.announced = 0
        self.late: set[int] = set()  # parameters whose gradient comes in several parts
        self._listener = listener
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._fires = [0] * len(parameters)
        self._order: list[int] = []
        self._tasks: set[int] = set()  # the graph tasks that will call `_end`
        self._buckets_of: dict[int, list[int]] = {}
        self._size_of: list[int] = []
        self._missing: list[int] = []
        self._announcing = threading.RLock()  # autograd has a thread for each device of a model

    # -- hooks -----------------------------------------------------------------------------------------------------

    def hook(self, keep: bool = False) -> bool:
        """Watches every parameter that requires a gradient now; tells whether that set has changed.

        With `keep` those that no longer do are watched on: they may hold a gradient that is still to be sent.
        """
        wanted = {index for index, parameter in enumerate(self.parameters) if parameter.requires_grad}
        if keep:
            wanted |= self._handles.keys()
        if wanted == self._handles.keys():
            return False
        for index in self._handles.keys() - wanted:
            self._handles.pop(index).remove()
        for index in sorted(wanted - self._handles.keys()):
            self._handles[index] = self.parameters[index].register_post_accumulate_grad_hook(self._hook_for(index))
        self.fingerprint = f"of {len(wanted)} gradients, {zlib.crc32(repr(self.watched).encode()):08x}"
        return True

    def unhook(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    @property
    def watched(self) -> list[int]:
        """The parameters that take part."""
        return sorted(self._handles)

    @property
    def unwatched(self) -> list[int]:
        """Those that require a gradient and have no hook yet: unfrozen since the last `hook`."""
        return [i for i, p in enumerate(self.parameters) if p.requires_grad and i not in self._handles]

    @property
    def order(self) -> list[int]:
        """The watched parameters as their gradients came in the last backward, those in parts and those unused last."""
        last = {index: at for at, index in enumerate(self._order)}  # of several times the last counts
        came = sorted((i for i in last if i not in self.late), key=last.__getitem__)
        late = sorted((i for i in last if i in self.late), key=last.__getitem__)
        return came + late + [index for index in reversed(self.watched) if index not in last]

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """From the next backward on these are announced."""
        self.buckets = buckets
        self._buckets_of = {}
        for bucket in buckets:
            for index in bucket.indices:
                self._buckets_of.setdefault(index, []).append(bucket.number)
        self._size_of = [len(bucket.indices) + bool(self.late & set(bucket.indices)) for bucket in buckets]
        self._missing = list(self._size_of)

    def clear_buckets(self) -> None:
        self.buckets = []
        self._buckets_of = {}
        self.late = set()

    def expect_end(self) -> None:
        """Called inside a backward pass: its end is to be noticed, even if no gradient of ours comes in it."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def join_in(self) -> None:
        """Called inside a backward pass: a gradient came that is ours, though it is of none of `parameters`."""
        if not self.running:
            self._begin()
        self.expect_end()

    def forget(self) -> None:
        """The last backward broke off; the next one starts afresh."""
        self.running = False
        self._tasks.clear()

    def _hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            with self._announcing:
                if not self.running:
                    self._begin()
                self.expect_end()
                self._came(index)

        return hook

    def _begin(self) -> None:
        self.running = True
        self.announced = 0
        self._order.clear()
        self._fires = [0] * len(self.parameters)
        self._missing = list(self._size_of)

    def _came(self, index: int) -> None:
        self._fires[index] += 1
        self.num_fires[index] += 1
        if not self.buckets:
            self._order.append(index)
            if self._fires[index] > 1:
                self.late.add(index)
            return
        if self._listener.silent:
            return
        if self._fires[index] > 1:
            if index in self.late:
                return
            if any(number < self.announced for number in self._buckets_of.get(index, ())):
                raise RuntimeError(
                    f"the gradient of {self.names[index]} came a second time in one backward(), after it had left; "
                    "in the first backward() it came once. Use overlap=false for a model whose graph changes"
                )
            return
        for number in self._buckets_of.get(index, ()):
            self._missing[number] -= 1
        while self.announced < len(self.buckets) and self._missing[self.announced] == 0:
            self.announced += 1
            self._listener.bucket_ready(self.buckets[self.announced - 1])

    def _end(self) -> None:
        is_nested, call = _caller()
        if is_nested:
            return  # the end of a checkpoint's own backward; the outer one goes on
        self._tasks.clear()
        if not self.running:
            if call is None or call.f_code.co_name == "grad" or call.f_locals.get("inputs"):
                self.passed = True
                return
            self._begin()
        self.running = False
        self._listener.after_backward()


def _caller() -> tuple[bool, types.FrameType | None]:
    """Whether the pass that ends now was called inside another one; if not, the call of `backward` or `grad`.

    No call is seen where a pass ends on a thread of autograd's own, as with GPUs.
    """
    frame: types.FrameType | None = sys._getframe(1)
    call = None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            if call is not None:
                return True, None
            call = frame.f_back
        elif code.co_name == "apply" and code.co_filename.endswith("autograd/function.py"):
            return True, None
        frame = frame.f_back
    return False, call
