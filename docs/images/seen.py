"""What the pictures of the page show: digits, with more to look at. python docs/images/shots.py takes them.

Rank SLOW, if there is one, sleeps in every step, so that it takes some three times as long as the others.
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--slow", type=int, default=-1)
parser.add_argument("--save", default="")
args = parser.parse_args()

job = hora.init()
torch.manual_seed(0)
train, test = digits()
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
job.prepare(model, optimizer, scheduler=scheduler)
loader = job.shard(train, batch_size=16, shuffle=True)
for epoch in job.epochs(args.epochs):
    for x, y in loader:
        time.sleep(0.04 if job.rank == args.slow else 0.012)
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        norm = hora.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        right = (output.argmax(1) == y).float().mean()
        job.log(loss=loss, accuracy=right, grad_norm=norm, lr=scheduler.get_last_lr()[0],
                weights=hora.Histogram(model[3].weight))  # fmt: skip
    scheduler.step()
    if args.save and epoch % 10 == 9:
        job.save(args.save)
