"""Words: what the workers tell each other as they meet in a round, from which all draw the same conclusions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ...collectives.group import Group

ENDED = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundStatus:
    """One worker's, in numbers. `samples` are what it saw since each fragment was exchanged."""

    warm: float = 0.0  # still in the steps that come before the first round
    gradients: float = 0.0  # it brings gradients instead of parameters, those of optimizer `number`
    number: float = 0.0
    missed: float = 0.0  # its scaler has found an infinity in these
    fragment: float = 0.0  # it brings this part of the model
    leaving: float = 0.0  # it has left its loop, and takes part in whatever the others do
    broke: float = 0.0  # before that loop's end; ENDED: and its script has ended there
    behind: float = 0.0  # it had no samples in a batch, and has not stepped its schedulers there
    loop: float = 0.0
    stop: float = 0.0  # it wants to stop
    step: float = 0.0
    step_s: float = 0.0  # what one of its steps takes
    outline: float = 0.0  # which parameters it trains
    buffers: float = 0.0  # its buffers have changed
    samples: Sequence[float] = ()

    def gather(self, group: Group) -> list[RoundStatus]:
        """Collective: everybody's, in order of rank."""
        names = [field.name for field in dataclasses.fields(self)[:-1]]
        mine = torch.tensor([*(getattr(self, name) for name in names), *self.samples], dtype=torch.float64)
        rows = [row.tolist() for row in group.all_gather(mine, name="words of a round")]
        return [RoundStatus(**dict(zip(names, row, strict=False)), samples=row[len(names) :]) for row in rows]


def shares(words: Sequence[RoundStatus], fragment: int) -> list[float] | None:
    """By how much each worker counts in a mean: by its samples. None if nobody saw any."""
    total = sum(word.samples[fragment] for word in words)
    return [word.samples[fragment] / total for word in words] if total else None
