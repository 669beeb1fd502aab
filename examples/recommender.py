"""Who clicks what? Two tables of embeddings that live on the parameter servers, under a small net.

python examples/recommender.py
hora run -n 2 --servers 1 --strategy ps:mode=async examples/recommender.py
hora run -n 2 --servers 2 --strategy ps examples/recommender.py --users 1000000000

The ids are as large as one likes: rows are made on the servers when they are first trained, and a worker holds those of
its batch alone.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hora

parser = argparse.ArgumentParser()
parser.add_argument("--users", type=int, default=10**8, help="how many ids there are; 300 of them are seen")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=250, help="clicks per worker and step")
parser.add_argument("--lr", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

NUM_USERS, NUM_ITEMS, NUM_CLICKS, WIDTH = 300, 100, 24_000, 4


def clicks(generator):
    """Users and items have tastes that nobody sees; a click is likely where they agree."""
    ids = torch.randint(0, args.users, (NUM_USERS,), generator=generator)  # far apart, as real ids are
    tastes = torch.randn(NUM_USERS, 2, generator=generator), torch.randn(NUM_ITEMS, 2, generator=generator)
    user = torch.randint(0, NUM_USERS, (NUM_CLICKS,), generator=generator)
    item = torch.randint(0, NUM_ITEMS, (NUM_CLICKS,), generator=generator)
    likely = torch.sigmoid(3 * (tastes[0][user] * tastes[1][item]).sum(1))
    clicked = torch.rand(NUM_CLICKS, generator=generator) < likely
    return ids[user], item, clicked.float()


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = hora.ServerEmbedding(args.users, WIDTH, scale=0.3, seed=1)
        self.items = hora.ServerEmbedding(NUM_ITEMS, WIDTH, scale=0.3, seed=2)
        self.net = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, item):
        user, item = self.users(user), self.items(item)
        return (user * item).sum(1) + self.net(torch.cat([user, item, user * item], 1)).squeeze(1)


job = hora.init(strategy="ps")
torch.manual_seed(args.seed)
data = clicks(torch.Generator().manual_seed(args.seed))
train = TensorDataset(*(column[:-4000] for column in data))
test = [column[-4000:] for column in data]
model = Recommender()
optimizer = torch.optim.Adagrad(model.parameters(), lr=args.lr)
job.prepare(model, optimizer)
loader = job.shard(train, batch_size=args.batch, shuffle=True, seed=args.seed)
for _ in job.epochs(args.epochs):
    for user, item, clicked in loader:
        loss = F.binary_cross_entropy_with_logits(model(user, item), clicked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss)

if job.rank == 0:
    model.eval()
    with torch.no_grad():
        right = ((model(test[0], test[1]) > 0).float() == test[2]).float().mean()
    print(f"test accuracy {right.item():.1%} after {job.step} steps")
