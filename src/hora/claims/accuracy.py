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

Three things were changed after first runs had been seen: the learning rates grew from seven to eight, since sync's best
lay at the edge; the pauses were lengthened; and the accuracy at the end became the mean over the last fifth.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .accuracy_runs import ASYNC, CORRECTIONS, EVERY, MOMENTA, SSP, STRATEGIES, SYNC, at, measure, standing
from .claim import Claim, Row, Table, Verdict, spread
from .figure import COLORS, dress, line

LABELS = {SYNC: "sync", ASYNC: "async", SSP: "ssp 2", EVERY: "every 8"}
JUDGED = (ASYNC, SSP)
DRAWN = 20
FASTER = 1.1
LOWER = 0.005
ERRORS = 2.0
SHORT_OF = 0.02


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


def _differences(these: Iterable[float], those: Iterable[float]) -> list[float]:
    return [a - b for a, b in zip(these, those, strict=True)]


def _runs(rows: Sequence[Row], mode: str, momentum: float) -> list[Row]:
    return [row for row in rows if row["kind"] == "run" and (row["mode"], row["momentum"]) == (mode, momentum)]


def _per_s(row: Row) -> float:
    return float(row["samples"] / row["seconds"])


def swept(rows: Sequence[Row], momentum: float, correct: str) -> dict[int, list[float]]:
    """The accuracies of the sweep, by lag."""
    return {row["lag"]: row["accuracies"] for row in rows
            if row["kind"] == "sweep" and (row["momentum"], row["correct"]) == (momentum, correct)}  # fmt: skip


def _ends(rows: Sequence[Row]) -> list[float]:
    """The accuracies in the end, of all repeats and seeds."""
    return [accuracy for row in rows for accuracy in row["ends"]]


def falls_from(rows: Sequence[Row], momentum: float, correct: str = "none") -> int | None:
    """The lag from which on accuracy is lower than without, in the sweep; None if it never is."""
    those, found = swept(rows, momentum, correct), None
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
    return f"In the sweep accuracy is lost {'; '.join(parts)}. {_won_back(rows)}"


def _won_back(rows: Sequence[Row]) -> str:
    """How accurate each correction was at the greatest lag of the sweep."""
    parts = []
    for momentum in MOMENTA:
        those = {correct: swept(rows, momentum, correct) for correct in CORRECTIONS}
        lag = max(those[CORRECTIONS[0]])
        words = [f"{correct} {100 * statistics.mean(found[lag]):.1f} %" for correct, found in those.items()]
        parts.append(f"at lag {lag} with momentum {momentum:g}: {', '.join(words)}")
    return f"Corrections, {'; '.join(parts)}; all at one rate"


def _from(lag: int | None) -> str:
    return "at no lag" if lag is None else f"from lag {lag} on"


# -- showing -----------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for momentum in MOMENTA:
        goal = statistics.mean(_ends(_runs(rows, SYNC, momentum))) - SHORT_OF
        for mode, label in LABELS.items():
            mine = _runs(rows, mode, momentum)
            other = against_sync(rows, mode, momentum)
            lines.append([
                label, f"{momentum:g}", f"{mine[0]['rate']:g}", f"{statistics.mean(row['lag'] for row in mine):.1f}",
                spread([_per_s(row) for row in mine], ",.0f"),
                _mean(_ends(mine)),
                *([_points(other.differences), _points(other.in_time)] if mode != SYNC else ["", ""]),
                _reached(mine, goal),
                f"{100 * statistics.mean(a for row in mine for a in row['untuned']):.1f}" if mode != SYNC else "",
            ])  # fmt: skip
    lines += _sweep_lines(rows)
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
        f"sync_every=8; late is the sweep, every gradient by that lag, compared with lag 0. Mean (least to most) of "
        f"accuracy, differences seed by seed ± standard error, median (least to most) of the rest. {_edges(rows)}",
    )  # fmt: skip


def _sweep_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Without lag all corrections are one."""
    lines = []
    late = [row for row in rows if row["kind"] == "sweep"]
    for row in sorted(late, key=lambda row: (row["momentum"], row["lag"], CORRECTIONS.index(row["correct"]))):
        if row["lag"] or row["correct"] == CORRECTIONS[0]:
            fresh = swept(rows, row["momentum"], row["correct"])[0]
            lines.append([
                f"late, {row['correct']}" if row["lag"] else "late", f"{row['momentum']:g}", f"{row['rate']:g}",
                str(row["lag"]), "", _mean(row["accuracies"]),
                _points(_differences(row["accuracies"], fresh)) if row["lag"] else "", "", "", "",
            ])  # fmt: skip
    return lines


def _mean(accuracies: Sequence[float]) -> str:
    """In per cent, with the least and the most."""
    found = [100 * accuracy for accuracy in accuracies]
    return f"{statistics.mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"


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
            points = swept(rows, momentum, correct).items()
            line(by_lag, {float(lag): [100 * a for a in found] for lag, found in points}, f"correct={correct}")
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
