"""Ledger: the seam that says who computes which samples of an epoch.

An epoch is an order of the samples, cut into global batches; a worker's part of one is a portion. Dealt to three:

    order           5 2 9 7 | 0 4 8 1 | 6 3         depends on seed and epoch alone
    global batch       0    |    1    |  2          the same samples for any number of workers
    rank 0          5 2     | 0 4     | 6           sizes differ by at most one, in order of rank;
    rank 1              9   |     8   |   3         rank 2 has no samples in the last one: it is absent
    rank 2                7 |       1 |

Or, where nobody waits for anybody, cut into blocks of one worker's batch, which the coordinator leases (its book.py):

    order           5 2 | 9 7 | 0 4 | 8 1 | 6 3     the same order
    block            0  |  1  |  2  |  3  |  4      whoever asks takes the next one
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..coordinator.messages import BlockName, EpochCut
from ..errors import HoraError, Timeout

if TYPE_CHECKING:
    from .service import LeaseClient

log = logging.getLogger(__name__)

POLL_S = 0.02  # how often a worker that waits for the others' blocks asks again
SLOW_S = 10.0  # after this long a wait is said aloud


@dataclasses.dataclass(frozen=True)
class BatchSlice:
    """This worker's part of one global batch: samples [start + offset, start + offset + mine) of the epoch's order."""

    batch: int  # which global batch of the epoch
    start: int  # where it begins in the epoch's order
    mine: int  # how many of its samples are this worker's
    total: int  # how many it has, all workers together
    offset: int  # where this worker's begin in it
    size: int  # among how many workers it is divided

    @classmethod
    def deal(cls, batch: int, start: int, total: int, rank: int, size: int) -> BatchSlice:
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

    @property
    def weight(self) -> float:
        """How much this worker's mean counts in the mean over those among whom the batch is divided; 1 if evenly."""
        return self.mine * self.size / self.total


@dataclasses.dataclass(frozen=True)
class LeasedBlock(BatchSlice):
    """A block that this worker has leased: a batch of its own, which it shares with nobody."""

    epoch: int
    loop: int  # which loop over the loader in that epoch
    num_samples: int  # of the epoch, as it was put in order

    @property
    def name(self) -> BlockName:
        return self.epoch, self.loop, self.batch


@dataclasses.dataclass(frozen=True)
class LedgerView:
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
    held: tuple[BatchSlice, ...]

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
    def take(self) -> BatchSlice | None:
        """The next part for this worker, None at the end of the epoch. May be called ahead of time, by prefetching.

        May block: to read a stream, or to ask for a lease."""

    def begin(self, portion: BatchSlice) -> bool:
        """Its batch is about to be handed to the user's code; False if another worker has taken it over: skip it."""
        return True

    @abc.abstractmethod
    def done(self, portion: BatchSlice) -> None:
        """The step of a portion that was taken is over. Saying so again changes nothing."""

    @abc.abstractmethod
    def release(self) -> None:
        """This worker takes no more: what it took and did not do is pending again."""

    @abc.abstractmethod
    def view(self) -> LedgerView:
        """Where the epoch stands."""


