"""A host of the claims over shaped links: python -m hora_benchmarks.claims.paced_rank, in its own namespace.

Sixteen workers cannot compute at once on two cores. So here a worker's compute is a sleep, as if an accelerator did it:
the core is free meanwhile, and communication is real. The sleep lies where compute would be: the model is LAYERS
vectors of equal length, whose forward takes a third of `compute_s` and whose backward takes the rest, layer by layer. A
gradient appears when the sleep of its layer is over, so a strategy that sends during backward can hide its
communication, and none can send sooner. Buckets of all-reduce are a quarter of the model, Hora's and DDP's.

Every gradient is 1 and the learning rate is 1, so a weight counts the updates that it got: a step that was lost or
applied twice would be seen, and is an error.

It answers requests as process_pool.py says. A request names one run: {"meeting", "how", "workers", "servers", "params",
"compute_s", "jitter", "lead", "steps", "trail"}. `how` is alone, ddp, or a strategy of Hora; the first ranks are
workers, then come the servers, and hosts beyond them answer with nothing. For each run the host forks a process that
does it all, from meeting the others to leaving them, so that torch is loaded once for all runs. A worker takes `lead`
untimed steps, `steps` timed ones, and `trail` more while others may still be at their last timed one. Its answer: the
seconds of each timed step, those of them that it waited for communication, the lags of its gradients, and `busy`, the
share of the machine's cores that were busy meanwhile, with whatever: near 1 the cores were waited for, and not the
links. Rank 0 adds how many updates each server has applied.

With `jitter` j each step takes (1 − j) to (1 + j) times `compute_s`, drawn anew for each meeting and rank, and the
workers begin spread over one step: where they do not wait for each other, they must not begin as one.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import random
import sys
import time
from typing import Any

import torch

import hora
from hora.strategies.ps.worker import ParameterServerSync
from hora_benchmarks.bench.links import FIRST_PORT
from hora_benchmarks.claims.paced import BUCKETS, FORWARD, LAYERS

Request = dict[str, Any]
Answer = dict[str, Any]


class Pace:
    """How long the step under way takes. The same `seed` draws the same steps."""

    def __init__(self, compute_s: float, jitter: float, seed: str) -> None:
        self._compute_s, self._jitter, self._random = compute_s, jitter, random.Random(seed)
        self.draw()

    def draw(self) -> None:
        self._now_s = self._compute_s * (1 + self._random.uniform(-self._jitter, self._jitter))

    def forward(self) -> None:
        time.sleep(self._now_s * FORWARD / LAYERS)

    def backward(self) -> None:
        time.sleep(self._now_s * (1 - FORWARD) / LAYERS)


class Slept(torch.autograd.Function):
    """One layer: takes its time forward and backward; the gradient of every weight is 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, pace: Pace) -> torch.Tensor:
        pace.forward()
        ctx.pace, ctx.shape = pace, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        ctx.pace.backward()
        return gradient, torch.ones(ctx.shape), None


class Paced(torch.nn.Module):
    def __init__(self, params: int, pace: Pace) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(params // LAYERS) for _ in range(LAYERS))
        self._pace = pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Slept.apply(x, layer, self._pace)
        return x


def take_part(request: Request, rank: int, answers: multiprocessing.connection.Connection) -> None:
    """One run, as the process of one worker or server."""
    torch.set_num_threads(1)
    pace = Pace(request["compute_s"], request["jitter"], f"meeting {request['meeting']}, rank {rank}")
    model = Paced(request["params"], pace)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if request["how"] == "alone":
        told = train(model, optimizer, pace, request)
    elif request["how"] == "ddp":
        told = train_with_ddp(model, optimizer, pace, request)
    else:
        told = train_with_hora(model, optimizer, pace, request, rank)
    answers.send_bytes(json.dumps(told).encode())


def train_with_ddp(model: Paced, optimizer: torch.optim.Optimizer, pace: Pace, request: Request) -> Answer:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    bucket_mb = 4 * request["params"] / BUCKETS / (1 << 20)
    told = train(torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_mb), optimizer, pace, request)
    check(model, request)
    dist.barrier()
    dist.destroy_process_group()
    return told


