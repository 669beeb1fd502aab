"""Rows: which rows of a sparse block have changed since when."""

from __future__ import annotations

import torch


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
