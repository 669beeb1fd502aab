"""Sources: where a predictor's parameters come from.

    FromShowcases     what workers show: the newest of it
    FromServers       parameters as they lie with the servers, the rest as rank 0 shows it
    FromCheckpoint    what a run has saved; it never changes

Each reads into a staging set first, and gives it to the model only if it is whole and finite. The memory is mapped, so
nobody is asked and nobody waits; and it stays readable after its owner's end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .. import checkpoint
from ..errors import HoraError
from ..parameters.registry import ParameterRegistry
from ..server.block_memory import BlockMemory
from ..server.layout import BlockLayout
from ..server.shelf import WORD, views
from ..training.checkpointing import BUFFER_PREFIX
from .snapshot_buffer import SnapshotBuffer
from .source import ParameterVersion
from .staging import StagedParameters

READ_S = 0.02  # how long a reader of servers tries to meet them at rest


class SnapshotSource:
    """The newest of what workers show: the later round, within it the later local step, else the later step."""

    def __init__(self, roster: ParameterRegistry, showcases: Sequence[SnapshotBuffer]) -> None:
        self._staging = StagedParameters(roster)
        self._showcases = list(showcases)
        self._held: ParameterVersion | None = None
        self._refused: dict[int, ParameterVersion] = {}  # what was not finite, by its showcase's place

    def add(self, showcase: SnapshotBuffer) -> None:
        """One more worker shows something. Thread-safe."""
        self._showcases.append(showcase)

    def refresh(self) -> ParameterVersion | None:
        cases = list(enumerate(self._showcases))
        found = [(stamp, number, case) for number, case in cases if (stamp := case.newest()) is not None]
        for stamp, number, case in sorted(found, key=lambda each: _order(each[0]), reverse=True):
            if not self._is_news(stamp) or stamp == self._refused.get(number):
                continue
            read = case.read(self._staging.parameters, self._staging.buffers)
            if read is None or not self._is_news(read):
                continue
            if self._staging.is_finite():
                self._staging.load()
                self._held = read
                break
            self._refused[number] = read
        return self._held

    def _is_news(self, stamp: ParameterVersion) -> bool:
        return self._held is None or (_order(stamp) > _order(self._held) and stamp.step >= self._held.step)

    def close(self) -> None:
        for showcase in self._showcases:
            showcase.close()


def _order(stamp: ParameterVersion) -> tuple[int, int, int]:
    return stamp.round or 0, stamp.local_step or 0, stamp.step


class ServerSource:
    """`together`: the servers take steps as one, and all blocks must be of the same. Else each block is whole, and the
    stamp is the lowest of their versions with the spread. As soon as one block was updated, those that never were, as
    those of a layer that gets no gradients, do not count; should one begin late, the step stays until it has come as
    far.

    Buffers, and parameters that no optimizer has, are those that rank 0 shows, which may be a little older. If all
    blocks of one step cannot be had in time, what rank 0 shows is taken instead, if it is newer.
    """

    def __init__(
        self,
        roster: ParameterRegistry,
        layout: BlockLayout,
        memories: Sequence[BlockMemory],
        showcase: SnapshotBuffer,
        together: bool,
    ) -> None:
        self._staging = StagedParameters(roster)
        self._layout = layout
        self._memories = memories
        self._showcase = showcase
        self._together = together
        self._served = sorted(layout.served)
        self._idle = [index for index in range(len(roster.parameters)) if index not in layout.served]
        dtypes = [parameter.dtype for parameter in roster.parameters]
        self._blocks = [
            [
                (block, source, self._staging.vector(block.index)[block.start : block.stop])
                for parcel, shown in zip(part.parcels, views(memory, part, dtypes), strict=True)
                for block, source in zip(parcel.blocks, shown, strict=True)
            ]
            for part, memory in zip(layout.parts, memories, strict=True)
        ]
        self._trained = {index for index in self._served if roster.parameters[index].requires_grad}
        self._held: ParameterVersion | None = None
        self._bases: list[int] = []  # the steps at which the servers got what the last stamp counts from
        self._seen: list[list[int]] = []  # the servers' words when they were read last
        self._shown: ParameterVersion | None = None  # what was last taken from rank 0

    def refresh(self) -> ParameterVersion | None:
        self._look_at_showcase()
        if self._shown is None:
            return None
        words = [list(memory.moment[:1] if self._together else memory.words) for memory in self._memories]
        if words == self._seen:
            return self._held
        stamp = self._read_step() if self._together else self._read_blocks()
        if stamp is None:
            self._fall_back()
        elif self._held is None or stamp.step >= self._held.step:
            self._seen = words
            if self._staging.is_finite(self._served, buffers=False):
                self._staging.load(self._served, buffers=False)
                self._held = stamp
        return self._held

    def _look_at_showcase(self) -> None:
        """What no server has."""
        newest = self._showcase.newest()
        if newest is None or newest == self._shown:
            return
        read = self._showcase.read(self._staging.parameters, self._staging.buffers)
        if read is not None and self._staging.is_finite(self._idle):
            self._staging.load(self._idle)
            self._shown = read

    def _fall_back(self) -> None:
        """To the whole model as rank 0 shows it; only where servers step together it counts as they do."""
        newest = self._showcase.newest()
        if not self._together or newest is None or (self._held is not None and newest.step <= self._held.step):
            return
        read = self._showcase.read(self._staging.parameters, self._staging.buffers)
        if read is not None and self._staging.is_finite():
            self._staging.load()
            self._held = self._shown = read

    def _read_step(self) -> ParameterVersion | None:
        """All blocks of one step: every server at rest, at the same moment, before and after."""
        deadline = time.monotonic() + READ_S
        while True:
            before = [memory.moment[0] for memory in self._memories]
            if before[0] and not before[0] & 1 and len(set(before)) == 1:
                step = self._memories[0].moment[1]
                for blocks in self._blocks:
                    for _, source, target in blocks:
                        target.copy_(source)
                if [memory.moment[0] for memory in self._memories] == before:
                    return ParameterVersion(step)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0)

    def _read_blocks(self) -> ParameterVersion | None:
        versions, moved = [], []
        bases = [memory.moment[1] for memory in self._memories]
        for memory, blocks, base in zip(self._memories, self._blocks, bases, strict=True):
            for block, source, target in blocks:
                version = _read_whole(memory, block.number, source, target)
                if version is None:
                    return None
                if block.index in self._trained:
                    versions.append(version)
                    if version != base:
                        moved.append(version)
        lowest = min(moved or versions, default=0)
        if self._held is not None and bases == self._bases:
            lowest = max(lowest, self._held.step)
        self._bases = bases
        return ParameterVersion(lowest, spread=max(0, max(versions, default=0) - lowest))

    def close(self) -> None:
        self._showcase.close()


def _read_whole(memory: BlockMemory, number: int, source: torch.Tensor, target: torch.Tensor) -> int | None:
    """Copies one block and gives its version, counted from the job's step 0; None if none is there, or it is being
    written for too long, by a server that has died perhaps."""
    deadline = time.monotonic() + READ_S
    while True:
        before = memory.words[number]
        if before and not before & 1:
            origin = memory.origins[number]
            target.copy_(source)
            if memory.words[number] == before:
                return (before // 2 - origin) & WORD
        if time.monotonic() >= deadline:
            return None
        time.sleep(0)


class CheckpointSource:
    """A saved model. HoraError if it is another than this one."""

    def __init__(self, roster: ParameterRegistry, found: checkpoint.Checkpoint) -> None:
        saved = found.tensors("model")
        staging = StagedParameters(roster)
        targets = dict(zip(roster.names, staging.parameters, strict=True))
        for name, target in {
            **targets,
            **{BUFFER_PREFIX + name: buffer for name, buffer in staging.buffers.items()},
        }.items():
            told = name.removeprefix(BUFFER_PREFIX)
            if name not in saved and name in targets:
                raise HoraError(f"{found.path} has no {told}: it is of another model")
            if name not in saved:
                target.copy_(roster.buffers[told])  # one that is not kept: the script's own
                continue
            if saved[name].shape != target.shape:
                raise HoraError(
                    f"{told} has shape {list(saved[name].shape)} in {found.path} and {list(target.shape)} here: it is "
                    "of another model"
                )
            target.copy_(saved[name])
        staging.load()
        self._stamp = ParameterVersion(found.step)

    def refresh(self) -> ParameterVersion | None:
        return self._stamp

    def close(self) -> None:
        """Nothing is held."""
