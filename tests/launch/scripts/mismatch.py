"""`mismatch.py TRANSPORT`: rank 1 makes another call than the others, in each way, on a fresh group each time."""

import sys
import time
from collections.abc import Callable

import torch

import hora

transport = sys.argv[1]
job = hora.init()
odd = job.rank == 1


def order(group: hora.Group) -> None:
    calls = [
        lambda: group.all_reduce(torch.ones(4), name="first"),
        lambda: group.all_reduce(torch.ones(4), name="second"),
    ]
    for call in reversed(calls) if odd else calls:
        call()


ways: dict[str, Callable[[hora.Group], object]] = {
    "shape": lambda group: group.all_reduce(torch.ones(4 if odd else 5), algorithm="ring"),
    "dtype": lambda group: group.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32)),
    "operation": lambda group: group.all_reduce(torch.ones(4), "max" if odd else "sum", algorithm="tree"),
    "call": lambda group: group.barrier() if odd else group.all_gather(torch.ones(4)),
    "order": order,
    "waiting": lambda group: group.reduce(torch.ones(4), root=1) if odd else group.broadcast(torch.ones(4), root=1),
}
for way, call in ways.items():
    ranks = [0, 1] if way == "waiting" else [0, 1, 2]  # two: with a third, a message of its would tell
    group = job.group.new_group(ranks, transport=transport)
    hora.barrier()
    if not group:
        continue
    started_at = time.monotonic()
    try:
        call(group)
        said = "nothing"
    except hora.HoraError as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{way} after {time.monotonic() - started_at:.3f} s: {said}", flush=True)
