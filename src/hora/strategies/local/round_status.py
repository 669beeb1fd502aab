"""RoundStatus: what the workers tell each other at the beginning of a round, from which all draw the same
conclusions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ..common.step_status import StepStatus

ENDED = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundStatus(StepStatus):
    """One worker's. A worker that has left its loop (`leaving`) takes part in whatever the others do."""

    tail: ClassVar[str] = "samples"

    warming_up: float = 0.0  # in the steps before the first round
    gradients: float = 0.0  # it brings gradients instead of parameters, those of optimizer `number`
    number: float = 0.0
    missed: float = 0.0  # its scaler has found an infinity in these
    fragment: float = 0.0  # it brings this part of the model
    broke: float = 0.0  # it left its loop before the end; ENDED: and its script has ended there
    behind: float = 0.0  # it had no samples in a batch, and has not stepped its schedulers there
    step_s: float = 0.0  # seconds of one of its steps
    trained: float = 0.0  # checksum of the parameters that it trains
    samples: Sequence[float] = ()  # seen since each fragment was exchanged


def shares(statuses: Sequence[RoundStatus], fragment: int) -> list[float] | None:
    """The weight of each worker in a mean: by its samples. None if no worker saw any."""
    total = sum(status.samples[fragment] for status in statuses)
    return [status.samples[fragment] / total for status in statuses] if total else None
