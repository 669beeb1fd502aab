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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(64)
        self.fc1 = nn.Linear(64 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.dropout(F.max_pool2d(x, 2).flatten(1), 0.25, self.training)
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.5, self.training))


def accuracy(job, model, dataset):
    """The share of the dataset that the model reads rightly; every worker looks at its part."""
    right = torch.zeros(1)
    model.eval()
    with torch.no_grad():
        for x, y in job.shard(dataset, batch_size=100, shuffle=False):
            right += (model(x.to(job.device)).argmax(1).cpu() == y).sum()
    model.train()
    return hora.all_reduce(right).item() / len(dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=50, help="samples per worker and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    job = hora.init()
    torch.manual_seed(job.rank)
    train, test = digits()
    model = Net().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    job.prepare(model, optimizer)
    loader = job.shard(train, batch_size=args.batch_size)
    for epoch in job.epochs(args.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
        if job.rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    reached = accuracy(job, model, test)
    if job.rank == 0:
        print(f"test accuracy {reached:.1%} after {job.step} steps", flush=True)


if __name__ == "__main__":
    main()
