"""What is measured for the claim `accuracy`: runs through the real launcher, and the sweep over exact lags.

Every run trains its networks at all learning rates and with all seeds side by side (accuracy_rank.py). The rate that is
best on the seeds that choose is found afterwards, and a row keeps of a run what the other seeds did at that rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from .claim import Row

SYNC, ASYNC, SSP, EVERY = "sync", "async", "ssp", "every"
STRATEGIES = {
    SYNC: "ps",
    ASYNC: "ps:mode=async",
    SSP: "ps:mode=ssp,staleness=2",
    EVERY: "ps:mode=async,sync_every=8",
}
MOMENTA = (0.0, 0.9)
CORRECTIONS = ("none", "scale", "dc")
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # times 1 - momentum
BATCH = 20
TRAIN_SAMPLES = 1500
PAUSE_S = (0.010, 0.030)
LOOKS = 30
WINDOW = 0.2  # where a run stands is the mean over this share of what is behind it: single looks jump
TUNING_SEED = 100  # from here on: those that choose the learning rate
MANY_CORES = 10

Curve = Sequence[Sequence[Any]]  # seconds, samples, accuracy by seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured. `seeds` are those of one repeat; `lags` and `sweep_seeds` are of the sweep."""

    workers: int
    epochs: int
    repeats: int
    seeds: int
    tuning_seeds: int
    lags: tuple[int, ...]
    sweep_seeds: int
    sweep_epochs: int


def size(quick: bool) -> Size:
    from hora.net.machine import num_cores

    if quick:
        return Size(workers=2, epochs=6, repeats=1, seeds=3, tuning_seeds=2, lags=(0, 7, 15), sweep_seeds=2,
                    sweep_epochs=6)  # fmt: skip
    workers = 8 if num_cores() >= MANY_CORES else 4
    return Size(workers=workers, epochs=20, repeats=4, seeds=4, tuning_seeds=1, lags=(0, 3, 7, 15), sweep_seeds=5,
                sweep_epochs=20)  # fmt: skip


def measure(quick: bool) -> list[Row]:
    how = size(quick)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in STRATEGIES}
    for repeat in range(how.repeats):
        modes = list(STRATEGIES)
        for mode in modes[repeat:] + modes[:repeat]:
            _log(f"repeat {repeat + 1} of {how.repeats}: {STRATEGIES[mode]}, {how.workers} workers")
            runs[mode].append(launch(mode, how.workers, plan(how, repeat)))
    return [*rows_of(runs, how), *sweep(how)]


def plan(how: Size, repeat: int) -> dict[str, Any]:
    """What the workers are told (accuracy_rank.Plan). First the seeds that choose, then those that count."""
    together = BATCH * how.workers
    tuning = range(TUNING_SEED + repeat * how.tuning_seeds, TUNING_SEED + (repeat + 1) * how.tuning_seeds)
    return {
        "samples": TRAIN_SAMPLES * how.epochs // together * together,
        "batch": BATCH,
        "momenta": MOMENTA,
        "rates": [[rate * (1 - momentum) for rate in RATES] for momentum in MOMENTA],
        "seeds": [*tuning, *range(repeat * how.seeds, (repeat + 1) * how.seeds)],
        "pause_s": PAUSE_S,
        "repeat": repeat,
        "looks": LOOKS,
    }


def launch(mode: str, workers: int, told: dict[str, Any]) -> dict[str, Any]:
    from hora.launch.launched import launched

    worker = ("-m", "hora_benchmarks.claims.accuracy_rank")
    found: dict[str, Any] = launched(
        worker, json.dumps(told), size=workers, strategy=STRATEGIES[mode], options=("--servers", "1")
    )
    return found


