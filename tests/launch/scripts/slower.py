"""The last worker's steps take four times as long; each says how many it took, and what share of the time it waited."""

import time

import torch

import hora

STEP_S, SLOWNESS, SAMPLES = 0.05, 4, 100

job = hora.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.prepare(model, optimizer)
data = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
loaders = [job.shard(part, batch_size=1) for part in (data[:16], data)]  # the first loop warms up
for loader in loaders:
    begin, first = time.perf_counter(), job.step
    job.traffic.reset()
    for x in loader:
        time.sleep(STEP_S * (SLOWNESS if job.rank == job.size - 1 else 1))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
waiting = job.traffic.exposed_s / (time.perf_counter() - begin)
print(f"took {job.step - first} steps, waited {waiting:.3f}", flush=True)
