"""One worker of the claim `local`: python -m hora_benchmarks.claims.local_rank RESULT TASK LR STEPS SEED...

The tasks of `hora bench quality`, one model per seed side by side, in one loop without a break, so that every round has
its full length. The learning rate rises, stays, and falls to 0: while it stays, the loss of the averaged model and of
rank 0's own is looked at every few steps; when it has fallen, what was reached.

    |‾‾‾‾‾‾‾‾‾‾‾‾‾‾‾|\\          the last two thirds of the flat part are looked at
    /     looks     | \\

The averaged model is the mean of all workers' parameters at that step, whether a round ends there or not. What the
looks send does not count.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

import torch
from torch import nn

import hora
from hora_benchmarks.bench.quality_rank import TASKS, WARM_UP, Task, Text, order

FALLS = 2 / 3  # of the steps: from here on the rate falls, linearly
LOOKS = 2 / 9  # of the steps: from here to there, the losses are looked at
LOOK_EVERY = 4
WINDOWS = 121


class Glimpse(Text):
    """The same text, of which little is held out: a look must not take longer than the steps between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self._held_out = self._held_out[:: len(self._held_out) // WINDOWS]


def rate(step: int, steps: int) -> float:
    """The learning rate's factor at this step."""
    return min(1.0, (step + 1) / (WARM_UP * steps), (1 - step / steps) / (1 - FALLS))


def losses(task: Task, models: nn.ModuleList) -> list[float]:
    with torch.no_grad():
        return [task.evaluate(model)[0] for model in models]


def main(path: str, task_name: str, lr: float, steps: int, seeds: Sequence[int]) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    task = TASKS[task_name]()
    looked_at = Glimpse() if task_name == "gpt" else task
    models, averaged = nn.ModuleList(), nn.ModuleList()
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(task.build())
        averaged.append(task.build())
    optimizer = torch.optim.AdamW(models.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    job.prepare(models, optimizer, scheduler=scheduler)
    sync = job.training.sync
    assert sync is not None
    curve, looking_bytes = [], 0

    def look() -> None:
        nonlocal looking_bytes
        before = job.traffic.sent_bytes
        mean = hora.all_reduce(nn.utils.parameters_to_vector(models.parameters()).detach(), "mean")
        looking_bytes += job.traffic.sent_bytes - before
        if job.rank == 0:
            nn.utils.vector_to_parameters(mean, averaged.parameters())
            found = {"averaged": losses(looked_at, averaged), "own": losses(looked_at, models)}
            curve.append({"samples": job.step * task.global_batch, **found})

    samples = torch.stack([order(task.num_train, steps * task.global_batch, seed) for seed in seeds], dim=1)
    for _ in job.epochs(1):
        for numbers in job.shard(samples, global_batch=task.global_batch, shuffle=False):
            torch.stack([task.loss(model, numbers[:, i]) for i, model in enumerate(models)]).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if LOOKS * steps <= job.step <= FALLS * steps and job.step % LOOK_EVERY == 0:
                look()
    num_rounds = steps if sync.rounds is None else sync.rounds
    mine = job.traffic.sent_bytes - looking_bytes
    sent = hora.all_reduce(torch.tensor([mine], dtype=torch.float64)).item() / job.size
    if job.rank == 0:
        with torch.no_grad():
            reached, accuracies = zip(*(task.evaluate(model) for model in models), strict=True)
        told = {"losses": reached, "accuracies": accuracies, "sent_bytes": sent, "rounds": num_rounds, "curve": curve}
        pathlib.Path(path).write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), [int(seed) for seed in sys.argv[5:]])
