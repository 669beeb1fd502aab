"""Shard: a loader that gives this worker its part of every global batch. `job.shard(...)` makes it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import logging
import operator
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from . import unwinding
from .ledger import BatchSlice, Leased, Ledger, LedgerView, num_batches
from .remote_dataset import as_is
from .service import DataService, LeaseClient
from .source import EpochOrder, EpochReader, Indexed, SampleSource, Stream

log = logging.getLogger(__name__)


class LoaderCallbacks(Protocol):
    """What a loader asks of the job, and tells it. Called by the loop's thread only.

    For every iteration: `enter`; for every portion `stopped`, then, unless it `passes`, `begin` and `finish` around the
    user's code, or `absent` while training; `leave` once, whatever happens. The same portions come in the same order on
    every worker, so each of these may meet the others; but not where blocks are leased: there each worker has its own,
    nobody is absent, and `stopped` is also asked while this worker waits at the end of the last epoch.
    `leave(finished=False)` is called from inside `break`, or while an exception passes (`raised`): Python prints what
    it raises and goes on.
    """

    rank: int
    size: int

    def epoch(self) -> int | None:
        """The epoch of `job.epochs` under way; None outside."""

    def training(self, loader: Shard) -> bool:
        """Whether this loop trains: then a worker without samples takes part in the step."""

    def stopped(self, loader: Shard) -> bool:
        """Whether the loop ends here, before the next batch."""

    def enter(self, loader: Shard) -> None:
        """An iteration starts."""

    def begin(self, loader: Shard, portion: BatchSlice) -> None:
        """A batch is about to be handed to the user's code. Once its step is taken, `loader.ledger` may be told."""

    def finish(self, loader: Shard, portion: BatchSlice) -> None:
        """The user's code came back for the next one."""

    def passes(self, loader: Shard, portion: BatchSlice) -> bool:
        """Whether this worker is so late that the others have gone on from this batch without it: it is left out."""

    def absent(self, loader: Shard, portion: BatchSlice) -> None:
        """This worker has no samples in this batch. Called only while training."""

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        """The iteration is over: ran to its end or `stopped` (finished), or user code broke out of it or raised."""

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        """Collective: rank 0's indices, on every rank. int64; lengths may differ between ranks."""


