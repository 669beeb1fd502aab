"""Shard: the loader that gives this worker its part of every global batch. `job.shard(...)` makes it."""

from __future__ import annotations

import collections
import dataclasses
import gc
import operator
from collections.abc import Generator
from typing import Any, Protocol

import torch

from . import unwinding
from .leased import LeaseClient, Leased
from .ledger import BatchSlice, Ledger, LedgerView, num_batches
from .source import EpochReader, Indexed, SampleSource


class LoaderCallbacks(Protocol):
    """What a loader calls on the training. Called by the loop's thread only.

    In every iteration: `enter`; for every slice `stopped`, then, unless it `passes`, `begin` and `finish` around the
    user's code, or `absent` while training; `leave` once, also after an error. All workers get the same batches in the
    same order, so each of these may be collective. Not so where blocks are leased: there each worker has its own, no
    worker is absent, and `stopped` is also called while this worker waits at the end of the last epoch. An exception
    raised by `leave(finished=False)` is lost: it is called from inside `break`, or while another exception passes
    (`raised`).
    """

    rank: int
    size: int

    def epoch(self) -> int | None:
        """The current epoch of `job.epochs`; None outside of it."""

    def training(self, loader: Shard) -> bool:
        """Whether this loop trains: then a worker without samples takes part in the step."""

    def stopped(self, loader: Shard) -> bool:
        """Whether the loop ends here, before the next batch."""

    def enter(self, loader: Shard) -> None:
        """An iteration starts."""

    def begin(self, loader: Shard, batch_slice: BatchSlice, /) -> None:
        """The user's code is about to get a batch."""

    def finish(self, loader: Shard, batch_slice: BatchSlice, /) -> None:
        """The user's code asks for the next batch."""

    def passes(self, loader: Shard, batch_slice: BatchSlice, /) -> bool:
        """Whether to skip this batch, because the other workers have finished it without this one."""

    def absent(self, loader: Shard, batch_slice: BatchSlice, /) -> None:
        """This worker has no samples in this batch. Called only while training."""

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        """The iteration is over: at its end or `stopped` (finished), by `break`, or by an exception (`raised`)."""

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        """Collective: rank 0's indices (int64), on every rank. Their lengths may differ before."""


@dataclasses.dataclass(frozen=True)
class _Position:
    """In an epoch: `batch` is the first that is not done; `drawn` is the order, if a sampler drew it."""

    epoch: int
    batch: int = 0
    drawn: torch.Tensor | None = None


