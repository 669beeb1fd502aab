"""One worker of the claim `batch`: python -m hora_benchmarks.claims.batch_rank RESULT SPEC, with SPEC a `Spec` as JSON.

Several models train side by side in one loop, one for each seed under each learning rate that is compared; they share
nothing but the samples of each seed and the time of the steps. Rank 0 writes what they have learnt.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits
from hora_benchmarks.bench.quality_rank import order

MOMENTUM = 0.9
GREATEST = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """`rates`: (learning rate, factor after warm-up, epochs of warm-up) each. `batch`: samples per worker and step.

    `exact`: in float64, and the parameters are part of the result."""

    rates: list[tuple[float, float, float]]
    seeds: list[int]
    batch: int
    epochs: int
    exact: bool = False


def net(seed: int) -> nn.Module:
    """Like that of examples/digits.py, but narrow. GroupNorm looks at one sample at a time, whatever the batch."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def finite(gradient: torch.Tensor) -> torch.Tensor:
    """A model that has diverged stays bad, but does not end the run of the others."""
    return gradient.nan_to_num(0.0, 0.0, 0.0).clamp(-GREATEST, GREATEST)


def told(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def main(path: str, spec: Spec) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if spec.exact else torch.float32)
    job = hora.init()
    (x, y), (test_x, test_y) = (each.tensors for each in digits())
    x, test_x = x.to(torch.get_default_dtype()), test_x.to(torch.get_default_dtype())
    samples = torch.stack([order(len(y), spec.epochs * len(y), seed) for seed in spec.seeds], dim=1)
    loader = job.shard(samples, batch_size=spec.batch, shuffle=False)

    teams = [nn.ModuleList(net(seed) for seed in spec.seeds) for _ in spec.rates]  # of all seeds at one rate
    optimizers, schedulers, warmups = [], [], []
    for team, (lr, factor, warmup_epochs) in zip(teams, spec.rates, strict=True):
        for parameter in team.parameters():
            parameter.register_hook(finite)
        optimizers.append(torch.optim.SGD(team.parameters(), lr=lr, momentum=MOMENTUM))
        warmups.append(round(warmup_epochs * len(loader) / spec.epochs))
        schedulers.append(hora.scale_lr(optimizers[-1], factor=factor, warmup_steps=warmups[-1]))
    job.prepare(teams, optimizers, scheduler=schedulers)

    for _ in job.epochs(1):
        for numbers in loader:
            batches = [(x[those], y[those]) for those in numbers.T]
            losses = [
                F.cross_entropy(model(inputs), labels)
                for team in teams
                for model, (inputs, labels) in zip(team, batches, strict=True)
            ]
            torch.stack(losses).sum().backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
                for group in optimizer.param_groups:  # which the scheduler has just set anew
                    group["lr"] *= 0.5 * (1 + math.cos(math.pi * job.step / len(loader)))
                optimizer.zero_grad()

    if job.rank == 0:
        with torch.no_grad():
            found = [
                {
                    "warmup_steps": warmup_steps,
                    "accuracies": [(model(test_x).argmax(1) == test_y).double().mean().item() for model in team],
                    "train_losses": [told(F.cross_entropy(model(x), y).item()) for model in team],
                }
                for team, warmup_steps in zip(teams, warmups, strict=True)
            ]
        parameters = [nn.utils.parameters_to_vector(team.parameters()).tolist() for team in teams if spec.exact]
        result = {"steps": job.step, "rates": found, "parameters": parameters}
        pathlib.Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Spec(**json.loads(sys.argv[2])))
