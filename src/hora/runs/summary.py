"""Summary: what `hora run` says of a run at its end, and `hora show` later."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Mapping
from typing import Any

from ..terminal.format import count, duration, harmless, number, percent, rate, size
from . import run_directory

MAX_VALUES = 6
POSSIBLE = 1.02  # of what so many workers could do at best; beyond it the two runs were not alike after all
ALIKE = 0.5  # a run must be half as long as another at least, to be compared with it
MAX_LOOKED_AT = 1000  # past runs among which one with a single worker is looked for


def summary_lines(summary: Mapping[str, Any], *, single: float | None) -> list[str]:
    """One to three lines of what Board.summary() tells; none for a run that did not train. `single` is what one worker
    alone does, in samples per second, if that is known."""
    steps, samples, seconds = (amount(summary, key) for key in ("steps", "samples", "seconds"))
    if not steps and not samples:
        return []
    speed, workers = amount(summary, "samples_per_s"), int(amount(summary, "workers"))
    here = steps_taken(summary)
    done = ", ".join(count(int(many), noun) for many, noun in ((here, "step"), (samples, "sample")) if many)
    if here < steps:
        done += f" (to step {int(steps):,})"
    trained_s = samples / speed if speed > 0 else seconds
    first = f"{done} in {duration(trained_s)}"
    if seconds > max(trained_s + 1, 1.1 * trained_s):
        first += f" ({duration(seconds)} from start to end)"
    if samples and speed > 0:
        first += f": {rate(speed)} samples/s"
        share = speed / (single * workers) if single else 0.0
        if single and workers > 1 and share <= POSSIBLE:
            first += f", {percent(share)} of {workers} times what one worker does alone ({rate(single)})"
    return [first, *filter(None, (_reached(summary), _communication(summary, workers)))]


def values(summary: Mapping[str, Any]) -> dict[str, float]:
    """What was logged last, the loss first."""
    told = summary.get("values")
    known = {str(name): _float(value) for name, value in told.items()} if isinstance(told, Mapping) else {}
    return {name: known[name] for name in sorted(known, key=lambda name: (name != "loss", "loss" not in name))}


def steps_taken(summary: Mapping[str, Any]) -> float:
    """Steps of this run, without those of the one it was restored from."""
    return max(0.0, amount(summary, "steps") - amount(summary, "from_step"))


def amount(summary: Mapping[str, Any], key: str) -> float:
    """A number of the summary; 0 if it has none there."""
    value = summary.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def single_worker_speed(facts: Mapping[str, Any], steps: float) -> float | None:
    """Samples per second of the newest past run of the same command that had one worker and ended well: from the same
    folder, on this host, with as many threads for a worker, and about as long. `facts` are what run.json says of the
    run in question, `steps` how many it has steps_taken."""
    if facts.get("size") == 1 or facts.get("hosts"):
        return None
    wanted = _command(facts)
    for found in itertools.islice(run_directory.all_runs(), MAX_LOOKED_AT):
        ended = found.end or {}
        told = ended.get("summary")
        if found.config.get("size") != 1 or "joins" in found.config or ended.get("code") != 0:
            continue
        if _command(found.config) == wanted and isinstance(told, dict) and amount(told, "samples_per_s") > 0:
            return amount(told, "samples_per_s") if steps_taken(told) >= ALIKE * steps else None
    return None


def _command(facts: Mapping[str, Any]) -> tuple[object, ...]:
    where = (facts.get("cwd", os.getcwd()), facts.get("host", socket.gethostname()))
    command = facts.get("command")
    how = (bool(facts.get("module")), str(facts.get("threads")), facts.get("max_steps"), list(facts.get("hosts") or []))
    return (list(command) if isinstance(command, list | tuple) else [], *how, *where)


def _reached(summary: Mapping[str, Any]) -> str:
    known = values(summary)
    told = [f"{harmless(name, 40)} {number(value)}" for name, value in list(known.items())[:MAX_VALUES]]
    parts = [", ".join(told)]
    for key, noun, end in (("rounds", "round", ""), ("checkpoints", "checkpoint", " written")):
        parts += [f"{count(int(amount(summary, key)), noun)}{end}"] * bool(amount(summary, key))
    parts += [f"{count(int(amount(summary, 'skipped')), 'step')} skipped"] * bool(amount(summary, "skipped"))
    return "; ".join(filter(None, parts))


def _communication(summary: Mapping[str, Any], workers: int) -> str:
    """Of several workers: what they sent, how much of that nobody waited for, and who kept the others waiting."""
    parts, sent, hidden = [], amount(summary, "bytes_per_step"), summary.get("hidden")
    if sent > 0:
        parts.append(f"{'each worker' if workers > 1 else 'the worker'} sent {size(sent)} per step")
        if isinstance(hidden, int | float) and 0 <= hidden <= 1:
            parts[-1] += f", {percent(hidden)} of the communication hidden behind computation"
    if summary.get("slowest"):
        parts.append(f"slowest: {harmless(summary['slowest'], 80)}")
    return "; ".join(parts)


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
