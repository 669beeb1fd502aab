"""A character-level GPT learns to write like the language reference that ships with Python.

python examples/gpt.py
hora run -n 2 examples/gpt.py
hora run -n 4 --strategy ring examples/gpt.py --epochs 3 --layers 6 --width 384
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import hora

CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width, heads=6):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, layers, width):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, codes):
        return self.head(self.blocks(self.token(codes) + self.position.weight[: codes.shape[1]]))


def loss_of(model, windows):
    """Predict every character of a window from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per worker and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="a multiple of 6, the number of heads")
    parser.add_argument("--characters", type=int, help="use only so much of the text")
    args = parser.parse_args()

    job = hora.init()
    torch.manual_seed(job.rank)
    text = "\n\n".join(topics.values())[: args.characters]
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(letter) for letter in text])
    windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
    train, valid = torch.utils.data.random_split(windows, [0.9, 0.1], torch.Generator().manual_seed(0))
    model = GPT(len(alphabet), args.layers, args.width).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    job.prepare(model, optimizer)
    loader = job.shard(train, batch_size=args.batch_size)
    for _ in job.epochs(args.epochs):
        for batch in loader:
            loss = loss_of(model, batch.to(job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
            if job.rank == 0 and job.step % 50 == 0:
                print(f"step {job.step}: loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        total = torch.zeros(1)
        for batch in job.shard(valid, batch_size=64, shuffle=False):  # every worker its part
            total += loss_of(model, batch.to(job.device)).cpu() * len(batch)
        hora.all_reduce(total)
        if job.rank == 0:
            print(f"validation loss {total.item() / len(valid):.3f} after {job.step} steps; a sample:\n", flush=True)
            written = codes[None, :20].to(job.device)
            for _ in range(300):
                chances = model(written[:, -CONTEXT:])[:, -1].softmax(1)
                written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
            print("".join(alphabet[code] for code in written[0].tolist()), flush=True)


if __name__ == "__main__":
    main()
