"""The memory limit of a push-pull: each worker copies a gradient in and the parameters out, and nothing else happens.

    python -m hora_benchmarks.bench.ps_copy PARAMS

is one worker of it: for each line {"seconds": S} on stdin it copies for S seconds and prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from .process_pool import PoolContestant, ProcessPool, Result

NAME = "memory limit"


def contestant(workers: int, params: int) -> PoolContestant:
    """No server: as many processes as workers, each with memory of its own, copying at the same time."""
    command = [sys.executable, "-m", "hora_benchmarks.bench.ps_copy", str(params)]
    pool = ProcessPool(NAME, [command] * workers, env={"OMP_NUM_THREADS": "1"})
    return PoolContestant(name=NAME, pool=pool, workers=workers, servers=0, params=params)


def copy_limit(params: int, workers: int, seconds: float = 2.0) -> Result:
    """Push-pulls of all workers together, if each were two copies of `params` float32 and no more."""
    one = contestant(workers, params)
    try:
        one.start()
        return one.measure(seconds)
    finally:
        one.stop()


def main() -> None:
    import torch

    params = int(sys.argv[1])
    torch.set_num_threads(1)
    # Filled, so that every page is there before the clock runs.
    gradient, pushed, parameters, pulled = (torch.full((params,), float(fill)) for fill in range(1, 5))

    def push_pull() -> float:
        began = time.perf_counter()
        pushed.copy_(gradient)
        pulled.copy_(parameters)
        return time.perf_counter() - began

    push_pull()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        seconds = json.loads(line)["seconds"]
        latencies: list[float] = []
        began = time.perf_counter()
        while not latencies or time.perf_counter() - began < seconds:
            latencies.append(push_pull())
        rate = len(latencies) / (time.perf_counter() - began)
        print(json.dumps({"updates_per_s": rate, "latency_s": statistics.median(latencies)}), flush=True)


if __name__ == "__main__":
    main()
