"""StepStatus: the few numbers that travel with every synchronisation among workers, from which all conclude the same.

Each worker posts its own. The all-reduce family adds them up, Local SGD gathers them; either way every worker reads the
same numbers, so a stop, a skipped step or a mismatch needs no further message. A step is committed once its status has
been read: until then no parameter has changed. What a worker tells parameter servers is server/messages.py's BeginStep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch

from ...collectives.group import Group
from ...transport.task_thread import TaskHandle

S = TypeVar("S", bound="StepStatus")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepStatus:
    """One worker's status, or the sum of all. `tail` names the field that holds a number per parameter or fragment."""

    tail: ClassVar[str] = "holders"

    generation: float = 0.0  # of the membership; a status of another generation is a mismatch
    loop: float = 0.0  # which of the user's training loops
    step: float = 0.0  # optimizer steps taken before this one
    weight: float = 0.0  # of the backward passes of this step, by samples
    expected: float = 0.0  # what the deal of samples promised for it
    leaving: float = 0.0  # this worker has left its loop and takes part with weight 0
    stop: float = 0.0  # this worker wants all to stop after this step
    nonfinite: float = 0.0  # gradients found NaN or infinite
    buffers: float = 0.0  # buffers have changed and must be shared
    holders: Sequence[float] = ()  # by parameter: whether this worker has a gradient

    def post(self, group: Group, name: str, late: bool = False) -> PendingStatus:
        """Collective: adds up the status of all workers. Blocks, unless it is to be read `late`."""
        total = torch.tensor(self.row(), dtype=torch.float64)
        return PendingStatus(type(self), group.all_reduce(total, name=name, wait=not late))

    def gather(self: S, group: Group, name: str) -> list[S]:
        """Collective, blocks: the status of every worker in order of rank."""
        row = torch.tensor(self.row(), dtype=torch.float64)
        return [self.of(theirs.tolist()) for theirs in group.all_gather(row, name=name)]

    def row(self) -> list[float]:
        return [*(float(getattr(self, name)) for name in self._scalars()), *getattr(self, self.tail)]

    @classmethod
    def of(cls: type[S], row: Sequence[float]) -> S:
        names = cls._scalars()
        values: dict[str, Any] = {**dict(zip(names, row, strict=False)), cls.tail: row[len(names) :]}
        return cls(**values)

    @classmethod
    def _scalars(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls) if field.name not in ("holders", cls.tail)]


class PendingStatus:
    """A posted status. `read` blocks until it is there, in the step that posted it or in the next one."""

    def __init__(self, kind: type[StepStatus], total: torch.Tensor | TaskHandle) -> None:
        self._kind = kind
        self._total = total

    def read(self) -> StepStatus:
        total = self._total if isinstance(self._total, torch.Tensor) else self._total.wait()
        return self._kind.of(total.tolist())


def difference(group: Group, mine: int, what: str, way_out: str) -> str:
    """Collective: names the worker whose count differs from rank 0's."""
    counts = [int(part.item()) for part in group.all_gather(torch.tensor([mine]), name="counts")]
    rank = next((rank for rank, count in enumerate(counts) if count != counts[0]), 0)
    theirs, first = group.transport.name_of(rank), group.transport.name_of(0)
    return f"on {theirs} {counts[rank]} {what}, on {first} {counts[0]}: {way_out}"
