"""`hora bench local`: samples/s and bytes on the wire over slow links, by strategy.

Every contestant is a set of processes of its own, one per worker, each on a host of its own as far as the network is
concerned (links.py), and running the same loop (local_rank.py). All are started, each takes one round untimed, then
they take turns: R repeats of a few whole rounds each, the order rotated, so that other load on the machine affects
all alike. A round takes as long as its slowest worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hora import strategies
from hora.launch.launched import ending_on_signals
from hora.net.machine import machine_text
from hora.runs import exit_codes
from hora.strategies.local.config import RoundStrategy
from hora_benchmarks.bench.bench_table import Row

from . import links, local_table
from .models import WORKLOADS
from .process_pool import Answer, ProcessPool

NONE = "no communication"
DDP = "ddp/gloo"
OURS = ("ring", "local:every=8", "diloco:every=32")
FURTHER = (
    "local:every=32", "diloco:every=32,wire=int8", "diloco:every=32,fragments=4,overlap=7",
    "diloco:every=32,overlap=31", "halving", "star", "auto",
)  # fmt: skip
DEFAULT = (NONE, DDP, *OURS)
RATES = ("100mbit", "1gbit")

LONG_STEPS = 16  # a round of so many is measured once in each repeat, a shorter one twice
FREE_STEPS = 16  # where there are no rounds
TURN_S = 900.0  # what a few rounds over a slow link may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """`how` is alone, ddp or hora. A repeat is so many `rounds` of `every` steps, after a `lead` of untimed ones.

    What travels beside the steps of the next round needs a lead: else the first round's exchange would be over before
    the clock runs, and the last one's begin when it stops.
    """

    name: str
    how: str = "hora"
    every: int = 1
    rounds: int = 2
    lead: int = 0


def contestant(name: str) -> Contestant:
    """The one with this name; any strategy is one, by its spelling. ValueError if it is neither."""
    if name == NONE:
        return Contestant(name=name, how="alone", rounds=FREE_STEPS)
    if name == DDP:
        return Contestant(name=name, how="ddp")
    try:
        strategy = strategies.parse(name)
    except ValueError as error:
        raise ValueError(f"{name!r} is neither {NONE!r} nor {DDP!r} nor a strategy: {error}") from None
    every = strategy.interval(0) if isinstance(strategy, RoundStrategy) else 1
    lead = every if isinstance(strategy, strategies.DiLoCo) and strategy.overlap else 0
    return Contestant(name=name, every=every, rounds=1 if every >= LONG_STEPS else 2, lead=lead)


def names(text: str) -> list[str]:
    """Splits a list at commas; a part that is an option belongs to the strategy before it."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def main(
    size: int,
    those: Sequence[Contestant],
    rates: Sequence[str] = RATES,
    model: str = "mlp",
    repeats: int = 3,
    json_path: str | None = None,
    plot_path: str | None = None,
) -> int:
    """Measures, prints the tables, writes JSON lines and the plot; returns the exit code."""
    rows: list[Row] = []
    failures: list[str] = []
    obstacle = links.obstacle()
    for rate in rates:
        where = links.Limited(size, rate, obstacle) if obstacle else links.Namespaces(size, rate)
        able = [one for one in those if one.how != "ddp" or where.counter]
        if len(able) < len(those):
            print(f"{DDP} is left out: a limit in Hora's transport does not slow it", file=sys.stderr)
        found, failed = measure(size, able, rate, where, model, repeats)
        rows += found
        failures += failed
        if found:
            title = f"{model}, {size} workers over links of {rate}, {repeats} repeat{'s' if repeats > 1 else ''}"
            local_table.print_rates(found, title, where.note)
    print(machine_text())
    if json_path:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if plot_path and rows:
        missing = local_table.plot_rates(rows, f"{model}, {size} workers\n{machine_text()}", plot_path)
        if missing:
            print(f"no plot: {missing}", file=sys.stderr)
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


