"""What Local SGD and DiLoCo promise: to learn as well as the ring from the same samples, and not to wait for the slow.

Ranks are threads, except where samples are lent: then they are processes under the real launcher.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ranks
from hora.collectives import Group
from hora.data import shard
from hora.datasets import digits
from trainings import building, training

NETS = 6  # side by side in one model: the mean of what they reach has little noise
WIDTH = 48
PATIENCE_S = 90.0  # a machine may have much else to do
SLOW = pathlib.Path(__file__).parent / "launch" / "scripts" / "slower.py"

DILOCO = "diloco:every=32,outer_momentum=0.6"  # few rounds: less momentum than for many
DIGITS = {"ring": 4e-3, "local:every=8": 4e-3, DILOCO: 4e-3}  # the best of 1e-3, 2e-3, 4e-3 for each
LETTERS = {"ring": 4e-3, "local:every=8": 4e-3, DILOCO: 4e-3}

Logits = Callable[[torch.Tensor], torch.Tensor]


class Nets(torch.nn.Module):
    """Networks of two layers that know nothing of each other."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.into = torch.nn.Parameter(torch.randn(NETS, inputs, WIDTH) / inputs**0.5)
        self.bias = torch.nn.Parameter(torch.zeros(NETS, 1, WIDTH))
        self.out = torch.nn.Parameter(torch.randn(NETS, WIDTH, outputs) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.into + self.bias).relu() @ self.out


def learn(strategy: str, lr: float, x: torch.Tensor, y: torch.Tensor, steps: int, batch: int) -> tuple[Logits, int]:
    """What two workers have agreed upon at the end of one long loop, and after how many rounds."""
    generator = torch.Generator().manual_seed(1)
    order = torch.cat([torch.randperm(len(x), generator=generator) for _ in range(steps * batch // len(x) + 1)])
    data = TensorDataset(x[order[: steps * batch]], y[order[: steps * batch]])

    def work(group: Group) -> tuple[Nets, int]:
        one = training(group, strategy)
        with building():
            nets = Nets(x.shape[1], int(y.max()) + 1)
        optimizer = torch.optim.AdamW(nets.parameters(), lr=lr)
        one.prepare(nets, optimizer)
        loader = one.adopt(shard(data, one, global_batch=batch, shuffle=False))
        for _ in one.epochs(1):
            for inputs, targets in loader:
                logits = nets(inputs).flatten(0, 1)
                (NETS * F.cross_entropy(logits, targets.repeat(NETS))).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert one.step == steps and one.sync is not None
        return nets, steps if one.sync.rounds is None else one.sync.rounds

    results = ranks.Run(2, timeout_s=PATIENCE_S).start(work).finish(PATIENCE_S).results
    assert all(results)
    for mine, first in zip(results[1][0].parameters(), results[0][0].parameters(), strict=True):
        assert torch.equal(mine, first)
    return results[0]


@torch.no_grad()
def accuracy(nets: Logits, x: torch.Tensor, y: torch.Tensor) -> float:
    return float((nets(x).argmax(2) == y).float().mean())


@torch.no_grad()
def loss(nets: Logits, x: torch.Tensor, y: torch.Tensor) -> float:
    return float(F.cross_entropy(nets(x).flatten(0, 1), y.repeat(NETS)))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_digits_are_read_as_well_as_under_the_ring() -> None:
    """At most a point below it on the test set, in the same samples, each with the best of three learning rates."""
    (x, y), (test_x, test_y) = (each.tensors for each in digits())
    reached = {}
    for strategy, lr in DIGITS.items():
        nets, rounds = learn(strategy, lr, x.flatten(1), y, 640, 60)
        reached[strategy] = accuracy(nets, test_x.flatten(1), test_y)
        assert rounds == {"ring": 640, "local:every=8": 80}.get(strategy, 20)
    assert reached["ring"] > 0.9
    assert min(reached.values()) >= reached["ring"] - 0.01, reached


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_language_model_learns_as_well_as_under_the_ring() -> None:
    """The next letter from the eight before it: validation loss at most 3 % above the ring's, in the same samples."""
    x, y = windows(200_000)
    cut = len(x) * 9 // 10
    reached = {}
    for strategy, lr in LETTERS.items():
        nets, _ = learn(strategy, lr, x[:cut], y[:cut], 640, 96)
        reached[strategy] = loss(nets, x[cut:], y[cut:])
    assert reached["ring"] < 2.9  # a guess has 4.6
    assert max(reached.values()) <= 1.03 * reached["ring"], reached


def windows(characters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every 13th letter of the text that ships with Python, and what the eight before it look like."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics.values())[:characters]
    alphabet = {letter: code for code, letter in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[letter] for letter in text]).unfold(0, 9, 13)
    looks = torch.randn(len(alphabet), 8, generator=torch.Generator().manual_seed(0))
    return looks[codes[:, :-1]].flatten(1), codes[:, -1].clone()


def workers_of(strategy: str, folder: pathlib.Path) -> list[tuple[int, float]]:
    """What two workers, the second four times slower, did: steps, and what share of the time they waited."""
    command = [sys.executable, "-m", "hora.cli.main", "run", "-n", "2", "--run-dir", str(folder / strategy)]
    done = subprocess.run(
        [*command, "--strategy", strategy, str(SLOW)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[(\d)\] took (\d+) steps, waited (\S+)$", done.stdout, re.MULTILINE)
    return [(int(steps), float(waited)) for _, steps, waited in sorted(found)]


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_slow_worker_costs_little_with_pace_time(tmp_path: pathlib.Path) -> None:
    """Nobody waits for it: each does what it can, all samples are done, and of what all could do less than 15 % is
    lost. With pace=steps they do the same number of steps, and the fast one waits most of the time."""
    (fast, fast_waited), (slow, slow_waited) = workers_of("local:every=8,pace=time", tmp_path)
    assert fast + slow == 100
    assert fast >= 2.5 * slow  # 4 but for what a step costs besides
    assert (fast_waited + slow_waited / 4) / (1 + 1 / 4) < 0.15
    (fast, fast_waited), (slow, _) = workers_of("local:every=8", tmp_path)
    assert fast == slow == 50 and fast_waited > 0.5
