"""One worker of a traced run of the claim `overlap`: python -m hora_benchmarks.claims.overlap_rank RESULT MODEL STEPS.

An ordinary script, but for a mark in the trace at every gradient: the last one of a backward is its true end, since the
span `backward` also holds what the strategy does there. Rank 0 leaves the bytes that it sent in each step.
"""

from __future__ import annotations

import json
import pathlib
import sys

import torch

import hora
from hora.monitor import spans
from hora_benchmarks.bench.models import WORKLOADS
from hora_benchmarks.claims.overlap_trace import GRADIENT, WARM_UP_STEPS


def mark(_: torch.Tensor) -> None:
    now = spans.clock()
    spans.add(spans.TRAINING, GRADIENT, now, now)


def main(path: str, model_name: str, steps: int) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    workload = WORKLOADS[model_name]
    torch.manual_seed(0)
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(mark)
    job.prepare(model, optimizer)
    inputs, targets = workload.batch(torch.Generator().manual_seed(job.rank))
    for number in range(WARM_UP_STEPS + steps):
        if number == WARM_UP_STEPS:
            job.traffic.reset()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if job.rank == 0:
        pathlib.Path(path).write_text(json.dumps({"sent_bytes": job.traffic.sent_bytes / steps}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
