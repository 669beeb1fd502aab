"""EpochProgress: how far the training has come, in epochs and batches. May be read from another thread."""

from __future__ import annotations

import contextlib

from ..data import BatchSlice, LeasedBlock, Shard


class EpochProgress:
    """`epoch` of `num_epochs` is under way; both are None and 0 where the user's code has no `job.epochs`."""

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.num_epochs = 0
        self._finished = False
        self._batches: tuple[int, int] | None = None  # that have begun in this epoch, and how many there are
        self._loaders: tuple[int | None, set[int]] = (None, set())  # an epoch, and those that train in it

    def begin(self, num_epochs: int) -> None:
        self.num_epochs, self._finished = num_epochs, False

    def finish(self) -> None:
        """The last epoch has come to its end."""
        self._finished = True

    @property
    def is_last(self) -> bool:
        """Whether no epoch comes after this one, as far as is known."""
        return self.epoch is None or self.epoch >= self.num_epochs - 1

    def note(self, loader: Shard, batch: BatchSlice, num_workers: int) -> None:
        """This batch begins. Of leased blocks each worker has its own."""
        if self._loaders[0] != self.epoch:
            self._loaders = (self.epoch, set())
        self._loaders[1].add(id(loader))
        if len(self._loaders[1]) > 1:
            self._batches = None  # the share of each loader in the epoch is unknown
            return
        with contextlib.suppress(TypeError):  # a stream has no length
            self._batches = (batch.batch + 1, len(loader) * (num_workers if isinstance(batch, LeasedBlock) else 1))

    def progress(self, step: int, max_steps: int | None) -> float | None:
        """How much is done, 0 to 1; None where it is unknown."""
        epoch, batches, parts = self.epoch, self._batches, []
        if max_steps:
            parts.append(step / max_steps)
        if epoch is not None and self.num_epochs and batches is not None:
            parts.append((epoch + batches[0] / max(1, batches[1])) / self.num_epochs)
        elif self._finished:
            parts.append(1.0)
        return min(1.0, max(parts)) if parts else None