class SingleWorkerCallbacks:
    """The seat of a single worker: nobody to meet."""

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


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an epoch stands: `batch` is the first that is not done; `drawn` the order if a sampler drew it."""

    epoch: int
    batch: int = 0
    drawn: torch.Tensor | None = None


class Shard:
    """Iterating it is one epoch: this worker's part of every global batch, collated as torch's DataLoader does.

    The samples of the k-th global batch depend on seed, epoch and `global_batch`, not on the number of workers. The
    epoch is that of `job.epochs`, outside of it the number of iterations so far. `len()` is the number of global
    batches, the same on every worker; one that has no samples in a batch is not given it.

    With a `lender` (strategies whose workers do not step together) loops that train take blocks of `batch_size` samples
    from the coordinator instead, as many as they get done; `len()` is what a worker does on average, rounded up. Other
    loops, evaluations, are dealt among the workers that the run was launched with; one that joined later has no part
    in their collectives and reads everything.
    """

    def __init__(self, source: SampleSource, seat: LoaderCallbacks, lender: LeaseClient | None = None) -> None:
        self.dataset = source.dataset
        self.global_batch = source.cut.global_batch
        self.seed = source.cut.seed
        self.shuffle = source.cut.shuffle
        self.ledger: Ledger | None = None  # of the epoch under way, or of the last
        self._source = source
        self._seat = seat
        self._place = _Place(0)
        self._next_epoch = 0
        self._loaded: _Place | None = None
        self._open = False
        self._lender = lender
        self._before: dict[int, list[tuple[int, int]]] = {}  # samples that a restored run has done, by epoch
        self._loops: collections.Counter[int] = collections.Counter()  # by epoch: leased loops begun

    def __repr__(self) -> str:
        data = type(self.dataset).__name__
        return f"<hora.Shard of {data}, rank {self._seat.rank} of {self._seat.size}, global batch {self.global_batch}>"

    @property
    def batch_size(self) -> float:
        """Samples per worker and batch; a fraction if the workers' parts differ."""
        if self._lender is not None:
            return self._source.block_samples(self._seat.size)
        share, more = divmod(self.global_batch, self._seat.size)
        return self.global_batch / self._seat.size if more else share

    def __len__(self) -> int:
        if self._lender is None:
            return self._source.num_batches()
        size, source = self._seat.size, self._source
        return -(-num_batches(source.num_samples(), source.block_samples(size), source.cut.drop_last) // size)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._open:
            gc.collect()  # ends an iteration that was abandoned and is kept alive only by a cycle of references
        if self._open:
            raise ValueError(
                "this loader is being iterated already: finish that loop, break out of it or close() its iterator "
                "first, or make a second loader with job.shard"
            )
        seat, place = self._seat, self._start()
        seat.enter(self)
        self._open, finished, ended, raised = True, False, False, False
        self._loaded, self.ledger, self._place = None, None, place
        try:
            ledger, portions, fetch, drawn = self._read(place)
            self.ledger, self._place = ledger, dataclasses.replace(place, drawn=drawn)
            for portion in portions:
                if seat.stopped(self):
                    break
                if portion.mine:
                    batch = fetch()
                    if not ledger.begin(portion):
                        continue
                    if seat.passes(self, portion):
                        ledger.done(portion)
                        continue
                    seat.begin(self, portion)
                    yield batch
                    ledger.done(portion)
                    seat.finish(self, portion)
                else:
                    if seat.training(self) and not seat.passes(self, portion):
                        seat.absent(self, portion)
                    ledger.done(portion)
            else:
                ended = not isinstance(ledger, Leased) or ledger.over
            finished = True
        except GeneratorExit as closing:
            raised = unwinding.by_exception(closing)
            raise
        except BaseException:
            raised = True
            raise
        finally:
            self._next_epoch = place.epoch + 1
            self._place = _Place(self._next_epoch) if ended else self._standing()
            if self.ledger is not None:
                self.ledger.release()
            self._open = False
            seat.leave(self, finished, raised)

    def _read(self, place: _Place) -> EpochReader:
        seat, epoch = self._seat, place.epoch
        if self._lender is None or not seat.training(self):
            return self._source.read(seat, epoch, place.batch, place.drawn)
        before = {each: self._before.pop(each) for each in sorted(self._before) if each <= epoch}
        loop = self._loops[epoch]
        self._loops[epoch] += 1
        return self._lease(self._lender, epoch, loop, before)

    def _lease(
        self, lender: LeaseClient, epoch: int, loop: int, before: dict[int, list[tuple[int, int]]]
    ) -> EpochReader:
        seat = self._seat
        return self._source.lease(lender, seat.rank, seat.size, epoch, loop, before, lambda: seat.stopped(self))

    def state(self) -> dict[str, Any]:
        """Where the epoch stands, as JSON can hold it: {"epoch": e, "batch": k}, and "order" if a sampler drew it.

        Batches before k are done. After the end of an epoch it is batch 0 of the next; after a break or a stop it is
        where that happened, although the next iteration in this process is a new epoch. Where blocks are leased, "done"
        has all samples that are done in epochs that are not over, as [epoch, [[from, to], …]]; every worker calls
        `settle` before one asks for the state.
        """
        place = self._loaded or self._standing()
        if self._loaded is None and isinstance(self.ledger, Leased):
            return self._leased_state(self.ledger, place.epoch)
        state: dict[str, Any] = {"epoch": place.epoch, "batch": place.batch}
        if self._before:
            state["done"] = [[epoch, [list(each) for each in samples]] for epoch, samples in self._before.items()]
        if place.drawn is not None:
            state["order"] = place.drawn.tolist()
        return state

    def _leased_state(self, ledger: Leased, epoch: int) -> dict[str, Any]:
        done: list[Any] = []
        whole = 0
        for each in ledger.account():
            if each["epoch"] < epoch and not each["ended"]:
                continue  # workers have left it before its end: it is over
            num_samples, size, _ = each["cut"]
            samples = [[start * size, min(end * size, num_samples)] for start, end in each["done"]]
            done.append([each["epoch"], samples])
            if each["epoch"] == epoch and samples and samples[0][0] == 0:
                whole = samples[0][1] // self.global_batch
        return {"epoch": epoch, "batch": whole, "done": done}

    def settle(self) -> None:
        """Tells the coordinator what is done, where blocks are leased. It would hear it with the next batch."""
        if isinstance(self.ledger, Leased):
            self.ledger.flush()

    def resize(self, global_batch: int) -> None:
        """Cuts epochs into batches of this size from now on: a restored run keeps its own, on any number of workers."""
        if self._open:
            raise ValueError("this loader is being iterated: restore before its loop begins")
        self.global_batch = _whole("global_batch", global_batch, 1)
        self._source.cut = dataclasses.replace(self._source.cut, global_batch=self.global_batch)

    def load(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where `state` was taken; from the beginning if it is of another epoch."""
        try:
            epoch, batch = _whole("epoch", state["epoch"], 0), _whole("batch", state["batch"], 0)
            before = {
                _whole("epoch", each, 0): [(_whole("sample", a, 0), _whole("sample", b, 0)) for a, b in samples]
                for each, samples in state.get("done", ())
            }
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{str(state)[:80]} is no state of a loader: give back what state() returned") from None
        drawn = state.get("order")
        if drawn is not None and not self._source.draws:
            raise ValueError("the state holds what a sampler drew, and this loader has none: load it into its like")
        if drawn is None and batch and self._source.draws:
            raise ValueError("the state holds no order, and this loader's sampler draws one: load it into its like")
        self._loaded = _Place(
            epoch, batch, None if drawn is None else torch.tensor(drawn, dtype=torch.int64, device="cpu")
        )
        self.ledger = self.ledger if self._open else None
        if self._lender is not None:
            end = batch * self.global_batch
            if batch and batch <= self._source.num_batches():
                end = min(end, self._source.num_samples())
            self._before = before or ({epoch: [(0, end)]} if end else {})

    def view(self) -> LedgerView:
        """The ledger of the epoch under way, or else of the last one, to be printed; before it, what is to come."""
        if self.ledger is not None:
            return self.ledger.view()
        if self._lender is not None and not self._source.draws and isinstance(self._source, Indexed):
            epoch = (self._loaded or self._place).epoch
            return self._lease(self._lender, epoch, self._loops[epoch], self._before).ledger.view()
        return self._source.ledger(self._seat.rank, self._seat.size, (self._loaded or self._place).batch).view()

    def _start(self) -> _Place:
        epoch = self._seat.epoch()
        if self._loaded is not None and epoch in (None, self._loaded.epoch):
            return self._loaded
        if self._loaded is not None:
            self._before.clear()
        return _Place(self._next_epoch if epoch is None else epoch)

    def _standing(self) -> _Place:
        if self._open and self.ledger is not None and not isinstance(self.ledger, Leased):
            return dataclasses.replace(self._place, batch=self.ledger.view().num_done)
        return self._place


# What torch's DataLoader is asked for, apart from how it cuts the samples into batches.
_OPTIONS = (
    "dataset",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)


def shard(
    data: Any,
    seat: LoaderCallbacks,
    *,
    batch_size: int | None = None,
    global_batch: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    source: int | None = None,
    desk: DataService | None = None,
) -> Shard:
    """A loader of this worker's part of `data`: a dataset, with len() and samples by number; a stream; or a DataLoader.

    A dataset comes with `batch_size`, per worker, or with `global_batch`, all workers together. `shuffle` puts it in an
    order that depends on `seed` and epoch. A torch DataLoader brings its own options; its random order becomes ours (so
    its generator is not used), what any other sampler draws on rank 0 is dealt to all. Of a stream, an IterableDataset,
    every worker reads all and keeps its part. With `source` the dataset lies with that rank only, which hands out its
    samples; the others may give None. ValueError says what cannot be, and what to do instead.

    `desk` is the job's: it lends blocks where samples are leased, and is needed for `source`.
    """
    seed = _whole("seed", seed, None)
    number = desk.register() if desk is not None else 0
    if source is not None and seat.size > 1:
        data, collate_fn = _handed_out(data, seat, desk, number, source, collate_fn)
    if isinstance(data, DataLoader):
        given = {
            "batch_size": batch_size is not None,
            "drop_last": drop_last,
            "num_workers": num_workers != 0,
            "collate_fn": collate_fn is not None,
            "pin_memory": pin_memory,
        }
        twice = [name for name, is_given in given.items() if is_given]
        if twice:
            raise ValueError(
                f"job.shard got a DataLoader and {', '.join(twice)} too: set that in the DataLoader, "
                "or give its dataset instead of it"
            )
        options = {name: getattr(data, name) for name in _OPTIONS if hasattr(data, name)}
        sampler, batch_size, drop_last = _batching(data)
        if global_batch is not None:
            batch_size = None
    else:
        options = {"dataset": data, "num_workers": _whole("num_workers", num_workers, 0)}
        options |= {"collate_fn": collate_fn, "pin_memory": pin_memory}
        sampler = None
    if (batch_size is None) == (global_batch is None):
        raise ValueError(
            "job.shard needs either batch_size, per worker, or global_batch, all workers together: "
            f"{'neither was' if batch_size is None else 'both were'} given, so say job.shard(dataset, batch_size=64)"
        )
    if batch_size is not None:
        global_batch = _whole("batch_size", batch_size, 1) * seat.size
    cut = EpochOrder(
        global_batch=_whole("global_batch", global_batch, 1), drop_last=drop_last, shuffle=bool(shuffle), seed=seed
    )
    lender = desk.lender(number) if desk is not None else None
    if isinstance(options["dataset"], IterableDataset):
        return Shard(_stream(options, cut), seat, lender)
    return Shard(_indexed(options, cut, sampler, shuffle, seat), seat, lender)


def _handed_out(
    data: Any,
    seat: LoaderCallbacks,
    desk: DataService | None,
    number: int,
    source: int,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """What this worker reads from, and how it collates, when the dataset lies with rank `source`. Blocks for it."""
    if not 0 <= _whole("source", source, 0) < seat.size:
        raise ValueError(f"source={source}: the run has the ranks 0 to {seat.size - 1}")
    if desk is None:
        raise ValueError("source= needs a run whose workers can reach each other: make the loader with job.shard")
    if seat.rank != source:
        return desk.handout.receive(number, source), as_is
    streams = isinstance(data, DataLoader | IterableDataset)
    if streams or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        problem = (
            f"source={source} hands out samples by number, which a {type(data).__name__} does not give: give a dataset "
            "with __len__ and __getitem__, and batch_size"
        )
        desk.handout.refuse(number, problem)
        raise ValueError(problem)
    return desk.handout.offer(number, data, collate or default_collate), collate


def _stream(options: dict[str, Any], cut: EpochOrder) -> Stream:
    name = type(options["dataset"]).__name__
    if cut.shuffle:
        raise ValueError(f"shuffle=True cannot reorder a stream ({name}): shuffle inside its __iter__, by a fixed seed")
    if options["num_workers"] > 1:
        raise ValueError(
            f"num_workers={options['num_workers']} would read the stream ({name}) once per process: "
            "give num_workers=1, or 0"
        )
    return Stream(options, cut)


def _indexed(
    options: dict[str, Any], cut: EpochOrder, sampler: Any, shuffle: bool | None, seat: LoaderCallbacks
) -> Indexed:
    dataset = options["dataset"]
    if sampler is None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"job.shard cannot deal the samples of a {type(dataset).__name__}: give a dataset with __len__ and "
            "__getitem__, a torch IterableDataset or a torch DataLoader"
        )
    if sampler is None:
        return Indexed(options, cut, dataset, draws=False)
    if type(sampler) is SequentialSampler:
        return Indexed(options, cut, sampler, draws=False)
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return Indexed(options, dataclasses.replace(cut, shuffle=shuffle is not False), sampler, draws=False)
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "the DataLoader has a DistributedSampler, and Hora deals the samples itself: "
            "give the DataLoader without it, with shuffle=True if they should be shuffled"
        )
    name = type(sampler).__name__
    if shuffle is not None:
        raise ValueError(f"shuffle={shuffle} has no effect on the order that {name} draws: leave one of the two out")
    if not hasattr(sampler, "__len__"):
        raise ValueError(f"nobody knows how many samples {name} draws for an epoch: give it a __len__")
    if seat.rank == 0:
        log.info("%s: rank 0 draws the samples of every epoch, and all workers share them", name)
    return Indexed(options, cut, sampler, draws=True)


def _batching(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """The sampler of a DataLoader, its batch size and drop_last."""
    if not getattr(loader, "in_order", True):
        raise ValueError("in_order=False would mix up the batches of different steps: leave it out of the DataLoader")
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(
            "the DataLoader has batch_size=None, so Hora cannot tell how many samples a batch has: "
            "give it a batch_size and let the dataset give single samples"
        )
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"the DataLoader has a batch_sampler of its own ({type(batches).__name__}), which Hora cannot deal: "
            "give it batch_size and, for its order, a sampler"
        )
    return batches.sampler, batches.batch_size, batches.drop_last


def _whole(name: str, value: Any, least: int | None) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueError(f"{name}={value!r}: give a whole number{'' if least is None else f', {least} or more'}")
    return number
