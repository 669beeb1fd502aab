"""Workers: ranks as threads that train a small model in float64; `workers(3, "shared", work, …)` gives all of them.

"As one process" means within CLOSE, since sums come in another order.
"""

from __future__ import annotations

from typing import Any

import torch

import ranks
import trainings
from hora.collectives import Group
from hora.data import Shard, shard
from hora.training import Training

CLOSE = 1e-9


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Small integers; every sample knows its number."""
    generator = torch.Generator().manual_seed(count)
    return [
        (
            torch.randint(-2, 3, (4,), generator=generator).double(),
            torch.randint(-2, 3, (2,), generator=generator).double(),
            number,
        )
        for number in range(count)
    ]


def net() -> torch.nn.Sequential:
    with trainings._building:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 5, dtype=torch.float64), torch.nn.Tanh(), torch.nn.Linear(5, 2, dtype=torch.float64)
        )


def mse(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def state(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


class Worker:
    """One rank of a training: model, optimizer, loader."""

    def __init__(
        self, group: Group, strategy: str, count: int, optimizer: str = "momentum", schedule: bool = False, **cut: Any
    ) -> None:
        self.one: Training = trainings.training(group, strategy)
        self.one.stop_reason = lambda: "as the test wants it"
        self.model = net()
        self.optimizer = {
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        }[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5) if schedule else None
        self.one.prepare(self.model, self.optimizer, self.scheduler)
        self.loader: Shard = self.one.adopt(shard(data(count), self.one, **cut))
        self.seen: list[int] = []
        self.grads: list[torch.Tensor] = []

    def epochs(self, count: int) -> Worker:
        for _ in self.one.epochs(count):
            for x, y, numbers in self.loader:
                self.seen += numbers.tolist()
                mse(self.model, x, y).backward()
                self.grads.append(torch.cat([p.grad.reshape(-1).clone() for p in self.model.parameters()]))
                self.step()
        return self

    def step(self) -> None:
        self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> torch.Tensor:
        return state(self.model)


def workers(size: int, strategy: str, work: Any, *args: Any, transport: str = "memory", **options: Any) -> list[Worker]:
    """Every rank's worker after `work(worker)`."""

    def rank(group: Group) -> Worker:
        worker = Worker(group, strategy, *args, **options)
        work(worker)
        return worker

    return ranks.run(size, rank, transport)


def alone(work: Any, *args: Any, **options: Any) -> Worker:
    return workers(1, "shared", work, *args, **options)[0]


def assert_alike(found: list[Worker], wanted: Worker | None = None) -> None:
    for rank, worker in enumerate(found):
        assert worker.state.equal(found[0].state), f"rank {rank} has other parameters than rank 0"
        assert worker.one.step == found[0].one.step
        assert worker.optimizer.param_groups[0]["lr"] == found[0].optimizer.param_groups[0]["lr"]
        if worker.scheduler:
            assert worker.scheduler.state_dict() == found[0].scheduler.state_dict()  # type: ignore[union-attr]
    if wanted is not None:
        assert found[0].one.step == wanted.one.step
        torch.testing.assert_close(found[0].state, wanted.state, rtol=0, atol=CLOSE)
