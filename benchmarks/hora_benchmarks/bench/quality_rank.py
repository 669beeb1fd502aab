"""One worker of `hora bench quality`: python -m hora_benchmarks.bench.quality_rank RESULT TASK LR STEPS SEED...

It trains one model per seed, side by side, each from its own beginning and in its own order of samples, in one loop
without a break: leaving a loop closes a round, and so every round has the length that the strategy gives it. Now and
then, and at the end, rank 0 looks at what the workers have agreed upon, with data that no worker trains on.
"""

from __future__ import annotations

import abc
import copy
import json
import math
import pathlib
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hora
from hora.datasets import digits

WARM_UP = 0.05  # of the steps; then the learning rate falls to 0 along a cosine
CONTEXT = 64
HELD_OUT = 0.1  # of the text, its end
WINDOWS_AT_ONCE = 121


class Task(abc.ABC):
    """What is learnt. `num_train`: so many samples; `global_batch`: those of a step, all workers together.

    `look_every`: after so many steps it is evaluated; rounds of 8 and of 32 have just been closed then."""

    num_train: int
    global_batch: int
    look_every: int

    @abc.abstractmethod
    def build(self) -> nn.Module: ...

    @abc.abstractmethod
    def loss(self, model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        """Of the training samples with these numbers."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Loss and accuracy on data that was held out."""


class Digits(Task):
    """The demo's net and its handwritten digits."""

    global_batch = 60
    look_every = 64

    def __init__(self) -> None:
        (self._x, self._y), (self._test_x, self._test_y) = (each.tensors for each in digits())
        self.num_train = len(self._x)

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip

    def loss(self, model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(self._x[numbers]), self._y[numbers])

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        logits = model(self._test_x)
        loss = F.cross_entropy(logits, self._test_y)
        return float(loss), float((logits.argmax(1) == self._test_y).float().mean())


class GPT(nn.Module):
    """That of examples/gpt.py."""

    def __init__(self, letters: int, layers: int, width: int) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(letters, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        x = self.letter(codes) + self.position.weight[: codes.shape[1]]
        past_only = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        for layer in self.layers:
            x = layer(x, past_only, is_causal=True)
        return self.head(x)


class Text(Task):
    """The language reference that ships with Python, letter by letter."""

    global_batch = 16
    look_every = 256
    layers, width = 2, 64

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        text = "\n\n".join(topics.values())
        alphabet = {letter: code for code, letter in enumerate(sorted(set(text)))}
        codes = torch.tensor([alphabet[letter] for letter in text])
        cut = int(len(codes) * (1 - HELD_OUT))
        self._windows, self._held_out = (part.unfold(0, CONTEXT + 1, CONTEXT) for part in (codes[:cut], codes[cut:]))
        self._letters = len(alphabet)
        self.num_train = len(self._windows)

    def build(self) -> nn.Module:
        return GPT(self._letters, self.layers, self.width)

    def loss(self, model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        windows = self._windows[numbers]
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        loss = right = 0.0
        for windows in self._held_out.split(WINDOWS_AT_ONCE):
            logits, targets = model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()
            loss += float(F.cross_entropy(logits, targets, reduction="sum"))
            right += float((logits.argmax(1) == targets).sum())
        count = len(self._held_out) * CONTEXT
        return loss / count, right / count


TASKS: dict[str, type[Task]] = {"digits": Digits, "gpt": Text}


def rate(step: int, steps: int) -> float:
    """The learning rate's factor at this step."""
    rising = (step + 1) / (WARM_UP * steps)
    return min(1.0, rising, 0.5 * (1 + math.cos(math.pi * step / steps)))


def order(count: int, length: int, seed: int) -> torch.Tensor:
    """`length` numbers below `count`: each once, in some order, and then again in another."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(count, generator=generator) for _ in range(math.ceil(length / count))]
    return torch.cat(rounds)[:length]


def main(path: str, task_name: str, lr: float, steps: int, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    task = TASKS[task_name]()
    models = nn.ModuleList()
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(task.build())
    optimizer = torch.optim.AdamW(models.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, steps))
    job.prepare(models, optimizer, scheduler=scheduler)
    sync = job.training.sync
    assert sync is not None
    shown = copy.deepcopy(models)
    curve = []

    def look() -> None:
        with torch.no_grad():
            for parameter, agreed in zip(shown.parameters(), sync.agreed_parameters(), strict=True):
                parameter.copy_(agreed)
            found = [task.evaluate(model) for model in shown]
        losses, accuracies = zip(*found, strict=True)
        curve.append({"samples": job.step * task.global_batch, "losses": losses, "accuracies": accuracies})

    samples = torch.stack([order(task.num_train, steps * task.global_batch, seed) for seed in seeds], dim=1)
    loader = job.shard(samples, global_batch=task.global_batch, shuffle=False)
    for _ in job.epochs(1):
        for numbers in loader:
            torch.stack([task.loss(model, numbers[:, i]) for i, model in enumerate(models)]).sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if job.rank == 0 and job.step % task.look_every == 0 and job.step < steps:
                look()
    num_rounds = steps if sync.rounds is None else sync.rounds
    sent = hora.all_reduce(torch.tensor([job.traffic.sent_bytes], dtype=torch.float64)).item() / job.size
    if job.rank == 0:
        look()
        pathlib.Path(path).write_text(json.dumps({"curve": curve, "sent_bytes": sent, "rounds": num_rounds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), [int(seed) for seed in sys.argv[5:]])
