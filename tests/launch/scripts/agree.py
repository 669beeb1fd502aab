"""Reduces by several algorithms under whichever launcher started it, and says so once every result was right."""

import torch

import hora

job = hora.init()
total = job.size * (job.size + 1) // 2
for algorithm in ("auto", "star", "ring", "tree", "halving", "shared", "engine"):
    reduced = hora.all_reduce(torch.full((1000,), job.rank + 1.0), algorithm=algorithm)
    assert reduced.eq(total).all(), (algorithm, reduced)
parts = hora.all_gather(torch.full((job.rank + 1,), job.rank))
assert [part.tolist() for part in parts] == [[rank] * (rank + 1) for rank in range(job.size)], parts
assert hora.broadcast(torch.tensor(job.rank), root=job.size - 1).item() == job.size - 1
hora.barrier()
launcher, kind, strategy = job.launcher, job.group.transport.kind, job.strategy.spell()
print(
    f"agreed: rank {job.rank} of {job.size} under {launcher} over {kind} by {strategy}\n", end="", flush=True
)  # one write: ranks may share it
