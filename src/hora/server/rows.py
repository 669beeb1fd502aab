"""Rows: which rows of a sparse block have changed since when; gradients that are rows; row numbers as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import HoraError
from ..net.tensor_bytes import tensor_bytes

ROW_BYTES = 8  # of a row's number


def to_bytes(rows: torch.Tensor) -> bytes:
    return bytes(tensor_bytes(rows.contiguous()))


def from_bytes(data: bytes) -> torch.Tensor:
    """HoraError for what are no whole numbers of rows."""
    if len(data) % ROW_BYTES:
        raise HoraError(f"{len(data)} bytes are no numbers of rows")
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


def checked(data: bytes, num_rows: int) -> torch.Tensor:
    """Row numbers that somebody else sent: in order, each once, all below `num_rows`; else HoraError."""
    rows = from_bytes(data)
    if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < num_rows and bool((rows.diff() > 0).all())):
        raise HoraError(f"rows that a block of {num_rows} rows does not have, or not in order")
    return rows


def num_bytes(gradients: Sequence[torch.Tensor | None]) -> int:
    """What these gradients weigh on their way: of a sparse one its rows and their numbers."""
    total = 0
    for gradient in gradients:
        if gradient is not None:
            values = gradient._values() if gradient.is_sparse else gradient
            total += values.numel() * values.element_size()
            total += len(values) * ROW_BYTES if gradient.is_sparse else 0
    return total


def add_up(given: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The sum of gradients times factors, of which some are sparse: sparse if all are, else a vector.

    Half precision is added up in float32 and rounded once."""
    dtype, shape = next((g.dtype, g.shape) for g, _ in given if g.is_sparse)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    sparse = [(g.coalesce(), factor) for g, factor in given if g.is_sparse]
    values = torch.cat([g.values().to(wide) * factor for g, factor in sparse])
    rows = torch.cat([g.indices() for g, _ in sparse], 1)
    total = torch.sparse_coo_tensor(
        rows, values, shape, is_coalesced=len(sparse) == 1, check_invariants=False
    ).coalesce()
    if len(sparse) == len(given):
        return total.to(dtype)
    whole = total.to_dense()
    for gradient, factor in given:
        if not gradient.is_sparse:
            whole.add_(gradient.view(shape), alpha=factor)
    return whole.to(dtype).view(-1)


def shift(gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor, factor: float) -> torch.Tensor:
    """Delay compensation of a sparse gradient, row by row: g + factor · g ⊙ g ⊙ (now − then)."""
    rows, values = gradient.coalesce().indices(), gradient.coalesce().values()
    values = (now[rows[0]] - then[rows[0]]).mul_(values).mul_(values).mul_(factor).add_(values)
    return torch.sparse_coo_tensor(rows, values, gradient.shape, is_coalesced=True, check_invariants=False)


def stays_in_rows(optimizer: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> bool:
    """Whether a sparse gradient changes its own rows alone: momentum and decay move others too."""
    if optimizer is torch.optim.SGD:
        return not settings["momentum"] and not settings["weight_decay"]
    return optimizer in (torch.optim.SparseAdam, torch.optim.Adagrad)


def takes_rows(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether it can do anything with a sparse gradient, as far as is known."""
    known = optimizer.__module__.startswith("torch.optim")
    return not known or optimizer in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)


class RowLog:
    """Remembers of each row the version that it last changed with; its length is bounded by that of the block.

    `version` is the block's as far as the log knows; what changed it otherwise, as filling does, changed all rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.version = 0
        self._floor = 0  # of what was before, nothing is known
        self._entries: list[tuple[torch.Tensor, torch.Tensor]] = []  # versions, rows; the newest last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def meet(self, version: int) -> None:
        """The block has this version."""
        if version != self.version:
            self.version = self._floor = version
            self._keep([])

    def touch(self, rows: torch.Tensor, version: int) -> None:
        """These rows, each named once, got this version."""
        self.version = version
        if not rows.numel():
            return
        self._entries.append((torch.full_like(rows, version), rows))
        self._length += rows.numel()
        if self._length > 2 * self.num_rows:
            last = torch.zeros(self.num_rows, dtype=torch.int64)
            for versions, touched in self._entries:
                last[touched] = versions
            self._keep([(last[kept], kept)] if (kept := last.nonzero().view(-1)).numel() else [])

    def since(self, version: int) -> torch.Tensor:
        """The rows that have changed after it, in order."""
        if version < self._floor:
            return torch.arange(self.num_rows)
        changed = [rows[versions > version] for versions, rows in self._entries]
        return torch.cat(changed).unique() if changed else torch.empty(0, dtype=torch.int64)

    def forget(self, version: int) -> None:
        """Nobody will ask for what changed with this version or before."""
        if self._entries and int(self._entries[0][0].min()) <= version:
            kept = [(versions[versions > version], rows[versions > version]) for versions, rows in self._entries]
            self._keep([(versions, rows) for versions, rows in kept if rows.numel()])

    def _keep(self, entries: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._entries = entries
        self._length = sum(rows.numel() for _, rows in entries)
