"""Several small nets, side by side, learn the digits with plain SGD: the mean of their accuracies has little noise."""

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits

NETS = 8

job = hora.init()
train, test = digits()
nets = nn.ModuleList()
for seed in range(NETS):
    torch.manual_seed(seed)
    nets.append(nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
optimizer = torch.optim.SGD(nets.parameters(), lr=0.5)
job.prepare(nets, optimizer)
loader = job.shard(train, global_batch=40, shuffle=True)
for _ in job.epochs(16):
    for x, y in loader:
        sum(F.cross_entropy(net(x), y) for net in nets).backward()
        optimizer.step()
        optimizer.zero_grad()
nets.eval()
if job.rank == 0:
    xs, ys = zip(*(test[number] for number in range(len(test))), strict=True)
    x, y = torch.stack(list(xs)), torch.tensor([int(each) for each in ys])
    with torch.no_grad():
        right = sum(float((net(x).argmax(1) == y).float().mean()) for net in nets) / NETS
    print(f"accuracy {right:.4f}")
