"""What `job.log` shows: rank 0 alone, one line now and then, the last values at the end."""

from __future__ import annotations

import pytest
import torch

from hora.training import progress
from hora.training.epoch_progress import EpochProgress
from hora.training.progress import Progress


class Stand:
    """The little of a training that a line is made of."""

    sync = None
    step = 0
    num_samples = 0
    leased = False
    progress = EpochProgress()


def test_many_calls_are_few_lines_and_the_last_values_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown, stand = Progress(), Stand()
    stand.progress.epoch = 0
    for step in range(1, 31):
        now[0] += 0.1
        stand.step, stand.num_samples = step, 4 * step
        shown.log({"loss": torch.tensor(1.0 / step), "rate": 0.5}, stand)  # type: ignore[arg-type]
    shown.close(stand)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) in (3, 4) and lines[-1].startswith("step 30  epoch 0  loss 0.03333  rate 0.5")
    assert "40 samples/s" in lines[0]
