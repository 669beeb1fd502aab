"""The "auto" all-reduce: a table, the same on all ranks, says which algorithm a size gets.

Where ranks share memory and a host there is nothing to measure: `shared` moves the fewest bytes with the fewest
synchronisations at every size. Elsewhere the candidates are measured at the first call, at a few sizes that grow until
`BUDGET_S` is spent, by rank 0's clock alone: it broadcasts before each size whether the measurement goes on, so all
ranks take part in the same number of calls. Beyond the largest size measured the winner stays the same. With several
ranks on a host the hosts' leaders measure.

`deterministic` skips the measurement: fixed thresholds, so that two runs take the same path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import HoraError
from . import halving, primitives, ring, star, tree
from .reduction import OPERATIONS, Operation

if TYPE_CHECKING:
    from .group import Group

CANDIDATES: dict[str, Callable[[Group, torch.Tensor, Operation], None]] = {
    "ring": ring.all_reduce,
    "halving": halving.all_reduce,
    "tree": tree.all_reduce,
    "star": star.all_reduce,
}
SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20)
BUDGET_S = 0.5
REPEATS = 5
FIXED = ((32 << 10, "tree"), (256 << 10, "halving"), (0, "ring"))


@dataclasses.dataclass(frozen=True)
class AlgorithmTable:
    """Which algorithm for how many bytes: the first row whose limit is not passed; the last row has no limit (0)."""

    rows: tuple[tuple[int, str], ...]
    measured: bool = False

    def json(self) -> bytes:
        rows = [{"up_to_bytes": limit or None, "algorithm": name} for limit, name in self.rows]
        return json.dumps({"measured": self.measured, "rows": rows}).encode()

    def choose(self, num_bytes: int) -> str:
        for limit, name in self.rows[:-1]:
            if num_bytes <= limit:
                return name
        return self.rows[-1][1]


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    CANDIDATES[choose(group, flat.numel() * flat.element_size())](group, flat, operation)


def choose(group: Group, num_bytes: int) -> str:
    """The algorithm for that size. Collective at the first call of a group that has to measure."""
    table = known_table(group)
    if table is None:
        table = measure(group)
        _set_table(group, table)
    return table.choose(num_bytes)


def known_table(group: Group) -> AlgorithmTable | None:
    """The group's table, if there is one without a measurement. Does not block."""
    if group.auto_table is None:
        if group.transport.shares_memory and group.num_hosts == 1:
            _set_table(group, AlgorithmTable(((0, "shared"),)))
        elif group.deterministic or group.size == 1:
            _set_table(group, AlgorithmTable(FIXED))
    return group.auto_table


def _set_table(group: Group, table: AlgorithmTable) -> None:
    """Rank 0 publishes it too: the coordinator keeps it with the run."""
    group.auto_table = table
    if group.rank == 0:
        with contextlib.suppress(HoraError):
            group.control.put(f"auto/{group.transport.spec.name}", table.json())


def measure(group: Group) -> AlgorithmTable:
    rows: list[tuple[int, str]] = []
    names = list(CANDIDATES)
    started = time.monotonic()
    for size in SIZES:
        go_on = torch.tensor([int(not rows or time.monotonic() - started < BUDGET_S)])
        primitives.broadcast(group, go_on, root=0)
        if not go_on.item():
            break
        data = torch.ones(size // 4)
        timings: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(REPEATS):
            for name in names:  # interleaved: a hiccup of the machine affects all of them
                primitives.barrier(group)
                begin = time.monotonic()
                CANDIDATES[name](group, data, OPERATIONS["max"])
                timings[name].append(time.monotonic() - begin)
        best = min(names, key=lambda name: statistics.median(timings[name]))
        choice = torch.tensor([names.index(best)])
        primitives.broadcast(group, choice, root=0)
        # A size stands for everything up to the geometric mean of it and the next one.
        rows.append((int(size * 8**0.5), names[int(choice.item())]))
    if len(rows) == len(SIZES):
        rows[-1] = (0, rows[-1][1])
    else:  # over slow links small sizes use up the time, and their winner would be wrong for large ones
        rows += [(limit, name) for limit, name in FIXED if not limit or limit > rows[-1][0]]
    return AlgorithmTable(tuple(rows), measured=True)
