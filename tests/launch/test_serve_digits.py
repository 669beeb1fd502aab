"""The whole promise at once: a client asks the test set again and again while digits are being learned."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from predictions import LIMIT_S, ask, running

from hora.datasets import digits
from launching import Launcher

pytestmark = pytest.mark.timeout(240)

IMAGES, LABELS = digits()[1].tensors


def accuracy(outputs: torch.Tensor) -> float:
    return float((outputs.argmax(1) == LABELS).float().mean())


def kept(folder: Path, name: object) -> torch.Tensor:
    return torch.frombuffer(bytearray((folder / str(name)).read_bytes()), dtype=torch.float32).view(-1, 10)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "strategy",
    [
        ["--strategy", "ring", "--serve-every", "step"],
        ["--strategy", "local:every=4"],
        pytest.param(["--strategy", "ps", "--servers", "1"], marks=pytest.mark.full),
        pytest.param(["--strategy", "local:every=4,via=ps", "--servers", "1"], marks=pytest.mark.full),
        pytest.param(["--strategy", "diloco:every=5,outer_lr=0.9,outer_momentum=0.3"], marks=pytest.mark.full),
        pytest.param(["--strategy", "local:every=4", "norm"], marks=pytest.mark.full),
    ],
    ids=lambda strategy: strategy[1] + "-norm" * ("norm" in strategy),
)
def test_accuracy_rises_from_chance_steps_never_go_back_and_each_answer_is_its_steps_own(
    launcher: Launcher, tmp_path: Path, strategy: list[str]
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    norm = ["--norm"] if "norm" in strategy else []
    flags = [flag for flag in strategy if flag != "norm"]
    body = json.dumps(IMAGES.tolist()).encode()
    answers: list[dict[str, Any]] = []
    command = ["run", "-n", 2, *flags, "--serve", "0", "--serve-after", "digits_served.py", folder, *norm]
    with running(launcher, *command) as run:
        port = run.port
        while not any("training has ended" in line for line in run.lines):
            with contextlib.suppress(ConnectionError):
                status, answer = ask(port, body)
                assert status == 200, answer
                answers.append(answer)
        answers.append(ask(port, body)[1])
        while any(os.path.exists(f"/proc/{pid}") for pid in run.workers):
            time.sleep(0.05)  # until then Ctrl-C would end the training, not the serving
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(LIMIT_S) == 0, run.text
    steps = [answer["step"] for answer in answers]
    assert steps == sorted(steps) and len(set(steps)) >= 4, "it went on with the training"
    for answer in answers:
        torch.testing.assert_close(torch.tensor(answer["outputs"]), kept(folder, answer["step"]), rtol=0, atol=1e-6)
        assert ("round" in answer) == (not flags[1].startswith(("ring", "ps")))
    curve = [accuracy(torch.tensor(answer["outputs"])) for answer in answers]
    assert curve[-1] == accuracy(kept(folder, "end")) > 0.85, "the last answer is the final model's"
    if steps[0] == 0:
        assert curve[0] < 0.3, "it began by guessing"
    assert accuracy(kept(folder, 0)) < 0.3
