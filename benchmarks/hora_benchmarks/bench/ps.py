"""`hora bench ps`: push-pull of a whole model, Hora against Ray, TensorFlow and the memory limit, interleaved.

Each worker writes a fresh gradient, pushes it, and has the parameters copied out into memory of its own; the server
applies plain SGD. Contestants stay alive and take turns, the order rotated from round to round, so that other load on
the machine affects all alike. Large models do not fit into memory side by side: there each is started for its turn and
ended after it.
"""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

from hora.launch.launched import ending_on_signals
from hora.net.machine import machine_text
from hora.runs import exit_codes
from hora_benchmarks.bench.bench_table import Row

from . import ps_copy, ps_peers, ps_table
from .process_pool import Contestant, Result

SECONDS = 2.5
RESIDENT_PARAMS = 50_000_000  # up to here all contestants live side by side
PEERS = tuple(ps_peers.MODES)

Maker = Callable[[int, int, int], Sequence[Contestant]]
"""Contestants for so many workers, servers and parameters."""


def main(
    workers: int,
    servers: int,
    params: Sequence[int],
    json_path: str | None = None,
    rounds: int = 10,
    peers: Sequence[str] = PEERS,
    ours: Maker | None = None,
    seconds: float = SECONDS,
) -> int:
    """Measures, prints the tables, writes JSON lines; returns the exit code.

    `peers` are measured beside the memory limit and `ours`; a peer that is not installed is left out, with a message.
    """
    rows: list[Row] = []
    failures: list[str] = []
    our_names: list[str] = []
    notes: dict[str, None] = {}
    for size in params:
        mine = list(ours(workers, servers, size)) if ours else []
        our_names += [one.name for one in mine if one.name not in our_names]
        theirs, missing = ps_peers.contestants(list(peers), workers, size)
        notes |= dict.fromkeys(missing)
        _log(f"{ps_table.params_text(size)} parameters: starting {len(mine) + len(theirs) + 1} contestants")
        those = [*mine, *theirs, ps_copy.contestant(workers, size)]
        results, failed = measure(those, rounds, seconds, resident=size <= RESIDENT_PARAMS)
        rows += [ps_table.row_of(those) for those in results.values() if those]
        failures += failed
    title = f"push-pull of float32, {workers} workers, {rounds} rounds of {seconds:g} s"
    if rows:
        ps_table.print_rates(rows, title)
        ps_table.print_ratios(rows, our_names, peers)
    print(machine_text())
    for note in notes:
        print(note)
    if json_path:
        pathlib.Path(json_path).write_text(ps_table.json_text(rows))
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


def measure(
    those: Sequence[Contestant], rounds: int, seconds: float, resident: bool = True
) -> tuple[dict[str, list[Result]], list[str]]:
    """Every contestant's results by name, and a message for each that failed. No process is left running.

    Contestants that are not `resident` are started and ended for each of their turns."""
    results: dict[str, list[Result]] = {one.name: [] for one in those}
    failures: dict[str, str] = {}
    with ending_on_signals(), contextlib.ExitStack() as stack:
        for one in those:
            stack.callback(one.stop)
            if resident:
                with _noting(one, failures):
                    one.start()
        for round in range(rounds):
            _log(f"round {round + 1} of {rounds}")
            first = round % len(those)
            for one in (*those[first:], *those[:first]):
                if one.name not in failures:
                    with _noting(one, failures):
                        one.start()
                        results[one.name].append(one.measure(seconds))
                        if not resident:
                            one.stop()
    return results, list(failures.values())


@contextlib.contextmanager
def _noting(one: Contestant, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        failures[one.name] = f"{one.name}: {error}"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
