"""LoaderCallbacks that record what a loader calls, and ranks that iterate one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hora.data import BatchSlice, Shard, shard


class Recorder:
    """A callbacks that records every call as (verb, what it was about)."""

    def __init__(self, rank: int = 0, size: int = 1, board: list[torch.Tensor] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.calls: list[tuple[str, Any]] = []
        self.now: int | None = None
        self.trains = True
        self.stop_before: int | None = None
        self.passed: set[int] = set()  # batches that the others are past
        self._asked = 0
        self._board = board if board is not None else []  # what rank 0 shared, epoch by epoch
        self._shared = 0

    def epoch(self) -> int | None:
        return self.now

    def training(self, loader: Shard) -> bool:
        return self.trains

    def stopped(self, loader: Shard) -> bool:
        self._asked += 1
        return self.stop_before is not None and self._asked > self.stop_before

    def enter(self, loader: Shard) -> None:
        self._asked = 0
        self.calls.append(("enter", loader))

    def begin(self, loader: Shard, portion: BatchSlice) -> None:
        self.calls.append(("begin", portion.batch))

    def finish(self, loader: Shard, portion: BatchSlice) -> None:
        self.calls.append(("finish", portion.batch))

    def passes(self, loader: Shard, portion: BatchSlice) -> bool:
        return portion.batch in self.passed

    def absent(self, loader: Shard, portion: BatchSlice) -> None:
        self.calls.append(("absent", portion.batch))

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        self.calls.append(("leave", finished))

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self._board.append(indices)
        self._shared += 1
        return self._board[self._shared - 1]

    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


class SingleWorkerCallbacks:
    """The callbacks of a single worker."""

    rank = 0
    size = 1

    def epoch(self) -> int | None:
        return None

    def training(self, loader: Shard) -> bool:
        return True

    def stopped(self, loader: Shard) -> bool:
        return False

    def enter(self, loader: Shard) -> None:
        pass

    def begin(self, loader: Shard, portion: BatchSlice) -> None:
        pass

    def finish(self, loader: Shard, portion: BatchSlice) -> None:
        pass

    def passes(self, loader: Shard, portion: BatchSlice) -> bool:
        return False

    def absent(self, loader: Shard, portion: BatchSlice) -> None:
        pass

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        pass

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        return indices


def ranks(size: int, make_data: Callable[[], Any], **options: Any) -> list[Shard]:
    """One loader per rank of `size`; rank 0 must be iterated first where a sampler draws."""
    board: list[torch.Tensor] = []
    return [shard(make_data(), Recorder(rank, size, board), **options) for rank in range(size)]


def global_batches(loaders: list[Shard]) -> list[list[int]]:
    """The samples of every global batch of one epoch, all ranks put together in order of rank."""
    batches: dict[int, list[int]] = {}
    for loader in loaders:
        callbacks = loader._callbacks
        for batch in loader:
            number = callbacks.calls[-1][1]  # type: ignore[attr-defined]
            batches.setdefault(number, []).extend(batch.tolist())
    return [batches[number] for number in sorted(batches)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


class Numbers(Dataset[int]):
    """Sample i is i; `length` may change."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


class Count(IterableDataset[int]):
    """A stream 0, 1, … that nobody knows the length of; counts how often it was read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.times_read = 0

    def __iter__(self) -> Any:
        self.times_read += 1
        return iter(range(self.length))


class SizedCount(Count):
    def __len__(self) -> int:
        return self.length
