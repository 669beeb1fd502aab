"""A small training, the same under every strategy. Each worker writes what it ended with."""

import argparse
import json
import os
import pathlib
import time

import torch
import torch.nn.functional as F

import hora

options = argparse.ArgumentParser()
options.add_argument("--out", default="", help="a folder for each worker's parameters")
options.add_argument("--epochs", type=int, default=2)
options.add_argument("--pause", type=float, default=0.0, help="seconds in every step")
options.add_argument("--until", default="", help="stop when this file is there")
options.add_argument("--raises", type=int, default=-1, help="the rank whose script fails in its third step")
options.add_argument("--each", action="store_true", help="batches by worker, where they do not step together")
given = options.parse_args()

job = hora.init(timeout_s=60.0)
torch.manual_seed(job.rank or 0)  # prepare makes all start from rank 0's parameters
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.prepare(model, optimizer)
generator = torch.Generator().manual_seed(1)
x = torch.randn(128, 6, generator=generator)
y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)
data = torch.utils.data.TensorDataset(x, y)
each, together = (4, None) if given.each else (None, 16)
loader = job.shard(data, batch_size=each, global_batch=together, shuffle=True)
for _ in job.epochs(given.epochs):
    for inputs, targets in loader:
        if job.step == 2 and job.rank == given.raises:
            raise RuntimeError("bad sample")
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if given.pause:
            print(f"step {job.step}", flush=True)
            time.sleep(given.pause)
        if given.until and os.path.exists(given.until):
            job.stop("it was enough")
with torch.no_grad():
    loss = F.cross_entropy(model(x), y).item()
print(f"rank {job.rank} ended at step {job.step} with loss {loss:.4f}", flush=True)
if given.out:
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
    told = {"rank": job.rank, "step": job.step, "loss": loss, "parameters": flat}
    pathlib.Path(given.out, f"rank-{job.rank}.json").write_text(json.dumps(told))
