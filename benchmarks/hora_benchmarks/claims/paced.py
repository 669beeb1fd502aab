"""Paced: training runs over shaped links whose compute is a sleep, for claims about 1 to 16 workers and their servers.

Every worker and every server is a network namespace with a link of RATE both ways (bench/links.py); what a host does,
and where the sleep lies in a step, says paced_rank.py. The sizes: the gradients of one worker take S/B = PARAMS · 4
bytes / RATE = 0.15 s to cross a link, a quarter of a step's compute, so that the ring's 2 S/B are half of it. That is
about a ResNet-50 (100 MB of gradients) with 0.3 s of compute a step on links of 10 Gbit/s. Both are small
enough that two cores move all the bytes of 16 workers, and the links, not the cores, are what is waited for. After a
pause the shaper lets 256 KB through at once, a twelfth of the gradients: a step may beat its limit by that much.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench import links
from ..bench.process_pool import Answer, ProcessPool

RATE = "160mbit"
PARAMS = 750_000
COMPUTE_S = 0.6
LAYERS, BUCKETS = 8, 4
FORWARD = 1 / 3  # of a step's compute; backward has the rest
NUM_BYTES = 4 * PARAMS
RUN_S = 300.0

WORKERS, SERVERS = (1, 2, 4, 8, 16), (1, 2, 4)
QUICK_WORKERS, QUICK_SERVERS = (1, 2, 4), (1, 2)
CHANGED = (
    "An earlier setting (200 Mbit/s, 480 ms of compute, 8 buckets) was given up because two cores were 70 % busy with "
    "16 workers then"
)
NEEDS = "root, ip and tc for network namespaces (21 of them); two cores are enough"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """`how` is alone, ddp, or a strategy of Hora. The other fields are those of a request (paced_rank.py)."""

    how: str
    workers: int
    servers: int = 0
    jitter: float = 0.0
    lead: int = 1
    steps: int = 2
    trail: int = 0

    @property
    def hosts(self) -> int:
        return self.workers + self.servers


def obstacle(quick: bool) -> str:
    why = links.obstacle()
    return why and (
        f"there can be no network namespaces here: {why}. Run it as root on Linux with ip and tc (iproute2), in a "
        "container with --privileged"
    )


def take(title: str, runs: Sequence[Run], rounds: int) -> list[list[list[Answer]]]:
    """For every run, for every round, its workers' answers by rank. The order rotates from round to round.

    RuntimeError if one fails; no process is left running."""
    hosts = max(run.hosts for run in runs)
    found: list[list[list[Answer]]] = [[] for _ in runs]
    with links.Namespaces(hosts, RATE) as where:
        program = [sys.executable, "-m", "hora_benchmarks.claims.paced_rank"]
        pool = ProcessPool(title, [[*where.command(rank, 0), *program] for rank in range(hosts)])
        try:
            _log(f"{title}: starting {hosts} hosts")
            pool.start()
            meeting = 0
            for round in range(rounds):
                first = round * len(runs) // rounds
                for index in (*range(first, len(runs)), *range(first)):
                    run = runs[index]
                    _log(f"{title}: round {round + 1} of {rounds}, {_text(run)}")
                    meeting += 1
                    found[index].append(pool.ask(_request(run, meeting), RUN_S)[: run.workers])
        finally:
            pool.stop(0.0)  # a host has no run to leave: its children have left theirs
    return found


def setting(varied: str = "") -> str:
    """What is the same in all runs; `varied` goes on after how compute was made up."""
    return (
        f"each worker and each server is a network namespace with a link of {links.bits_per_s(RATE) / 1e6:g} Mbit/s; "
        f"{NUM_BYTES / 1e6:g} MB of gradients, {1000 * COMPUTE_S:g} ms of compute a step (slept{varied})"
    )


def busy_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """How busy the machine was: near 100 % the cores were the limit, not the links."""
    busiest = max(rows, key=lambda row: max(row["busy"]))
    return f"The cores were busy at most {100 * max(busiest['busy']):.0f} %, with {busiest['workers']} workers"


def _request(run: Run, meeting: int) -> dict[str, Any]:
    return {**dataclasses.asdict(run), "meeting": meeting, "params": PARAMS, "compute_s": COMPUTE_S}


def _text(run: Run) -> str:
    servers = f", {run.servers} server{'s' * (run.servers > 1)}" if run.servers else ""
    return f"{run.how}, {run.workers} worker{'s' * (run.workers > 1)}{servers}"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
