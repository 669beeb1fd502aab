"""Desk: where a server hands out its blocks. It applies what the rules have decided on, and answers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..hyper import Hyper
from .layout import Parcel
from .messages import Ready
from .rows import RowLog
from .shelf import Gradient, Shelf

Address = tuple[str, int]
Out = list[tuple[Address, Any]]


@dataclasses.dataclass
class Counts:
    """What a server has done."""

    updates: int = 0  # of a whole step by one gradient, or one mean
    parcels: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: int = 0
    skipped: int = 0
    lags: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


class Desk:
    """What a worker was given, and what has changed since."""

    def __init__(self, shelf: Shelf, record: Callable[..., None] | None = None) -> None:
        self.shelf = shelf
        self.counts = Counts()
        self.record = record or (lambda kind, **facts: None)
        self.copies: dict[
            int, list[torch.Tensor]
        ] = {}  # by worker and block: what it was last given, where it is copied
        self._rows: dict[int, RowLog] = {}  # by parcel
        self._seen: dict[int, dict[int, int]] = {}  # by worker and parcel: versions of sparse blocks when last answered

    def join(self, worker: int) -> None:
        self._seen[worker] = {}

    def lend(self, worker: int, copies: list[torch.Tensor]) -> None:
        self.copies[worker] = copies
        for copy, flat in zip(copies, self.shelf.flats, strict=True):
            copy.copy_(flat)

    def leave(self, worker: int) -> None:
        self.copies.pop(worker, None)
        self._seen.pop(worker, None)

    def apply(self, parcel: Parcel, gradients: Sequence[Gradient], settings: Hyper | None) -> None:
        if all(gradient is None for gradient in gradients):
            return
        if not parcel.row:
            self.shelf.apply(parcel, gradients, settings)
        elif gradients[0] is not None:
            log = self._log(parcel)
            self.shelf.apply(parcel, gradients, settings)
            sparse = gradients[0].is_sparse
            rows = gradients[0].coalesce().indices()[0] if sparse else torch.arange(log.num_rows)
            log.touch(rows, self.shelf.version(parcel.blocks[0]))

    def answer(self, worker: int, readies: list[Ready]) -> Out:
        out: Out = []
        for ready in readies:
            parcel = self.shelf.part.parcels[ready.parcel]
            ready.versions = self.shelf.versions(parcel)
            if parcel.row:
                ready.rows = [self._changed_rows(worker, parcel)]
            self.counts.bytes_out += parcel.num_bytes
            if worker in self.copies:
                for block in parcel.blocks:
                    self.copies[worker][block.number].copy_(self.shelf.flats[block.number])
            out.append((("worker", worker), ready))
        return out

    def _changed_rows(self, worker: int, parcel: Parcel) -> bytes:
        """The rows of a sparse block that have changed since this worker was last answered; all, the first time."""
        log, version = self._log(parcel), self.shelf.version(parcel.blocks[0])
        seen = self._seen[worker].get(parcel.number)
        self._seen[worker][parcel.number] = version
        rows = torch.arange(log.num_rows) if seen is None else log.since(seen)
        log.forget(min(each.get(parcel.number, version) for each in self._seen.values()))
        return rows.numpy().tobytes()

    def _log(self, parcel: Parcel) -> RowLog:
        if parcel.number not in self._rows:
            self._rows[parcel.number] = RowLog(parcel.blocks[0].numel // parcel.row)
        self._rows[parcel.number].meet(self.shelf.version(parcel.blocks[0]))
        return self._rows[parcel.number]
