"""Summary: what `hora run` says of a run at its end, and `hora show` later."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Mapping
from typing import Any

from . import runfile
from .wording import count, duration, harmless, number, percent, rate, size

MAX_VALUES = 6
MAX_LOOKED_AT = 1000  # past runs among which one with a single worker is looked for


def sentences(summary: Mapping[str, Any], *, single: float | None) -> list[str]:
    """One to three lines of what Board.summary() tells; none for a run that did not train. `single` is what one worker
    alone does, in samples per second, if that is known."""
    steps, samples, seconds = (amount(summary, key) for key in ("steps", "samples", "seconds"))
    if not steps and not samples:
        return []
    speed, workers = amount(summary, "samples_per_s"), int(amount(summary, "workers"))
    taken = max(0, steps - amount(summary, "from_step"))
    done = ", ".join(count(int(many), noun) for many, noun in ((taken, "step"), (samples, "sample")) if many)
    if taken < steps:
        done += f" (to step {int(steps):,})"
    trained_s = samples / speed if speed > 0 else seconds
    first = f"{done} in {duration(trained_s)}"
    if seconds > max(trained_s + 1, 1.1 * trained_s):
        first += f" ({duration(seconds)} from start to end)"
    if samples and speed > 0:
        first += f": {rate(speed)} samples/s"
        if single and workers > 1:
            share = speed / (single * workers)
            first += f", {percent(share)} of {workers} times what one worker does alone ({rate(single)})"
    return [first, *filter(None, (_reached(summary), _communication(summary, workers)))]


def values(summary: Mapping[str, Any]) -> dict[str, float]:
    """What was logged last, the loss first."""
    told = summary.get("values")
    known = {str(name): _float(value) for name, value in told.items()} if isinstance(told, Mapping) else {}
    return {name: known[name] for name in sorted(known, key=lambda name: (name != "loss", "loss" not in name))}


def amount(summary: Mapping[str, Any], key: str) -> float:
    """A number of the summary; 0 if it has none there."""
    value = summary.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def single_speed(facts: Mapping[str, Any]) -> float | None:
    """Samples per second of the newest past run of the same command, from the same folder, on this host, that had one
    worker and ended well. `facts` are what run.json says of the run in question."""
    if facts.get("size") == 1:
        return None
    wanted = _command(facts)
    for found in itertools.islice(runfile.all_runs(), MAX_LOOKED_AT):
        ended = found.ended or {}
        told = ended.get("summary")
        if found.begun.get("size") != 1 or "joins" in found.begun or ended.get("code") != 0:
            continue
        if _command(found.begun) == wanted and isinstance(told, dict) and amount(told, "samples_per_s") > 0:
            return amount(told, "samples_per_s")
    return None


def _command(facts: Mapping[str, Any]) -> tuple[object, ...]:
    where = (facts.get("cwd", os.getcwd()), facts.get("host", socket.gethostname()))
    command = facts.get("command")
    return (list(command) if isinstance(command, list | tuple) else [], bool(facts.get("module")), *where)


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
