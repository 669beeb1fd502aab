"""A worker or server of Hora's in `hora bench ps`: an ordinary script under `hora run`, driven over a Unix socket.

    python -m hora_benchmarks.bench.ps_rank SOCKET PARAMS HOW OPTIMIZER

HOW is `write`, where the fresh gradient is written straight into the memory that the servers read, or `step`, where it
is written into `p.grad` and the user's own `optimizer.step()` does the rest. OPTIMIZER is what the servers do: `sgd`,
as the peers, or `adamw`, several times as much work, so that the servers are the bottleneck.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import hora
from hora.server.layout import ParameterBlock
from hora.strategies.common.sync import LoopEvent
from hora.strategies.ps.worker import ParameterServerSync

LAYERS = 10
NUM_SOURCES = 2


class Flat(torch.nn.Module):
    """So many parameters in a few tensors, and nothing to compute."""

    def __init__(self, params: int) -> None:
        super().__init__()
        each = params // LAYERS
        sizes = [each] * (LAYERS - 1) + [params - each * (LAYERS - 1)]
        self.layers = torch.nn.ParameterList(torch.zeros(size) for size in sizes)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
}


def main(path: str, params: int, how: str, kind: str) -> None:
    torch.set_num_threads(1)
    job = hora.init()
    model = Flat(params)
    optimizer = OPTIMIZERS[kind](model.parameters())
    job.prepare(model, optimizer)
    sync = job.training.sync
    assert isinstance(sync, ParameterServerSync)
    generator = torch.Generator().manual_seed(job.rank)
    parameters = list(model.parameters())
    sources = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(NUM_SOURCES)]
    if how == "step":
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    sync.join(LoopEvent.ENTERED)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        file = line.makefile("rw")
        file.write(json.dumps({"rank": job.rank}) + "\n")
        file.flush()
        number = 0
        for text in file:
            deadline = time.perf_counter() + json.loads(text)["seconds"]
            before = [json.loads(each) for each in sync.stats()] if job.rank == 0 else []
            started, latencies = time.perf_counter(), []
            while True:
                begin = time.perf_counter()
                push_pull(sync, optimizer, parameters, sources[number % NUM_SOURCES], how)
                number += 1
                latencies.append(time.perf_counter() - begin)
                # In sync all must take the same number of steps: rank 0 says when it is enough.
                if enough(job, begin >= deadline):
                    break
            seconds = time.perf_counter() - started
            answer: dict[str, Any] = {
                "updates_per_s": len(latencies) / seconds,
                "latency_s": statistics.median(latencies),
            }
            if job.rank == 0:
                after = [json.loads(each) for each in sync.stats()]
                spent = sum(b["cpu_s"] - a["cpu_s"] for a, b in zip(before, after, strict=True))
                answer["server_cpu"] = spent / seconds
            file.write(json.dumps(answer) + "\n")
            file.flush()
    sync.join(LoopEvent.FINISHED)


def enough(job: hora.Job, mine: bool) -> bool:
    if job.training.sync is not None and not job.training.sync.lockstep:
        return mine
    word = torch.tensor([float(mine)])
    hora.broadcast(word)
    return bool(word)


def push_pull(
    sync: ParameterServerSync,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    source: list[torch.Tensor],
    how: str,
) -> None:
    if how == "write":

        def gradient(block: ParameterBlock) -> torch.Tensor:
            return source[block.index][block.start : block.stop]

        sync.push_pull(0, gradient)
        return
    for parameter, fresh in zip(parameters, source, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(fresh)
    optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
