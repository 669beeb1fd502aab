"""Exchange: how the leaders of hosts add up one vector with fewer bytes than it has.

An exchange is what `Group.all_reduce(between=…)` takes: it is called on the leaders only, whose vectors are already the
sums of their hosts, in full precision. It belongs to one vector, whose calls come one after the other, and remembers
what was taken away from it, to add it the next time: *error feedback*. All leaders get the same bits.

Vectors that are not float32 go through float32. Where the exchange would send no less than a ring, a ring it is.
"""

from __future__ import annotations

import abc
import math

import torch

from ..collectives import ring
from ..collectives.group import Group
from ..collectives.reduction import OPERATIONS, Operation
from .savings import CompressionSavings

SUM = OPERATIONS["sum"]


class CompressedSum(abc.ABC):
    """`name` is the wire's, `numel` the vector's length. For one thread at a time."""

    def __init__(self, name: str, numel: int, tally: CompressionSavings) -> None:
        self.__name__ = name  # what the group's all-reduce calls it by: the same on all ranks
        self.numel = numel
        self._tally = tally

    def __call__(self, leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        """Collective: every leader's `flat` becomes the sum of all of them, in place."""
        assert operation.name == "sum" and len(flat) == self.numel
        before = sum(leaders.transport.sent_bytes)
        plain = 2 * (leaders.size - 1) * self.numel * flat.element_size() // leaders.size
        if self.num_bytes(leaders.size) < plain:
            flat.copy_(self._sum(leaders, flat.float()))
        else:
            ring.all_reduce(leaders, flat, operation)
        self._tally.sent_bytes += sum(leaders.transport.sent_bytes) - before
        self._tally.plain_bytes += plain

    @abc.abstractmethod
    def num_bytes(self, num_hosts: int) -> int:
        """How many a leader sends in a call, up to what an uneven cut makes of it."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Nothing is owed any more."""

    @abc.abstractmethod
    def settle(self, counts: bool) -> None:
        """What the last call gave was used, or it does not count: then what was owed before that call is owed still.
        Until then both debts are kept."""

    @abc.abstractmethod
    def _sum(self, leaders: Group, vector: torch.Tensor) -> torch.Tensor:
        """Collective: the sum of all leaders' vectors, each with what it still owes. The vector stays as it is.

        A sum that is not finite is of no use to anybody: then all owe what they owed before."""


def is_finite(vector: torch.Tensor) -> bool:
    """A sum that is merely too large is looked at again."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())
