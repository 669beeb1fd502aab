"""`hora demo`: first the ring on paper, then four real ranks that reduce by every algorithm, in a few seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RANKS = 4
NUMEL = 250_000
REPEATS = 15


def main() -> int:
    """Prints the ring's schedule, then starts the ranks through the real launcher; its exit code is ours."""
    from .explain import explain

    print(explain("ring", RANKS), flush=True)
    print(f"\nAnd now for real: {RANKS} processes, each with 1 MB of its own numbers, add them up.\n", flush=True)
    command = [sys.executable, "-m", "hora.launch.cli", "run", "-n", str(RANKS), "-m", "hora.demo"]
    code = subprocess.call(command)
    if code == 0:
        print(
            "\nNext: hora explain tree -n 8 · hora run --help · hora bench allreduce -n 2 (against Gloo and MPI)",
            flush=True,
        )
    return code


def rank() -> None:
    """What each of the four processes does."""
    import torch

    import hora

    job = hora.init()
    print(f"I am rank {job.rank} of {job.size} and hold {NUMEL:,} times the number {job.rank + 1}", flush=True)
    job.group.barrier()
    tcp = hora.new_group(range(job.size), transport="tcp")
    assert tcp is not None
    rows = []
    for group, algorithms in (
        (job.group, ("auto", "shared", "ring", "tree", "halving", "star")),
        (tcp, ("auto", "ring", "tree", "halving", "star")),
    ):
        for algorithm in algorithms:
            if algorithm == "shared" and not group.transport.shares_memory:
                continue
            seconds = []
            for _ in range(REPEATS + 1):
                tensor = torch.full((NUMEL,), float(job.rank + 1))
                group.barrier()
                begin = time.perf_counter()
                hora.all_reduce(tensor, algorithm=algorithm, group=group)
                seconds.append(time.perf_counter() - begin)
            right = bool((tensor == sum(range(1, job.size + 1))).all())
            rows.append((algorithm, group.transport.kind, statistics.median(seconds[1:]) * 1e3, right))
    if job.rank == 0:
        print(f"\n{'algorithm':<10} {'over':<5} {'ms (median)':>12}   1+2+3+4 everywhere?")
        for algorithm, kind, milliseconds, right in rows:
            print(f"{algorithm:<10} {kind:<5} {milliseconds:>12.2f}   {'yes' if right else 'NO'}")
    if not all(right for *_, right in rows):
        raise SystemExit("a sum was wrong")


if __name__ == "__main__":
    rank()
