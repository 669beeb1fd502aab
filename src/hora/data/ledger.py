"""Ledger: the seam that says who computes which samples of an epoch.

An epoch is an order of the samples, cut into global batches; a worker's part of one is a portion. Dealt to three:

    order           5 2 9 7 | 0 4 8 1 | 6 3         depends on seed and epoch alone
    global batch       0    |    1    |  2          the same samples for any number of workers
    rank 0          5 2     | 0 4     | 6           sizes differ by at most one, in order of rank;
    rank 1              9   |     8   |   3         rank 2 has no samples in the last one: it is absent
    rank 2                7 |       1 |
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Iterator

import torch


@dataclasses.dataclass(frozen=True)
class Portion:
    """This worker's part of one global batch: samples [start + offset, start + offset + mine) of the epoch's order."""

    batch: int  # which global batch of the epoch
    start: int  # where it begins in the epoch's order
    mine: int  # how many of its samples are this worker's
    total: int  # how many it has, all workers together
    offset: int  # where this worker's begin in it
    size: int  # among how many workers it is divided

    @classmethod
    def deal(cls, batch: int, start: int, total: int, rank: int, size: int) -> Portion:
        """Evenly and contiguously, in order of rank: the first `total % size` ranks have one sample more."""
        share, more = divmod(total, size)
        return cls(batch, start, share + (rank < more), total, rank * share + min(rank, more), size)

    @property
    def present(self) -> int:
        """How many workers have samples in this batch: ranks 0 to present - 1."""
        return min(self.total, self.size)

    @property
    def whole(self) -> bool:
        """Nobody is absent."""
        return self.present == self.size


@dataclasses.dataclass(frozen=True)
class View:
    """A ledger at one moment: of all workers, and what this one holds. Made to be printed.

    Every batch is done, leased (taken, its step not over) or pending. `num_pending` and `num_samples` are None for a
    stream, whose end nobody knows.
    """

    rank: int
    size: int
    num_done: int
    num_leased: int
    num_pending: int | None
    samples_done: int
    num_samples: int | None
    held: tuple[Portion, ...]

    def __str__(self) -> str:
        if self.num_pending is None:
            batches, samples = f"{self.num_done}", f"{self.samples_done}"
            rest = "the stream's end is not known"
        else:
            batches = f"{self.num_done} of {self.num_done + self.num_leased + self.num_pending}"
            samples = f"{self.samples_done} of {self.num_samples}"
            rest = f"{self.num_pending} pending"
        if self.held:
            numbers = ", ".join(str(portion.batch) for portion in self.held)
            holds = f"{sum(portion.mine for portion in self.held)} samples, of batch {numbers}"
        else:
            holds = "nothing"
        return (
            f"all workers: {batches} batches done, {self.num_leased} leased, {rest}; {samples} samples done\n"
            f"rank {self.rank} of {self.size} holds {holds}"
        )


class Ledger(abc.ABC):
    """One epoch's account of who computes what. Every worker has its own end of it, used by the loop's thread only.

    Each sample is in exactly one portion that gets done, whoever does it.
    """

    @abc.abstractmethod
    def take(self) -> Portion | None:
        """The next part for this worker, None at the end of the epoch. May be called ahead of time, by prefetching.

        May block: to read a stream, or to ask for a lease."""

    @abc.abstractmethod
    def done(self, portion: Portion) -> None:
        """The step of a portion that was taken is over. Saying so again changes nothing."""

    @abc.abstractmethod
    def release(self) -> None:
        """This worker takes no more: what it took and did not do is pending again."""

    @abc.abstractmethod
    def view(self) -> View:
        """Where the epoch stands."""


class _Lockstep(Ledger):
    """All workers go through the same global batches together, so each can keep the account alone: nothing is sent."""

    def __init__(self, rank: int, size: int, begin: int, start: int) -> None:
        self._rank = rank
        self._size = size
        self._next = begin
        self._start = start
        self._held: dict[int, Portion] = {}

    @abc.abstractmethod
    def _total(self) -> int | None:
        """How many samples the next global batch has; None if there is none."""

    def take(self) -> Portion | None:
        total = self._total()
        if total is None:
            return None
        portion = Portion.deal(self._next, self._start, total, self._rank, self._size)
        self._held[portion.batch] = portion
        self._next += 1
        self._start += total
        return portion

    def done(self, portion: Portion) -> None:
        self._held.pop(portion.batch, None)

    def release(self) -> None:
        if self._held:
            first = next(iter(self._held.values()))
            self._next, self._start = first.batch, first.start
            self._held.clear()

    def _view(self, num_batches: int | None, num_samples: int | None) -> View:
        held = tuple(self._held.values())
        return View(
            rank=self._rank,
            size=self._size,
            num_done=self._next - len(held),
            num_leased=len(held),
            num_pending=None if num_batches is None else num_batches - self._next,
            samples_done=self._start - sum(portion.total for portion in held),
            num_samples=num_samples,
            held=held,
        )


class Dealt(_Lockstep):
    """The k-th global batch is the k-th `global_batch` samples of the order, dealt evenly.

    Which samples it has does not depend on the number of workers. Every sample is dealt once: no padding, no
    duplicates. The last batch is shorter, or left out with `drop_last`. `begin` is the first batch to deal; those
    before it are done. Nothing blocks.
    """

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
                f"batch {begin} of the epoch is to come next, but it has only {self.num_batches}: "
                "go on with the dataset and the global batch size that the state was saved with"
            )
        super().__init__(rank, size, begin, min(begin * global_batch, self.num_samples))
        self._global_batch = global_batch

    def _total(self) -> int | None:
        return min(self._global_batch, self.num_samples - self._start) or None

    def view(self) -> View:
        return self._view(self.num_batches, self.num_samples)


class Streamed(_Lockstep):
    """Global batches of a stream that every worker reads, dealt evenly as they come.

    `totals` gives the size of each; `take` blocks as long as it does. `begin` of them are passed over: they are done.
    """

    def __init__(
        self, totals: Iterator[int], global_batch: int, *, rank: int = 0, size: int = 1, begin: int = 0
    ) -> None:
        super().__init__(rank, size, begin, begin * global_batch)
        self._totals = totals
        self._to_pass = begin

    def _total(self) -> int | None:
        if self._to_pass:
            passed = list(itertools.islice(self._totals, self._to_pass))
            if len(passed) < self._to_pass:
                raise ValueError(
                    f"batch {self._to_pass} of the stream is to come next, but it ended after {len(passed)}: "
                    "go on with the stream and the global batch size that the state was saved with"
                )
            self._to_pass, self._start = 0, sum(passed)
        return next(self._totals, None)

    def release(self) -> None:
        super().release()
        self._totals = iter(())  # lets go of the reader, and of its process

    def view(self) -> View:
        return self._view(None, None)


def num_batches(num_samples: int, global_batch: int, drop_last: bool) -> int:
    """Into how many global batches an epoch is cut."""
    return num_samples // global_batch if drop_last else -(-num_samples // global_batch)


def order(num_samples: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """The numbers of an epoch's samples in the order in which they are dealt; depends on seed and epoch alone."""
    if not shuffle:
        return torch.arange(num_samples, device="cpu")
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    return torch.randperm(num_samples, generator=generator, device="cpu")


def mix(*numbers: int) -> int:
    """A seed out of several numbers: neighbours of any of them give unrelated ones, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
