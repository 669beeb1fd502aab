"""`hora demo`: first the ring on paper, then four real ranks that reduce by every algorithm, in a few seconds."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RANKS = 4
NUMEL = 250_000
REPEATS = 22


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
    ways = [
        (group, name) for group in (job.group, tcp) for name in ("auto", "shared", "ring", "tree", "halving", "star")
    ]
    ways = [(group, name) for group, name in ways if name != "shared" or group.transport.shares_memory]
    seconds: dict[tuple[str, str], list[float]] = {}
    right = True
    for turn in range(REPEATS):
        first = turn % len(ways)  # in turns, each time another one first: whoever follows its like finds a warm cache
        for group, name in ways[first:] + ways[:first]:
            tensor = torch.full((NUMEL,), float(job.rank + 1))
            group.barrier()
            begin = time.perf_counter()
            hora.all_reduce(tensor, algorithm=name, group=group)
            seconds.setdefault((name, group.transport.kind), []).append(time.perf_counter() - begin)
            right &= bool((tensor == sum(range(1, job.size + 1))).all())
    if job.rank == 0:
        print(f"\n{'algorithm':<10} {'over':<5} {'ms (median)':>12}")
        for name, kind in ((name, group.transport.kind) for group, name in ways):
            print(f"{name:<10} {kind:<5} {statistics.median(seconds[name, kind]) * 1e3:>12.2f}")
        print(f"\n1 + 2 + 3 + 4 = 10 in all {NUMEL:,} places, every time: {'yes' if right else 'NO'}")
    if not right:
        raise SystemExit("a sum was wrong")


if __name__ == "__main__":
    rank()
