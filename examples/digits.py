"""A small convolutional net learns to read handwritten digits.

python examples/digits.py
hora run -n 2 examples/digits.py
hora run -n 4 --strategy shared:update=sharded examples/digits.py --epochs 20
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits


def conv(before, after):
    """GroupNorm looks at one sample at a time, so that any number of workers learns the same."""
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch", type=int, default=60, help="samples per step, all workers together")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

job = hora.init()
torch.manual_seed(args.seed)
train, test = digits()
model = nn.Sequential(
    conv(1, 32), conv(32, 64), nn.MaxPool2d(2), conv(64, 64), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 2 * 2, 10)
).to(job.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
job.prepare(model, optimizer)
loader = job.shard(train, global_batch=args.batch, shuffle=True, seed=args.seed)
for _ in job.epochs(args.epochs):
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss)

model.eval()
right = torch.zeros(1)
with torch.no_grad():
    for x, y in job.shard(test, global_batch=297):  # every worker looks at its part
        right += (model(x.to(job.device)).argmax(1).cpu() == y).sum()
hora.all_reduce(right)
if job.rank == 0:
    print(f"test accuracy {right.item() / len(test):.1%} after {job.step} steps")
