"""References for Local SGD and DiLoCo: plain loops with all workers in one process, which the strategies must equal.

`Replicas` is so many copies of a model, each with an optimizer of its own; `local` and `diloco` train it. A worker's
samples of a step are whatever `given(rank, step)` says: a tensor, or None for a worker that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.collectives import Group
from trainings import batch, loss_of, mlp, parameters_of, training

Given = Callable[[int, int], torch.Tensor | None]
SMALL = 5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
}


def even(size: int) -> Given:
    return lambda rank, step: batch(step).chunk(size)[rank]


def uneven(size: int) -> Given:
    """In three steps the higher ranks have more, in the next three others."""

    def given(rank: int, step: int) -> torch.Tensor:
        whole, part = batch(step), (rank + step // 3) % size
        edges = [len(whole) * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
        return whole[edges[part] : edges[part + 1]]

    return given


class Replicas:
    def __init__(
        self, size: int, given: Given, optimizer: str = "sgd", build: Callable[[], torch.nn.Module] | None = None
    ) -> None:
        self.models = [(build or (lambda: mlp(SMALL)))() for _ in range(size)]
        self.optimizers = [OPTIMIZERS[optimizer](model.parameters()) for model in self.models]
        self.given = given
        self.seen = [0.0] * size

    def step(self, step: int) -> None:
        """Everybody by itself."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            x = self.given(rank, step)
            if x is not None:
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                self.seen[rank] += len(x)

    def step_together(self, step: int) -> None:
        """With the mean gradient over all samples."""
        parts = [self.given(rank, step) for rank in range(len(self.models))]
        whole = torch.cat([x for x in parts if x is not None])
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, whole).backward()
            optimizer.step()

    @property
    def columns(self) -> list[list[torch.Tensor]]:
        """Each parameter, of all workers."""
        return [[p.detach() for p in each] for each in zip(*(m.parameters() for m in self.models), strict=True)]

    def mean(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """By samples."""
        total = sum(self.seen)
        return sum(
            (t * (seen / total) for t, seen in zip(tensors, self.seen, strict=True)), torch.zeros_like(tensors[0])
        )

    def average(self) -> None:
        if sum(self.seen):
            for column in self.columns:
                mean = self.mean(column)
                for parameter in column:
                    parameter.copy_(mean)
        self.seen = [0.0] * len(self.seen)

    def result(self) -> list[torch.Tensor]:
        return parameters_of(self.models[0])


def local(replicas: Replicas, steps: int, every: int | Callable[[int], int], warmup: int = 0) -> list[torch.Tensor]:
    """`every(step)`: how long the round is that begins there. The last round ends where the steps do."""
    interval = every if callable(every) else lambda step: every
    begin = warmup
    for step in range(steps):
        if step < warmup:
            replicas.step_together(step)
            continue
        replicas.step(step)
        if step + 1 - begin >= interval(begin):
            replicas.average()
            begin = step + 1
    replicas.average()
    return replicas.result()


def diloco(
    replicas: Replicas,
    steps: int,
    every: int,
    lr: float = 0.7,
    momentum: float = 0.9,
    cut: Sequence[Sequence[int]] | None = None,
    overlap: int = 0,
    warmup: int = 0,
) -> list[torch.Tensor]:
    """`cut`: which parameters belong to which fragment; fragment f of k is exchanged after every·(f + 1)/k steps of a
    round. What is exchanged after step t is taken over after step t + overlap, and what was done meanwhile is kept."""
    size = len(replicas.models)
    num = len(replicas.columns)
    cut = cut or [list(range(num))]
    for step in range(warmup):
        replicas.step_together(step)
    anchors = [column[0].clone() for column in replicas.columns]
    outer = torch.optim.SGD(anchors, lr=lr, momentum=momentum, nesterov=momentum > 0)
    seen = [[0.0] * size for _ in cut]  # by fragment
    under_way: list[tuple[int, int, list[torch.Tensor], list[list[torch.Tensor]]]] = []

    def send(fragment: int, due: int) -> None:
        replicas.seen, seen[fragment] = seen[fragment], [0.0] * size
        if sum(replicas.seen):
            left = [[p.clone() for p in replicas.columns[index]] for index in cut[fragment]]
            pseudo_gradients = [
                replicas.mean([anchors[i] - p for p in each]) for i, each in zip(cut[fragment], left, strict=True)
            ]
            under_way.append((due, fragment, pseudo_gradients, left))

    def arrive(step: int) -> None:
        while under_way and under_way[0][0] <= step:
            _, fragment, pseudo_gradients, left = under_way.pop(0)
            for index, pseudo_gradient in zip(cut[fragment], pseudo_gradients, strict=True):
                anchors[index].grad = pseudo_gradient
            outer.step()
            for index, were in zip(cut[fragment], left, strict=True):
                anchors[index].grad = None
                for parameter, was in zip(replicas.columns[index], were, strict=True):
                    parameter.copy_(anchors[index] + (parameter - was))

    turn = 0
    in_round = 0
    for step in range(warmup, steps):
        replicas.seen = [0.0] * size
        replicas.step(step)
        seen = [[a + b for a, b in zip(each, replicas.seen, strict=True)] for each in seen]
        in_round += 1
        arrive(step + 1)
        if in_round >= max(1, every * (turn + 1) // len(cut)):
            arrive(1 << 30)
            send(turn, step + 1 + overlap)
            turn = (turn + 1) % len(cut)
            in_round = 0 if turn == 0 else in_round
            arrive(step + 1)
    arrive(1 << 30)
    for fragment in range(len(cut)):
        send(fragment, 0)
    arrive(0)
    return replicas.result()


def work(
    group: Group,
    strategy: str,
    steps: int,
    given: Given | None = None,
    optimizer: str = "sgd",
    build: Callable[[], torch.nn.Module] | None = None,
    each: Callable[[Any, torch.nn.Module, int], None] | None = None,
) -> list[torch.Tensor]:
    """The same as a user's loop on one rank; `each(training, model, step)` is called after every step."""
    one = training(group, strategy)
    model = (build or (lambda: mlp(SMALL)))()
    chosen = OPTIMIZERS[optimizer](model.parameters())
    one.prepare(model, chosen)
    given = given or even(group.size)
    for step in range(steps):
        x = given(group.rank, step)
        assert x is not None
        one.weight(len(x))
        chosen.zero_grad()
        loss_of(model, x).backward()
        chosen.step()
        if each:
            each(one, model, step)
    one.depart()
    return parameters_of(model)


def assert_same(results: Sequence[Sequence[torch.Tensor]], wanted: Sequence[torch.Tensor], rtol: float = 1e-9) -> None:
    """Bit for bit on every rank, and close to what is wanted."""
    for rank, found in enumerate(results):
        for number, (mine, first, other) in enumerate(zip(found, results[0], wanted, strict=True)):
            assert torch.equal(mine, first), f"tensor {number} on rank {rank} is not that of rank 0"
            torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol / 100, msg=lambda m, n=number: f"{n}: {m}")
