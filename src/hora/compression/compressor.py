"""Compressor: the compressed sums of one worker's vectors, one for each, and what they save together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .codec import make_codec
from .compressed_sum import CompressedSum, CompressionSavings
from .error_feedback import GatheredSum, ScatteredSum
from .names import FULL, POWERSGD, TOPK
from .powersgd import Matrix, PowerSGDSum

RANK = 4


class Compressor:
    """Residuals are lost with the worker, and not saved in checkpoints."""

    def __init__(
        self, name: str, topk: float | None = None, rank: int | None = None, savings: CompressionSavings | None = None
    ) -> None:
        self.name = name
        self.savings = savings or CompressionSavings()
        self._topk = TOPK if topk is None else topk
        self._rank = RANK if rank is None else rank
        self._sums: dict[Hashable, CompressedSum] = {}

    def sum_for(self, key: Hashable, numel: int, matrices: Sequence[Matrix] = ()) -> CompressedSum | None:
        """The sum of the vector with this key; None where vectors are not encoded. `matrices`: what powersgd takes for
        one."""
        if self.name == FULL:
            return None
        if key not in self._sums:
            self._sums[key] = self._make(numel, matrices)
        return self._sums[key]

    def _make(self, numel: int, matrices: Sequence[Matrix]) -> CompressedSum:
        if self.name == POWERSGD:
            return PowerSGDSum(self.name, numel, self.savings, matrices, self._rank)
        kind = GatheredSum if self.name == "topk" else ScatteredSum
        return kind(self.name, numel, self.savings, make_codec(self.name, self._topk))

    def settle(self, applied: bool) -> None:
        """The sums of the last step were used, or that step was dropped."""
        for each in self._sums.values():
            each.settle(applied)

    def reset(self) -> None:
        """Discards all residuals."""
        for each in self._sums.values():
            each.reset()