def train_with_hora(model: Paced, optimizer: torch.optim.Optimizer, pace: Pace, request: Request, rank: int) -> Answer:
    job = hora.init()
    try:
        job.prepare(model, optimizer)
    except SystemExit:  # a server has served until the workers left
        job.close()
        return {}
    if request["jitter"]:
        time.sleep(request["compute_s"] * rank / request["workers"])
    told = train(model, optimizer, pace, request, job)
    job.group.barrier()
    if request["servers"] and rank == 0:
        sync = job.training.sync
        assert isinstance(sync, ParameterServerSync)
        told["updates"] = [json.loads(each)["updates"] for each in sync.stats()]
    if "async" not in request["how"]:
        check(model, request)
    job.group.barrier()
    job.close()
    return told


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: Pace,
    request: Request,
    job: hora.Job | None = None,
) -> Answer:
    x = torch.zeros(1, requires_grad=True)
    each: list[float] = []
    waited: list[float] = []
    lags: list[float] = []
    first, last = request["lead"], request["lead"] + request["steps"]
    before = after = (0, 0)
    for number in range(last + request["trail"]):
        if number == first:
            before = core_ticks()
        exposed_s = job.traffic.exposed_s if job is not None else 0.0
        begin = time.perf_counter()
        pace.draw()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if first <= number < last:
            each.append(time.perf_counter() - begin)
            if job is not None:
                waited.append(job.traffic.exposed_s - exposed_s)
                lags.append(
                    job.training.sync.describe().figures.get("lag", 0.0) if job.training.sync is not None else 0.0
                )
            after = core_ticks()
    busy = (after[0] - before[0]) / max(1, after[1] - before[1])
    return {"each": each, "waited": waited, "lags": lags, "busy": busy}


def core_ticks() -> tuple[int, int]:
    """Of all cores since the machine was started: those that were busy, and all."""
    ticks = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # less idle, and less idle with a disk at work


def check(model: Paced, request: Request) -> None:
    wanted = -float(request["lead"] + request["steps"] + request["trail"])
    for layer in model.layers:
        low, high = layer.min().item(), layer.max().item()
        if low != wanted or high != wanted:
            raise RuntimeError(f"{request['how']}: weights are {low:g} to {high:g} after {-wanted:g} updates")


def environment(request: Request) -> dict[str, str]:
    """What the namespace's own words leave out of one run."""
    size = request["workers"] + request["servers"]
    told = {"WORLD_SIZE": str(size), "MASTER_PORT": str(FIRST_PORT + request["meeting"])}
    if request["how"] not in ("alone", "ddp"):
        told["HORA_STRATEGY"] = request["how"]
    if request["servers"]:
        told["HORA_SERVERS"] = str(request["servers"])
    return told


def in_child(request: Request, rank: int) -> bytes:
    """The answer of a process of its own. RuntimeError if it gave none; why, it said itself."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    os.environ.update(environment(request))
    process = multiprocessing.get_context("fork").Process(target=take_part, args=(request, rank, sender))
    process.start()
    for name in ("HORA_STRATEGY", "HORA_SERVERS"):
        os.environ.pop(name, None)
    sender.close()
    try:
        answer = receiver.recv_bytes()
    except EOFError:
        process.join()
        raise RuntimeError(f"rank {rank} of {request['how']} ended with exit code {process.exitcode}") from None
    process.join()
    return answer


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer loads half of torch: once here, not in every child
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed between the answers
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        takes_part = rank < request["workers"] + request["servers"]
        print(in_child(request, rank).decode() if takes_part else "{}", file=answers, flush=True)


if __name__ == "__main__":
    main()
