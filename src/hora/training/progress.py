"""Progress: what `job.log` shows, one line now and then on rank 0's stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from ..monitor.values import Scalar
from ..terminal.format import sanitize
from . import Training

EVERY_S = 1.0


class Progress:
    """Keeps the newest values and shows them at most once per `EVERY_S`, the last ones at the end.

    A tensor is read only when it is shown, so that logging every step forces no device to finish every step.
    """

    def __init__(self) -> None:
        self._values: dict[str, Scalar] = {}
        self._shown_at = time.monotonic()
        self._shown_step = -1
        self._shown_samples = 0

    def log(self, values: Mapping[str, Scalar], training: Training) -> None:
        self._values.update(values)
        if time.monotonic() - self._shown_at >= EVERY_S:
            self._print(training)

    def close(self, training: Training) -> None:
        if self._values and training.step != self._shown_step:
            self._print(training)

    def _print(self, training: Training) -> None:
        now = time.monotonic()
        speed = (training.num_samples - self._shown_samples) / max(1e-9, now - self._shown_at)
        parts = [f"step {training.step}"]
        if training.progress.epoch is not None:
            parts.append(f"epoch {training.progress.epoch}")
        parts += [f"{sanitize(name)} {float(value):.4g}" for name, value in self._values.items()]
        if training.sync is not None:
            figures = training.sync.describe().figures
            parts += [f"{name} {value:.3g}" for name, value in figures.items()]
            if training.sync.rounds is not None:
                parts.append(f"round {training.sync.rounds}")
        if training.num_samples > self._shown_samples:
            parts.append(f"{speed:,.0f} samples/s{' of this rank' if training.leased else ''}")
        print("  ".join(parts), file=sys.stderr, flush=True)
        self._shown_at, self._shown_step, self._shown_samples = now, training.step, training.num_samples
