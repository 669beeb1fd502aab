"""Turns of `hora bench hosts`: contestants are started side by side, then measured one after the other.

R rounds, the order rotated from round to round, so that other load on the machine affects all alike. A call takes as
long as its slowest rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from hora_benchmarks.bench.bench_table import Row

from .process_pool import Answer, ProcessPool
from .train import duration_text

TURN_S = 900.0  # what a turn over slow links may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing to measure: a request to a pool, which several may share. `row` is what is known of it before."""

    pool: ProcessPool
    warm_up: Answer
    request: Answer
    row: Row


def take(title: str, entries: Sequence[Entry], rounds: int) -> tuple[list[Row], list[str]]:
    """The row of every entry, and a message for each pool that failed. No process is left running."""
    turns: list[list[list[Answer]]] = [[] for _ in entries]
    failures: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        for pool in dict.fromkeys(entry.pool for entry in entries):
            _log(f"{title}: starting {pool.name}")
            stack.callback(pool.stop, 0.0)
            with _noting(pool, failures):
                pool.start()
        started = time.monotonic()
        for entry in entries:
            if id(entry.pool) not in failures:
                with _noting(entry.pool, failures):
                    entry.pool.ask(entry.warm_up, TURN_S)
        rough_s = (time.monotonic() - started) * rounds
        for round in range(rounds):
            left = f", about {duration_text(rough_s)} in all" if round == 0 else ""
            _log(f"{title}: round {round + 1} of {rounds}{left}")
            first = round % len(entries)
            for index in (*range(first, len(entries)), *range(first)):
                entry = entries[index]
                if id(entry.pool) not in failures:
                    with _noting(entry.pool, failures):
                        turns[index].append(entry.pool.ask(entry.request, TURN_S))
        for pool in {entry.pool for entry in entries if id(entry.pool) not in failures}:
            pool.stop()  # all is measured: they may leave the run in order
    rows = [
        row_of(entry.row, mine) for entry, mine in zip(entries, turns, strict=True) if id(entry.pool) not in failures
    ]
    return rows, list(failures.values())


def row_of(known: Row, turns: Sequence[Sequence[Answer]]) -> Row:
    """One JSON line: what is known, times over all calls of all turns, and the bytes that left the busiest host in one.

    `cpu_s`, where it is told, is what a call took of the busiest rank's processor, one value for each turn.

    With a limit, `of_limit` is the share of the wires that was made use of: 1 cannot be reached, headers take 4 to 5 %.
    """
    each = sorted(max(call) for ranks in turns for call in zip(*(answer["each"] for answer in ranks), strict=True))
    median = statistics.median(each)
    wire_bytes = [max(answer["wire_bytes"] / len(answer["each"]) for answer in ranks) for ranks in turns]
    cpu_s = [max(answer["cpu_s"] for answer in ranks) for ranks in turns if "cpu_s" in ranks[0]]
    row = {
        **known,
        "each_s": each,
        "median_s": median,
        "p10_s": each[len(each) // 10],
        "p90_s": each[(len(each) * 9) // 10],
        "wire_bytes": statistics.median(wire_bytes),
        "repeats": len(each),
        "rounds": len(turns),
    }
    row |= {"cpu_s": cpu_s} if cpu_s else {}
    return row | ({"of_limit": known["limit_s"] / median} if known.get("limit_s") else {})


@contextlib.contextmanager
def _noting(pool: ProcessPool, failures: dict[int, str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        failures[id(pool)] = str(error)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
