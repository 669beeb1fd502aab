"""TrainingHooks: what a Sync reads of the training loop, and its calls back into the loop.

Training makes one and hands it to the strategy's Sync at construction. The defaults are those of a loop in which every
worker has samples and none leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch

from ...rendezvous.context import RunContext
from .accumulation import Accumulation


@dataclasses.dataclass(frozen=True)
class BatchPosition:
    """The batch under way: `present` workers have samples in it, and `unit` samples weigh 1."""

    loop: int = 0
    batch: int = 0
    present: int = 0
    unit: float = 1.0


class TrainingHooks:
    """Training thread only. The attributes are written by Training, but for the last three, which a Sync writes."""

    def __init__(self, context: RunContext | None = None, on_nonfinite: str = "raise") -> None:
        self.context = context  # of the run, where the strategy has servers
        self.on_nonfinite = on_nonfinite  # raise, skip, or poison: an infinity is left for the GradScaler to find
        self.accumulation = Accumulation()
        self.silent = False  # inside job.accumulate()
        self.stop_wanted = False
        self.step = 0  # optimizer steps, of the first optimizer
        self.loop = 0  # training loops begun; the same on all workers
        self.batch = BatchPosition()
        self.run = 0  # which job.epochs is under way, 0 outside
        self.ended = False  # this worker's script has ended inside its loop
        self.num_exchanges = 0  # exchanges that this worker has begun
        self.exchanging = False  # one of them was not concluded
        self.halted = ""  # why there will be no exchange any more

    def before_exchange(self) -> None:
        """Called before anything of an exchange is sent. ExchangeCancelled if a worker will not take part in it."""

    def announce_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Called before a step that all workers take together; True if workers without samples follow it."""
        return False

    def opening_step(self) -> contextlib.AbstractContextManager[None]:
        """Around the last meeting before the optimizer writes. ExchangeCancelled if a worker has left before it."""
        return contextlib.nullcontext()

    def on_skipped(self, reason: str) -> None:
        """This worker's step is not taken; those of the others are."""

    def loop_state(self) -> dict[str, Any]:
        """What the user's loop has made of hyper-parameters, schedulers, scaler and modes."""
        return {}

    def load_loop_state(self, state: dict[str, Any]) -> None:
        """Takes over another worker's `loop_state`."""
