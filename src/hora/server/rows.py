"""Sparse gradients by row: their sums, row numbers as bytes, and RowLog, which rows of a block changed since when."""

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
    """HoraError if these are not whole row numbers."""
    if len(data) % ROW_BYTES:
        raise HoraError(f"{len(data)} bytes are not a whole number of row numbers")
    return torch.frombuffer(bytearray(data), dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64)


def checked(data: bytes, num_rows: int) -> torch.Tensor:
    """Row numbers from another process: ascending, without duplicates, all below `num_rows`; else HoraError."""
    rows = from_bytes(data)
    if len(rows) and not (int(rows[0]) >= 0 and int(rows[-1]) < num_rows and bool((rows.diff() > 0).all())):
        raise HoraError(f"row numbers must be ascending and below {num_rows}, the number of rows of the block")
    return rows


def make_sparse(rows: torch.Tensor, values: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A coalesced sparse matrix; `rows` ascend without duplicates. Nothing is copied or checked."""
    shape = (num_rows, values.shape[1])
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def num_bytes(gradients: Sequence[torch.Tensor | None]) -> int:
    """What these gradients take on the wire: a sparse one its rows and their numbers."""
    total = 0
    for gradient in gradients:
        if gradient is not None and gradient.is_sparse:
            values = gradient._values()
            total += values.nbytes + len(values) * ROW_BYTES
        elif gradient is not None:
            total += gradient.nbytes
    return total


def weighted_sum(terms: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The sum of gradients times factors, some of them sparse: sparse if all are, else a vector.

    Half precision is summed in float32 and rounded once."""
    dtype, shape = next((g.dtype, g.shape) for g, _ in terms if g.is_sparse)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    sparse = [(g.coalesce(), factor) for g, factor in terms if g.is_sparse]
    values = torch.cat([g.values().to(wide) * factor for g, factor in sparse])
    rows = torch.cat([g.indices() for g, _ in sparse], 1)
    total = torch.sparse_coo_tensor(
        rows, values, shape, is_coalesced=len(sparse) == 1, check_invariants=False
    ).coalesce()
    if len(sparse) == len(terms):
        return total.to(dtype)
    dense = total.to_dense()
    for gradient, factor in terms:
        if not gradient.is_sparse:
            dense.add_(gradient.view(shape), alpha=factor)
    return dense.to(dtype).view(-1)


def compensate_delay(gradient: torch.Tensor, now: torch.Tensor, then: torch.Tensor, factor: float) -> torch.Tensor:
    """Delay compensation of a sparse gradient, by row: g + factor · g ⊙ g ⊙ (now − then)."""
    gradient = gradient.coalesce()
    rows, values = gradient.indices()[0], gradient.values()
    values = (now[rows] - then[rows]).mul_(values).mul_(values).mul_(factor).add_(values)
    return make_sparse(rows, values, len(now))


def stays_in_rows(optimizer: type[torch.optim.Optimizer], settings: Mapping[str, Any]) -> bool:
    """Whether a sparse gradient changes its own rows only: momentum and weight decay move others too."""
    if optimizer is torch.optim.SGD:
        return not settings["momentum"] and not settings["weight_decay"]
    return optimizer in (torch.optim.SparseAdam, torch.optim.Adagrad)


def supports_sparse(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether it takes sparse gradients; optimizers that are not torch's are assumed to."""
    known = optimizer.__module__.startswith("torch.optim")
    return not known or optimizer in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad)


class RowLog:
    """The version at which each row last changed. Its length is bounded by the block's.

    `version` is the block's, as far as the log knows. Any other change, as by filling, counts as a change of all
    rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.version = 0
        self._floor = 0  # the log knows nothing of older versions
        self._entries: list[tuple[torch.Tensor, torch.Tensor]] = []  # versions, rows; the newest last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def set_version(self, version: int) -> None:
        """The block has this version; if the log does not know of it, all rows have changed."""
        if version != self.version:
            self.version = self._floor = version
            self._set_entries([])

    def touch(self, rows: torch.Tensor, version: int) -> None:
        """These rows, without duplicates, changed with this version."""
        self.version = version
        if not rows.numel():
            return
        self._entries.append((torch.full_like(rows, version), rows))
        self._length += rows.numel()
        if self._length > 2 * self.num_rows:
            last = torch.zeros(self.num_rows, dtype=torch.int64)
            for versions, touched in self._entries:
                last[touched] = versions
            self._set_entries([(last[kept], kept)] if (kept := last.nonzero().view(-1)).numel() else [])

    def since(self, version: int) -> torch.Tensor:
        """The rows that changed after this version, in ascending order."""
        if version < self._floor:
            return torch.arange(self.num_rows)
        changed = [rows[versions > version] for versions, rows in self._entries]
        return torch.cat(changed).unique() if changed else torch.empty(0, dtype=torch.int64)

    def forget(self, version: int) -> None:
        """Discards changes up to this version, which will not be asked for again."""
        if self._entries and int(self._entries[0][0].min()) <= version:
            kept = [(versions[versions > version], rows[versions > version]) for versions, rows in self._entries]
            self._set_entries([(versions, rows) for versions, rows in kept if rows.numel()])

    def _set_entries(self, entries: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._entries = entries
        self._length = sum(rows.numel() for _, rows in entries)
