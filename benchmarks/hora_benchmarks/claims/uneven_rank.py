"""One worker of an uneven run: python -m hora_benchmarks.claims.uneven_rank RESULT PLAN

It trains a small network on handwritten digits in the loop of any user. What a step computes is paced by sleeping, as
if an accelerator did it, so that workers hardly compete for cores: `pace_s`, times what PLAN says of this worker and
step. The sleep lies between forward and backward, since in some strategies backward already waits for others.

Every worker notes, by the clock that all processes of a host share, when each step began, had computed and was over,
and which samples it had; with `views` also what `job.ledger()` said before the step. Rank 0 writes it all down.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.data import LedgerView
from hora.datasets import digits

WARM_UP_STEPS = 3
LEARNING_RATE = 0.05


def main(path: str, plan_text: str) -> None:
    torch.set_num_threads(1)
    plan = json.loads(plan_text)
    job = hora.init()
    torch.manual_seed(0)
    x, y = digits()[0].tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    job.prepare(model, optimizer)
    batch = plan["batch"]
    loader = job.shard(torch.arange(plan["num_samples"]), batch_size=batch, num_workers=plan["readers"])
    warm_up = job.shard(torch.arange(WARM_UP_STEPS * batch * job.size), batch_size=batch)

    def work(numbers: torch.Tensor, pace_s: float) -> tuple[float, float, float]:
        """A step; when it began, had computed, and was over."""
        began = time.monotonic()
        loss = F.cross_entropy(model(x[numbers % len(x)]), y[numbers % len(x)])
        time.sleep(max(0.0, began + pace_s - time.monotonic()))
        computed = time.monotonic()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return began, computed, time.monotonic()

    for numbers in warm_up:
        work(numbers, plan["pace_s"])
    loops = []
    for epoch in job.epochs(len(plan["factors"])):
        factors = plan["factors"][epoch][job.rank]
        steps, samples, views = [], [], []
        dropped = num_dropped(job)
        hora.barrier()
        began = time.monotonic()
        for number, numbers in enumerate(loader):
            if plan["views"]:
                views.append([time.monotonic(), *spelt(job.ledger())])
            steps.append(work(numbers, plan["pace_s"] * factors[number % len(factors)]))
            samples.append(numbers.tolist())
        ended = time.monotonic()
        hora.barrier()
        dropped = num_dropped(job) - dropped
        loops.append({"began": began, "ended": ended, "steps": steps, "samples": samples, "views": views,
                      "dropped": dropped})  # fmt: skip
    pathlib.Path(f"{path}.{job.rank}").write_text(json.dumps(loops))
    hora.barrier()
    if job.rank == 0:
        workers = [json.loads(pathlib.Path(f"{path}.{rank}").read_text()) for rank in range(job.size)]
        pathlib.Path(path).write_text(json.dumps(workers))


def num_dropped(job: hora.Job) -> int:
    """Gradients of this worker that came too late and were thrown away, so far."""
    return getattr(job.training.sync, "num_dropped", 0)


def spelt(view: LedgerView) -> list[Any]:
    """How many batches are done, leased and pending, all workers together; and those that this one holds."""
    return [view.num_done, view.num_leased, view.num_pending, [portion.batch for portion in view.held]]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
