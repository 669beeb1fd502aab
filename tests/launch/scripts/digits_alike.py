"""`digits_alike.py FOLDER`: the digits' net for one epoch, in float64; every worker writes its parameters there.

Float64, so that another order of summing shows in the last digits only.
"""

import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits

job = hora.init(timeout_s=30.0)
torch.manual_seed(job.rank or 0)  # prepare makes all start from rank 0's parameters
train, _ = digits()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
model.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.prepare(model, optimizer)
for _ in job.epochs(1):
    for x, y in job.shard(train, global_batch=60, shuffle=True):
        F.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
pathlib.Path(sys.argv[1], f"worker-{job.rank}").write_bytes(flat.numpy().tobytes())
print(f"trained: rank {job.rank} of {job.size} under {job.launcher} by {job.strategy.spell()}\n", end="", flush=True)