class Shard:
    """Iterating it is one epoch: this worker's part of every global batch, collated as torch's DataLoader does.

    The samples of the k-th global batch depend on seed, epoch and `global_batch`, not on the number of workers. The
    epoch is that of `job.epochs`, outside of it the number of iterations so far. `len()` is the number of global
    batches, the same on every worker; a worker without samples in a batch skips it.

    With a `lease_client` (strategies whose workers do not step together) loops that train take blocks of `batch_size`
    samples from the coordinator instead; `len()` is the average number per worker, rounded up. Other loops
    (evaluations) are divided among the workers of the launch; one that joined later reads everything.
    """

    def __init__(
        self, source: SampleSource, callbacks: LoaderCallbacks, lease_client: LeaseClient | None = None
    ) -> None:
        self.dataset = source.dataset
        self.global_batch = source.cut.global_batch
        self.seed = source.cut.seed
        self.shuffle = source.cut.shuffle
        self.ledger: Ledger | None = None  # of the current epoch, or of the last
        self._source = source
        self._callbacks = callbacks
        self._position = _Position(0)
        self._next_epoch = 0
        self._loaded: _Position | None = None
        self._open = False
        self._lease_client = lease_client
        self._before: dict[int, list[tuple[int, int]]] = {}  # samples that a restored run has done, by epoch
        self._loops: collections.Counter[int] = collections.Counter()  # by epoch: leased loops begun

    def __repr__(self) -> str:
        data, rank, size = type(self.dataset).__name__, self._callbacks.rank, self._callbacks.size
        return f"<hora.Shard of {data}, rank {rank} of {size}, global batch {self.global_batch}>"

    @property
    def batch_size(self) -> float:
        """Samples per worker and batch; a fraction if the workers' parts differ."""
        if self._lease_client is not None:
            return self._source.block_samples(self._callbacks.size)
        share, more = divmod(self.global_batch, self._callbacks.size)
        return self.global_batch / self._callbacks.size if more else share

    def __len__(self) -> int:
        if self._lease_client is None:
            return self._source.num_batches()
        size, source = self._callbacks.size, self._source
        return -(-num_batches(source.num_samples(), source.block_samples(size), source.cut.drop_last) // size)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._open:
            gc.collect()  # closes an abandoned iteration that only a reference cycle keeps alive
        if self._open:
            raise ValueError(
                "this loader is being iterated already: finish that loop, break out of it or close() its iterator "
                "first, or make a second loader with job.shard"
            )
        callbacks, position = self._callbacks, self._start()
        callbacks.enter(self)
        self._open, finished, ended, raised = True, False, False, False
        self._loaded, self.ledger, self._position = None, None, position
        try:
            ledger, slices, fetch, drawn = self._read(position)
            self.ledger, self._position = ledger, dataclasses.replace(position, drawn=drawn)
            for batch_slice in slices:
                if callbacks.stopped(self):
                    break
                if batch_slice.mine:
                    batch = fetch()
                    if not ledger.begin(batch_slice):
                        continue
                    if callbacks.passes(self, batch_slice):
                        ledger.done(batch_slice)
                        continue
                    callbacks.begin(self, batch_slice)
                    yield batch
                    ledger.done(batch_slice)
                    callbacks.finish(self, batch_slice)
                else:
                    if callbacks.training(self) and not callbacks.passes(self, batch_slice):
                        callbacks.absent(self, batch_slice)
                    ledger.done(batch_slice)
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
            self._next_epoch = position.epoch + 1
            self._position = _Position(self._next_epoch) if ended else self._current()
            if self.ledger is not None:
                self.ledger.release()
            self._open = False
            callbacks.leave(self, finished, raised)

    def _read(self, position: _Position) -> EpochReader:
        callbacks, epoch = self._callbacks, position.epoch
        if self._lease_client is None or not callbacks.training(self):
            return self._source.read(callbacks, epoch, position.batch, position.drawn)
        before = {each: self._before.pop(each) for each in sorted(self._before) if each <= epoch}
        loop = self._loops[epoch]
        self._loops[epoch] += 1
        return self._lease(self._lease_client, epoch, loop, before)

    def _lease(
        self, client: LeaseClient, epoch: int, loop: int, before: dict[int, list[tuple[int, int]]]
    ) -> EpochReader:
        return self._source.lease(client, self._callbacks, epoch, loop, before, lambda: self._callbacks.stopped(self))

    def state(self) -> dict[str, Any]:
        """The position in the epoch, for JSON: {"epoch": e, "batch": k}, and "order" if a sampler drew it.

        Batches before k are done. After the end of an epoch it is batch 0 of the next; after a break or a stop it is
        where that happened, although the next iteration in this process is a new epoch. Where blocks are leased, "done"
        lists the samples done in epochs that are not over, as [epoch, [[from, to], …]]; call `settle` on every worker
        before.
        """
        position = self._loaded or self._current()
        if self._loaded is None and isinstance(self.ledger, Leased):
            return self._leased_state(self.ledger, position.epoch)
        state: dict[str, Any] = {"epoch": position.epoch, "batch": position.batch}
        if self._before:
            state["done"] = [[epoch, [list(each) for each in samples]] for epoch, samples in self._before.items()]
        if position.drawn is not None:
            state["order"] = position.drawn.tolist()
        return state

    def _leased_state(self, ledger: Leased, epoch: int) -> dict[str, Any]:
        done: list[Any] = []
        whole = 0
        for each in ledger.account():
            if each["epoch"] < epoch and not each["ended"]:
                continue  # all workers have left it before its end
            num_samples, size, _ = each["cut"]
            samples = [[start * size, min(end * size, num_samples)] for start, end in each["done"]]
            done.append([each["epoch"], samples])
            if each["epoch"] == epoch and samples and samples[0][0] == 0:
                whole = samples[0][1] // self.global_batch
        return {"epoch": epoch, "batch": whole, "done": done}

    def settle(self) -> None:
        """Where blocks are leased: reports those that are done now, not with the next request."""
        if isinstance(self.ledger, Leased):
            self.ledger.flush()

    def resize(self, global_batch: int) -> None:
        """Sets the global batch size: a restored run keeps its own, on any number of workers."""
        if self._open:
            raise ValueError("this loader is being iterated: restore before its loop begins")
        self.global_batch = whole_number("global_batch", global_batch, 1)
        self._source.cut = dataclasses.replace(self._source.cut, global_batch=self.global_batch)

    def load(self, state: dict[str, Any]) -> None:
        """The next iteration resumes at `state`, or at its beginning if it is another epoch."""
        try:
            epoch, batch = whole_number("epoch", state["epoch"], 0), whole_number("batch", state["batch"], 0)
            before = {
                whole_number("epoch", each, 0): [
                    (whole_number("sample", start, 0), whole_number("sample", end, 0)) for start, end in samples
                ]
                for each, samples in state.get("done", ())
            }
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{str(state)[:80]} is no state of a loader: pass what state() returned") from None
        drawn = state.get("order")
        if drawn is not None and not self._source.draws:
            raise ValueError("the state was saved from a loader with a sampler; this loader has none")
        if drawn is None and batch and self._source.draws:
            raise ValueError("the state was saved from a loader without a sampler; this loader has one")
        self._loaded = _Position(
            epoch, batch, None if drawn is None else torch.tensor(drawn, dtype=torch.int64, device="cpu")
        )
        self.ledger = self.ledger if self._open else None
        if self._lease_client is not None:
            end = batch * self.global_batch
            if batch and batch <= self._source.num_batches():
                end = min(end, self._source.num_samples())
            self._before = before or ({epoch: [(0, end)]} if end else {})

    def view(self) -> LedgerView:
        """The ledger of the current epoch, else of the last one; before the first, of the next. To be printed."""
        if self.ledger is not None:
            return self.ledger.view()
        position = self._loaded or self._position
        if self._lease_client is not None and not self._source.draws and isinstance(self._source, Indexed):
            loop = self._loops[position.epoch]
            return self._lease(self._lease_client, position.epoch, loop, self._before).ledger.view()
        return self._source.ledger(self._callbacks.rank, self._callbacks.size, position.batch).view()

    def _start(self) -> _Position:
        epoch = self._callbacks.epoch()
        if self._loaded is not None and epoch in (None, self._loaded.epoch):
            return self._loaded
        if self._loaded is not None:
            self._before.clear()
        return _Position(self._next_epoch if epoch is None else epoch)

    def _current(self) -> _Position:
        if self._open and self.ledger is not None and not isinstance(self.ledger, Leased):
            return dataclasses.replace(self._position, batch=self.ledger.view().num_done)
        return self._position


def whole_number(name: str, value: Any, least: int | None) -> int:
    """`value` as an int; ValueError if it is none, or below `least`."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ValueError(f"{name}={value!r}: give a whole number{'' if least is None else f', {least} or more'}")
    return number
