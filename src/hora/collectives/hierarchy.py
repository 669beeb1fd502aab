"""Hierarchy: the ranks of a group by host. Inside a host sums go through shared memory; between hosts, one leader's.

        host a                     host b
    ┌─ 0 ◀── 1 ──┐             ┌─ 2 ◀── 3 ──┐        inner: the ranks of one host, over shared memory
    └─ │ ────────┘             └─ │ ────────┘
       └────────── ring ──────────┘                  leaders: the first rank of each host

    gather      the leader adds up the vectors of its host out of their memory
    between     the leaders agree on the sum of all, by a ring, by what `auto` measured, or compressed (`between`)
    spread      the leader's result goes to the others of its host

Large vectors that the leaders exchange by a ring pass through all three at once, segment by segment: while one is on
the wire the next is gathered, and those that are complete are spread.

So each host's link carries 2(h−1)/h of the data once with h hosts, whatever the ranks per host. Half precision is
rounded once inside a host, and between hosts as `between` does it: the ring at every hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import HoraError
from . import auto, moves, ring, shared, tree
from .consistency import SubgroupChecker
from .reduction import OPERATIONS, Operation

if TYPE_CHECKING:
    from .group import Group

Between = Callable[["Group", torch.Tensor, Operation], None]
"""`between(leaders, flat, operation)`: every leader's flat becomes the reduction of all of them, in place. The
operation divides nothing. There are two leaders at least, and all of them call it in the same call."""

BETWEEN: dict[str, Between] = {"ring": ring.all_reduce, "shared": ring.all_reduce, "auto": auto.all_reduce}

STREAM_BYTES = 4 << 20  # from here on it pays to overlap the three phases

Found = Callable[[list[int], str], "Group | None"]


class HostHierarchy:
    """Made by all ranks of `group` together, in one call of it; `found(ranks, kind)` makes its parts.

    `inner` is None for a rank that is alone on its host, `leaders` where this rank is not the first of its host. With
    one rank on every host the leaders are the group itself.
    """

    def __init__(self, group: Group, found: Found) -> None:
        moves.barrier(group)  # all mean the same call
        firsts = sorted({group.hosts.index(host) for host in group.hosts})
        self._mates = [rank for rank in range(group.size) if group.hosts[rank] == group.hosts[group.rank]]
        self._firsts = firsts
        self.inner = found(self._mates, "auto") if len(self._mates) > 1 else None
        self.leaders: Group | None = None
        if len(firsts) == group.size:
            self.leaders = group
        elif self._mates[0] == group.rank:
            self.leaders = found(firsts, group.transport.kind)
        pairs = ((self.inner, self._mates), (self.leaders, firsts))
        self._parts = [(part, ranks) for part, ranks in pairs if part is not None and part is not group]

    def all_reduce(self, group: Group, flat: torch.Tensor, operation: Operation, between: Between) -> None:
        plain = OPERATIONS["sum"] if operation.mean else operation
        for part, _ in self._parts:
            assert isinstance(part.consistency, SubgroupChecker)
            part.consistency.stand_in()
            part.transport.background = group.transport.background
        if self._streams(flat, between):
            self._stream(group, flat, operation, plain)
            return
        if self.inner is not None:
            _gather(self.inner, flat, plain)
        if self.leaders is not None:
            try:
                between(self.leaders, flat, plain)
            except ValueError as mistake:  # only leaders see it; the others must not wait for them
                raise HoraError(f"{group.transport.name_of(group.rank)}: {mistake}") from mistake
            operation.finish(flat, group.size)
        if self.inner is not None:
            _spread(self.inner, flat)

    def _streams(self, flat: torch.Tensor, between: Between) -> bool:
        """Whether the leaders exchange this vector by a ring, and in segments; the others of a host ask their leader,
        who alone knows what was measured."""
        num_bytes = flat.numel() * flat.element_size()
        if num_bytes < STREAM_BYTES:
            return False
        if between is not auto.all_reduce:
            return between is ring.all_reduce
        chosen = torch.zeros(1, dtype=torch.uint8)
        if self.leaders is not None:
            chosen += auto.choose(self.leaders, num_bytes) == "ring"
        if self.inner is not None:
            _spread(self.inner, chosen)
        return bool(chosen)

    def _stream(self, group: Group, flat: torch.Tensor, operation: Operation, plain: Operation) -> None:
        inner = self.inner

        def first(segment: torch.Tensor) -> None:
            if inner is not None:
                _gather(inner, segment, plain)

        def final(segment: torch.Tensor) -> None:
            if inner is not None:
                _spread(inner, segment)

        if self.leaders is not None:
            ring.all_reduce(self.leaders, flat, operation, group.size, first, final)
        else:
            ring.follow(flat, len(self._firsts), self._firsts.index(self._mates[0]), first, final)

    def add_sent_bytes(self, totals: list[int]) -> None:
        """Adds what this rank sent over the parts, by rank of the group."""
        for part, ranks in self._parts:
            for rank, num_bytes in zip(ranks, part.transport.sent_bytes, strict=True):
                totals[rank] += num_bytes

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()


def _gather(inner: Group, flat: torch.Tensor, operation: Operation) -> None:
    """The leader's `flat` becomes the reduction of its host's; the others' are spoilt or stay as they are."""
    if inner.transport.shares_memory:
        shared.reduce(inner, flat, operation)
    else:
        tree.up(inner, flat, operation, root=0)


def _spread(inner: Group, flat: torch.Tensor) -> None:
    if inner.transport.shares_memory:
        shared.broadcast(inner, flat)
    else:
        tree.down(inner, flat, root=0)
