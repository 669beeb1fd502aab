"""Bulk: all that is large in a round goes through here, and is counted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...collectives.group import Group
from ...collectives.hierarchy import Between
from ..common.sync import CommStats
from . import comm_summary


class CountedAllReduce:
    """Vectors are added up over `group` by `algorithm`. For one thread at a time."""

    def __init__(self, group: Group, algorithm: str, traffic: CommStats) -> None:
        self.group = group
        self.sent_bytes = 0  # by this worker, since the run began
        self._shown_bytes = 0  # of these, what the others read in shared memory
        self._algorithm = algorithm
        self._traffic = traffic

    def sum(self, vector: torch.Tensor, name: str, between: Between | None = None) -> None:
        """Collective, in place; `between` is how it crosses between hosts. Where memory is shared nothing is sent: then
        what a ring would send counts."""
        before = sum(self.group.sent_bytes)
        self.group.all_reduce(vector, "sum", self._algorithm, name=name, between=between)
        sent = sum(self.group.sent_bytes) - before
        if not sent and self.group.num_hosts == 1:
            sent = comm_summary.by_ring(vector.numel() * vector.element_size(), self.group.size)
            self._shown_bytes += sent
        self.count(sent)

    def peers(self) -> dict[int, int]:
        """How many bytes each other worker has had from this one. In shared memory each reads as much as any other."""
        sent, others = self.group.sent_bytes, self.group.others
        return {peer: sent[peer] + self._shown_bytes // len(others) for peer in others}

    def weighted_sum(
        self, vector: torch.Tensor, shares: Sequence[float], name: str, between: Between | None = None
    ) -> None:
        """Collective, in place: the sum of everybody's vector times its share."""
        share = shares[self.group.rank]
        if not share:
            vector.zero_()  # whatever it holds
        elif share != 1.0:
            vector.mul_(share)
        self.sum(vector, name, between)

    def count(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        self._traffic.sent_bytes += num_bytes
