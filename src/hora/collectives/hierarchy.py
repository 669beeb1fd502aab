"""Hierarchical all-reduce: inside a host through shared memory, between hosts by one leader each.

        host a                     host b
    ┌─ 0 ◀── 1 ──┐             ┌─ 2 ◀── 3 ──┐        inner: the ranks of one host, over shared memory
    └─ │ ────────┘             └─ │ ────────┘
       └────────── ring ──────────┘                  leaders: the first rank of each host

    reduce      the leader adds up the vectors of its host out of their memory
    between     the leaders all-reduce these sums, by a ring, by what `auto` measured, or compressed (`between`)
    broadcast   the leader's result goes to the other ranks of its host

Large vectors that the leaders exchange by a ring pass through all three at once, segment by segment: while one is on
the wire the next is reduced, and those that are complete are broadcast.

So each host's link carries 2(h−1)/h of the data once with h hosts, however many ranks a host has. Half precision is
rounded once inside a host, and between hosts as `between` does it: the ring at every hop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import HoraError
from . import auto, primitives, ring, shared, tree
from .consistency import SubgroupChecker
from .reduction import OPERATIONS, Operation

if TYPE_CHECKING:
    from .group import Group

Between = Callable[["Group", torch.Tensor, Operation], None]
"""`between(leaders, flat, operation)`: every leader's flat becomes the reduction of all of them, in place. The
operation divides nothing. There are two leaders at least, and all of them call it in the same call."""

BETWEEN: dict[str, Between] = {"ring": ring.all_reduce, "shared": ring.all_reduce, "auto": auto.all_reduce}

STREAM_BYTES = 4 << 20  # from here on it pays to overlap the three phases


class HostHierarchy:
    """Made by all ranks of `group` together, in one call of it; `make_part(ranks, kind)` makes its parts.

    `inner` is None for a rank that is alone on its host, `leaders` where this rank is not the first of its host. With
    one rank on every host the leaders are the group itself.
    """

    def __init__(self, group: Group, make_part: Callable[[list[int], str], Group | None]) -> None:
        primitives.barrier(group)  # all ranks are in the same call
        self._leader_ranks = sorted({group.hosts.index(host) for host in group.hosts})
        self._local_ranks = [rank for rank in range(group.size) if group.hosts[rank] == group.hosts[group.rank]]
        self.inner = make_part(self._local_ranks, "auto") if len(self._local_ranks) > 1 else None
        self.leaders: Group | None = None
        if len(self._leader_ranks) == group.size:
            self.leaders = group
        elif self._local_ranks[0] == group.rank:
            self.leaders = make_part(self._leader_ranks, group.transport.kind)
        parts = ((self.inner, self._local_ranks), (self.leaders, self._leader_ranks))
        self._parts = [(part, ranks) for part, ranks in parts if part is not None and part is not group]

    def all_reduce(self, group: Group, flat: torch.Tensor, operation: Operation, between: Between) -> None:
        plain = OPERATIONS["sum"] if operation.mean else operation
        for part, _ in self._parts:
            assert isinstance(part.consistency, SubgroupChecker)
            part.consistency.enter_call()
            part.transport.background = group.transport.background
        if self._streams(flat, between):
            self._stream(group, flat, operation, plain)
            return
        self._reduce(flat, plain)
        if self.leaders is not None:
            try:
                between(self.leaders, flat, plain)
            except ValueError as mistake:  # only leaders see it; the others must not wait for them
                raise HoraError(f"{group.transport.name_of(group.rank)}: {mistake}") from mistake
            operation.finish(flat, group.size)
        self._broadcast(flat)

    def _streams(self, flat: torch.Tensor, between: Between) -> bool:
        """Whether the leaders exchange this vector by a ring, in segments. The other ranks ask their leader, which
        alone knows what was measured."""
        num_bytes = flat.numel() * flat.element_size()
        if num_bytes < STREAM_BYTES:
            return False
        if between is not auto.all_reduce:
            return between is ring.all_reduce
        chosen = torch.zeros(1, dtype=torch.uint8)
        if self.leaders is not None:
            chosen += auto.choose(self.leaders, num_bytes) == "ring"
        self._broadcast(chosen)
        return bool(chosen)

    def _stream(self, group: Group, flat: torch.Tensor, operation: Operation, plain: Operation) -> None:
        def first(segment: torch.Tensor) -> None:
            self._reduce(segment, plain)

        if self.leaders is not None:
            ring.all_reduce(self.leaders, flat, operation, group.size, first, self._broadcast)
        else:
            number = self._leader_ranks.index(self._local_ranks[0])
            ring.follow(flat, len(self._leader_ranks), number, first, self._broadcast)

    def _reduce(self, flat: torch.Tensor, operation: Operation) -> None:
        """The leader's `flat` becomes the reduction of its host's; the others' are undefined afterwards."""
        if self.inner is None:
            return
        if self.inner.transport.shares_memory:
            shared.reduce(self.inner, flat, operation)
        else:
            tree.up(self.inner, flat, operation, root=0)

    def _broadcast(self, flat: torch.Tensor) -> None:
        """From the leader to the other ranks of its host."""
        if self.inner is None:
            return
        if self.inner.transport.shares_memory:
            shared.broadcast(self.inner, flat)
        else:
            tree.down(self.inner, flat, root=0)

    def add_sent_bytes(self, totals: list[int]) -> None:
        """Adds what this rank sent over the parts, by rank of the group."""
        for part, ranks in self._parts:
            for rank, num_bytes in zip(ranks, part.transport.sent_bytes, strict=True):
                totals[rank] += num_bytes

    def close(self) -> None:
        for part, _ in self._parts:
            part.close()
