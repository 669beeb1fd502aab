"""Parameter sources: where the predictor's parameters come from.

    SnapshotSource     the newest of the workers' snapshot buffers
    ServerSource       the parameter servers' own memory; what no server has comes from rank 0's snapshot buffer
    CheckpointSource   a saved model; it never changes

Each reads into a second set of tensors first, and the model gets it only if it is whole and finite. The memory is
mapped, so no process is asked or waited for, and it stays readable after its owner has exited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from ..checkpoint import Checkpoint
from ..errors import HoraError
from ..parameters.registry import ParameterRegistry
from ..parameters.shards import flatten, is_dense
from ..server.block_memory import UINT64_MASK, BlockMemory
from ..server.layout import BlockLayout
from ..strategies.common.nonfinite import is_finite
from ..training.checkpointing import BUFFER_PREFIX
from .snapshot_buffer import ParameterVersion, SnapshotBuffer

READ_S = 0.02  # how long a reader waits for servers to finish an update


class ParameterSource(Protocol):
    """Called on the batcher's thread between two batches, so that every batch sees one version."""

    def refresh(self) -> ParameterVersion | None:
        """Load the newest complete and finite parameters into the model; their version, or None if there are none."""

    def close(self) -> None: ...


class StagedParameters:
    """A copy of a model's tensors on the CPU, checked before it is loaded into the model. Buffers that were not finite
    from the start, such as a mask of -inf, are not checked."""

    def __init__(self, registry: ParameterRegistry) -> None:
        self._registry = registry
        self.parameters = [_empty_like(parameter) for parameter in registry.parameters]
        self.buffers = {
            name: torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
            for name, buffer in registry.buffers.items()
        }
        self._checked = [self.buffers[name] for name, buffer in registry.buffers.items() if is_finite(buffer.detach())]

    def load(self, indices: Collection[int] | None = None, buffers: bool = True) -> bool:
        """Load these parameters (None: all), and the buffers, into the model; False, without a change, if a value is
        not finite."""
        chosen = range(len(self.parameters)) if indices is None else indices
        checked = [*(self.parameters[index] for index in chosen), *(self._checked if buffers else ())]
        if not all(map(is_finite, checked)):
            return False
        with torch.no_grad():
            for index in chosen:
                self._registry.parameters[index].copy_(self.parameters[index])
            if buffers:
                self._registry.refresh_buffers()
                for name, buffer in self._registry.buffers.items():
                    if name in self.buffers:
                        buffer.copy_(self.buffers[name])
        return True


def _empty_like(parameter: torch.Tensor) -> torch.Tensor:
    if is_dense(parameter):
        return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")


class SnapshotSource:
    """The newest of several snapshot buffers: the later round, within it the later local step, else the later step."""

    def __init__(self, registry: ParameterRegistry, snapshots: Sequence[SnapshotBuffer]) -> None:
        self._staged = StagedParameters(registry)
        self._snapshots = list(snapshots)
        self._loaded: ParameterVersion | None = None
        self._nonfinite: dict[int, ParameterVersion] = {}  # by the number of the buffer

    def add(self, snapshot: SnapshotBuffer) -> None:
        """Thread-safe."""
        self._snapshots.append(snapshot)

    def refresh(self) -> ParameterVersion | None:
        found = [(snapshot.newest(), number) for number, snapshot in enumerate([*self._snapshots])]
        newer = [(version, number) for version, number in found if version is not None and self._is_newer(version)]
        for version, number in sorted(newer, key=lambda each: _order(each[0]), reverse=True):
            if version == self._nonfinite.get(number):
                continue
            read = self._snapshots[number].read(self._staged.parameters, self._staged.buffers)
            if read is None or not self._is_newer(read):
                continue
            if self._staged.load():
                self._loaded = read
                break
            self._nonfinite[number] = read
        return self._loaded

    def _is_newer(self, version: ParameterVersion) -> bool:
        loaded = self._loaded
        return loaded is None or (_order(version) > _order(loaded) and version.step >= loaded.step)

    def close(self) -> None:
        for snapshot in self._snapshots:
            snapshot.close()


def _order(version: ParameterVersion) -> tuple[int, int, int]:
    return version.round or 0, version.local_step or 0, version.step


