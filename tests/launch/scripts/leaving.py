"""`leaving.py HOW`: rank 1 does as told after its fifth step; what comes after the loop must not run then."""

import os
import signal
import sys

import torch

import hora

how = sys.argv[1]
job = hora.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.prepare(model, optimizer)
loader = job.shard([torch.ones(4)] * 400, batch_size=2)
for _ in job.epochs(3):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.step == 5 and how == "all exit":
            sys.exit(0)
        if job.step == 5 and job.rank == 1:
            if how == "raise":
                raise ValueError("bad sample")
            if how == "exit":
                sys.exit(0)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "alone":
                hora.all_reduce(torch.ones(1))
print(f"after the loop, step {job.step}", flush=True)
