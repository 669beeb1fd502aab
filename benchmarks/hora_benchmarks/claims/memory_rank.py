"""One process of the claim `memory`: python -m hora_benchmarks.claims.memory_rank RESULT LAYERS WIDTH STEPS HOW.

HOW is hora, or plain for the same loop without Hora. So many square layers are trained for a few steps with AdamW; a
single one of width 1 shows what the process needs without a model. It is looked at from outside, so there is little to
tell: how many parameters there are. In the end it stays for a moment, so that it is looked at once with all that it
has, says so, and stays for another: no process is looked at while others leave.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import torch
from torch import nn

from hora_benchmarks.claims.memory import LEAVES

BATCH = 16
STAY_S = 0.3


def main(path: str, layers: int, width: int, steps: int, how: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = None
    if how == "hora":
        import hora

        job = hora.init()
    model = nn.Sequential()
    for _ in range(layers):
        model.extend([nn.Linear(width, width), nn.ReLU()])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if job is not None:
        job.prepare(model, optimizer)
    inputs = torch.randn(BATCH, width)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if job is not None:
        hora.barrier()
    time.sleep(STAY_S)
    if job is None or job.rank == 0:
        pathlib.Path(path).write_text(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))
        print(LEAVES, flush=True)
    time.sleep(STAY_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
