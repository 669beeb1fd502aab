"""Claim 5: synchronous against asynchronous is accuracy against speed.

Handwritten digits (1,500 of them, a network of 64 hidden units, SGD without and with momentum) under one parameter
server through the real launcher: all workers wait for all (sync), nobody waits (async), nobody is more than two steps
ahead (ssp), or all meet after every eighth step (every). Each worker takes 20 samples a step everywhere, so a
synchronous step is of W · 20, and all have seen the same samples in the end. Each has the learning rate that is best
for it on seeds that are used for nothing else, of eight that are the same for all.

In place of a large computation every step sleeps 10 to 30 ms at random, as uneven machines do: how much faster it is
not to wait follows from that choice, and with equal steps there would be nothing to win. Accuracy is looked at after
the run, in copies of what rank 0 had read, so it costs no time on the clock. Since single looks jump by a point or two,
the accuracy at the end is the mean over the last fifth.

The sweep is that of `hora bench staleness`: every gradient is late by exactly so many updates, at one learning rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict, spread
from .figure import COLORS, dress, line

SYNC, ASYNC, SSP, EVERY = "sync", "async", "ssp", "every"
STRATEGIES = {
    SYNC: "ps",
    ASYNC: "ps:mode=async",
    SSP: "ps:mode=ssp,staleness=2",
    EVERY: "ps:mode=async,sync_every=8",
}
LABELS = {SYNC: "sync", ASYNC: "async", SSP: "ssp 2", EVERY: "every 8"}
JUDGED = (ASYNC, SSP)
MOMENTA = (0.0, 0.9)
CORRECTIONS = ("none", "scale", "dc")
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # times 1 - momentum
BATCH = 20
TRAIN_SAMPLES = 1500
PAUSE_S = (0.010, 0.030)
LOOKS, DRAWN = 30, 20
WINDOW = 0.2  # where a run stands is the mean over this share of what is behind it: single looks jump
TUNING_SEED = 100  # from here on: those that choose the learning rate
FASTER = 1.1
LOWER = 0.005
ERRORS = 2.0
SHORT_OF = 0.02
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
    from ..transport.base import num_cores

    if quick:
        return Size(workers=2, epochs=6, repeats=1, seeds=3, tuning_seeds=2, lags=(0, 7, 15), sweep_seeds=2,
                    sweep_epochs=6)  # fmt: skip
    workers = 8 if num_cores() >= MANY_CORES else 4
    return Size(workers=workers, epochs=20, repeats=3, seeds=3, tuning_seeds=2, lags=(0, 3, 7, 15), sweep_seeds=3,
                sweep_epochs=20)  # fmt: skip


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(quick: bool) -> list[Row]:
    how = size(quick)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in STRATEGIES}
    for repeat in range(how.repeats):
        modes = list(STRATEGIES)
        for mode in modes[repeat:] + modes[:repeat]:
            _say(f"repeat {repeat + 1} of {how.repeats}: {STRATEGIES[mode]}, {how.workers} workers")
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
    from ..bench.launched import launched

    worker = ("-m", "hora.claims.accuracy_rank")
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
                _say(f"sweep: momentum {momentum:g}, correct={correct}, lag {lag}")
                found = [train(momentum, correct, lag, seed, how.sweep_epochs) for seed in range(how.sweep_seeds)]
                fresh = fresh or found
            rows.append({"kind": "sweep", "momentum": momentum, "correct": correct, "lag": lag,
                         "rate": LEARNING_RATES[momentum], "accuracies": found if lag else fresh})  # fmt: skip
    return rows


def _say(text: str) -> None:
    print(f"   {text}", file=sys.stderr, flush=True)


# -- judging -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Against:
    """A mode against sync at one momentum. `faster`: its samples/s as a multiple; `differences` in accuracy, after the
    same samples, seed by seed; `in_time` the same at the moment at which the first of both was through."""

    mode: str
    momentum: float
    faster: float
    differences: list[float]
    in_time: list[float]

    @property
    def trades(self) -> bool:
        return self.faster >= FASTER and is_lower(self.differences)


def is_lower(differences: Sequence[float]) -> bool:
    """By half a point, and by more than what the seeds scatter."""
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return mean <= -LOWER and mean < -ERRORS * error


def against_sync(rows: Sequence[Row], mode: str, momentum: float) -> Against:
    mine, theirs = (_runs(rows, each, momentum) for each in (mode, SYNC))
    differences, in_time = [], []
    for a, b in zip(mine, theirs, strict=True):
        differences += _differences(a["ends"], b["ends"])
        moment = min(a["seconds"], b["seconds"])
        in_time += _differences(standing(a["curve"], moment, 0), standing(b["curve"], moment, 0))
    faster = statistics.median(map(_per_s, mine)) / statistics.median(map(_per_s, theirs))
    return Against(mode=mode, momentum=momentum, faster=faster, differences=differences, in_time=in_time)


def at(curve: Curve, place: float, axis: int) -> list[float]:
    """What was seen last by that time (axis 0) or number of samples (1); the first thing seen, if that is later."""
    seen = [point for point in curve if point[axis] <= place]
    found: list[float] = (seen[-1] if seen else curve[0])[2]
    return found


def standing(curve: Curve, place: float, axis: int = 1) -> list[float]:
    """By seed, the mean over the last fifth before that time (axis 0) or number of samples (1)."""
    seen = [point[2] for point in curve if (1 - WINDOW) * place <= point[axis] <= place] or [at(curve, place, axis)]
    return [statistics.mean(values) for values in zip(*seen, strict=True)]


def _differences(these: Iterable[float], those: Iterable[float]) -> list[float]:
    return [a - b for a, b in zip(these, those, strict=True)]


def _runs(rows: Sequence[Row], mode: str, momentum: float) -> list[Row]:
    return [row for row in rows if row["kind"] == "run" and (row["mode"], row["momentum"]) == (mode, momentum)]


def _per_s(row: Row) -> float:
    return float(row["samples"] / row["seconds"])


def _ends(rows: Sequence[Row]) -> list[float]:
    """The accuracies in the end, of all repeats and seeds."""
    return [accuracy for row in rows for accuracy in row["ends"]]


def falls_from(rows: Sequence[Row], momentum: float, correct: str = "none") -> int | None:
    """The lag from which on accuracy is lower than without, in the sweep; None if it never is."""
    those = {row["lag"]: row["accuracies"] for row in rows
             if row["kind"] == "sweep" and (row["momentum"], row["correct"]) == (momentum, correct)}  # fmt: skip
    found = None
    for lag in sorted(those, reverse=True):
        if not is_lower(_differences(those[lag], those[0])):
            break
        found = lag
    return found


def judge(rows: Sequence[Row]) -> Verdict:
    found = [against_sync(rows, mode, momentum) for mode in JUDGED for momentum in MOMENTA]
    trading = [each for each in found if each.trades]
    falls = {momentum: lag for momentum in MOMENTA if (lag := falls_from(rows, momentum)) is not None}
    told = f"{_runs_text(found)}. {_sweep_text(rows)}"
    if len(trading) == len(found):
        return Verdict(word="holds", text=told)
    if trading:
        return Verdict(word="only if", text=f"{_which(trading)}: else nothing is given up, or nothing won. {told}")
    if falls and any(each.faster >= FASTER for each in found):
        lags = " or ".join(f"{lag} updates (momentum {momentum:g})" for momentum, lag in falls.items())
        late = statistics.mean(row["lag"] for mode in JUDGED for row in _runs(rows, mode, MOMENTA[0]))
        return Verdict(
            word="only if",
            text=f"gradients come late by {lags} or more at a learning rate that was chosen without lag; with "
            f"{rows[0]['workers']} workers (mean lag {late:.1f}) and a rate of its own there was no trade. {told}",
        )
    return Verdict(word="fails", text=f"there was no trade. {told}")


def _which(trading: Sequence[Against]) -> str:
    """Those that trade, in words: by their momentum alone, where that decides."""
    momenta = {each.momentum for each in trading}
    if len(momenta) == 1 and len(trading) == len(JUDGED):
        return f"momentum is {momenta.pop():g}"
    return "it is " + " or ".join(f"{each.mode} with momentum {each.momentum:g}" for each in trading)


def _runs_text(found: Sequence[Against]) -> str:
    parts = [
        f"{each.mode} with momentum {each.momentum:g}: {each.faster - 1:+.0%} samples/s, "
        f"{_points(each.differences)} over samples, {_points(each.in_time)} over time"
        for each in found
    ]
    return f"Points of accuracy against sync, {'; '.join(parts)}"


def _points(differences: Sequence[float]) -> str:
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return f"{100 * statistics.mean(differences):+.1f} ± {100 * error:.1f}"


def _sweep_text(rows: Sequence[Row]) -> str:
    parts = []
    for momentum in MOMENTA:
        lags = {correct: falls_from(rows, momentum, correct) for correct in CORRECTIONS}
        words = [f"{_from(lag)}{'' if correct == 'none' else f' (correct={correct})'}" for correct, lag in lags.items()]
        parts.append(f"with momentum {momentum:g} {', '.join(words)}")
    return f"In the sweep accuracy is lost {'; '.join(parts)}"


def _from(lag: int | None) -> str:
    return "at no lag" if lag is None else f"from lag {lag} on"


# -- showing -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for momentum in MOMENTA:
        goal = statistics.mean(_ends(_runs(rows, SYNC, momentum))) - SHORT_OF
        for mode, label in LABELS.items():
            mine = _runs(rows, mode, momentum)
            other, ends = against_sync(rows, mode, momentum), [100 * end for end in _ends(mine)]
            lines.append([
                label, f"{momentum:g}", f"{mine[0]['rate']:g}", f"{statistics.mean(row['lag'] for row in mine):.1f}",
                spread([_per_s(row) for row in mine], ",.0f"),
                f"{statistics.mean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})",
                *([_points(other.differences), _points(other.in_time)] if mode != SYNC else ["", ""]),
                _reached(mine, goal),
                f"{100 * statistics.mean(a for row in mine for a in row['untuned']):.1f}" if mode != SYNC else "",
            ])  # fmt: skip
    first = rows[0]
    seeds = sum(len(row["seeds"]) for row in _runs(rows, SYNC, MOMENTA[0]))
    repeats = len(_runs(rows, SYNC, MOMENTA[0]))
    sweep_seeds = max((len(row["accuracies"]) for row in rows if row["kind"] == "sweep"), default=0)
    return Table(
        headings=("mode", "momentum", "rate", "lag", "samples/s", "accuracy, %", "points, same samples",
                  "points, same time", f"seconds to {SHORT_OF * 100:g} below sync", "% at sync's rate"),
        lines=lines,
        note=f"{first['workers']} workers, {first['samples']:,} samples; {seeds} seeds in {repeats} run"
        f"{'s' if repeats > 1 else ''}, the sweep with {sweep_seeds}. ssp 2 is staleness=2, every 8 is async with "
        f"sync_every=8. Mean (least to most) of accuracy, differences "
        f"seed by seed ± standard error, median (least to most) of the rest. {_edges(rows)}",
    )  # fmt: skip


def _reached(mine: Sequence[Row], goal: float) -> str:
    """After how many seconds the mean over the seeds first came so far."""
    found = [next((point[0] for point in row["curve"] if statistics.mean(point[2]) >= goal), None) for row in mine]
    reached = [seconds for seconds in found if seconds is not None]
    return f"{statistics.median(reached):.1f}" if len(reached) == len(found) else "not reached"


def _edges(rows: Sequence[Row]) -> str:
    """Whether a better learning rate may lie outside of those tried."""
    names = {f"{row['mode']} with momentum {row['momentum']:g}" for row in rows if row["kind"] == "run"
             and max(row["tuning"]) in (row["tuning"][0], row["tuning"][-1])}  # fmt: skip
    if not names:
        return "No best learning rate was at the edge of those tried."
    return f"At the edge of the learning rates tried: {', '.join(sorted(names))}."


def draw(rows: Sequence[Row], figure: Any) -> None:
    axes = figure.subplots(len(MOMENTA), 3, squeeze=False)
    for (by_samples, by_time, by_lag), momentum in zip(axes, MOMENTA, strict=True):
        where = f"momentum {momentum:g}"
        for mode, strategy in STRATEGIES.items():
            mine = _runs(rows, mode, momentum)
            label = f"{strategy} (lr {mine[0]['rate']:g})"
            color = COLORS.get(mode, "tab:brown")
            line(by_samples, _points_of(mine, 1), label, color=color)
            line(by_time, _points_of(mine, 0), label, color=color)
        low = min(_ends(_runs(rows, SYNC, momentum))) - 0.2
        for axis in (by_samples, by_time):
            axis.set_ylim(100 * low, 100)
        dress(by_samples, f"Over samples, {where}", "samples, all workers together", "test accuracy, %", legend=False)
        by_samples.legend(fontsize=8, loc="lower right")
        dress(by_time, f"Over time, {where}", "seconds", "test accuracy, %", legend=False)
        for correct in CORRECTIONS:
            those = [row for row in rows if row["kind"] == "sweep"
                     and (row["momentum"], row["correct"]) == (momentum, correct)]  # fmt: skip
            line(by_lag, {row["lag"]: [100 * a for a in row["accuracies"]] for row in those}, f"correct={correct}")
        rate = next(row["rate"] for row in rows if row["kind"] == "sweep" and row["momentum"] == momentum)
        dress(by_lag, f"Every gradient late by so much, {where}, lr {rate:g}", "lag (updates)", "test accuracy, %",
              legend=False)  # fmt: skip
        by_lag.set_ylim(0, 100)
        by_lag.legend(fontsize=8, loc="lower left")


def _points_of(mine: Sequence[Row], axis: int) -> dict[float, list[float]]:
    """Accuracy in per cent at equal distances, up to where all repeats have come."""
    end: Callable[[Row], float] = lambda row: row["curve"][-1][axis]  # noqa: E731
    last = min(map(end, mine))
    places = [last * (i + 1) / DRAWN for i in range(DRAWN)]
    return {place: [100 * a for row in mine for a in at(row["curve"], place, axis)] for place in places}


CLAIM = Claim(
    number=5,
    name="accuracy",
    says="Synchronous against asynchronous is accuracy against speed",
    rule=f"it holds if async and ssp, without and with momentum and each at its own best learning rate, train at least "
    f"{FASTER - 1:.0%} more samples/s than sync and end lower after the same samples (mean over the last fifth), by "
    f"{100 * LOWER:g} points or more and by more than {ERRORS:g} standard errors of the differences seed by seed. "
    "'Only if': this is so for some of them; or for none, but one is faster and in the sweep accuracy falls so from "
    "some lag on. It fails if neither: then not waiting costs nothing, or wins nothing.",
    needs="two cores, 4 workers; with ten cores or more 8 workers",
    minutes=(1, 5),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(15.0, 8.0),
)
