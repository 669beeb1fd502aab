"""`hora bench staleness`: what stale gradients cost, and what the corrections win back.

One process, the real server (server/state.py), and s + 1 workers that take turns: each pulls, computes, and pushes
after all others have pushed once. So every gradient has a lag of exactly s, which no run of several processes could
promise. All runs see the same number of samples: handwritten digits, a small network, SGD with and without momentum.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from hora.datasets import digits
from hora.parameters import hyperparameters
from hora.runs import exit_codes
from hora.server.block_memory import BlockMemory
from hora.server.layout import cut
from hora.server.messages import BeginStep, Push
from hora.server.state import Rules, ServerState
from hora.server.store import ParameterStore
from hora.strategies.ps.config import DC_LAMBDA

LAGS = (0, 1, 3, 5, 7, 9, 11, 13, 15)
MOMENTA = (0.0, 0.9)
CORRECTIONS = ("none", "scale", "dc")
LEARNING_RATES = {0.0: 0.1, 0.9: 0.01}  # the same size of step in the long run: lr / (1 - momentum)
BATCH = 20
EPOCHS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """The test accuracy of one kind of run, by seed."""

    momentum: float
    correct: str
    lag: int
    accuracies: tuple[float, ...]


def main(seeds: int, json_path: str | None, plot_path: str | None) -> int:
    """Measures, prints a table, draws it; returns the exit code."""
    points = list(sweep(range(seeds)))
    _print(points, seeds)
    if json_path:
        lines = [json.dumps({"name": "staleness", **dataclasses.asdict(point)}) for point in points]
        pathlib.Path(json_path).write_text("\n".join(lines) + "\n")
    if plot_path:
        _plot(points, plot_path)
    return exit_codes.OK


def sweep(seeds: Sequence[int]) -> Iterator[Point]:
    for momentum in MOMENTA:
        for correct in CORRECTIONS:
            for lag in LAGS:
                print(f"momentum {momentum:g}, correct={correct}, lag {lag}", file=sys.stderr, flush=True)
                found = tuple(train(momentum, correct, lag, seed) for seed in seeds)
                yield Point(momentum=momentum, correct=correct, lag=lag, accuracies=found)


def train(momentum: float, correct: str, lag: int, seed: int, epochs: int = EPOCHS) -> float:
    """The test accuracy after `epochs`, every gradient of which came with this lag."""
    torch.manual_seed(seed)
    data, test = digits()
    x, y = data.tensors
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATES[momentum], momentum=momentum)
    settings = hyperparameters.read([optimizer])
    server = _server(parameters, optimizer, Rules(mode="async", correct=correct, dc_lambda=DC_LAMBDA))
    workers = [_Turn(server, rank) for rank in range(lag + 1)]
    generator = torch.Generator().manual_seed(seed)
    number = 0
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            workers[number % len(workers)].step(model, x[batch], y[batch], settings)
            number += 1
    server.store_to(parameters)
    with torch.no_grad():
        return float((model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean())


class _Held(ServerState):
    """The server, whose blocks can be read here and now."""

    def store_to(self, parameters: Sequence[torch.Tensor], copies: list[torch.Tensor] | None = None) -> None:
        flats = self.store.flats if copies is None else copies
        with torch.no_grad():
            for block in self.store.part.blocks:
                parameters[block.index].view(-1)[block.start : block.stop].copy_(flats[block.number])


def _server(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, rules: Rules) -> _Held:
    part = cut(parameters, [optimizer], 1, 1 << 20).parts[0]
    store = ParameterStore(part, BlockMemory(len(part.blocks), part.num_bytes), parameters, [optimizer])
    for chunk in part.chunks:
        store.fill(chunk, [parameters[b.index].detach().view(-1)[b.start : b.stop] for b in chunk.blocks])
    return _Held(store, rules)


class _Turn:
    """One worker: what it read last, and from that its gradient."""

    def __init__(self, server: _Held, rank: int) -> None:
        self._server = server
        self._rank = rank
        self._step = 0
        server.join(rank)
        server.refresh(rank, -1)
        self._read()

    def _read(self) -> None:
        self._copies = [flat.clone() for flat in self._server.store.flats]
        self._base = [self._server.store.version(block) for block in self._server.store.part.blocks]

    def step(self, model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, settings: hyperparameters.Hyper) -> None:
        server, parameters = self._server, list(model.parameters())
        server.store_to(parameters, self._copies)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        chunks = server.store.part.chunks
        server.handle(self._rank, BeginStep(self._step, 0, len(chunks), hyper=settings))
        for chunk in chunks:
            gradients = [_flat_gradient(parameters[b.index])[b.start : b.stop] for b in chunk.blocks]
            server.handle(
                self._rank, Push(self._step, chunk.number, [self._base[b.number] for b in chunk.blocks]), gradients
            )
        self._step += 1
        self._read()


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(-1)


def _print(points: Sequence[Point], seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"digits, test accuracy after {EPOCHS} epochs, mean of {seeds} seeds", title_justify="left")
    table.add_column("momentum")
    table.add_column("correct")
    for lag in LAGS:
        table.add_column(f"lag {lag}", justify="right")
    for momentum in MOMENTA:
        for correct in CORRECTIONS:
            those = [point for point in points if (point.momentum, point.correct) == (momentum, correct)]
            table.add_row(f"{momentum:g}", correct, *(f"{statistics.mean(point.accuracies):.1%}" for point in those))
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(table)


def _plot(points: Sequence[Point], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MOMENTA), figsize=(10, 4), sharey=True)
    for axis, momentum in zip(axes, MOMENTA, strict=True):
        for correct in CORRECTIONS:
            those = [point for point in points if (point.momentum, point.correct) == (momentum, correct)]
            middle = [100 * statistics.mean(point.accuracies) for point in those]
            low = [m - 100 * min(point.accuracies) for m, point in zip(middle, those, strict=True)]
            high = [100 * max(point.accuracies) - m for m, point in zip(middle, those, strict=True)]
            axis.errorbar(LAGS, middle, [low, high], marker="o", capsize=3, label=f"correct={correct}")
        axis.set_title(f"momentum {momentum:g}, learning rate {LEARNING_RATES[momentum]:g}")
        axis.set_xlabel("lag of every gradient (updates)")
        axis.set_xticks(LAGS)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
