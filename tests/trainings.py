"""Trainings of ranks as threads: `train(n, strategy, …)` trains a small model and returns every rank's parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

import ranks
from hora.collectives import Group
from hora.data import shard
from hora.strategies import parse
from hora.training import Training

SAMPLES = 60
_building = threading.Lock()  # the seed is the process's, and ranks are threads


def training(group: Group, strategy: str = "shared", **options: Any) -> Training:
    return Training(group, group._control, parse(strategy), **options)


def net(seed: int = 0, width: int = 24) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 3)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def samples(count: int = SAMPLES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)) for _ in range(count)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def fit(one: Training, optimizer: str = "sgd", steps: int = 50, count: int = SAMPLES, global_batch: int = 12,
        width: int = 24, each: Callable[..., Any] | None = None) -> list[torch.Tensor]:  # fmt: skip
    """The plain loop on one rank; the parameters at its end."""
    with _building:
        model = net(width=width)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    one.prepare(model, chosen)
    loader = shard(samples(count), one, global_batch=global_batch, shuffle=True, seed=3)
    one.adopt(loader)
    for _ in one.epochs(10_000):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if each:
                each(one, model)
            chosen.step()
            chosen.zero_grad()
            if one.step >= steps:
                break
        if one.step >= steps:
            break
    return [p.detach().clone() for p in model.parameters()]


def train(size: int, strategy: str, transport: str = "memory", **options: Any) -> list[list[torch.Tensor]]:
    return ranks.run(size, lambda group: fit(training(group, strategy), **options), transport)
