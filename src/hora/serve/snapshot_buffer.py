"""Snapshot buffer: shared memory in which one worker publishes parameters and buffers for the predictor.

    header   | counter 0 | counter 1 | newest | entries length | opened | signature length | … | version 0 | version 1 |
    data     | signature | entries: names, shapes and dtypes, as JSON | slot 0: parameters, buffers | slot 1: the same |

Double-buffered, with a seqlock per slot. The writer fills the slot that is not the newest; its counter is odd then.
A reader copies the newest slot, and the same even counter before and after proves that the copy is whole; otherwise it
tries again. The writer never waits, and a writer that dies while it publishes leaves the other slot intact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from ..errors import HoraError, Mismatch, OutOfMemory
from ..net.tensor_bytes import tensor_bytes
from ..parameters.shards import is_dense
from ..server.block_memory import BlockMemory, header_bytes
from ..transport.arena import round_up

NEWEST, ENTRIES, OPENED, SIGNATURE, VERSIONS = 2, 3, 4, 5, 8  # header fields; 0 and 1 are the slots' seqlock counters
VERSION_FIELDS = 4
HEADER_FIELDS = VERSIONS + 2 * VERSION_FIELDS
ALIGN_BYTES = 64
SIGNATURE_BYTES = 16 << 10
MAX_TRIES = 50  # a read fails only if the writer publishes twice while it copies once


class ParameterVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The step that a model's parameters are of. `step` never decreases from one prediction to the next.

    `round` and `local_step` are set where workers train alone between rounds: the last round, and one worker's steps
    since. `spread` is set where servers apply updates independently: `step` is the oldest block's version, and the
    newest block is `spread` versions ahead."""

    step: int
    round: int | None = None
    local_step: int | None = None
    spread: int | None = None