class ServerSource:
    """With `sync`, servers step together, and all blocks must be of one step. Otherwise each block is whole, and the
    version is the oldest block's, with the spread. Blocks without any update (of a layer that gets no gradients) do not
    count once another block has one; if such a block starts late, `step` stays until it has caught up.

    Buffers, and parameters without an optimizer, come from rank 0's snapshot and may be a little older. If blocks of
    one step cannot be read in time, the whole snapshot is used instead, if it is newer.
    """

    def __init__(
        self, registry: ParameterRegistry, layout: BlockLayout, memories: Sequence[BlockMemory],
        snapshot: SnapshotBuffer, sync: bool,
    ) -> None:  # fmt: skip
        self._staged = StagedParameters(registry)
        self._memories = memories
        self._snapshot = snapshot
        self._sync = sync
        self._served = sorted(layout.served)
        self._unserved = [index for index in range(len(registry.parameters)) if index not in layout.served]
        self._trained = {index for index in self._served if registry.parameters[index].requires_grad}
        dtypes = [parameter.dtype for parameter in registry.parameters]
        self._blocks = [
            [
                (block, source, flatten(self._staged.parameters[block.index])[block.start : block.stop])
                for chunk, sources in zip(part.chunks, memory.block_views(part, dtypes), strict=True)
                for block, source in zip(chunk.blocks, sources, strict=True)
            ]
            for part, memory in zip(layout.parts, memories, strict=True)
        ]
        self._loaded: ParameterVersion | None = None
        self._from_snapshot: ParameterVersion | None = None  # the version last taken from rank 0's snapshot
        self._bases: list[int] = []  # the steps at which the servers' versions begin, at the last read
        self._counters: list[list[int]] = []  # the servers' seqlock counters at the last read

    def refresh(self) -> ParameterVersion | None:
        if self._snapshot.newest() not in (None, self._from_snapshot):
            self._load_snapshot(self._unserved)
        if self._from_snapshot is None:
            return None
        counters = [list(memory.step_seqlock[:1] if self._sync else memory.counters) for memory in self._memories]
        if counters == self._counters:
            return self._loaded
        version = self._read_step() if self._sync else self._read_blocks()
        if version is None:
            newest = self._snapshot.newest()
            if self._sync and newest is not None and (self._loaded is None or newest.step > self._loaded.step):
                self._loaded = self._load_snapshot() or self._loaded
        elif self._loaded is None or version.step >= self._loaded.step:
            self._counters = counters
            if self._staged.load(self._served, buffers=False):
                self._loaded = version
        return self._loaded

    def _load_snapshot(self, indices: Collection[int] | None = None) -> ParameterVersion | None:
        read = self._snapshot.read(self._staged.parameters, self._staged.buffers)
        if read is None or not self._staged.load(indices):
            return None
        self._from_snapshot = read
        return read

    def _read_step(self) -> ParameterVersion | None:
        def copy() -> int:
            step = self._memories[0].step_seqlock[1]
            for blocks in self._blocks:
                for _, source, target in blocks:
                    target.copy_(source)
            return step

        found = _read_stable(lambda: [memory.step_seqlock[0] for memory in self._memories], copy)
        return ParameterVersion(found[1]) if found else None

    def _read_blocks(self) -> ParameterVersion | None:
        versions, updated = [], []
        bases = [memory.step_seqlock[1] for memory in self._memories]
        for memory, blocks, base in zip(self._memories, self._blocks, bases, strict=True):
            for block, source, target in blocks:
                version = _read_block(memory, block.number, source, target)
                if version is None:
                    return None
                if block.index in self._trained:
                    versions.append(version)
                    if version != base:
                        updated.append(version)
        oldest = min(updated or versions, default=0)
        if self._loaded is not None and bases == self._bases:
            oldest = max(oldest, self._loaded.step)
        self._bases = bases
        return ParameterVersion(oldest, spread=max(0, max(versions, default=0) - oldest))

    def close(self) -> None:
        self._snapshot.close()


def _read_block(memory: BlockMemory, number: int, source: torch.Tensor, target: torch.Tensor) -> int | None:
    """Copy one block; its version, counted from the job's step 0. None as `_read_stable`."""

    def copy() -> int:
        origin = memory.origins[number]
        target.copy_(source)
        return origin

    found = _read_stable(lambda: [memory.counters[number]], copy)
    return (found[0] // 2 - found[1]) & UINT64_MASK if found else None


def _read_stable(counters: Callable[[], list[int]], copy: Callable[[], int]) -> tuple[int, int] | None:
    """Call `copy` until all seqlock counters are one even number, not 0, before and after; that number and the result
    of `copy`. None after READ_S, for a server that died while it wrote."""
    deadline = time.monotonic() + READ_S
    while True:
        before = counters()
        if before[0] and not before[0] & 1 and len(set(before)) == 1:
            result = copy()
            if counters() == before:
                return before[0], result
        if time.monotonic() >= deadline:
            return None
        time.sleep(0)


class CheckpointSource:
    """HoraError if the checkpoint is of another model. Buffers that are not in it stay as the script made them."""

    def __init__(self, registry: ParameterRegistry, checkpoint: Checkpoint) -> None:
        saved = checkpoint.tensors("model")
        targets: dict[str, torch.Tensor] = dict(zip(registry.names, registry.parameters, strict=True))
        buffers = {BUFFER_PREFIX + name: buffer for name, buffer in registry.buffers.items()}
        targets |= {name: buffer for name, buffer in buffers.items() if name in saved}
        for name, target in targets.items():
            if name not in saved:
                raise HoraError(f"{checkpoint.path} has no {name}: it was saved from another model")
            if saved[name].shape != target.shape:
                raise HoraError(
                    f"{name.removeprefix(BUFFER_PREFIX)} has shape {list(saved[name].shape)} in {checkpoint.path} and "
                    f"{list(target.shape)} here: the checkpoint was saved from another model"
                )
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(saved[name])
        self._version = ParameterVersion(checkpoint.step)

    def refresh(self) -> ParameterVersion | None:
        return self._version

    def close(self) -> None: ...
