"""One rank of one contestant of `hora bench train`:

    python -m hora_benchmarks.bench.train_rank SOCKET NAME HOW MODEL DEVICE

HOW is plain, kept, ddp, hora, or logged, which is hora with a job.log in every step. It builds the model, connects to
the conductor's socket, reports that it is ready, then blocks until a line {"steps": K} comes: it takes one step untimed
and K timed ones and answers with their times. The end of the connection is the end of the rank. Only the last two load
Hora's training parts.

On a GPU the loop has bf16 autocast, K steps are timed together, and each rank says that it is a host of its own to
NCCL: only so does NCCL let ranks share a GPU. That is a facility of this benchmark; its figures for NCCL are those of
sockets between processes. HOW may be path then: hora with one rank that goes the way of several.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hora_benchmarks.bench.models import WORKLOADS

Step = Callable[[], None]


def train(how: str, model_name: str, device: str) -> tuple[int, Step, Any, Step]:
    """Builds what is trained: this rank, a step of it, its traffic where there is one, and how to end."""
    workload = WORKLOADS[model_name]
    cuda = device == "cuda"
    job = traffic = None
    end: Step = lambda: None  # noqa: E731
    if how == "kept":
        from hora.parameters.allocator import keep

        keep()
    if how in ("hora", "logged", "path"):
        import hora

        job = hora.init()
    if how == "path":
        from hora.strategies.allreduce.replicated import ReplicatedSync

        ReplicatedSync.binds_alone = True
    rank = job.rank if job is not None else int(os.environ["RANK"])
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
        os.environ["NCCL_HOSTID"] = f"hora-bench-{rank}"
    torch.manual_seed(0)
    model = workload.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if job is not None:
        job.prepare(model, optimizer)
        traffic = job.traffic
    if how == "ddp":
        import torch.distributed as dist

        ranks = int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "nccl" if cuda else "gloo", init_method=os.environ["MEET_AT"], rank=rank, world_size=ranks
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
        end = dist.destroy_process_group  # without it Gloo may abort at exit
    inputs, targets = (each.to(device) for each in workload.batch(torch.Generator().manual_seed(rank)))

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = workload.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if how == "logged":
            assert job is not None
            job.log(loss=loss)

    return rank, step, traffic, end


def measure(step: Step, traffic: Any, steps: int, cuda: bool) -> dict[str, Any]:
    if cuda:
        return {"seconds": [measure_together(step, steps)] * steps}
    step()  # brings its data back into the cache and wakes idle connections
    if traffic is not None:
        traffic.reset()
    seconds = []
    then = time.perf_counter()
    for _ in range(steps):
        step()
        now = time.perf_counter()
        seconds.append(now - then)
        then = now
    told: dict[str, Any] = {"seconds": seconds}
    if traffic is not None:
        told |= {"comm_s": traffic.comm_s, "exposed_s": traffic.exposed_s, "sent_bytes": traffic.sent_bytes}
    return told


def measure_together(step: Step, steps: int) -> float:
    """Seconds per step, where the GPU works behind the host."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def main(path: str, name: str, how: str, model_name: str, device: str) -> None:
    torch.set_num_threads(1)
    rank, step, traffic, end = train(how, model_name, device)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        hello = {"name": name, "rank": rank, "batch_size": WORKLOADS[model_name].batch_size}
        line.sendall(json.dumps(hello).encode() + b"\n")
        for word in line.makefile("rb"):
            told = measure(step, traffic, json.loads(word)["steps"], device == "cuda")
            line.sendall(json.dumps(told).encode() + b"\n")
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])
