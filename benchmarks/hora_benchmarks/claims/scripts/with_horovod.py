"""The script of plain.py in Horovod's style, as its page on PyTorch advises.

hvd.init, one device per process, a DistributedSampler that is told the epoch, the wrapped optimizer, parameters and
optimizer state broadcast from rank 0, output and checkpoint by rank 0 alone. The advice to scale the learning rate is
left out, here and in all the others. The test set is cut by Subset, as in with_ddp.py.

a$ horovodrun -np 2 -H a:1,b:1 python with_horovod.py
"""

import argparse

import horovod.torch as hvd
import torch
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

    hvd.init()
    torch.manual_seed(0)
    device = torch.device(f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu")
    train, test = digits()
    sampler: DistributedSampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train, batch_size=args.batch, sampler=sampler)
    test_loader = DataLoader(Subset(test, range(hvd.rank(), len(test), hvd.size())), batch_size=256)
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
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
        right = hvd.allreduce(right, op=hvd.Sum)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test accuracy {right.item() / len(test):.1%}")

    if hvd.rank() == 0:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
