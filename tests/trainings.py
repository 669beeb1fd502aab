"""Trainings of ranks as threads.

`train(n, strategy, …)` trains a small model on `job.shard` and returns every rank's parameters. `same(script, …)` runs
a script, as a user would write it, on workers and in plain PyTorch on the whole batch, and compares what it returns.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

import ranks
from hora.collectives import Group
from hora.data import DataService, shard
from hora.rendezvous.context import RunContext
from hora.strategies import parse
from hora.training import Training

FAMILY = ("shared", "ring", "shared:update=sharded", "ring:update=sharded")
REPLICATED, SHARDED = FAMILY[:2], FAMILY[2:]
SAMPLES = 60
_open: list[Training] = []  # those that were made and not closed yet
_building = threading.Lock()  # the seed is the process's, and ranks are threads


def training(group: Group, strategy: str = "shared", history: str = "", **options: Any) -> Training:
    """`strategy` may end in /N: so many servers, hosted by the first ranks, one without it; /Ntcp: reached over TCP."""
    servers = found[1] if (found := re.search(r"/(\d*(?:tcp)?)$", strategy)) else ""
    chosen = parse(strategy.removesuffix(f"/{servers}"))
    if chosen.uses_servers:
        options["context"] = RunContext(
            control=group.control,
            token=ranks.TOKEN,
            rank=group.rank,
            size=group.size,
            num_servers=int(servers.removesuffix("tcp") or 1),
            colocated=True,
            shared=not servers.endswith("tcp"),
            history=history,
            timeout_s=group.transport.spec.timeout_s,
        )
    made = Training(group, group.control, chosen, **options)
    _open.append(made)
    return made


def data_service(one: Training, group: Group, leased: bool) -> DataService:
    """As a job's: for shard(..., service=)."""
    context = RunContext(control=group.control, rank=one.rank, token=ranks.TOKEN, timeout_s=20.0)
    return DataService(context, leased=leased, last=one.last_epoch, idle=one.idle)


def close_all() -> None:
    """Ends what a test has left open: connections to servers, their threads and memory would pile up over the suite."""
    while _open:
        one = _open.pop()
        with contextlib.suppress(Exception):
            one.close()
        outpost = getattr(one.sync, "_connections", None) or getattr(
            getattr(one.sync, "_averager", None), "_connections", None
        )
        if outpost is not None:
            outpost.client.close()
            if outpost._colocated is not None:
                outpost._colocated._loop.stop()


def net(seed: int = 0, width: int = 24) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, width), torch.nn.Linear(width, width), torch.nn.Linear(width, 3)]
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def samples(count: int = SAMPLES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, generator=generator), torch.randint(0, 3, (), generator=generator)) for _ in range(count)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def fit(one: Training, optimizer: str = "sgd", steps: int = 50, count: int = SAMPLES, global_batch: int = 12,
        width: int = 24, each: Callable[..., Any] | None = None) -> list[torch.Tensor]:  # fmt: skip
    """The plain loop on one rank; the parameters at its end."""
    with _building:
        model = net(width=width)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    one.prepare(model, chosen)
    loader = shard(samples(count), one, global_batch=global_batch, shuffle=True, seed=3)
    one.adopt(loader)
    for _ in one.epochs(10_000):
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if each:
                each(one, model)
            chosen.step()
            chosen.zero_grad()
            if one.step >= steps:
                break
        if one.step >= steps:
            break
    return [p.detach().clone() for p in model.parameters()]


def train(size: int, strategy: str, transport: str = "memory", **options: Any) -> list[list[torch.Tensor]]:
    return ranks.run(size, lambda group: fit(training(group, strategy), **options), transport)


class Plain:
    """Plain PyTorch behind the words of Training: the reference, one process on the whole batch."""

    rank, size = 0, 1

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        pass

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weight(self, count: float) -> None:
        pass

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type)


Script = Callable[[Any], list[torch.Tensor]]


def same(script: Script, strategy: str, size: int = 2, transport: str = "memory", rtol: float = 1e-10,
         atol: float = 1e-12, **options: Any) -> list[torch.Tensor]:  # fmt: skip
    """What `script` returns is the same on every rank, bit for bit, and close to what it returns in plain PyTorch."""
    expected = script(Plain())
    results = ranks.run(size, lambda group: script(training(group, strategy, **options)), transport)
    for rank, found in enumerate(results):
        for number, (mine, first, wanted) in enumerate(zip(found, results[0], expected, strict=True)):
            assert torch.equal(mine, first), f"tensor {number} on rank {rank} is not that of rank 0"
            torch.testing.assert_close(mine, wanted, rtol=rtol, atol=atol, msg=lambda m, n=number: f"tensor {n}: {m}")
    return results[0]


def fail(script: Callable[[Any], Any], strategy: str, size: int = 2, transport: str = "memory", timeout_s: float = 5.0,
         **options: Any) -> list[str]:  # fmt: skip
    """What every rank raised, in words; "" where it did not."""
    errors = ranks.failures(
        size, lambda group: script(training(group, strategy, **options)), transport, timeout_s=timeout_s
    )
    return [f"{type(error).__name__}: {error}" if error is not None else "" for error in errors]


@contextlib.contextmanager
def building(seed: int = 0) -> Iterator[None]:
    """Models are built one after the other: the seed is the process's, and ranks are threads."""
    with _building:
        torch.manual_seed(seed)
        yield


def mlp(width: int = 24, inputs: int = 6, outputs: int = 3, seed: int = 0) -> torch.nn.Sequential:
    """In float64, so that one process and many differ by rounding only, far below any mistake."""
    with building(seed):
        return torch.nn.Sequential(
            torch.nn.Linear(inputs, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh(),
            torch.nn.Linear(width, outputs)
        ).double()  # fmt: skip


def batch(step: int, count: int = 12, inputs: int = 6) -> torch.Tensor:
    """The whole batch of a step, the same for everybody."""
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)


def part(one: Any, whole: torch.Tensor) -> torch.Tensor:
    """This worker's even share of it."""
    return whole.chunk(one.size)[one.rank]


def uneven(one: Any, whole: torch.Tensor) -> torch.Tensor:
    """This worker's share, more the higher its rank; its weight is said."""
    edges = [len(whole) * r * (r + 1) // (one.size * (one.size + 1)) for r in range(one.size + 1)]
    mine = whole[edges[one.rank] : edges[one.rank + 1]]
    one.weight(len(mine))
    return mine


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return (y.square().sum(1) + y.sum(1)).mean()


def parameters_of(*models: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]
