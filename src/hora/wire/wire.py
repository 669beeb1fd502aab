"""Wire: how one worker's vectors cross between hosts: an exchange for each, and what they saved together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .codec import codec
from .exchange import Exchange
from .feedback import Gathered, Scattered
from .names import FULL, POWERSGD, TOPK
from .powersgd import Matrix, PowerSGD
from .tally import Tally

RANK = 4


class Wire:
    """`forget` gives up what the exchanges still owe; that is also lost with the worker, and no checkpoint has it."""

    def __init__(
        self, name: str, topk: float | None = None, rank: int | None = None, tally: Tally | None = None
    ) -> None:
        self.name = name
        self.tally = tally or Tally()
        self._topk = TOPK if topk is None else topk
        self._rank = RANK if rank is None else rank
        self._exchanges: dict[Hashable, Exchange] = {}

    def exchange(self, key: Hashable, numel: int, matrices: Sequence[Matrix] = ()) -> Exchange | None:
        """The exchange of the vector that goes by this name; None where vectors cross as they are. `matrices`: what of
        it powersgd takes for one."""
        if self.name == FULL:
            return None
        found = self._exchanges.get(key)
        if found is None:
            found = self._exchanges[key] = self._make(numel, matrices)
        return found

    def _make(self, numel: int, matrices: Sequence[Matrix]) -> Exchange:
        if self.name == POWERSGD:
            return PowerSGD(self.name, numel, self.tally, matrices, self._rank)
        kind = Gathered if self.name == "topk" else Scattered
        return kind(self.name, numel, self.tally, codec(self.name, self._topk))

    def settle(self, counts: bool) -> None:
        """What the exchanges gave in the last step was used, or that step does not count: see `Exchange.settle`."""
        for exchange in self._exchanges.values():
            exchange.settle(counts)

    def forget(self) -> None:
        for exchange in self._exchanges.values():
            exchange.forget()
