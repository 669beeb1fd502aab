"""One worker of `hora bench serve`: trains a model on random batches for some seconds, and says how fast.

    python -m hora_benchmarks.bench.serve_rank --model mlp --seconds 8 --folder DIR

Rank 0 writes DIR/began when it begins to count, and DIR/result.json, with times of the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time

import torch

import hora

from .models import WORKLOADS

WARM_S = 1.5  # before anything counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKLOADS[given.model]
    job = hora.init()
    model = work.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(job.rank)
    inputs, targets = work.batch(generator)
    began, steps = time.monotonic() + WARM_S, 0
    counted_from = None
    while not job.stopped:
        work.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = time.monotonic()
        if job.rank:
            continue
        if counted_from is not None:
            steps += 1
            if now - counted_from >= given.seconds:
                job.stop("measured")
                break_at = now
        elif now >= began:
            counted_from = now
            (given.folder / "began").write_text(str(now))
    if job.rank == 0 and counted_from is not None:
        seconds = break_at - counted_from
        result = {"samples_per_s": steps * work.batch_size * job.size / seconds, "from": counted_from, "to": break_at}
        (given.folder / "partial.json").write_text(json.dumps(result))
        (given.folder / "partial.json").rename(given.folder / "result.json")


if __name__ == "__main__":
    main()
