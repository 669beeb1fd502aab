"""SampleSource: reads a loader's samples, by index (Indexed) or one after the other (Stream).

Both read through a torch DataLoader, which provides worker processes, pinned memory and collating.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import operator
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, default_collate

from .leased import LeaseClient, Leased
from .ledger import BatchSlice, Dealt, Ledger, Streamed, mix, num_batches, order

if TYPE_CHECKING:
    from .loader import LoaderCallbacks


Before = Mapping[int, Sequence[tuple[int, int]]]  # by epoch: ranges of samples that are done
Stopped = Callable[[], bool]


class EpochReader(NamedTuple):
    """One epoch being read. `fetch` returns the batch of the last slice that `slices` has yielded, if it has samples.

    `drawn` is the order, if a sampler drew it; None if it follows from seed and epoch."""

    ledger: Ledger
    slices: Iterator[BatchSlice]
    fetch: Callable[[], Any]
    drawn: torch.Tensor | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """How an epoch is ordered and cut into global batches."""

    global_batch: int
    drop_last: bool
    shuffle: bool
    seed: int


class SampleSource(abc.ABC):
    """`options` are arguments of torch's DataLoader, `dataset` among them."""

    draws = False  # whether the user's sampler draws the order

    def __init__(self, options: dict[str, Any], cut: EpochOrder) -> None:
        self.dataset = options["dataset"]
        self.cut = cut
        self._options = options

    @abc.abstractmethod
    def num_samples(self) -> int:
        """Of the next epoch; TypeError if it is not known."""

    @abc.abstractmethod
    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        """The ledger of an epoch that is not being read, at batch `begin`."""

    @abc.abstractmethod
    def read(self, callbacks: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        """Starts to read an epoch at batch `begin`, in the order `drawn` if it was drawn before.

        Collective if a sampler draws the order now. Reading ends with the last reference to the result."""

    def lease(
        self, client: LeaseClient, callbacks: LoaderCallbacks, epoch: int, loop: int, before: Before, stopped: Stopped
    ) -> EpochReader:
        """Starts to read an epoch whose blocks are leased; those in `before` are done. ValueError if not supported."""
        raise ValueError(
            f"workers that do not step together cannot read a stream ({type(self.dataset).__name__}) in blocks: give a "
            "dataset with __len__ and __getitem__, or run with a synchronous strategy (ps:mode=sync)"
        )

    def num_batches(self) -> int:
        return num_batches(self.num_samples(), self.cut.global_batch, self.cut.drop_last)

    def block_samples(self, size: int) -> int:
        """The size of a leased block, for `size` workers."""
        return max(1, self.cut.global_batch // size)

    def _generator(self, *numbers: int) -> torch.Generator:
        """For torch's DataLoader, which would otherwise advance the user's own random state."""
        return torch.Generator(torch.get_default_device()).manual_seed(mix(self.cut.seed, *numbers))


class Indexed(SampleSource):
    """Samples by index. `sampler` says how many there are, and with `draws` in which order."""

    def __init__(self, options: dict[str, Any], cut: EpochOrder, sampler: Any, draws: bool) -> None:
        super().__init__(options, cut)
        self.draws = draws
        self._sampler = sampler
        self._batch_sampler = _SliceSampler()
        self._loader: DataLoader[Any] = DataLoader(**options, batch_sampler=self._batch_sampler)

    def num_samples(self) -> int:
        return len(self._sampler)

    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        return self._dealt(self.num_samples(), rank, size, begin)

    def read(self, callbacks: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        if self.draws and drawn is None:
            drawn = _draw(self._sampler)
            if callbacks.rank < callbacks.size:  # a worker that joined later takes no part in collectives
                drawn = callbacks.share_order(drawn)
        indices = order(self.num_samples(), self.cut.shuffle, self.cut.seed, epoch) if drawn is None else drawn
        ledger = self._dealt(len(indices), *_part(callbacks), begin)
        slices, self._batch_sampler.slices = itertools.tee(iter(ledger.take, None))
        self._batch_sampler.indices = lambda batch_slice: indices
        self._loader.generator = self._generator(epoch, callbacks.rank)
        return EpochReader(ledger, slices, _batches(self._loader).__next__, drawn)

    def lease(
        self, client: LeaseClient, callbacks: LoaderCallbacks, epoch: int, loop: int, before: Before, stopped: Stopped
    ) -> EpochReader:
        if self.draws:
            raise ValueError(
                f"workers that do not step together cannot share what {type(self._sampler).__name__} draws: leave the "
                "sampler out (shuffle=True gives a random order), or run with a synchronous strategy (ps:mode=sync)"
            )
        ledger = Leased(
            client,
            self.num_samples(),
            self.block_samples(callbacks.size),
            epoch=epoch,
            loop=loop,
            rank=callbacks.rank,
            size=callbacks.size,
            drop_last=self.cut.drop_last,
            before=before,
            stopped=stopped,
        )
        cut = self.cut

        @functools.lru_cache(maxsize=2)  # the current epoch, and now and then an earlier one
        def epoch_order(epoch: int, num_samples: int) -> torch.Tensor:
            return order(num_samples, cut.shuffle, cut.seed, epoch)

        self._batch_sampler.indices = lambda block: epoch_order(block.epoch, block.num_samples)
        self._loader.generator = self._generator(epoch, callbacks.rank)
        if not self._loader.num_workers:
            slices, self._batch_sampler.slices = itertools.tee(iter(ledger.take, None))
            return EpochReader(ledger, slices, _batches(self._loader).__next__, None)
        batches: list[Iterator[Any]] = []
        return EpochReader(ledger, self._rounds(ledger, batches), lambda: next(batches[0]), None)

    def _rounds(self, ledger: Leased, batches: list[Iterator[Any]]) -> Iterator[BatchSlice]:
        """Prefetching: takes blocks ahead while there are any, and waits for other workers only once all of these are
        done: they may wait for the blocks that this worker holds."""
        for first in iter(ledger.take, None):
            taken = itertools.chain([first], iter(ledger.take_ahead, None))
            slices, self._batch_sampler.slices = itertools.tee(taken)
            batches[:] = [_batches(self._loader)]
            yield from slices
            batches.clear()  # ends the worker processes before `take` waits

    def _dealt(self, num_samples: int, rank: int, size: int, begin: int) -> Ledger:
        cut = self.cut
        return Dealt(num_samples, cut.global_batch, rank=rank, size=size, drop_last=cut.drop_last, begin=begin)


class _SliceSampler:
    """The batch sampler of torch's DataLoader: this worker's sample indices in each slice. Prefetching runs ahead."""

    slices: Iterator[BatchSlice] = iter(())
    indices: Callable[[Any], torch.Tensor]  # the order of the slice's epoch

    def __iter__(self) -> Iterator[list[int]]:
        for batch_slice in self.slices:
            if batch_slice.mine:
                first = batch_slice.start + batch_slice.offset
                yield self.indices(batch_slice)[first : first + batch_slice.mine].tolist()


class Stream(SampleSource):
    """Samples of an IterableDataset, in its own order.

    Every worker reads all of them, a global batch at a time, and collates its part. So the streams must be the same on
    every worker; torch's and Python's random numbers in a reading process are, by seed and epoch.
    """

    _loader: DataLoader[Any] | None = None

    def num_samples(self) -> int:
        try:
            return len(self.dataset)
        except (TypeError, NotImplementedError):
            raise TypeError(
                f"the number of batches of a {type(self.dataset).__name__} is not known before it was read: "
                "give it a __len__"
            ) from None

    def ledger(self, rank: int, size: int, begin: int) -> Ledger:
        return Streamed(iter(()), self.cut.global_batch, rank=rank, size=size, begin=begin)

    def read(self, callbacks: LoaderCallbacks, epoch: int, begin: int, drawn: torch.Tensor | None) -> EpochReader:
        kept: list[Any] = []
        rank, size = _part(callbacks)
        totals = _keep(_batches(self._slicing(rank, size, epoch)), kept)
        ledger = Streamed(totals, self.cut.global_batch, rank=rank, size=size, begin=begin)
        return EpochReader(ledger, iter(ledger.take, None), kept.pop, None)

    def _slicing(self, rank: int, size: int, epoch: int) -> DataLoader[Any]:
        mine = _CollateSlice(rank, size, self._options.get("collate_fn") or default_collate)
        if self._loader is None or self._loader.collate_fn != mine:
            cut = {"batch_size": self.cut.global_batch, "drop_last": self.cut.drop_last, "collate_fn": mine}
            self._loader = DataLoader(**{**self._options, **cut})
        self._loader.generator = self._generator(epoch)
        return self._loader


@dataclasses.dataclass(frozen=True)
class _CollateSlice:
    """Collates this worker's part of a global batch; also returns the size of the global batch."""

    rank: int
    size: int
    collate: Callable[[list[Any]], Any]

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        batch_slice = BatchSlice.deal(0, 0, len(samples), self.rank, self.size)
        mine = samples[batch_slice.offset : batch_slice.offset + batch_slice.mine]
        return batch_slice.total, self.collate(mine) if mine else None


def _part(callbacks: LoaderCallbacks) -> tuple[int, int]:
    """This worker's rank and the number of workers; a worker that joined later reads everything."""
    return (callbacks.rank, callbacks.size) if callbacks.rank < callbacks.size else (0, 1)


def _batches(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """The batches of torch's DataLoader. Its processes end with the last reference, and with an exception."""
    try:
        yield from loader
    except Exception as error:
        if loader.num_workers:  # a reference cycle of frames and error would keep the processes for ten seconds
            traceback.clear_frames(error.__traceback__)
        raise


def _keep(batches: Iterator[tuple[int, Any]], kept: list[Any]) -> Iterator[int]:
    """Yields the sizes of the global batches; `kept` holds this worker's part of the last one."""
    for total, batch in batches:
        kept[:] = [batch]
        yield total


def _draw(sampler: Iterable[Any]) -> torch.Tensor:
    """One epoch's indices. Drawn on every rank, so that their random states stay equal."""
    expected = len(sampler)  # type: ignore[arg-type]
    drawn = list(itertools.islice(sampler, expected + 1))
    name = type(sampler).__name__
    if len(drawn) > expected:
        raise ValueError(f"{name} gives more samples than the {expected} of its len(): both must be the same")
    try:
        return torch.tensor([operator.index(number) for number in drawn], dtype=torch.int64, device="cpu")
    except TypeError:
        raise ValueError(f"{name} yields samples that are not integers: it must yield indices") from None
