"""One worker or server of `hora bench hosts`: python -m hora_benchmarks.bench.hosts_ps_rank PARAMS COUNTER.

Its rank is in the environment, as torchrun sets it; the last HORA_SERVERS ranks are servers. It answers requests
as process_pool.py says: for {"calls": K} a worker pushes a gradient of so many parameters and pulls the result K times,
all workers beginning together, and answers with the seconds of each and the bytes that left its host in all of them.
A server answers too, with nothing, from a thread: it serves until the workers have left.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import time
from typing import Any, TextIO

import torch

import hora
from hora.server.layout import ParameterBlock
from hora.strategies.common.sync import LoopEvent
from hora.strategies.ps.worker import ParameterServerSync
from hora_benchmarks.bench.ps_rank import OPTIMIZERS, Flat

LEAD_CALLS = 1  # untimed, before each turn: idle connections start slowly

Answer = dict[str, Any]


def measure(
    job: hora.Job, sync: ParameterServerSync, gradients: list[torch.Tensor], calls: int, counter: str
) -> Answer:
    def gradient(block: ParameterBlock) -> torch.Tensor:
        return gradients[block.index][block.start : block.stop]

    each = []
    for _ in range(LEAD_CALLS):
        sync.push_pull(0, gradient)
    job.group.barrier()
    before = _count(counter)
    for _ in range(calls):
        job.group.barrier()
        begin = time.perf_counter()
        sync.push_pull(0, gradient)
        each.append(time.perf_counter() - begin)
    job.group.barrier()
    return {"each": each, "wire_bytes": _count(counter) - before}


def _count(counter: str) -> int:
    return int(pathlib.Path(counter).read_text())


def answer_nothing(answers: TextIO) -> None:
    for line in sys.stdin:
        print(json.dumps({"each": [0.0] * json.loads(line)["calls"], "wire_bytes": 0}), file=answers, flush=True)


def main(params: int, counter: str) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed between the answers
    job = hora.init()
    model = Flat(params)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    if job.role == "server":
        print(json.dumps({"ready": True}), file=answers, flush=True)
        threading.Thread(target=answer_nothing, args=(answers,), daemon=True).start()
    job.prepare(model, optimizer)
    sync = job.training.sync
    assert isinstance(sync, ParameterServerSync)
    generator = torch.Generator().manual_seed(job.rank)
    gradients = [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]
    sync.join(LoopEvent.ENTERED)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(job, sync, gradients, json.loads(line)["calls"], counter)), file=answers, flush=True)
    sync.join(LoopEvent.FINISHED)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
