"""Source: where a predictor's parameters come from. The seam between the training and whoever answers.

    refresh()    the model now holds the newest complete parameters and buffers there are; of which moment they are
    close()

Called on the predictor's inference thread alone, between two batches, so that no batch sees two moments. What is not
whole, or not finite, is never loaded: the model keeps what it had.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ParameterVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The moment that a model's parameters are of. `step` never goes back from one answer to the next.

    `round` and `local_step` where workers train alone between rounds: after which round, and how many steps of one
    worker since. `spread` where servers go their own ways: by how many versions the newest block is ahead of `step`,
    which is the lowest."""

    step: int
    round: int | None = None
    local_step: int | None = None
    spread: int | None = None


class ParameterSource(Protocol):
    def refresh(self) -> ParameterVersion | None:
        """None as long as there never were any parameters."""

    def close(self) -> None: ...
