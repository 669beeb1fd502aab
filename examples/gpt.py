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


class GPT(nn.Module):
    def __init__(self, letters, layers, width):
        super().__init__()
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, codes):
        x = self.letter(codes) + self.position.weight[: codes.shape[1]]
        past_only = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], device=codes.device)
        for layer in self.layers:
            x = layer(x, past_only, is_causal=True)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=32, help="windows per step, all workers together")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--layers", type=int, default=3)
parser.add_argument("--width", type=int, default=96, help="a multiple of 4, the number of heads")
parser.add_argument("--characters", type=int, help="use only so much of the text")
args = parser.parse_args()

job = hora.init()
torch.manual_seed(0)
text = "\n\n".join(topics.values())[: args.characters]
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(letter) for letter in text])
windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
model = GPT(len(alphabet), args.layers, args.width).to(job.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
job.prepare(model, optimizer)
loader = job.shard(windows, global_batch=args.batch, shuffle=True)
for _ in job.epochs(args.epochs):
    for window in loader:
        window = window.to(job.device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss)

if job.rank == 0:
    model.eval()
    written = codes[None, :20].to(job.device)
    with torch.no_grad():
        for _ in range(300):
            chances = model(written[:, -CONTEXT:])[:, -1].softmax(1)
            written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
    print(f"loss {loss.item():.3f} after {job.step} steps; it writes:\n")
    print("".join(alphabet[code] for code in written[0].tolist()))
