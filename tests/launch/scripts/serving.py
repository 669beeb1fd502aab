"""A plain loop whose outputs on a fixed input are written down after every step, to be compared with predictions.

Options say what is special; every process runs the same lines.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.nn.functional as F

import hora

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=2000)
options.add_argument("--pause", type=float, default=0.0, help="seconds in every step")
options.add_argument("--told", default="", help="a file for rank 0's outputs, step by step")
options.add_argument("--until", default="", help="train until this file is there")
options.add_argument("--save", default="", help="a folder for checkpoints, every 50 steps and at the end")
options.add_argument("--width", type=int, default=8)
options.add_argument("--fault", default="")
given = options.parse_args()

torch.set_num_threads(1)
if given.fault == "no-init" and os.environ.get("HORA_ROLE") == "predictor":
    sys.exit(0)
job = hora.init()
if given.fault == "no-prepare" and job.role == "predictor":
    sys.exit(0)
torch.manual_seed(job.rank or 0)
width = given.width + (given.fault == "other-model" and job.role == "predictor")
model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if given.fault == "raise" and job.role == "predictor":
    raise RuntimeError("no predictor today")
job.prepare(model, optimizer)
if job.role != "worker":
    print("a process came past prepare that is no worker")
    sys.exit(3)
probe = torch.arange(12.0).view(2, 6) / 6
told = open(given.told, "w", buffering=1) if given.told and job.rank == 0 else None  # noqa: SIM115


def note() -> None:
    if told is not None:
        with torch.no_grad():
            told.write(json.dumps([job.step, model(probe).tolist()]) + "\n")


note()
print("pid", os.getpid(), flush=True)
generator = torch.Generator().manual_seed(1)
dataset = [(torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)) for _ in range(64)]
loader = job.shard(dataset, batch_size=4, shuffle=True)
for _ in job.epochs(10**6):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        note()
        time.sleep(given.pause)
        if given.save and job.step % 50 == 0:
            job.save(given.save)
        if job.step >= given.steps or (given.until and os.path.exists(given.until)):
            job.stop("that is enough")
if given.save:
    job.save(given.save)
print("ended at", job.step, flush=True)
