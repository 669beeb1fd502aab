"""The summary of a run in words: printed by `hora run` at its end, and by `hora show` later."""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Mapping
from typing import Any

from ..terminal.format import count, duration, number, percent, rate, sanitize, size
from . import run_directory

MAX_VALUES = 6
MAX_EFFICIENCY = 1.02  # relative to perfect scaling; above it the two runs are not comparable
MIN_LENGTH = 0.5  # a single-worker run must have at least this share of the steps to be compared with
MAX_RUNS_SEARCHED = 1000


def summary_lines(summary: Mapping[str, Any], *, single: float | None) -> list[str]:
    """One to three lines for RunStatus.summary(); none for a run that did not train. `single` is the speed of one
    worker alone, in samples per second, if known."""
    steps, samples, seconds = (number_at(summary, key) for key in ("steps", "samples", "seconds"))
    if not steps and not samples:
        return []
    speed, workers, taken = (
        number_at(summary, "samples_per_s"),
        int(number_at(summary, "workers")),
        steps_taken(summary),
    )
    done = ", ".join(count(int(many), noun) for many, noun in ((taken, "step"), (samples, "sample")) if many)
    if taken < steps:
        done += f" (to step {int(steps):,})"
    trained_s = samples / speed if speed > 0 else seconds
    first = f"{done} in {duration(trained_s)}"
    if seconds > max(trained_s + 1, 1.1 * trained_s):
        first += f" ({duration(seconds)} from start to end)"
    if samples and speed > 0:
        first += f": {rate(speed)} samples/s"
        efficiency = speed / (single * workers) if single else 0.0
        if single and workers > 1 and efficiency <= MAX_EFFICIENCY:
            first += f", {percent(efficiency)} of {workers} times what one worker does alone ({rate(single)})"
    return [first, *filter(None, (_results(summary), _communication(summary, workers)))]


def logged_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """The newest logged values, the loss first."""
    values = summary.get("values")
    known = {str(name): _float(value) for name, value in values.items()} if isinstance(values, Mapping) else {}
    return {name: known[name] for name in sorted(known, key=lambda name: (name != "loss", "loss" not in name))}


def steps_taken(summary: Mapping[str, Any]) -> float:
    """Steps of this run, without those of the run it was restored from."""
    return max(0.0, number_at(summary, "steps") - number_at(summary, "from_step"))


def number_at(summary: Mapping[str, Any], key: str) -> float:
    """summary[key] if it is a finite number, else 0."""
    value = summary.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else 0


def single_worker_speed(config: Mapping[str, Any], steps: float) -> float | None:
    """Samples per second of the newest comparable past run with one worker; None if there is none. Comparable: same
    command, directory, host and threads per worker, ended well, and about as long. `config` is run.json of the run in
    question, `steps` how many it has taken."""
    if config.get("size") == 1 or config.get("hosts"):
        return None
    wanted = _comparison_key(config)
    for record in itertools.islice(run_directory.all_runs(), MAX_RUNS_SEARCHED):
        end = record.end or {}
        summary = end.get("summary")
        if record.config.get("size") != 1 or "joins" in record.config or end.get("code") != 0:
            continue
        if isinstance(summary, dict) and _comparison_key(record.config) == wanted:
            speed = number_at(summary, "samples_per_s")
            if speed > 0:
                return speed if steps_taken(summary) >= MIN_LENGTH * steps else None
    return None


def _comparison_key(config: Mapping[str, Any]) -> tuple[object, ...]:
    command = config.get("command")
    return (
        list(command) if isinstance(command, list | tuple) else [],
        bool(config.get("module")),
        str(config.get("threads")),
        config.get("max_steps"),
        list(config.get("hosts") or []),
        config.get("cwd", os.getcwd()),
        config.get("host", socket.gethostname()),
    )


def _results(summary: Mapping[str, Any]) -> str:
    values = [f"{sanitize(name, 40)} {number(value)}" for name, value in logged_values(summary).items()]
    parts = [", ".join(values[:MAX_VALUES])]
    for key, noun, verb in (
        ("rounds", "round", ""),
        ("checkpoints", "checkpoint", " written"),
        ("skipped", "step", " skipped"),
    ):
        if many := int(number_at(summary, key)):
            parts.append(f"{count(many, noun)}{verb}")
    return "; ".join(filter(None, parts))


def _communication(summary: Mapping[str, Any], workers: int) -> str:
    """Bytes sent per step, how much of the communication was hidden, and the slowest worker."""
    parts, sent, hidden = [], number_at(summary, "bytes_per_step"), summary.get("hidden")
    if sent > 0:
        parts.append(f"{'each worker' if workers > 1 else 'the worker'} sent {size(sent)} per step")
        if isinstance(hidden, int | float) and 0 <= hidden <= 1:
            parts[-1] += f", {percent(hidden)} of the communication hidden behind computation"
    if summary.get("slowest"):
        parts.append(f"slowest: {sanitize(summary['slowest'], 80)}")
    return "; ".join(parts)


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
