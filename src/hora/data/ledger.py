"""Ledger: which worker computes which samples of an epoch. Dealt and Streamed divide every global batch evenly.

An epoch is an order of the samples, cut into global batches; a worker's part of one is a BatchSlice. Among three:

    order           5 2 9 7 | 0 4 8 1 | 6 3         depends on seed and epoch alone
    global batch       0    |    1    |  2          the same samples for any number of workers
    rank 0          5 2     | 0 4     | 6           sizes differ by at most one, in order of rank;
    rank 1              9   |     8   |   3         rank 2 has no samples in the last one: it is absent
    rank 2                7 |       1 |

Where workers do not step together, the same order is cut into blocks of one worker's batch, which the coordinator
leases to the workers one at a time (leased.py):

    order           5 2 | 9 7 | 0 4 | 8 1 | 6 3
    block            0  |  1  |  2  |  3  |  4
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """This worker's part of one global batch: samples [start + offset, start + offset + mine) of the epoch's order."""

    batch: int  # the number of the global batch in the epoch
    start: int  # of the global batch in the epoch's order
    mine: int  # samples of this worker
    total: int  # samples of all workers
    offset: int  # of this worker's samples in the global batch
    size: int  # the number of workers among whom it is divided

    @classmethod
    def deal(cls, batch: int, start: int, total: int, rank: int, size: int) -> BatchSlice:
        """Evenly and contiguously, in order of rank: the first `total % size` ranks have one sample more."""
        share, more = divmod(total, size)
        return cls(batch, start, share + (rank < more), total, rank * share + min(rank, more), size)

    @property
    def present(self) -> int:
        """The number of workers that have samples in this batch: ranks 0 to present - 1."""
        return min(self.total, self.size)

    @property
    def whole(self) -> bool:
        """Whether every worker has samples in it."""
        return self.present == self.size

    @property
    def weight(self) -> float:
        """The weight of this worker's mean in the mean over all workers; 1 if the batch is divided evenly."""
        return self.mine * self.size / self.total


@dataclasses.dataclass(frozen=True)
class LedgerView:
    """A snapshot of a ledger, to be printed: the counts of all workers, and what this one holds.

    Every batch is done, leased (taken, its step not over) or pending. `num_pending` and `num_samples` are None for a
    stream, whose length is not known.
    """

    rank: int
    size: int
    num_done: int
    num_leased: int
    num_pending: int | None
    samples_done: int
    num_samples: int | None
    held: tuple[BatchSlice, ...]

    def __str__(self) -> str:
        if self.num_pending is None:
            batches, samples = f"{self.num_done}", f"{self.samples_done}"
            rest = "the length of the stream is not known"
        else:
            batches = f"{self.num_done} of {self.num_done + self.num_leased + self.num_pending}"
            samples = f"{self.samples_done} of {self.num_samples}"
            rest = f"{self.num_pending} pending"
        if self.held:
            numbers = ", ".join(str(batch_slice.batch) for batch_slice in self.held)
            holds = f"{sum(batch_slice.mine for batch_slice in self.held)} samples, of batch {numbers}"
        else:
            holds = "nothing"
        return (
            f"all workers: {batches} batches done, {self.num_leased} leased, {rest}; {samples} samples done\n"
            f"rank {self.rank} of {self.size} holds {holds}"
        )


class Ledger(abc.ABC):
    """One worker's view of one epoch. Used by the loop's thread only. Each sample is computed by exactly one worker."""

    @abc.abstractmethod
    def take(self) -> BatchSlice | None:
        """This worker's next slice, None at the end of the epoch. Prefetching calls it ahead of time.

        May block: to read a stream, or for the reply to a lease request."""

    def begin(self, batch_slice: BatchSlice) -> bool:
        """The user's code is about to get the batch; False if another worker has taken it over: skip it."""
        return True

    @abc.abstractmethod
    def done(self, batch_slice: BatchSlice) -> None:
        """The step of this slice is over. Idempotent."""

    @abc.abstractmethod
    def release(self) -> None:
        """This worker takes no more: slices that it took and did not finish are pending again."""

    @abc.abstractmethod
    def view(self) -> LedgerView: ...


