"""CompressedSum: an all-reduce (sum) of encoded vectors between the leaders of hosts, with error feedback.

It is what `Group.all_reduce(between=…)` takes: it is called on the leaders only, whose vectors are already the sums of
their hosts, in full precision. It belongs to one vector, whose calls come one after the other, and adds what one call's
encoding has lost (the *residual*) to the next. All leaders get the same bits.

Vectors that are not float32 go through float32. Where compression would send no less than a ring, a ring is used.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import torch

from ..collectives import ring
from ..collectives.group import Group
from ..collectives.reduction import OPERATIONS, Operation

SUM = OPERATIONS["sum"]


@dataclasses.dataclass
class CompressionSavings:
    """What this worker has sent between hosts, and what a ring would have sent of the same vectors."""

    sent_bytes: int = 0
    plain_bytes: int = 0

    def describe(self, wire: str, count: int, unit: str) -> str:
        """One sentence, per unit; empty where nothing was sent."""
        if not self.plain_bytes or not count:
            return ""
        sent, plain = format_bytes(self.sent_bytes / count), format_bytes(self.plain_bytes / count)
        return f"wire={wire}: {sent} instead of {plain} per {unit} between hosts"


def format_bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


class CompressedSum(abc.ABC):
    """`name` is the codec's, `numel` the vector's length. Used by one thread at a time."""

    def __init__(self, name: str, numel: int, savings: CompressionSavings) -> None:
        self.__name__ = name  # how the group's all-reduce names it: the same on all ranks
        self.numel = numel
        self._savings = savings
        self.reset()

    def reset(self) -> None:
        """Discards the residual."""
        self._state = self._initial_state()
        self._previous: tuple[Any] | None = None  # the state before a call, until that is settled

    def settle(self, applied: bool) -> None:
        """The result of the last call was used; or it was dropped, and the residual before it holds again."""
        if self._previous is not None and not applied:
            (self._state,) = self._previous
        self._previous = None

    def __call__(self, leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        """Collective: every leader's `flat` becomes the sum over all leaders, in place."""
        assert operation.name == "sum" and len(flat) == self.numel
        before = sum(leaders.transport.sent_bytes)
        plain = 2 * (leaders.size - 1) * self.numel * flat.element_size() // leaders.size
        if self.num_bytes(leaders.size) < plain:
            total, state = self._sum(leaders, flat.float(), self._state)
            if is_finite(total):  # else no leader uses it, and all keep their residual
                self._previous, self._state = (self._state,), state
            flat.copy_(total)
        else:
            ring.all_reduce(leaders, flat, operation)
        self._savings.sent_bytes += sum(leaders.transport.sent_bytes) - before
        self._savings.plain_bytes += plain

    @abc.abstractmethod
    def num_bytes(self, num_hosts: int) -> int:
        """What a leader sends in a call, up to rounding."""

    @abc.abstractmethod
    def _initial_state(self) -> Any:
        """The state without a residual."""

    @abc.abstractmethod
    def _sum(self, leaders: Group, vector: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """Collective: the sum of all leaders' vectors and residuals, and the next state. Changes neither argument."""


def is_finite(vector: torch.Tensor) -> bool:
    """The sum alone may overflow, so it proves only that all is finite."""
    return math.isfinite(float(vector.sum())) or bool(vector.isfinite().all())
