"""Hierarchy: the ranks of a group by host. Inside a host sums go through shared memory; between hosts, one leader's.

        host a                     host b
    ┌─ 0 ◀── 1 ──┐             ┌─ 2 ◀── 3 ──┐        inner: the ranks of one host, over shared memory
    └─ │ ────────┘             └─ │ ────────┘
       └────────── ring ──────────┘                  leaders: the first rank of each host

    inside      every rank's vector is added up in its host's memory
    between     the leaders agree on the sum of all, by a ring, by what `auto` measured, or compressed (`between`)
    inside      the leader's result goes to the others of its host

So each host's link carries 2(h−1)/h of the data once with h hosts, whatever the ranks per host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import ring, shared, tree
from .reduction import OPERATIONS, Operation

if TYPE_CHECKING:
    from .base import Group

Between = Callable[["Group", torch.Tensor, Operation], None]
"""`between(leaders, flat, operation)`: every leader's flat becomes the reduction of all of them, in place. The operation
divides nothing."""


class Hierarchy:
    """Made by all ranks of `group` together, in one call of it. `inner` is None for a rank that is alone on its host,
    `leaders` where this rank is not the first of its host."""

    def __init__(self, group: Group, found: Callable[[list[int], str], Group | None]) -> None:
        firsts = sorted({group.hosts.index(host) for host in group.hosts})
        mates = [rank for rank in range(group.size) if group.hosts[rank] == group.hosts[group.rank]]
        self.num_hosts = len(firsts)
        self.mates = mates
        self.leads = mates[0] == group.rank
        self.inner = found(mates, "auto") if len(mates) > 1 else None
        self.leaders = found(firsts, group.transport.kind) if self.leads else None
        for part in (self.inner, self.leaders):
            if part is not None:
                group.accord.transports.append(part.transport)

    def all_reduce(self, group: Group, flat: torch.Tensor, operation: Operation, between: Between) -> None:
        text = group.accord.doing()
        plain = OPERATIONS["sum"] if operation.mean else operation
        if self.inner is not None:
            self.inner.announce(text)
            with self.inner.part():
                self._gather(self.inner, flat, plain)
        if self.leaders is not None:
            self.leaders.announce(text)
            with self.leaders.part():
                between(self.leaders, flat, plain)
                operation.finish(flat, group.size)
        if self.inner is not None:
            with self.inner.part():
                tree.down(self.inner, flat, root=0)

    @staticmethod
    def _gather(inner: Group, flat: torch.Tensor, operation: Operation) -> None:
        if inner.transport.shares_memory:
            shared.all_reduce(inner, flat, operation)
        else:
            tree.up(inner, flat, operation, root=0)

    def close(self) -> None:
        for part in (self.inner, self.leaders):
            if part is not None:
                part.close()


def ring_between(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
    ring.all_reduce(leaders, flat, operation)
