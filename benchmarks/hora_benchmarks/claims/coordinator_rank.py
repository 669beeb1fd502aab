"""One process of claim `coordinator`: python -m hora_benchmarks.claims.coordinator_rank PARAMS.

It answers requests as bench/process_pool.py says: for {"steps": K} a worker trains K steps of a model with about PARAMS
parameters, logs the loss in each, and answers with the bytes of tensors that it gave to others and the seconds of the
steps, as soon as the last is over. A server answers too, with nothing, from a thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from typing import Any, TextIO

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hora

FEATURES, CLASSES = 64, 10
BATCH = 16  # for each worker
NUM_SAMPLES = 40_000  # one epoch does not end before the measurement does
LR = 1e-3


def build(params: int) -> nn.Module:
    width = round(params / (FEATURES + CLASSES + 1))
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)
    return TensorDataset(torch.randn(NUM_SAMPLES, FEATURES, generator=generator), targets)


def batches(job: hora.Job, loader: hora.Shard) -> Generator[Any]:
    for _ in job.epochs(1):
        yield from loader


def answer_nothing(answers: TextIO) -> None:
    for _ in sys.stdin:
        print("{}", file=answers, flush=True)


def main(params: int) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed between the answers
    job = hora.init()
    torch.manual_seed(0)
    model = build(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    if job.role == "server":
        print("{}", file=answers, flush=True)
        threading.Thread(target=answer_nothing, args=(answers,), daemon=True).start()
    job.prepare(model, optimizer)
    mine = batches(job, job.shard(samples(), batch_size=BATCH, shuffle=True))
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        before, begin = job.traffic.sent_bytes, time.perf_counter()
        for _ in range(json.loads(line)["steps"]):
            inputs, targets = next(mine)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
        told = {"seconds": time.perf_counter() - begin, "sent_bytes": job.traffic.sent_bytes - before}
        print(json.dumps(told), file=answers, flush=True)
    mine.close()
    job.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
