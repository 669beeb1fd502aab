"""One worker of one contestant of `hora bench local`: python -m hora_benchmarks.bench.local_rank HOW MODEL [COUNTER].

HOW is alone, ddp or hora; its rank is in the environment, as torchrun sets it, and the strategy in HORA_STRATEGY.
A worker alone does not communicate, but keeps freed memory as Hora does, so that none that communicates can be faster.
It answers requests as process_pool.py says: for {"lead": L, "steps": K} it takes L steps untimed and K timed ones, all
workers beginning together, and answers with the seconds that the latter took, all and each, and the bytes that left
it: `wire_bytes` by the kernel's own COUNTER, a file, headers and acknowledgements included, `sent_bytes` as Hora counts
what it gives to others. With "settle" it answers when its link is quiet: an exchange that goes on would take the
next contestant's.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from hora_benchmarks.bench.models import WORKLOADS

LR = 1e-3
SETTLE_S = 120.0
QUIET_S, QUIET_BYTES = 2.5, 500_000  # this little in this time is heartbeats; an exchange may begin late

Step = Callable[[], None]


class Worker:
    """`step` is one of training, `meet` waits for the other workers, `traffic` is Hora's count where it is at work."""

    def __init__(self, how: str, model_name: str) -> None:
        workload = WORKLOADS[model_name]
        self.meet: Step = lambda: None
        self.end: Step = lambda: None
        self.traffic: Any = None
        rank = int(os.environ["RANK"])
        job = None
        if how == "alone":
            from hora.parameters.allocator import keep

            keep()
        if how == "hora":
            import hora

            job = hora.init()
        torch.manual_seed(0)
        model = workload.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        if job is not None:
            job.prepare(model, optimizer)
            self.traffic, self.meet, self.end = job.traffic, job.group.barrier, job.close
        if how == "ddp":
            import torch.distributed as dist

            dist.init_process_group("gloo")
            model = torch.nn.parallel.DistributedDataParallel(model)
            self.meet, self.end = dist.barrier, dist.destroy_process_group
        inputs, targets = workload.batch(torch.Generator().manual_seed(rank))

        def step() -> None:
            workload.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

        self.step: Step = step


def measure(worker: Worker, lead: int, steps: int, counter: str | None) -> dict[str, Any]:
    for _ in range(lead):
        worker.step()
    worker.meet()
    if worker.traffic is not None:
        worker.traffic.reset()
    before = _count(counter)
    start = time.perf_counter()
    ends = [start]
    for _ in range(steps):
        worker.step()
        ends.append(time.perf_counter())
    each = [end - begin for begin, end in itertools.pairwise(ends)]
    told: dict[str, Any] = {"seconds": ends[-1] - start, "each": each}
    if worker.traffic is not None:
        told |= {"sent_bytes": worker.traffic.sent_bytes, "exposed_s": worker.traffic.exposed_s}
    worker.meet()  # until then sent bytes may still be in this host's kernel
    return told | {"wire_bytes": _count(counter) - before if counter else None}


def settle(counter: str) -> None:
    """Blocks until nothing leaves this worker any more."""
    deadline = time.monotonic() + SETTLE_S
    before = -QUIET_BYTES
    while (now := _count(counter)) - before >= QUIET_BYTES and time.monotonic() < deadline:
        before = now
        time.sleep(QUIET_S)


def _count(counter: str | None) -> int:
    return int(pathlib.Path(counter).read_text()) if counter else 0


def main(how: str, model_name: str, counter: str | None = None) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed between the answers
    worker = Worker(how, model_name)
    told: dict[str, Any] = {"ready": True, "batch_size": WORKLOADS[model_name].batch_size}
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        told = measure(worker, request["lead"], request["steps"], counter)
        if request["settle"] and counter:
            settle(counter)
        print(json.dumps(told), file=answers, flush=True)
    worker.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
