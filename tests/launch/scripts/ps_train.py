"""A plain loop under the parameter server. Options say what goes wrong, where and when.

Every worker writes what it was told: after `optimizer.step()` has returned, its step; after the next batch came, the
samples of the block before, which the coordinator then knows to be done.
"""

import argparse
import hashlib
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F

import hora

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=2)
options.add_argument("--samples", type=int, default=60)
options.add_argument("--batch", type=int, default=2)
options.add_argument("--width", type=int, default=8)
options.add_argument("--pause", type=float, default=0.0, help="seconds in every batch")
options.add_argument("--fault", default="")
options.add_argument("--at", type=int, default=4)
options.add_argument("--rank", type=int, default=1)
options.add_argument("--save", default="")
options.add_argument("--strategy", default=None)
options.add_argument("--source", type=int, default=None)
options.add_argument("--told", default="", help="a folder for what each worker was told")
options.add_argument("--until-joined", type=int, default=0, help="at step 10, wait until this rank has stepped too")
given = options.parse_args()

job = hora.init(given.strategy, timeout_s=20.0, on_nonfinite="skip" if given.fault == "nan-skip" else None)
torch.manual_seed(job.rank or 0)  # prepare makes all start from rank 0's parameters
width = given.width
if given.fault == "other-server" and job.role == "server":
    width += 1
if given.fault == "other-worker" and job.rank == given.rank:
    width += 1
model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.prepare(model, optimizer)
if job.role != "worker":
    print("a server came past prepare")
    sys.exit(3)
generator = torch.Generator().manual_seed(1)
dataset = [
    (torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator), number)
    for number in range(given.samples)
]
mine = job.rank == given.rank
here = given.source is None or job.rank == given.source
loader = job.shard(dataset if here else None, batch_size=given.batch, shuffle=True, source=given.source)
if given.save:
    print("restored", job.restore(given.save), flush=True)
told = open(os.path.join(given.told, f"worker-{job.rank}"), "a", buffering=1) if given.told else None  # noqa: SIM115
if told is not None:
    told.write(f"pid {os.getpid()}\n")
seen = []


def tell(what, number):
    if told is not None:
        told.write(f"{what} {number}\n")


for epoch in job.epochs(given.epochs):
    before = []
    for x, y, numbers in loader:
        for number in before:
            tell(f"done {epoch}", number)
        before = numbers.tolist()
        seen += before
        for number in before:
            tell(f"begun {epoch}", number)
        if mine and job.step == given.at:
            if given.fault == "kill-before":
                os.kill(os.getpid(), signal.SIGKILL)
            if given.fault.startswith("nan"):
                x = x * float("nan")
            if given.fault == "raise":
                raise RuntimeError("bad sample")
            if given.fault == "stop":
                job.stop("it is good enough")
            if given.fault == "break":
                break
        F.cross_entropy(model(x), y).backward()
        if mine and job.step == given.at and given.fault == "kill-between":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        tell("step", job.step)
        if mine and job.step == given.at and given.fault == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)
        if given.pause:
            time.sleep(given.pause)
        if given.until_joined > job.rank and job.step == 10:
            guest = os.path.join(given.told, f"worker-{given.until_joined}")
            while not os.path.exists(guest) or "step" not in open(guest).read():  # noqa: SIM115
                time.sleep(0.02)
        if given.fault == "say":
            print(f"step {job.step}", flush=True)
    else:
        for number in before:
            tell(f"done {epoch}", number)
if given.save:
    print("saved", job.save(given.save), flush=True)
if job.rank == 0:
    print(job.ledger(), flush=True)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]
finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
print(f"ended at step {job.step}, {len(seen)} samples, parameters {digest}, finite {finite}", flush=True)
