"""CountedAllReduce: all-reduce of a round's vectors, with the bytes that this worker sent, against those of a ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...collectives.group import Group
from ...collectives.hierarchy import Between
from ...compression.compressed_sum import format_bytes
from ..common.sync import CommStats


class CountedAllReduce:
    """Sums vectors over `group` with `algorithm`. One thread at a time."""

    def __init__(self, group: Group, algorithm: str, traffic: CommStats) -> None:
        self.group = group
        self.sent_bytes = 0  # by this worker, since the run began
        self._shared_bytes = 0  # of these, what the other workers read in shared memory
        self._algorithm = algorithm
        self.traffic = traffic

    def sum(self, vector: torch.Tensor, name: str, between: Between | None = None) -> None:
        """Collective, in place; `between` is how it crosses between hosts. In shared memory nothing is sent: there the
        bytes that a ring would send are counted."""
        before = sum(self.group.sent_bytes)
        self.group.all_reduce(vector, "sum", self._algorithm, name=name, between=between)
        sent = sum(self.group.sent_bytes) - before
        if not sent and self.group.num_hosts == 1:
            sent = _ring_bytes(vector.numel() * vector.element_size(), self.group.size)
            self._shared_bytes += sent
        self.count(sent)

    def weighted_sum(
        self, vector: torch.Tensor, shares: Sequence[float], name: str, between: Between | None = None
    ) -> None:
        """Collective, in place: the sum of every worker's vector times its share."""
        share = shares[self.group.rank]
        if not share:
            vector.zero_()  # also of NaN
        elif share != 1.0:
            vector.mul_(share)
        self.sum(vector, name, between)

    def count(self, num_bytes: int) -> None:
        self.sent_bytes += num_bytes
        self.traffic.sent_bytes += num_bytes

    def sent_to(self) -> dict[int, int]:
        """Bytes by worker. In shared memory each worker reads as much as any other."""
        sent, others = self.group.sent_bytes, self.group.others
        return {peer: sent[peer] + self._shared_bytes // len(others) for peer in others}


def summarize(strategy: str, rounds: int, steps: int, sent: int, parameters: Iterable[torch.Tensor], size: int) -> str:
    """The last line of a run: what one worker sent, against a ring at every step. Empty if it sent nothing."""
    ring = _ring_bytes(sum(p.numel() * p.element_size() for p in parameters), size) * steps
    if not sent or not ring:
        return ""
    return (
        f"{strategy}: {rounds} rounds in {steps} steps, {format_bytes(sent)} sent per worker; for the same samples the "
        f"ring sends {format_bytes(ring)}, {ring / sent:.1f} times as much"
    )


def _ring_bytes(num_bytes: int, size: int) -> int:
    """What each of `size` workers sends in a ring all-reduce of so many bytes."""
    return 2 * (size - 1) * num_bytes // size
