"""One worker of the claim `accuracy`: python -m hora_benchmarks.claims.accuracy_rank RESULT PLAN, a JSON `Plan`.

It trains many small networks side by side in one run, so that all see the same timing of workers: those of all seeds
and learning rates, without and with momentum. A network's learning rate multiplies its loss, which under SGD with a
constant rate is the same thing. Before each step the worker sleeps for a random time, in place of computing something
large. Rank 0 copies the parameters that it has read now and then; only after the end is accuracy looked at.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits
from hora.strategies.ps.worker import ParameterServerSync
from hora_benchmarks.bench.quality_rank import order

HIDDEN = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """`batch` samples are one worker's, `samples` all workers' together. `rates`: the learning rates, by momentum in
    the order of `momenta`. `pause_s`: least and most; `repeat` chooses which."""

    samples: int
    batch: int
    momenta: Sequence[float]
    rates: Sequence[Sequence[float]]
    seeds: Sequence[int]
    pause_s: Sequence[float]
    repeat: int
    looks: int


class Nets(nn.Module):
    """One network for each rate and seed, as stacks of matrices. Those of one seed begin alike."""

    def __init__(self, seeds: Sequence[int], rates: Sequence[float]) -> None:
        super().__init__()
        made = []
        for seed in seeds:
            torch.manual_seed(seed)
            made.append((nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, 10)))
        stacks = []
        for layers in zip(*made, strict=True):
            stacks.append(torch.stack([layer.weight.detach().T for layer in layers]).repeat(len(rates), 1, 1))
            stacks.append(torch.stack([layer.bias.detach()[None] for layer in layers]).repeat(len(rates), 1, 1))
        self.stacks = nn.ParameterList(stacks)
        self.rates = torch.tensor(rates).repeat_interleave(len(seeds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: seeds × samples × pixels; what comes: networks × samples × digits."""
        weight, bias, last_weight, last_bias = self.stacks
        x = x.repeat(len(weight) // len(x), 1, 1)
        return torch.baddbmm(last_bias, torch.baddbmm(bias, x, weight).relu(), last_weight)

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean of each network."""
        logits = self(x)
        y = y.repeat(len(logits) // len(y), 1)
        return F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)

    @torch.no_grad()
    def accuracies(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self(x[None]).argmax(2) == y).float().mean(1)


class Lesson:
    """The networks by momentum, what updates them, and their digits in the order of each seed."""

    def __init__(self, plan: Plan) -> None:
        (self._x, self._y), (self._test_x, self._test_y) = (
            (each.tensors[0].flatten(1), each.tensors[1]) for each in digits()
        )
        self.nets = [Nets(plan.seeds, rates) for rates in plan.rates]
        self.model = nn.ModuleList(self.nets)
        groups = [
            {"params": list(nets.parameters()), "momentum": momentum}
            for nets, momentum in zip(self.nets, plan.momenta, strict=True)
        ]
        self.optimizer = torch.optim.SGD(groups, lr=1.0)
        self.numbers = torch.stack([order(len(self._x), plan.samples, seed) for seed in plan.seeds], dim=1)

    def backward(self, numbers: torch.Tensor) -> None:
        """Of these samples, samples × seeds. A network that has blown up stands still instead of ending the run."""
        x, y = self._x[numbers.T], self._y[numbers.T]
        torch.stack([(nets.losses(x, y) * nets.rates).sum() for nets in self.nets]).sum().backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    @torch.no_grad()
    def losses(self) -> list[list[float]]:
        """On the test set, by momentum and network."""
        return [nets.losses(self._test_x[None], self._test_y[None]).tolist() for nets in self.nets]

    def look(self, parameters: Sequence[torch.Tensor] | None = None) -> list[list[float]]:
        """Test accuracy by momentum and network, of these parameters or of those of now."""
        with torch.no_grad():
            for mine, kept in zip(self.model.parameters(), parameters or (), strict=parameters is not None):
                mine.copy_(kept)
        return [nets.accuracies(self._test_x, self._test_y).tolist() for nets in self.nets]


def main(path: str, plan: Plan) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    lesson = Lesson(plan)
    Lesson(plan).backward(lesson.numbers[: plan.batch])  # what is slow the first time
    job.prepare(lesson.model, lesson.optimizer)
    sync = job.training.sync
    assert isinstance(sync, ParameterServerSync)
    pauses = random.Random(f"{plan.repeat} {job.rank}")
    loader = job.shard(lesson.numbers, global_batch=plan.batch * job.size, shuffle=False)
    every = max(1, plan.samples // (plan.batch * job.size * plan.looks))
    computed: list[float] = []  # when each gradient was ready
    kept: list[tuple[float, list[torch.Tensor]]] = []
    hora.barrier()
    begin = end = time.monotonic()
    for numbers in loader:
        time.sleep(pauses.uniform(*plan.pause_s))
        lesson.backward(numbers)
        computed.append(time.monotonic())
        lesson.optimizer.step()
        lesson.optimizer.zero_grad()
        end = time.monotonic()
        if job.rank == 0 and len(computed) % every == 0:
            kept.append((end, [parameter.detach().clone() for parameter in lesson.model.parameters()]))
    hora.barrier()
    sync.snapshot(complete=False)  # all parameters are the newest now
    everyone = hora.all_gather(torch.tensor([end, *computed], dtype=torch.float64))
    if job.rank == 0:
        told = _told(lesson, begin, everyone, kept, plan.batch)
        told["lags"] = _lags([json.loads(each) for each in sync.stats()])
        pathlib.Path(path).write_text(json.dumps(told))


def _told(
    lesson: Lesson, begin: float, everyone: list[torch.Tensor], kept: list[tuple[float, list[torch.Tensor]]], batch: int
) -> dict[str, Any]:
    """`everyone`: of each worker when it ended, then when its gradients were ready. The last point is the end."""
    last, losses = lesson.look(), lesson.losses()
    times = sorted(torch.cat([each[1:] for each in everyone]).tolist())
    seconds, samples = max(float(each[0]) for each in everyone) - begin, len(times) * batch
    curve = [
        (when - begin, bisect.bisect_right(times, when) * batch, lesson.look(parameters)) for when, parameters in kept
    ]
    curve = [point for point in curve if point[1] < samples]
    return {"seconds": seconds, "samples": samples, "curve": [*curve, (seconds, samples, last)], "losses": losses}


def _lags(servers: list[dict[str, Any]]) -> dict[str, int]:
    """How many gradients came how late, over all servers."""
    found: dict[str, int] = {}
    for server in servers:
        for lag, count in server["lags"].items():
            found[lag] = found.get(lag, 0) + count
    return found


if __name__ == "__main__":
    main(sys.argv[1], Plan(**json.loads(sys.argv[2])))
