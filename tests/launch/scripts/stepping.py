"""Trains without end, and says so once all have stepped; what stops it is the test's business."""

import time

import torch

import hora

job = hora.init(timeout_s=60.0)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3))  # a block for each of three servers
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.prepare(model, optimizer)
for _ in job.epochs(1_000_000):
    for x in job.shard([torch.randn(6) for _ in range(12)], batch_size=2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if job.step == 3:
            print(f"steps: rank {job.rank} of {job.size}\n", end="", flush=True)
        time.sleep(0.02)
