"""Wire: how one worker's vectors cross between hosts: an exchange for each, and what they saved together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .codec import make_codec
from .exchange import CompressedSum
from .feedback import GatheredSum, ScatteredSum
from .names import FULL, POWERSGD, TOPK
from .powersgd import Matrix, PowerSGDSum
from .savings import CompressionSavings

RANK = 4


class Compressor:
    """`forget` gives up what the exchanges still owe; that is also lost with the worker, and no checkpoint has it."""

    def __init__(
        self, name: str, topk: float | None = None, rank: int | None = None, tally: CompressionSavings | None = None
    ) -> None:
        self.name = name
        self.tally = tally or CompressionSavings()
        self._topk = TOPK if topk is None else topk
        self._rank = RANK if rank is None else rank
        self._exchanges: dict[Hashable, CompressedSum] = {}

    def exchange(self, key: Hashable, numel: int, matrices: Sequence[Matrix] = ()) -> CompressedSum | None:
        """The exchange of the vector that goes by this name; None where vectors cross as they are. `matrices`: what of
        it powersgd takes for one."""
        if self.name == FULL:
            return None
        found = self._exchanges.get(key)
        if found is None:
            found = self._exchanges[key] = self._make(numel, matrices)
        return found

    def _make(self, numel: int, matrices: Sequence[Matrix]) -> CompressedSum:
        if self.name == POWERSGD:
            return PowerSGDSum(self.name, numel, self.tally, matrices, self._rank)
        kind = GatheredSum if self.name == "topk" else ScatteredSum
        return kind(self.name, numel, self.tally, make_codec(self.name, self._topk))

    def settle(self, counts: bool) -> None:
        """What the exchanges gave in the last step was used, or that step does not count: see `Exchange.settle`."""
        for exchange in self._exchanges.values():
            exchange.settle(counts)

    def forget(self) -> None:
        for exchange in self._exchanges.values():
            exchange.forget()
