"""The character-level GPT as a pipeline: its layers in two processes, which hand each other micro-batches.

python examples/pipeline.py
hora run -n 2 examples/pipeline.py
hora run -n 4 examples/pipeline.py --schedule gpipe --micro-batches 8

With four workers there are two such pipelines, each with half of the batch, and the gradients are averaged between
them. Alone, all layers are in one process.
"""

import argparse
import itertools
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import hora

CONTEXT = 64


class Letters(nn.Module):
    def __init__(self, letters, width):
        super().__init__()
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)

    def forward(self, codes):
        return self.letter(codes) + self.position.weight[: codes.shape[1]]


class Layer(nn.TransformerEncoderLayer):
    def __init__(self, width):
        super().__init__(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x):
        past_only = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return super().forward(x, past_only, is_causal=True)


def loss_of(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b")
parser.add_argument("--micro-batches", type=int, default=4, help="in how many parts a batch goes through the pipeline")
parser.add_argument("--stages", type=int, default=2, help="processes of one pipeline")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch", type=int, default=32, help="windows per step, all pipelines together")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=96, help="a multiple of 4, the number of heads")
parser.add_argument("--characters", type=int, help="use only so much of the text")
args = parser.parse_args()

job = hora.init()
job.process_group()  # torch's own, which its pipelines speak through
num_stages = args.stages if job.size > 1 else 1
num_pipelines, rest = divmod(job.size, num_stages)
if rest or args.batch % (num_pipelines * args.micro_batches):
    raise SystemExit(
        f"{args.batch} windows on {job.size} worker(s) make no pipelines of {num_stages} with {args.micro_batches} "
        f"equal micro-batches each; try hora run -n 2 examples/pipeline.py --batch {8 * args.micro_batches}"
    )
text = "\n\n".join(topics.values())[: args.characters]
if args.epochs < 1 or len(text) <= args.batch * CONTEXT:
    raise SystemExit(
        f"{args.epochs} epoch(s) of {len(text)} characters make no batch of {args.batch} windows; each window takes "
        f"{CONTEXT}, and the last one more"
    )
pipeline, here = divmod(job.rank, num_stages)

torch.manual_seed(0)
alphabet = sorted(set(text))
codes = torch.tensor([alphabet.index(letter) for letter in text])
windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
head = nn.LayerNorm(args.width), nn.Linear(args.width, len(alphabet))
model = nn.Sequential(Letters(len(alphabet), args.width), *(Layer(args.width) for _ in range(args.layers)), *head)
cuts = [0, *(1 + args.layers * stage // num_stages for stage in range(1, num_stages)), len(model)]
parts = [model[begin:end] for begin, end in itertools.pairwise(cuts)]
part = parts[here]

firsts = range(0, job.size, num_stages)
group = [dist.new_group(list(range(first, first + num_stages))) for first in firsts][pipeline]
twins = [hora.new_group(range(stage, job.size, num_stages)) for stage in range(num_stages)][here]  # in each pipeline
takes = windows[: args.batch // (num_pipelines * args.micro_batches), :-1].contiguous()
for earlier in parts[:here]:
    takes = earlier(takes)
known = {"input_args": takes.to(job.device), "output_args": part(takes).to(job.device)}  # shapes, so that no stage asks
stage = PipelineStage(part.to(job.device), here, num_stages, job.device, group=group, **known)
kind = ScheduleGPipe if args.schedule == "gpipe" else Schedule1F1B
schedule = kind(stage, args.micro_batches, loss_of)
optimizer = torch.optim.AdamW(part.parameters(), lr=args.lr)
shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(0)}  # the same order in every process
loader = torch.utils.data.DataLoader(windows, args.batch, drop_last=True, **shuffled)
steps = 0
for _ in range(args.epochs):
    for batch in loader:
        window = batch.chunk(num_pipelines)[pipeline].to(job.device)
        losses = []
        inputs = [window[:, :-1].contiguous()] if stage.is_first else []
        schedule.step(*inputs, target=window[:, 1:] if stage.is_last else None, losses=losses)
        for parameter in part.parameters():
            twins.all_reduce(parameter.grad, "mean")
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if stage.is_last and pipeline == 0 and steps % 50 == 0:
            print(f"step {steps}: loss {torch.stack(losses).mean().item():.3f}", flush=True)

model.to(job.device)  # from here on all of it is everywhere, from the first pipeline
for root, each in enumerate(parts):
    for parameter in each.parameters():
        hora.broadcast(parameter.data, root)
loss = torch.stack(losses).mean().detach() if stage.is_last else torch.zeros((), device=job.device)
twins.all_reduce(loss, "mean")
hora.broadcast(loss, num_stages - 1)
if job.rank == 0:
    model.eval()
    written = codes[None, :20].to(job.device)
    with torch.no_grad():
        for _ in range(300):
            chances = model(written[:, -CONTEXT:])[:, -1].softmax(1)
            written = torch.cat([written, torch.multinomial(chances, 1)], dim=1)
    print(f"loss {loss.item():.3f} after {steps} steps; it writes:\n")
    print("".join(alphabet[code] for code in written[0].tolist()))