def measure(
    size: int, those: Sequence[Contestant], rate: str, where: links.Links, model: str, repeats: int
) -> tuple[list[Row], list[str]]:
    """The row of every contestant, and a message for each that has none. No process is left running."""
    answers: dict[str, list[list[Answer]]] = {one.name: [] for one in those}
    failures: dict[str, str] = {}
    with ending_on_signals(), where, contextlib.ExitStack() as stack:
        pools = {}
        for number, one in enumerate(those):
            _log(f"{rate}: starting {one.name}")
            pools[one.name] = pool = ProcessPool(
                one.name, [_command(where, rank, number, one, model) for rank in range(size)]
            )
            stack.callback(pool.stop, 0.0)
            with _noting(one, failures):
                pool.start()
                pool.ask({"lead": 0, "steps": one.every, "settle": one.lead > 0}, TURN_S)
        for repeat in range(repeats):
            first = repeat % len(those)
            for one in (*those[first:], *those[:first]):
                if one.name not in failures:
                    _log(f"{rate}: repeat {repeat + 1} of {repeats}, {one.name}")
                    with _noting(one, failures):
                        request = {"lead": one.lead, "steps": one.every * one.rounds, "settle": one.lead > 0}
                        answers[one.name].append(pools[one.name].ask(request, TURN_S))
        for pool in pools.values():
            pool.stop()  # all is measured: they may leave the run in order
    rows = [row_of(one, model, rate, answers[one.name], where) for one in those if one.name not in failures]
    return rows, list(failures.values())


def row_of(one: Contestant, model: str, rate: str, repeats: Sequence[Sequence[Answer]], where: links.Links) -> Row:
    """One JSON line. Bytes are those of one worker in one step, the mean over workers and repeats.

    `link_use` is the share of its link's rate that the busiest worker made use of, in the median repeat; `each_s`
    has a step's seconds in each repeat.
    """
    steps, size = one.every * one.rounds, len(repeats[0])
    seconds = [max(answer["seconds"] for answer in answers) for answers in repeats]
    per_s = [size * WORKLOADS[model].batch_size * steps / s for s in seconds]
    counted = "wire_bytes" if where.counter else "sent_bytes"
    uses = [
        max(answer.get(counted) or 0 for answer in answers) * 8 / (s * links.bits_per_s(rate))
        for answers, s in zip(repeats, seconds, strict=True)
    ]
    return {
        "name": one.name,
        "model": model,
        "workers": size,
        "rate": rate,
        "samples_per_s": statistics.median(per_s),
        "samples_per_s_min": min(per_s),
        "samples_per_s_max": max(per_s),
        "wire_bytes": _mean(repeats, "wire_bytes", steps),
        "sent_bytes": _mean(repeats, "sent_bytes", steps),
        "link_use": statistics.median(uses),
        "exposed_s": _mean(repeats, "exposed_s", steps),
        "step_s": statistics.median(seconds) / steps,
        "each_s": [s / steps for s in seconds],
        "every": one.every,
        "rounds": one.rounds,
        "repeats": len(repeats),
        "links": where.note,
    }


def _mean(repeats: Sequence[Sequence[Answer]], key: str, steps: int) -> float | None:
    """Per worker and step; None where it was not counted."""
    values: list[Any] = [answer.get(key) for answers in repeats for answer in answers]
    return None if None in values else statistics.mean(values) / steps


def _command(where: links.Links, rank: int, meeting: int, one: Contestant, model: str) -> list[str]:
    strategy = [f"HORA_STRATEGY={one.name}"] if one.how == "hora" else []
    counter = [where.counter] if where.counter else []
    python = [sys.executable, "-m", "hora_benchmarks.bench.local_rank", one.how, model, *counter]
    return [*where.command(rank, meeting), *strategy, *python]


@contextlib.contextmanager
def _noting(one: Contestant, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        failures[one.name] = str(error)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
