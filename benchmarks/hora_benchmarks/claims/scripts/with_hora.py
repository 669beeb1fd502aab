"""The script of plain.py with Hora: docs of `hora.init`, `Job.prepare`, `Job.shard`, `Job.epochs` and `Job.save`.

The architecture is a word of the command; a server is caught inside `prepare`, so no role stands in this code.

a$ hora run --hosts a:1,b:1 with_hora.py
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hora
from hora.datasets import digits


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", default="checkpoint")
    args = parser.parse_args()

    job = hora.init()
    torch.manual_seed(0)
    device = job.device
    train, test = digits()
    loader = job.shard(DataLoader(train, batch_size=args.batch, shuffle=True))
    test_loader = job.shard(DataLoader(test, batch_size=256))
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    job.prepare(model, optimizer, scheduler=scheduler)

    for epoch in job.epochs(args.epochs):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        right = torch.zeros(1, device=device)
        with torch.no_grad():
            for x, y in test_loader:
                right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        hora.all_reduce(right)
        if job.rank == 0:
            print(f"epoch {epoch}: test accuracy {right.item() / len(test):.1%}")

    job.save(args.save)


if __name__ == "__main__":
    main()