class SnapshotBuffer:
    """One writer, any number of readers. `create` it in the worker, `open` it in the predictor.

    `parameters` and `buffers` are the model's own; their shapes, dtypes and strides give the layout."""

    def __init__(
        self, memory: BlockMemory, at: int, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._memory = memory
        self._header = memory.counters
        self._slots = []
        for _ in range(2):
            views, at = _views(memory, at, parameters)
            buffer_views, at = _views(memory, at, [buffer.contiguous() for buffer in buffers.values()])
            self._slots.append((views, dict(zip(buffers, buffer_views, strict=True))))

    @classmethod
    def create(
        cls, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], entries: list[list[Any]]
    ) -> SnapshotBuffer:
        """OutOfMemory if there is too little memory, or none that can be shared."""
        encoded = msgspec.json.encode(entries)
        at = SIGNATURE_BYTES + round_up(len(encoded), ALIGN_BYTES)
        memory = BlockMemory.shared(HEADER_FIELDS, at + 2 * _num_bytes([*parameters, *buffers.values()]))
        if memory.descriptor is None:
            raise OutOfMemory("memory cannot be shared on this machine")
        tensor_bytes(memory.data)[SIGNATURE_BYTES : SIGNATURE_BYTES + len(encoded)] = encoded
        memory.counters[ENTRIES] = len(encoded)
        return cls(memory, at, parameters, buffers)

    @classmethod
    def open(
        cls, descriptor: int, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor],
        entries: list[list[Any]],
    ) -> SnapshotBuffer:  # fmt: skip
        """Map a worker's buffer; closes `descriptor`. Mismatch names the first difference between the two models."""
        try:
            memory = BlockMemory(HEADER_FIELDS, os.fstat(descriptor).st_size - header_bytes(HEADER_FIELDS), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        memory.close()
        length = memory.counters[ENTRIES]
        _compare(entries, msgspec.json.decode(tensor_bytes(memory.data[SIGNATURE_BYTES : SIGNATURE_BYTES + length])))
        at = SIGNATURE_BYTES + round_up(length, ALIGN_BYTES)
        if at + 2 * _num_bytes([*parameters, *buffers.values()]) > memory.data.numel():
            raise HoraError("a worker's snapshot buffer is smaller than its model")
        memory.counters[OPENED] = 1
        return cls(memory, at, parameters, buffers)

    @property
    def descriptor(self) -> int:
        assert self._memory.descriptor is not None
        return self._memory.descriptor

    @property
    def opened(self) -> bool:
        """Whether a reader has opened it."""
        return self._header[OPENED] != 0

    @property
    def signature(self) -> bytes:
        """What `set_signature` has stored; empty before."""
        return bytes(tensor_bytes(self._memory.data[: min(self._header[SIGNATURE], SIGNATURE_BYTES)]))

    def set_signature(self, signature: bytes) -> None:
        """Store it for the readers; only the first call counts, and one that is too long is dropped."""
        if signature and len(signature) <= SIGNATURE_BYTES and not self._header[SIGNATURE]:
            tensor_bytes(self._memory.data)[: len(signature)] = signature
            self._header[SIGNATURE] = len(signature)

    def publish(
        self, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], version: ParameterVersion
    ) -> None:
        """Make these the newest; blocks for the copy. ValueError, without a change, if a buffer's shape has changed."""
        slot = 1 if self._header[NEWEST] == 1 else 0
        views, buffer_views = self._slots[slot]
        for name, view in buffer_views.items():
            if name not in buffers or buffers[name].shape != view.shape:
                raise ValueError(f"buffer {name} has changed its shape since job.prepare()")
        self._header[slot] |= 1
        for view, parameter in zip(views, parameters, strict=True):
            view.copy_(parameter.detach())
        for name, view in buffer_views.items():
            view.copy_(buffers[name].detach())
        at = VERSIONS + VERSION_FIELDS * slot
        for field, value in enumerate((version.step, version.round, version.local_step)):
            self._header[at + field] = 0 if value is None else value + 1
        self._header[slot] += 1
        self._header[NEWEST] = slot + 1

    def newest(self) -> ParameterVersion | None:
        """The newest version; None if there is none yet, or the writer was faster than MAX_TRIES reads."""
        return self.read([], {})

    def read(self, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> ParameterVersion | None:
        """Copy the newest slot into all parameters (or none, for []) and the named buffers. On None (nothing published,
        or no whole copy) their values are undefined."""
        for _ in range(MAX_TRIES):
            newest = self._header[NEWEST]
            if newest not in (1, 2):
                return None
            slot = newest - 1
            before = self._header[slot]
            if not before & 1:
                at = VERSIONS + VERSION_FIELDS * slot
                step, number, local_step = (value - 1 if value else None for value in self._header[at : at + 3])
                views, buffer_views = self._slots[slot]
                for parameter, view in zip(parameters, views, strict=False):
                    parameter.copy_(view)
                for name, buffer in buffers.items():
                    buffer.copy_(buffer_views[name])
                if self._header[slot] == before:
                    return ParameterVersion(step or 0, number, local_step)
            time.sleep(0)
        return None

    def close(self) -> None:
        """Close the descriptor; mappings stay readable."""
        self._memory.close()


def _views(memory: BlockMemory, at: int, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """A view per tensor, with the tensor's own strides where it is dense, so that a copy is contiguous."""
    views = []
    for tensor in tensors:
        flat = memory.tensor(at, tensor.numel(), tensor.dtype)
        dense = is_dense(tensor) and tensor.numel()
        views.append(flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape))
        at += _num_bytes([tensor])
    return views, at


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(round_up(tensor.numel() * tensor.element_size(), ALIGN_BYTES) for tensor in tensors)


def _compare(mine: list[list[Any]], theirs: list[list[Any]]) -> None:
    for here, there in zip_longest(mine, theirs, fillvalue=["nothing", "", ""]):
        if here[:4] != there[:4]:
            raise Mismatch(
                f"the models differ: the predictor has {here[0]} {here[1]} {here[2]} where the workers have {there[0]} "
                f"{there[1]} {there[2]}. Every process must build the same model"
            )
