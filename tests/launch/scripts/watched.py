"""Trains a little, slowly, and logs: python watched.py [steps [slow_rank [pause_s]]]."""

import sys
import time

import torch

import hora

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
slow = int(sys.argv[2]) if len(sys.argv) > 2 else -1
pause_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0

job = hora.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.prepare(model, optimizer)
data = torch.randn(steps * 4 * (job.size or 1), 4, generator=torch.Generator().manual_seed(0))
for _ in job.epochs(1):
    for x in job.shard(data, batch_size=4):
        time.sleep(pause_s * (4 if job.rank == slow else 1))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss, **{"<b>odd</b>": 1.0}, weights=hora.Histogram(model.weight))