class _Lockstep(Ledger):
    """All workers go through the same global batches together, so each keeps its own account and sends nothing."""

    num_batches: int | None = None  # of the epoch; None: not known
    num_samples: int | None = None

    def __init__(self, rank: int, size: int, begin: int, start: int) -> None:
        self._rank = rank
        self._size = size
        self._next = begin
        self._start = start
        self._held: dict[int, BatchSlice] = {}

    @abc.abstractmethod
    def _total(self) -> int | None:
        """The size of the next global batch; None if there is none."""

    def take(self) -> BatchSlice | None:
        total = self._total()
        if total is None:
            return None
        batch_slice = BatchSlice.deal(self._next, self._start, total, self._rank, self._size)
        self._held[batch_slice.batch] = batch_slice
        self._next += 1
        self._start += total
        return batch_slice

    def done(self, batch_slice: BatchSlice) -> None:
        self._held.pop(batch_slice.batch, None)

    def release(self) -> None:
        if self._held:
            first = next(iter(self._held.values()))
            self._next, self._start = first.batch, first.start
            self._held.clear()

    def view(self) -> LedgerView:
        held = tuple(self._held.values())
        return LedgerView(
            rank=self._rank,
            size=self._size,
            num_done=self._next - len(held),
            num_leased=len(held),
            num_pending=None if self.num_batches is None else self.num_batches - self._next,
            samples_done=self._start - sum(batch_slice.total for batch_slice in held),
            num_samples=self.num_samples,
            held=held,
        )


class Dealt(_Lockstep):
    """The k-th global batch is the k-th `global_batch` samples of the order, divided evenly.

    Its samples do not depend on the number of workers. No padding, no duplicates: the last batch is shorter, or left
    out with `drop_last`. Batches before `begin` are done. Nothing blocks.
    """

    num_batches: int
    num_samples: int

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        *,
        rank: int = 0,
        size: int = 1,
        drop_last: bool = False,
        begin: int = 0,
    ) -> None:
        self.num_batches = num_batches(num_samples, global_batch, drop_last)
        self.num_samples = min(num_samples, self.num_batches * global_batch)
        if begin > self.num_batches:
            raise ValueError(
                f"the state resumes at batch {begin} of the epoch, but it has only {self.num_batches}: "
                "restore with the dataset and the global batch size that the state was saved with"
            )
        super().__init__(rank, size, begin, min(begin * global_batch, self.num_samples))
        self._global_batch = global_batch

    def _total(self) -> int | None:
        return min(self._global_batch, self.num_samples - self._start) or None


class Streamed(_Lockstep):
    """Global batches of a stream that every worker reads, divided evenly as they come.

    `totals` yields the size of each; `take` blocks as long as it does. The first `begin` batches are done: skipped.
    """

    def __init__(
        self, totals: Iterator[int], global_batch: int, *, rank: int = 0, size: int = 1, begin: int = 0
    ) -> None:
        super().__init__(rank, size, begin, begin * global_batch)
        self._totals = totals
        self._to_skip = begin

    def _total(self) -> int | None:
        if self._to_skip:
            skipped = list(itertools.islice(self._totals, self._to_skip))
            if len(skipped) < self._to_skip:
                raise ValueError(
                    f"the state resumes at batch {self._to_skip} of the stream, but it ended after {len(skipped)}: "
                    "restore with the stream and the global batch size that the state was saved with"
                )
            self._to_skip, self._start = 0, sum(skipped)
        return next(self._totals, None)

    def release(self) -> None:
        super().release()
        self._totals = iter(())  # drops the reader, and its process


def num_batches(num_samples: int, global_batch: int, drop_last: bool) -> int:
    """The number of global batches in an epoch."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """The indices of an epoch's samples in order; depends on seed and epoch only."""
    if not shuffle:
        return torch.arange(num_samples, device="cpu")
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator, device="cpu")


def mix(*numbers: int) -> int:
    """A seed from several numbers, the same on every machine. Neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
