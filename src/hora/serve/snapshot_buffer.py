"""Showcase: memory in which one worker shows its parameters and buffers, and the predictor reads them.

    words     | word 0 | word 1 | newest | length of entries | seen | length of note | … | stamp 0 | stamp 1 |
    data      | note | entries: names, shapes and types, as JSON | slot 0: parameters, buffers | slot 1: the same |

The writer fills the slot that is not the newest: its word is odd meanwhile and grows by two; then it is the newest. Who
reads takes the newest, and its word before and after, the same even number, proves that it was whole. So the writer
never waits, and one that dies half-way leaves the other slot as it was. A reader that was overtaken tries again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..errors import HoraError, Mismatch, OutOfMemory
from ..net.tensor_bytes import tensor_bytes
from ..parameters.shards import is_dense
from ..server.block_memory import BlockMemory, words_bytes
from .source import ParameterVersion

NEWEST, LENGTH, SEEN, NOTE, STAMPS = 2, 3, 4, 5, 8  # places among the words; 0 and 1 are the slots' own
STAMP_WORDS = 4
NUM_WORDS = STAMPS + 2 * STAMP_WORDS
ALIGN_BYTES = 64
NOTE_BYTES = 16 << 10
TRIES = 50  # a reader is overtaken only by a writer that publishes twice while it copies once


class SnapshotBuffer:
    """One worker's. `create` it where parameters are trained, `open` it where they are read; one writer, any readers.

    `parameters` and `buffers` are the model's own: their shapes, types and strides say how the memory is cut.
    """

    def __init__(
        self, memory: BlockMemory, at: int, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._memory = memory
        self._words = memory.words
        self._slots = []
        for _ in range(2):
            views, at = _views(memory, at, parameters)
            shown, at = _views(memory, at, [buffer.contiguous() for buffer in buffers.values()])
            self._slots.append((views, dict(zip(buffers, shown, strict=True))))

    @classmethod
    def create(
        cls, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], entries: list[list[Any]]
    ) -> SnapshotBuffer:
        """OutOfMemory if there is too little memory, or none that can be shared."""
        words = msgspec.json.encode(entries)
        at = NOTE_BYTES + _aligned(len(words))
        memory = BlockMemory.shared(NUM_WORDS, at + 2 * _num_bytes([*parameters, *buffers.values()]))
        if memory.descriptor is None:
            raise OutOfMemory("memory cannot be shared on this machine")
        memory.data[NOTE_BYTES : NOTE_BYTES + len(words)].copy_(_tensor(words))
        memory.words[LENGTH] = len(words)
        return cls(memory, at, parameters, buffers)

    @classmethod
    def open(
        cls,
        descriptor: int,
        parameters: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        entries: list[list[Any]],
    ) -> SnapshotBuffer:
        """Maps what a worker shows, and closes `descriptor`. Mismatch names the first difference, if its model is
        another than this one."""
        try:
            memory = BlockMemory(NUM_WORDS, os.fstat(descriptor).st_size - words_bytes(NUM_WORDS), descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        memory.close()
        at = NOTE_BYTES + _aligned(memory.words[LENGTH])
        theirs = msgspec.json.decode(tensor_bytes(memory.data[NOTE_BYTES : NOTE_BYTES + memory.words[LENGTH]]))
        _compare(entries, theirs)
        if at + 2 * _num_bytes([*parameters, *buffers.values()]) > memory.data.numel():
            raise HoraError("a worker shows less memory than its model has")
        memory.words[SEEN] = 1
        return cls(memory, at, parameters, buffers)

    @property
    def descriptor(self) -> int:
        assert self._memory.descriptor is not None
        return self._memory.descriptor

    @property
    def seen(self) -> bool:
        """Whether somebody has opened it."""
        return self._words[SEEN] != 0

    def sign(self, note: bytes) -> None:
        """Leaves a note beside the parameters, once; one that is too long is left out."""
        if note and len(note) <= NOTE_BYTES and not self._words[NOTE]:
            self._memory.data[: len(note)].copy_(_tensor(note))
            self._words[NOTE] = len(note)

    @property
    def note(self) -> bytes:
        """What `sign` has left; nothing if nothing was."""
        return bytes(tensor_bytes(self._memory.data[: min(self._words[NOTE], NOTE_BYTES)]))

    def publish(
        self, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor], stamp: ParameterVersion
    ) -> None:
        """What is given now is the newest. Blocks as long as the copy takes. ValueError, with the newest as it was, for
        a buffer whose shape has changed."""
        slot = 1 if self._words[NEWEST] == 1 else 0
        views, shown = self._slots[slot]
        for name, view in shown.items():
            if name not in buffers or buffers[name].shape != view.shape:
                raise ValueError(f"buffer {name} is not what it was in job.prepare()")
        self._words[slot] |= 1
        for view, parameter in zip(views, parameters, strict=True):
            view.copy_(parameter.detach())
        for name, view in shown.items():
            view.copy_(buffers[name].detach())
        at = STAMPS + STAMP_WORDS * slot
        for place, value in enumerate((stamp.step, stamp.round, stamp.local_step)):
            self._words[at + place] = 0 if value is None else value + 1
        self._words[slot] += 1
        self._words[NEWEST] = slot + 1

    def newest(self) -> ParameterVersion | None:
        """Of which moment the newest is; None if there is none, or the writer was faster."""
        return self.read([], {})

    def read(self, parameters: Sequence[torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> ParameterVersion | None:
        """Copies the newest into these tensors, of the shapes that are shown: the parameters, or none of them, and the
        buffers that are named. None if there is none yet, or none could be had whole; then they are worth nothing."""
        for _ in range(TRIES):
            newest = self._words[NEWEST]
            if newest not in (1, 2):
                return None
            slot = newest - 1
            before = self._words[slot]
            if not before & 1:
                stamp = self._stamp(slot)
                views, shown = self._slots[slot]
                for parameter, view in zip(parameters, views, strict=False):
                    parameter.copy_(view)
                for name, buffer in buffers.items():
                    buffer.copy_(shown[name])
                if self._words[slot] == before:
                    return stamp
            time.sleep(0)
        return None

    def _stamp(self, slot: int) -> ParameterVersion:
        at = STAMPS + STAMP_WORDS * slot
        step, number, local_step = (self._words[at + place] for place in range(3))
        return ParameterVersion(
            step=max(0, step - 1),
            round=number - 1 if number else None,
            local_step=local_step - 1 if local_step else None,
        )

    def close(self) -> None:
        """Gives the descriptor back; what is mapped stays, here and there."""
        self._memory.close()


def _views(memory: BlockMemory, at: int, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """Each tensor's place, in the order of its own memory if it fills it, so that a copy is one stretch."""
    views = []
    for tensor in tensors:
        flat = memory.tensor(at, tensor.numel(), tensor.dtype)
        dense = is_dense(tensor) and tensor.numel()
        views.append(flat.as_strided(tensor.shape, tensor.stride()) if dense else flat.view(tensor.shape))
        at += _aligned(tensor.numel() * tensor.element_size())
    return views, at


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _compare(mine: list[list[Any]], theirs: list[list[Any]]) -> None:
    absent = ["nothing", "", ""]
    for number in range(max(len(mine), len(theirs))):
        here = mine[number][:4] if number < len(mine) else absent
        there = theirs[number][:4] if number < len(theirs) else absent
        if here != there:
            raise Mismatch(
                f"the models differ: the predictor has {here[0]} {here[1]} {here[2]} where the workers have {there[0]} "
                f"{there[1]} {there[2]}. Every process must build the same model"
            )
