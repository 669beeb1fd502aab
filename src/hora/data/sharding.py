"""`job.shard(...)`: checks its arguments and makes a Shard from a dataset, a stream or a torch DataLoader."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from .loader import LoaderCallbacks, Shard, whole_number
from .remote_dataset import as_is
from .service import DataService
from .source import EpochOrder, Indexed, Stream

log = logging.getLogger(__name__)

# The options of a torch DataLoader that are taken over: all but how it cuts the samples into batches.
_OPTIONS = (
    "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor", "persistent_workers", "pin_memory_device",
)  # fmt: skip


def shard(
    data: Any,
    callbacks: LoaderCallbacks,
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
    service: DataService | None = None,
) -> Shard:
    """A loader of this worker's part of `data`: a map-style dataset, an IterableDataset, or a torch DataLoader.

    A dataset comes with `batch_size`, per worker, or with `global_batch`, all workers together. `shuffle` puts it in an
    order that depends on `seed` and epoch. A DataLoader brings its own options; its random order becomes ours (its
    generator is not used), and what any other sampler draws on rank 0 is divided among all. Of an IterableDataset every
    worker reads all samples and keeps its part. With `source` only that rank has the dataset and sends the samples; the
    others may pass None. ValueError says what is wrong, and what to do instead.

    `service` is the job's; `source` and leased samples need it.
    """
    seed = whole_number("seed", seed, None)
    number = service.register() if service is not None else 0
    if source is not None and callbacks.size > 1:
        data, collate_fn = _remote(data, callbacks, service, number, source, collate_fn)
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
        options = {"dataset": data, "num_workers": whole_number("num_workers", num_workers, 0)}
        options |= {"collate_fn": collate_fn, "pin_memory": pin_memory}
        sampler = None
    if (batch_size is None) == (global_batch is None):
        raise ValueError(
            "job.shard needs either batch_size, per worker, or global_batch, all workers together: "
            f"{'neither was' if batch_size is None else 'both were'} given, so say job.shard(dataset, batch_size=64)"
        )
    if batch_size is not None:
        global_batch = whole_number("batch_size", batch_size, 1) * callbacks.size
    global_batch = whole_number("global_batch", global_batch, 1)
    cut = EpochOrder(global_batch=global_batch, drop_last=drop_last, shuffle=bool(shuffle), seed=seed)
    client = service.lease_client(number) if service is not None else None
    if isinstance(options["dataset"], IterableDataset):
        return Shard(_stream(options, cut), callbacks, client)
    return Shard(_indexed(options, cut, sampler, shuffle, callbacks), callbacks, client)


def _remote(
    data: Any,
    callbacks: LoaderCallbacks,
    service: DataService | None,
    number: int,
    source: int,
    collate: Callable[[list[Any]], Any] | None,
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """The dataset that this worker reads, and its collate function, if rank `source` has the data. Blocks for it."""
    if not 0 <= whole_number("source", source, 0) < callbacks.size:
        raise ValueError(f"source={source}: the run has the ranks 0 to {callbacks.size - 1}")
    if service is None:
        raise ValueError("source= needs a job: make the loader with job.shard")
    if callbacks.rank != source:
        return service.exchange.receive(number, source), as_is
    streams = isinstance(data, DataLoader | IterableDataset)
    if streams or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        problem = (
            f"source={source} sends samples by index, which a {type(data).__name__} does not support: give a dataset "
            "with __len__ and __getitem__, and batch_size"
        )
        service.exchange.refuse(number, problem)
        raise ValueError(problem)
    return service.exchange.offer(number, data, collate or default_collate), collate


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
    options: dict[str, Any], cut: EpochOrder, sampler: Any, shuffle: bool | None, callbacks: LoaderCallbacks
) -> Indexed:
    dataset = options["dataset"]
    if sampler is None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"job.shard cannot divide the samples of a {type(dataset).__name__}: give a dataset with __len__ and "
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
            "the DataLoader has a DistributedSampler, but Hora divides the samples itself: "
            "give the DataLoader without it, with shuffle=True if they should be shuffled"
        )
    name = type(sampler).__name__
    if shuffle is not None:
        raise ValueError(f"shuffle={shuffle} has no effect on the order that {name} draws: leave one of the two out")
    if not hasattr(sampler, "__len__"):
        raise ValueError(f"{name} does not say how many samples it draws for an epoch: give it a __len__")
    if callbacks.rank == 0:
        log.info("%s: rank 0 draws the samples of every epoch for all workers", name)
    return Indexed(options, cut, sampler, draws=True)


def _batching(loader: DataLoader[Any]) -> tuple[Any, int, bool]:
    """The sampler of a DataLoader, its batch size and drop_last."""
    if not getattr(loader, "in_order", True):
        raise ValueError("in_order=False would mix the batches of different steps: leave it out of the DataLoader")
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError(
            "the DataLoader has batch_size=None, so Hora cannot tell how many samples a batch has: "
            "give it a batch_size and let the dataset give single samples"
        )
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"the DataLoader has a batch_sampler of its own ({type(batches).__name__}), which Hora cannot divide: "
            "give it batch_size and, for its order, a sampler"
        )
    return batches.sampler, batches.batch_size, batches.drop_last
