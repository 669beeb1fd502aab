"""The script of plain.py with PyTorch's DistributedDataParallel, as its tutorials and torchrun's pages advise.

init_process_group, one device per process, a DistributedSampler that is told the epoch, the wrapped model, output and
checkpoint by rank 0 alone, destroy_process_group. The test set is cut by Subset, which takes as many lines as a second
sampler, and counts no sample twice. The same command is given on both machines.

a$ torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint a:29400 with_ddp.py
b$ torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint a:29400 with_ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset

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

    dist.init_process_group()
    torch.manual_seed(0)
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    train, test = digits()
    sampler: DistributedSampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(dist.get_rank(), len(test), dist.get_world_size())), batch_size=256)
    model = nn.parallel.DistributedDataParallel(build().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
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
        dist.all_reduce(right)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test accuracy {right.item() / len(test):.1%}")

    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