class _Lockstep(Ledger):
    """All workers go through the same global batches together, so each can keep the account alone: nothing is sent."""

    def __init__(self, rank: int, size: int, begin: int, start: int) -> None:
        self._rank = rank
        self._size = size
        self._next = begin
        self._start = start
        self._held: dict[int, BatchSlice] = {}

    @abc.abstractmethod
    def _total(self) -> int | None:
        """How many samples the next global batch has; None if there is none."""

    def take(self) -> BatchSlice | None:
        total = self._total()
        if total is None:
            return None
        portion = BatchSlice.deal(self._next, self._start, total, self._rank, self._size)
        self._held[portion.batch] = portion
        self._next += 1
        self._start += total
        return portion

    def done(self, portion: BatchSlice) -> None:
        self._held.pop(portion.batch, None)

    def release(self) -> None:
        if self._held:
            first = next(iter(self._held.values()))
            self._next, self._start = first.batch, first.start
            self._held.clear()

    def _view(self, num_batches: int | None, num_samples: int | None) -> LedgerView:
        held = tuple(self._held.values())
        return LedgerView(
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

    def view(self) -> LedgerView:
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

    def view(self) -> LedgerView:
        return self._view(None, None)


class Leased(Ledger):
    """Blocks of `block_samples` samples, leased by the coordinator to whoever asks: nobody steps together.

    Every block is done once, and again only if its holder dies. `take` asks the coordinator and says at the same time
    what is done since: one request per batch. It ends the epoch when nothing is left to take, while others may still be
    at theirs; in the last epoch it waits for them, since one of them may die: Timeout after `timeout_s`, or the end
    when `stopped` says so. With `take_ahead` (prefetching) a block is taken before it is
    begun: until `begin`, a worker that has nothing left may take it over.

    `before` are the samples that a restored run has done, by epoch: of this one and of earlier ones that owe the rest.
    """

    def __init__(
        self,
        lender: LeaseClient,
        num_samples: int,
        block_samples: int,
        *,
        epoch: int = 0,
        loop: int = 0,
        rank: int = 0,
        size: int = 1,
        drop_last: bool = False,
        before: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_blocks = num_batches(num_samples, block_samples, drop_last)
        self._lender = lender
        self._cut = EpochCut(num_samples, block_samples, self.num_blocks)
        self._epoch = epoch
        self._loop = loop
        self._rank = rank
        self._size = size
        self._before = [(each, self._blocks(each, samples)) for each, samples in sorted((before or {}).items())]
        self._stopped = stopped
        self._held: dict[BlockName, LeasedBlock] = {}
        self._unsaid: list[BlockName] = []  # blocks that are done, which the coordinator does not know yet
        self._ahead: set[BlockName] = set()
        self._inside = False
        self.over = False  # the coordinator has said that nothing is left

    def _blocks(self, epoch: int, samples: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The blocks that lie within these ranges of samples."""
        num_samples, size, num_blocks = self._cut
        found = []
        for start, end in samples:
            if end > num_samples:
                raise ValueError(
                    f"sample {end - 1} of epoch {epoch} is said to be done, but it has only {num_samples}: "
                    "go on with the dataset that the state was saved with"
                )
            last = num_blocks if end == num_samples else min(num_blocks, end // size)
            found.append((-(-start // size), last))
        return tuple((start, end) for start, end in found if start < end)

    def take(self) -> LeasedBlock | None:
        got = self._ask(ahead=False)
        if got and not isinstance(got, LeasedBlock):
            self._lender.idle(True)
            try:
                got = self._wait(got)
            finally:
                self._lender.idle(False)
        if isinstance(got, LeasedBlock):
            return got
        self.over = not got
        self._inside = not self.over
        return None

    def _wait(self, holders: tuple[int, ...]) -> LeasedBlock | tuple[int, ...]:
        """Asks again until a block comes back, or nothing is left to wait for, or the run stops."""
        started, next_word = time.monotonic(), SLOW_S
        while not self._stopped():
            waited = time.monotonic() - started
            words = (
                f"rank {self._rank} has waited {waited:.0f} s at the end of epoch {self._epoch} for the blocks of "
                f"rank{'s' if len(holders) > 1 else ''} {', '.join(map(str, holders))}"
            )
            if waited >= self._lender.timeout_s:
                raise Timeout(words)
            if waited >= next_word:
                log.warning("%s", words)
                next_word *= 2
            time.sleep(POLL_S)
            got = self._ask(ahead=False)
            if isinstance(got, LeasedBlock) or not got:
                return got
            holders = got
        return holders

    def take_ahead(self) -> LeasedBlock | None:
        """A block to be begun later; None if there is none for now. Never waits for others."""
        block = self._ask(ahead=True)
        if not isinstance(block, LeasedBlock):
            return None
        self._ahead.add(block.name)
        return block

    def _ask(self, ahead: bool) -> LeasedBlock | tuple[int, ...]:
        """A block; or the ranks whose blocks are to be waited for, none of them at the end."""
        self._inside = True
        grant = self._lender.take(self._epoch, self._loop, self._cut, self._unsaid, self._before, ahead)
        self._unsaid.clear()
        self._before = []  # whoever came first has founded the ledger
        if grant.kind != "block":
            return grant.holders
        num_samples, size, _ = grant.cut
        start = grant.block * size
        total = min(size, num_samples - start)
        block = LeasedBlock(grant.block, start, total, total, 0, 1, grant.epoch, grant.loop, num_samples)
        self._held[block.name] = block
        return block

    def begin(self, portion: BatchSlice) -> bool:
        assert isinstance(portion, LeasedBlock)
        if portion.name not in self._ahead:
            return True
        self._ahead.discard(portion.name)
        still = self._lender.begin(portion.name, self._unsaid)
        self._unsaid.clear()
        if not still:
            self._held.pop(portion.name, None)
        return still

    def done(self, portion: BatchSlice) -> None:
        assert isinstance(portion, LeasedBlock)
        if self._held.pop(portion.name, None) is not None:
            self._unsaid.append(portion.name)

    def flush(self) -> None:
        """Says what is done now, not with the next request."""
        if self._unsaid:
            self._lender.done(self._unsaid, release=False)
            self._unsaid.clear()

    def release(self) -> None:
        if self._inside or self._held or self._unsaid:
            with contextlib.suppress(HoraError):  # without a line to the coordinator this worker is given up anyway
                self._lender.done(self._unsaid, release=True)
        self._inside = False
        self._unsaid.clear()
        self._held.clear()
        self._ahead.clear()

    def account(self) -> list[dict[str, Any]]:
        """The open ledgers of this loader, of all epochs, as the coordinator has them."""
        self.flush()
        return self._lender.account()["open"]

    def view(self) -> LedgerView:
        self.flush()
        num_samples, size, num_blocks = self._cut
        total = min(num_samples, num_blocks * size)
        account = self._lender.account()
        key = [self._epoch, self._loop]
        known = [each for each in [*account["open"], account["last"]] if each and [each["epoch"], each["loop"]] == key]
        if known:
            done, leased, samples = (known[0][name] for name in ("num_done", "num_leased", "samples_done"))
        elif account["newest"] is not None and account["newest"] >= key:
            done, leased, samples = num_blocks, 0, total
        else:
            ranges = dict(self._before).get(self._epoch, ())
            done, leased = sum(end - start for start, end in ranges), 0
            samples = sum(min(end * size, total) - start * size for start, end in ranges)
        return LedgerView(
            rank=self._rank,
            size=self._size,
            num_done=done,
            num_leased=leased,
            num_pending=num_blocks - done - leased,
            samples_done=samples,
            num_samples=total,
            held=tuple(self._held.values()),
        )


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