def rows_of(runs: dict[str, list[dict[str, Any]]], how: Size) -> list[Row]:
    """One for each mode, momentum and repeat, at the learning rate that is best for that mode and momentum; beside it
    how the same ended at the rate that is best for sync."""
    rows: list[Row] = []
    for number, momentum in enumerate(MOMENTA):
        curves = {mode: [[(s, n, networks[number]) for s, n, networks in run["curve"]] for run in found]
                  for mode, found in runs.items()}  # fmt: skip
        ends = {mode: [standing(curve, curve[-1][1]) for curve in found] for mode, found in curves.items()}
        tuning = {mode: _tuning(found, how) for mode, found in ends.items()}
        best = {mode: max(range(len(RATES)), key=values.__getitem__) for mode, values in tuning.items()}
        for mode, found in runs.items():
            for repeat, run in enumerate(found):
                its, untuned = (_counting(how, best[each]) for each in (mode, SYNC))
                end = ends[mode][repeat]
                rows.append({
                    "kind": "run", "mode": mode, "momentum": momentum, "repeat": repeat, "workers": how.workers,
                    "seeds": plan(how, repeat)["seeds"][how.tuning_seeds :],
                    "rate": RATES[best[mode]] * (1 - momentum), "tuning": tuning[mode],
                    "seconds": run["seconds"], "samples": run["samples"], "lag": mean_lag(run["lags"]),
                    "curve": [(s, n, networks[its]) for s, n, networks in curves[mode][repeat]], "ends": end[its],
                    "untuned_rate": RATES[best[SYNC]] * (1 - momentum), "untuned": end[untuned],
                })  # fmt: skip
    return rows


def _tuning(ends: Sequence[Sequence[float]], how: Size) -> list[float]:
    """By learning rate, where the seeds that choose it ended: the mean over these and the repeats."""
    each = how.tuning_seeds + how.seeds
    return [
        statistics.mean(end[at * each + seed] for end in ends for seed in range(how.tuning_seeds))
        for at in range(len(RATES))
    ]


def _counting(how: Size, at: int) -> slice:
    """Of all networks of a momentum those of one learning rate and of the seeds that count."""
    each = how.tuning_seeds + how.seeds
    return slice(at * each + how.tuning_seeds, (at + 1) * each)


def mean_lag(lags: dict[str, int]) -> float:
    return sum(int(lag) * count for lag, count in lags.items()) / max(1, sum(lags.values()))


def at(curve: Curve, place: float, axis: int) -> list[float]:
    """What was seen last by that time (axis 0) or number of samples (1); the first thing seen, if that is later."""
    seen = [point for point in curve if point[axis] <= place]
    found: list[float] = (seen[-1] if seen else curve[0])[2]
    return found


def standing(curve: Curve, place: float, axis: int = 1) -> list[float]:
    """By seed, the mean over the last fifth before that time (axis 0) or number of samples (1)."""
    seen = [point[2] for point in curve if (1 - WINDOW) * place <= point[axis] <= place] or [at(curve, place, axis)]
    return [statistics.mean(values) for values in zip(*seen, strict=True)]


def sweep(how: Size) -> list[Row]:
    """Without lag there is nothing to correct: those are trained once."""
    import torch

    from ..bench.staleness import LEARNING_RATES, train

    torch.set_num_threads(1)  # as everywhere here; the matrices are small
    rows = []
    for momentum in MOMENTA:
        fresh: list[float] = []
        for lag, correct in itertools.product(how.lags, CORRECTIONS):
            if lag or not fresh:
                _log(f"sweep: momentum {momentum:g}, correct={correct}, lag {lag}")
                found = [train(momentum, correct, lag, seed, how.sweep_epochs) for seed in range(how.sweep_seeds)]
                fresh = fresh or found
            rows.append({"kind": "sweep", "momentum": momentum, "correct": correct, "lag": lag,
                         "rate": LEARNING_RATES[momentum], "accuracies": found if lag else fresh})  # fmt: skip
    return rows


def _log(text: str) -> None:
    print(f"   {text}", file=sys.stderr, flush=True)
