"""Source: where a loader's samples come from. Samples by number are asked for; a stream is read by every worker.

Both read through a torch DataLoader of their own, so processes, pinned memory and collating are torch's.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import operator
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from .ledger import BatchSlice, Dealt, Leased, LeasedBlock, Ledger, Streamed, mix, num_batches, order

if TYPE_CHECKING:
    from .loader import LoaderCallbacks
    from .service import LeaseClient


Before = Mapping[int, Sequence[tuple[int, int]]]  # by epoch: ranges of samples that are done
Stopped = Callable[[], bool]


class EpochReader(NamedTuple):
    """One epoch being read. `fetch` gives the batch of the portion that came last out of `portions`, if it has samples.

    `drawn` is the order where a sampler drew it; None where it follows from seed and epoch."""

    ledger: Ledger
    portions: Iterator[BatchSlice]
    fetch: Callable[[], Any]
    drawn: torch.Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """How an epoch is put in order and cut into global batches."""

    global_batch: int
    drop_last: bool
    shuffle: bool
    seed: int


class SampleSource(abc.ABC):
    """What a loader reads. `options` are the arguments of torch's DataLoader that say how, `dataset` among them."""

    draws = False  # whether a sampler of the user's draws the order

    def __init__(self, options: dict[str, Any], cut: EpochOrder) -> None:
        self.dataset = options["dataset"]
        self.cut = cut
        self._options = options

    @abc.abstractmethod
    def num_samples(self) -> int:
        """How many samples the next epoch has; TypeError if nobody can know."""

    @abc.abstractmethod
    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        """The ledger of an epoch that is not being read, as it will stand at batch `begin`."""

    @abc.abstractmethod
    def read(self, seat: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        """Starts to read an epoch at batch `begin`, in the order `drawn` if it was drawn before.

        Collective where a sampler draws the order anew. What is being read ends with the last reference to it."""

    @abc.abstractmethod
    def lease(
        self, lender: LeaseClient, rank: int, size: int, epoch: int, loop: int, before: Before, stopped: Stopped
    ) -> EpochReader:
        """Starts to read an epoch whose blocks are leased, `before` being done; ValueError if they cannot be."""

    def num_batches(self) -> int:
        return num_batches(self.num_samples(), self.cut.global_batch, self.cut.drop_last)

    def block_samples(self, size: int) -> int:
        """What one of `size` workers takes at a time where blocks are leased."""
        return max(1, self.cut.global_batch // size)

    def _generator(self, *numbers: int) -> torch.Generator:
        """Seeds torch's DataLoader, which would otherwise draw from the user's own stream of random numbers."""
        return torch.Generator(torch.get_default_device()).manual_seed(mix(self.cut.seed, *numbers))


class Indexed(SampleSource):
    """Samples that are asked for by number. `sampler` says how many there are, and with `draws` in which order."""

    def __init__(self, options: dict[str, Any], cut: EpochOrder, sampler: Any, draws: bool) -> None:
        super().__init__(options, cut)
        self.draws = draws
        self._sampler = sampler
        self._ahead = _Ahead()
        self._loader: DataLoader[Any] = DataLoader(**options, batch_sampler=self._ahead)

    def num_samples(self) -> int:
        return len(self._sampler)

    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        return self._deal(self.num_samples(), rank, size, begin)

    def read(self, seat: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        if self.draws and drawn is None:
            drawn = seat.share_order(_draw(self._sampler)) if seat.rank < seat.size else _draw(self._sampler)
        indices = order(self.num_samples(), self.cut.shuffle, self.cut.seed, epoch) if drawn is None else drawn
        ledger = self._deal(len(indices), *_part(seat), begin)
        portions, self._ahead.portions = itertools.tee(iter(ledger.take, None))
        self._ahead.indices = lambda portion: indices
        self._loader.generator = self._generator(epoch, seat.rank)
        return EpochReader(ledger, portions, _batches(self._loader).__next__, drawn)

    def lease(
        self, lender: LeaseClient, rank: int, size: int, epoch: int, loop: int, before: Before, stopped: Stopped
    ) -> EpochReader:
        if self.draws:
            raise ValueError(
                f"workers that do not step together cannot share what {type(self._sampler).__name__} draws: leave the "
                "sampler out (shuffle=True gives a random order), or run with a synchronous strategy (ps:mode=sync)"
            )
        ledger = Leased(
            lender,
            self.num_samples(),
            self.block_samples(size),
            epoch=epoch,
            loop=loop,
            rank=rank,
            size=size,
            drop_last=self.cut.drop_last,
            before=before,
            stopped=stopped,
        )
        self._ahead.indices = _Orders(self.cut)
        self._loader.generator = self._generator(epoch, rank)
        if not self._loader.num_workers:
            portions, self._ahead.portions = itertools.tee(iter(ledger.take, None))
            return EpochReader(ledger, portions, _batches(self._loader).__next__, None)
        batches: list[Iterator[Any]] = []
        return EpochReader(ledger, self._rounds(ledger, batches), lambda: next(batches[0]), None)

    def _rounds(self, ledger: Leased, batches: list[Iterator[Any]]) -> Iterator[BatchSlice]:
        """Prefetching: takes ahead as long as there is something, and comes back once all of it is done.

        Only then may it wait for others: they may wait for what lies here."""
        for first in iter(ledger.take, None):
            taken = itertools.chain([first], iter(ledger.take_ahead, None))
            portions, self._ahead.portions = itertools.tee(taken)
            batches[:] = [_batches(self._loader)]
            yield from portions
            batches.clear()  # its processes end before this worker waits

    def _deal(self, num_samples: int, rank: int, size: int, begin: int) -> Ledger:
        cut = self.cut
        return Dealt(num_samples, cut.global_batch, rank=rank, size=size, drop_last=cut.drop_last, begin=begin)


class _Ahead:
    """torch's side of the portions: the numbers of my samples in each that has any. Prefetching runs ahead on it."""

    portions: Iterator[BatchSlice] = iter(())
    indices: Callable[[BatchSlice], torch.Tensor]  # the order of the portion's epoch

    def __iter__(self) -> Iterator[list[int]]:
        for portion in self.portions:
            if portion.mine:
                first = portion.start + portion.offset
                yield self.indices(portion)[first : first + portion.mine].tolist()


class _Orders:
    """The orders of the epochs that leased blocks are of: this one, and now and then an earlier one."""

    def __init__(self, cut: EpochOrder) -> None:
        self._cut = cut
        self._kept: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, portion: BatchSlice) -> torch.Tensor:
        assert isinstance(portion, LeasedBlock)
        key = (portion.epoch, portion.num_samples)
        if key not in self._kept:
            if len(self._kept) > 1:
                del self._kept[min(self._kept)]
            self._kept[key] = order(portion.num_samples, self._cut.shuffle, self._cut.seed, portion.epoch)
        return self._kept[key]


class Stream(SampleSource):
    """Samples that come one after the other, in an order that is the dataset's own.

    Every worker reads all of them, a global batch at a time, and collates its part. The streams must therefore be the
    same on every worker; torch's and Python's random numbers in a reading process are, by seed and epoch.
    """

    _loader: DataLoader[Any] | None = None

    def num_samples(self) -> int:
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            raise TypeError(
                f"nobody knows how many batches a {type(self.dataset).__name__} has before it was read: "
                "give it a __len__ if you do"
            ) from None

    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        return Streamed(iter(()), self.cut.global_batch, rank=rank, size=size, begin=begin)

    def read(self, seat: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        kept: list[Any] = []
        rank, size = _part(seat)
        totals = _keep(_batches(self._cutting(rank, size, epoch)), kept)
        ledger = Streamed(totals, self.cut.global_batch, rank=rank, size=size, begin=begin)
        return EpochReader(ledger, iter(ledger.take, None), kept.pop, None)

    def lease(
        self, lender: LeaseClient, rank: int, size: int, epoch: int, loop: int, before: Before, stopped: Stopped
    ) -> EpochReader:
        raise ValueError(
            f"workers that do not step together cannot read a stream ({type(self.dataset).__name__}) in blocks: give a "
            "dataset with __len__ and __getitem__, or run with a synchronous strategy (ps:mode=sync)"
        )

    def _cutting(self, rank: int, size: int, epoch: int) -> DataLoader[Any]:
        mine = _Mine(rank, size, self._options.get("collate_fn") or default_collate)
        if self._loader is None or self._loader.collate_fn != mine:
            cut = {"batch_size": self.cut.global_batch, "drop_last": self.cut.drop_last, "collate_fn": mine}
            self._loader = DataLoader(**{**self._options, **cut})
        self._loader.generator = self._generator(epoch)
        return self._loader


@dataclasses.dataclass(frozen=True)
class _Mine:
    """Collates my part of a global batch, where it is read; and says how many samples all have."""

    rank: int
    size: int
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        portion = BatchSlice.deal(0, 0, len(samples), self.rank, self.size)
        mine = samples[portion.offset : portion.offset + portion.mine]
        return portion.total, self.collate(mine) if mine else None


def _part(seat: LoaderCallbacks) -> tuple[int, int]:
    """Which part of how many is this worker's; one that joined after the launch reads everything."""
    return (seat.rank, seat.size) if seat.rank < seat.size else (0, 1)


def _batches(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """What torch's DataLoader gives; its processes end with the last reference, and with an exception."""
    try:
        yield from loader
    except Exception as error:
        if loader.num_workers:  # torch's frames and the error hold each other, and the processes: ten seconds in gc
            traceback.clear_frames(error.__traceback__)
        raise


def _keep(batches: Iterator[tuple[int, Any]], kept: list[Any]) -> Iterator[int]:
    """The sizes of the global batches; my part of the one whose size was given last is kept."""
    for total, batch in batches:
        kept[:] = [batch]
        yield total


def _draw(sampler: Iterable[Any]) -> torch.Tensor:
    """One epoch's numbers, drawn on every rank: their streams of random numbers stay side by side."""
    expected = len(sampler)  # type: ignore[arg-type]
    drawn = list(itertools.islice(sampler, expected + 1))
    name = type(sampler).__name__
    if len(drawn) > expected:
        raise ValueError(f"{name} gives more samples than the {expected} of its len(): let the two agree")
    try:
        return torch.tensor([operator.index(number) for number in drawn], dtype=torch.int64, device="cpu")
    except TypeError:
        raise ValueError(f"{name} gives samples that are not whole numbers: let it give indices") from None
