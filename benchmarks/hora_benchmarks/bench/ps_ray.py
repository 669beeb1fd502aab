"""A parameter server of Ray actors, as Ray's own documentation builds it. Run by Ray's Python; imports nothing of Hora.

    python ps_ray.py WORKERS PARAMS

For each line {"mode": "async" or "sync", "seconds": S} on stdin it measures for S seconds and prints one JSON line;
it ends when stdin does. The driver passes references only: gradients and parameters go through Ray's object store.
Asynchronous: the driver waits for any worker's gradient, has the server apply it, and gives that worker the new
parameters. Synchronous: the server applies the mean of all workers' gradients; each of these counts as an update.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import ray

LEARNING_RATE = 1e-6
CHUNK = 1 << 16  # stays in the cache between the two passes of an update: half as fast again as `p -= rate * g`
WARM_UP_S = 1.0


class Server:
    def __init__(self, params: int) -> None:
        self.params = np.random.default_rng(0).random(params, dtype=np.float32)
        self.scratch = np.empty(CHUNK, dtype=np.float32)

    def apply_gradients(self, *gradients: np.ndarray) -> np.ndarray:
        rate = np.float32(LEARNING_RATE / len(gradients))
        for start in range(0, self.params.size, CHUNK):
            part = self.params[start : start + CHUNK]
            change = self.scratch[: part.size]
            for gradient in gradients:
                np.multiply(gradient[start : start + CHUNK], rate, out=change)
                np.subtract(part, change, out=part)
        return self.params

    def get_weights(self) -> np.ndarray:
        return self.params

    def cpu_s(self) -> float:
        return time.process_time()


class Worker:
    def __init__(self, rank: int, params: int) -> None:
        random = np.random.default_rng(1 + rank)
        self.sources = [random.random(params, dtype=np.float32) for _ in range(2)]
        self.gradient = np.zeros(params, dtype=np.float32)
        self.weights = np.zeros(params, dtype=np.float32)
        self.count = 0
        self.pushed_at: float | None = None
        self.latencies: list[float] = []

    def compute_gradients(self, weights: np.ndarray) -> np.ndarray:
        """The end of one push-pull, the parameters copied out, and the begin of the next: a fresh gradient."""
        np.copyto(self.weights, weights)
        if self.pushed_at is not None:
            self.latencies.append(time.perf_counter() - self.pushed_at)
        np.copyto(self.gradient, self.sources[self.count % len(self.sources)])
        self.count += 1
        self.pushed_at = time.perf_counter()
        return self.gradient

    def take_latencies(self) -> list[float]:
        taken, self.latencies, self.pushed_at = self.latencies, [], None
        return taken


def run_async(server: Any, workers: list[Any], seconds: float) -> tuple[int, float]:
    """Gradients applied, and the seconds they took."""
    weights = server.get_weights.remote()
    pending = {worker.compute_gradients.remote(weights): worker for worker in workers}
    done, began = 0, time.perf_counter()
    while pending:
        (ready,), _ = ray.wait(list(pending))
        worker = pending.pop(ready)
        weights = server.apply_gradients.remote(ready)
        done += 1
        if time.perf_counter() - began < seconds:
            pending[worker.compute_gradients.remote(weights)] = worker
    ray.wait([weights], fetch_local=False)
    return done, time.perf_counter() - began


def run_sync(server: Any, workers: list[Any], seconds: float) -> tuple[int, float]:
    weights = server.get_weights.remote()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        gradients = [worker.compute_gradients.remote(weights) for worker in workers]
        weights = server.apply_gradients.remote(*gradients)
        ray.wait([weights], fetch_local=False)  # or the driver would queue up steps without end
        done += len(workers)
    return done, time.perf_counter() - began


def main() -> None:
    num_workers, params = int(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray must not print between the answers
    # Ray's actors demand a token from clients, and would write one to the home directory.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    folder = tempfile.mkdtemp(prefix="hora-ray-")
    try:
        ray.init(
            num_cpus=num_workers + 1,
            object_store_memory=max(1 << 29, (3 * num_workers + 4) * 4 * params),
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        server = ray.remote(Server).remote(params)
        workers = [ray.remote(Worker).remote(rank, params) for rank in range(num_workers)]
        modes = {"async": run_async, "sync": run_sync}
        for run in modes.values():
            run(server, workers, WARM_UP_S)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            ray.get([worker.take_latencies.remote() for worker in workers])
            cpu_s = ray.get(server.cpu_s.remote())
            done, seconds = modes[request["mode"]](server, workers, request["seconds"])
            cpu_s = ray.get(server.cpu_s.remote()) - cpu_s
            latencies = [one for worker in workers for one in ray.get(worker.take_latencies.remote())]
            answer = {
                "updates_per_s": done / seconds,
                "latency_s": statistics.median(latencies),
                "server_cpu": cpu_s / seconds,
            }
            print(json.dumps(answer), file=answers, flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
