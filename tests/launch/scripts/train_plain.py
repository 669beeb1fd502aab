"""The example of the README: a plain loop, as a user writes it. Options choose what goes wrong, and where."""

import argparse
import hashlib
import os
import signal
import time

import torch
import torch.nn.functional as F

import hora

options = argparse.ArgumentParser()
options.add_argument("--batch", type=int, default=8)
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--fault", default="")
options.add_argument("--at", type=int, default=4)
options.add_argument("--rank", type=int, default=1)
options.add_argument("--dropout", type=float, default=0.0)
options.add_argument("--save", default="")
given = options.parse_args()

job = hora.init(timeout_s=20.0)
torch.manual_seed(job.rank)  # prepare makes all start from rank 0's parameters
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(given.dropout), torch.nn.Linear(16, 3)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = hora.scale_lr(optimizer, factor=2, warmup_steps=5)
job.prepare(model, optimizer, scheduler=scheduler)
generator = torch.Generator().manual_seed(1)
dataset = [(torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)) for _ in range(61)]
loader = job.shard(dataset, global_batch=given.batch, shuffle=True)
if given.save:
    restored = job.restore(given.save)
    if job.rank == 0:
        print("restored", restored)
mine = job.rank == given.rank
for _epoch in job.epochs(given.epochs):
    for x, y in loader:
        if mine and job.step == given.at:
            if given.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if given.fault == "raise":
                raise RuntimeError("bad sample")
            if given.fault == "nan":
                x = x * float("nan")
            if given.fault == "break":
                break
            if given.fault == "stop":
                job.stop("it is good enough")
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        hora.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.log(loss=loss, rate=scheduler.get_last_lr()[0])
        if given.fault == "slow":
            print(f"step {job.step}", flush=True)
            time.sleep(0.05)
    if mine and given.fault == "break":
        break
if given.save:
    job.save(given.save)
if job.rank == 0:
    print(job.ledger())
total = torch.ones(1)
hora.all_reduce(total)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
print(f"step {job.step} of {int(total)} workers, parameters {digest}")
