"""Digits; rank 0 keeps its outputs on the whole test set after every step, in eval mode."""

import argparse
import os
import time

import torch
import torch.nn.functional as F

import hora
from hora.datasets import digits

options = argparse.ArgumentParser()
options.add_argument("folder")
options.add_argument("--epochs", type=int, default=5)
options.add_argument("--norm", action="store_true", help="with buffers")
given = options.parse_args()

torch.set_num_threads(1)
job = hora.init()
torch.manual_seed(0)
train, test = digits()
norm = [torch.nn.BatchNorm1d(48)] if given.norm else []
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 48), *norm, torch.nn.ReLU(), torch.nn.Linear(48, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.prepare(model, optimizer)
images, labels = test.tensors
print("pid", os.getpid(), flush=True)


def keep(name: str) -> None:
    if job.rank == 0:
        model.eval()
        with torch.inference_mode():
            outputs = model(images)
        model.train()
        outputs.numpy().tofile(os.path.join(given.folder, name))


keep("0")
loader = job.shard(train, global_batch=60, shuffle=True)
for _ in job.epochs(given.epochs):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        keep(str(job.step))
        time.sleep(0.02)  # so that somebody comes to ask
    keep(str(job.step))  # leaving the loop may have closed a round
keep("end")
