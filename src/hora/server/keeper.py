"""Keeper: where a server hands out its blocks. It applies what the rules have decided on, and answers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..parameters.hyperparameters import Hyper
from .layout import Chunk
from .messages import ChunkReady
from .rows import ROW_BYTES, RowLog, to_bytes
from .shelf import Gradient, Shelf

Address = tuple[str, int]
Out = list[tuple[Address, Any]]


@dataclasses.dataclass
class ServerCounts:
    """What a server has done."""

    updates: int = 0  # of a whole step by one gradient, or one mean
    parcels: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: int = 0
    skipped: int = 0
    lags: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


class Keeper:
    """What a worker was given, and what has changed since."""

    def __init__(self, shelf: Shelf, record: Callable[..., None] | None = None) -> None:
        self.shelf = shelf
        self.counts = ServerCounts()
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

    def apply(self, parcel: Chunk, gradients: Sequence[Gradient], settings: Hyper | None) -> None:
        if all(gradient is None for gradient in gradients):
            return
        if parcel.table is not None:
            assert gradients[0] is not None
            self.shelf.apply_to_table(parcel, gradients[0], settings)
        elif not parcel.row:
            self.shelf.apply(parcel, gradients, settings)
        elif gradients[0] is not None:
            log = self._log(parcel)
            rows = self._apply_rows(parcel, gradients, settings, log.num_rows)
            log.touch(rows, self.shelf.version(parcel.blocks[0]))

    def _apply_rows(
        self, parcel: Chunk, gradients: Sequence[Gradient], settings: Hyper | None, num_rows: int
    ) -> torch.Tensor:
        """Which rows it has changed."""
        gradient, flat = gradients[0], self.shelf.flats[parcel.blocks[0].number]
        assert gradient is not None
        if gradient.is_sparse and self.shelf.stays_in_rows(parcel, settings):
            self.shelf.apply(parcel, gradients, settings)
            return gradient.coalesce().indices()[0].clone()
        before = flat.clone() if gradient.is_sparse else None
        self.shelf.apply(parcel, gradients, settings)
        if before is None:
            return torch.arange(num_rows)
        return (before != flat).view(num_rows, -1).any(1).nonzero().view(-1)

    def answer(self, worker: int, readies: list[ChunkReady]) -> Out:
        out: Out = []
        for ready in readies:
            parcel = self.shelf.part.parcels[ready.parcel]
            ready.versions = self.shelf.versions(parcel)
            copies = self.copies.get(worker)
            if parcel.table is not None:
                pass  # its rows are read when they are asked for
            elif parcel.row:
                rows = self._changed_rows(worker, parcel)
                ready.rows = [to_bytes(rows)]
                self._copy_rows(parcel, rows, copies)
            else:
                self.counts.bytes_out += parcel.num_bytes
                if copies is not None:
                    for block in parcel.blocks:
                        copies[block.number].copy_(self.shelf.flats[block.number])
            out.append((("worker", worker), ready))
        return out

    def look_up(self, parcel: Chunk, rows: torch.Tensor) -> tuple[int, torch.Tensor]:
        """A table's version and these rows of it."""
        found = self.shelf.tables[parcel.number].look_up(rows)
        self.counts.bytes_out += found.numel() * found.element_size()
        return self.shelf.version(parcel.blocks[0]), found

    def _copy_rows(self, parcel: Chunk, rows: torch.Tensor, copies: list[torch.Tensor] | None) -> None:
        """What a worker reads of a sparse block, counted, and, where it has a copy of its own, brought into that."""
        number = parcel.blocks[0].number
        table = self.shelf.flats[number].view(-1, parcel.row)
        self.counts.bytes_out += len(rows) * (parcel.row * table.element_size() + ROW_BYTES)
        if copies is not None and len(rows):
            copies[number].view(-1, parcel.row).index_copy_(0, rows, table[rows])

    def _changed_rows(self, worker: int, parcel: Chunk) -> torch.Tensor:
        """The rows of a sparse block that have changed since this worker was last answered; all, the first time."""
        log, version = self._log(parcel), self.shelf.version(parcel.blocks[0])
        seen = self._seen[worker].get(parcel.number)
        self._seen[worker][parcel.number] = version
        rows = torch.arange(log.num_rows) if seen is None else log.since(seen)
        log.forget(min(each.get(parcel.number, version) for each in self._seen.values()))
        return rows

    def _log(self, parcel: Chunk) -> RowLog:
        if parcel.number not in self._rows:
            self._rows[parcel.number] = RowLog(parcel.blocks[0].numel // parcel.row)
        self._rows[parcel.number].meet(self.shelf.version(parcel.blocks[0]))
        return self._rows[parcel.number]
