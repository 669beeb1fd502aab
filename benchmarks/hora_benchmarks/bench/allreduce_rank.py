"""One rank of `hora bench allreduce`: python -m hora_benchmarks.bench.allreduce_rank RESULTS SIZES REPEATS [NAMES]."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import hora
from hora.collectives import Group
from hora.job import Job
from hora_benchmarks.bench import peers

BATCH_S = 1e-3  # a batch of calls takes about this long, so that the clock's resolution does not matter
ALGORITHMS = ("ring", "tree", "halving", "star")


class Candidate:
    """Something that all-reduces. `call(tensor)` runs it, in place."""

    def __init__(self, name: str, call: Callable[[Any], Any]) -> None:
        self.name = name
        self.call = call
        self.batch = 1
        self.seconds: list[float] = []


def candidates(job: Job) -> tuple[list[Candidate], Callable[[], None]]:
    group = job.group
    tcp = group.new_group(range(group.size), transport="tcp")
    assert tcp is not None
    found: list[Candidate] = []
    if group.transport.shares_memory:
        found.append(Candidate("shared", lambda t: group.all_reduce(t, algorithm="shared")))
    found.append(Candidate("auto", lambda t: group.all_reduce(t)))
    for over in (group, tcp):
        if over is tcp or group.transport.shares_memory:
            found += [
                Candidate(f"{name}/{over.transport.kind}", functools.partial(over.all_reduce, algorithm=name))
                for name in ALGORITHMS
            ]
    call, end = peers.gloo(job)
    found.append(Candidate("gloo", call))
    mpi = peers.mpi() if job.launcher == "mpirun" else None
    if mpi is not None:
        found.append(Candidate("mpi", mpi))
    return found, end


def verify(group: Group, candidate: Candidate, tensor: torch.Tensor, salt: int) -> None:
    """One untimed call with checked sums; a wrong sum ends the benchmark."""
    tensor.fill_(group.rank + salt)
    candidate.call(tensor)
    expected = sum(range(group.size)) + salt * group.size
    if not bool((tensor == expected).all()):
        raise SystemExit(f"{candidate.name} gave a wrong sum: {tensor[:4].tolist()}…, expected {expected}")
    group.barrier()
    tensor.zero_()


def measure(group: Group, those: list[Candidate], num_bytes: int, repeats: int) -> None:
    data = torch.zeros(num_bytes // 4).fill_(0)
    for candidate in those:  # warm-up, and how many calls fill a batch
        candidate.seconds = []
        verify(group, candidate, data, 1)
        begin = time.perf_counter()
        for _ in range(3):
            candidate.call(data)
        took = torch.tensor([(time.perf_counter() - begin) / 3])
        group.all_reduce(took, "max")
        candidate.batch = max(1, min(200, int(BATCH_S / took.item())))
    for round in range(repeats):
        if round % 7 == 3:
            for candidate in those:
                verify(group, candidate, data, round)
        for candidate in those:
            call, batch = candidate.call, candidate.batch
            for _ in range(1 + batch // 4):  # brings its data back into the cache and wakes idle connections
                call(data)
            group.barrier()
            begin = time.perf_counter()
            for _ in range(batch):
                call(data)
            candidate.seconds.append((time.perf_counter() - begin) / batch)


def core_distance_ns(group: Group, memory: Any, pings: int = 2000) -> float:
    """How long a flag takes from rank 0's core to rank 1's and back, halved, in this interpreter; 0 elsewhere."""
    base = memory.epoch
    memory.epoch = base + 2 * pings
    if group.rank > 1:
        return 0.0
    peer = 1 - group.rank
    laps = []
    for ping in range(pings):
        begin = time.perf_counter_ns()
        if group.rank == 0:
            memory.signal(4 * (base + ping) + 1)
            memory.await_signal(peer, 4 * (base + ping) + 1)
        else:
            memory.await_signal(peer, 4 * (base + ping) + 1)
            memory.signal(4 * (base + ping) + 1)
        laps.append(time.perf_counter_ns() - begin)
    return statistics.median(laps) / 2


def main(results: str, sizes: str, repeats: str, only: str = "") -> None:
    torch.set_num_threads(1)
    job = hora.init()
    group = job.group
    those, end = candidates(job)
    wanted = set(filter(None, only.split(",")))
    those = [c for c in those if not wanted or c.name in wanted]
    out = open(results, "w") if group.rank == 0 else None  # noqa: SIM115
    pings = group.buffer("pings", 1, torch.float32) if group.transport.shares_memory and group.size > 1 else None
    for num_bytes in map(int, sizes.split(",")):
        near = core_distance_ns(group, pings) if pings else 0.0
        group.barrier()
        measure(group, those, num_bytes, int(repeats))
        for candidate in those:
            mine = torch.tensor(candidate.seconds, dtype=torch.float64)
            group.all_reduce(mine, "max")  # a call has ended when the last rank has its result
            ordered = sorted(mine.tolist())
            row = {
                "name": candidate.name,
                "ranks": group.size,
                "bytes": num_bytes,
                "median_s": statistics.median(ordered),
                "p10_s": ordered[len(ordered) // 10],
                "p90_s": ordered[(len(ordered) * 9) // 10],
                "repeats": len(ordered),
                "batch": candidate.batch,
                "core_to_core_ns": round(near),
            }
            if out:
                out.write(json.dumps(row) + "\n")
                out.flush()
        if out:
            print(f"measured {num_bytes} bytes", file=sys.stderr, flush=True)
    group.barrier()
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])
