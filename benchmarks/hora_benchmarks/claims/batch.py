"""Claim 10: the linear learning-rate rule with warm-up keeps large batches accurate.

A narrow convolutional net learns the handwritten digits (1,500 samples, 297 for the test) by SGD with momentum, the
rule's home, in equally many epochs at every batch size; the learning rate falls along a cosine to 0 in all of them. The
batch is 8 times 1 to 32: the largest is a sixth of all samples, far more than where the rule is usually practised, and
leaves 6 steps per epoch. Each batch size is one run through the launcher: as many workers as the factor, up to the
number of cores, 8 samples each (weak scaling); from there on more samples each, which is the same training, as a test
of this claim shows to 1e-9 of each parameter. In a run, all seeds under all four ways to choose the rate train side by
side, from the same beginnings, on the same samples:

    same     the learning rate of batch × 1
    at once  hora.scale_lr: × k from the first step on
    warm-up  hora.scale_lr: from × 1 to × k within the first tenth of the epochs: the rule as it is taught
    root     × √k, with the same warm-up

The rate of batch × 1 is the best of a grid, on the mean of seeds that are used nowhere else, and of equals the
smallest, which the table's note says where it was so; at × 1 all four are one. Batches are compared with × 1 seed by
seed; verdict, table and figure all give the mean of these differences and its standard error.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict

BATCH = 8
FACTORS = (1, 2, 4, 8, 16, 32)
EPOCHS = 15
WARMUP = 0.1  # of the epochs
SEEDS = (0, 1, 2, 3, 4)
GRID = (0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
GRID_SEEDS = (100, 101)
POINTS = 1.0
IMAGES = 297  # of the test
ERRORS = 2.0  # standard errors: what lies closer than so many cannot be told
RULE = "warm-up"
WITHOUT = "same"
ARMS = (WITHOUT, "at once", RULE, "root")
TITLES = {
    WITHOUT: "the rate of × 1",
    "at once": "× k at once",
    RULE: "× k with warm-up (the rule)",
    "root": "× √k with warm-up",
}
WORKER = ("-m", "hora_benchmarks.claims.batch_rank")

Rate = tuple[float, float, float]


def rate(arm: str, lr: float, factor: int, epochs: int) -> Rate:
    """The learning rate of × 1, by how much it grows, and over how many epochs it does."""
    warmup = WARMUP * epochs
    return {
        WITHOUT: (lr, 1.0, 0.0),
        "at once": (lr, float(factor), 0.0),
        RULE: (lr, float(factor), warmup),
        "root": (lr, math.sqrt(factor), warmup),
    }[arm]


def train(factor: int, rates: Sequence[Rate], seeds: Sequence[int], epochs: int) -> tuple[int, Any]:
    """The number of workers, and what batch_rank found, for a batch of BATCH × factor."""
    from hora.launch.launched import launched
    from hora.net.machine import num_cores

    workers = max(size for size in FACTORS if size <= min(factor, max(num_cores(), 1)))
    spec = {"rates": rates, "seeds": seeds, "batch": BATCH * factor // workers, "epochs": epochs}
    return workers, launched(WORKER, json.dumps(spec), size=workers, strategy="ring")


def measure(quick: bool) -> list[Row]:
    epochs, seeds = (3, SEEDS[:2]) if quick else (EPOCHS, SEEDS)
    grid, grid_seeds = (GRID[2:5:2], GRID_SEEDS[:1]) if quick else (GRID, GRID_SEEDS)
    factors = (1, 4, 32) if quick else FACTORS
    print(f"batch × 1: {len(grid)} learning rates", file=sys.stderr, flush=True)
    _, found = train(1, [rate(WITHOUT, lr, 1, epochs) for lr in grid], grid_seeds, epochs)
    tried = [
        {"kind": "grid", "lr": lr, "seeds": list(grid_seeds), "accuracies": each["accuracies"]}
        for lr, each in zip(grid, found["rates"], strict=True)
    ]
    best = min(best_rates(tried))
    rows: list[Row] = [*tried]
    for factor in factors:
        print(f"batch × {factor}, learning rate {best:g}", file=sys.stderr, flush=True)
        arms = ARMS if factor > 1 else (WITHOUT,)
        workers, found = train(factor, [rate(arm, best, factor, epochs) for arm in arms], seeds, epochs)
        for arm, each in zip(arms, found["rates"], strict=True):
            lr, times, _ = rate(arm, best, factor, epochs)
            rows.append(
                {
                    "kind": "run", "arm": arm, "factor": factor, "batch": BATCH * factor, "workers": workers,
                    "peak_lr": lr * times, "steps": found["steps"], "epochs": epochs, "seeds": list(seeds), **each,
                }
            )  # fmt: skip
    return rows


# -- evaluating the rows -----------------------------------------------------------------------------------------------


def best_rates(rows: Sequence[Row]) -> list[float]:
    """Those of the grid with the greatest mean accuracy; several if they are equal but for rounding."""
    means = {row["lr"]: statistics.mean(row["accuracies"]) for row in rows if row["kind"] == "grid"}
    return [lr for lr, mean in means.items() if math.isclose(mean, max(means.values()))]


def runs_of(rows: Sequence[Row], arm: str) -> dict[int, Row]:
    """By factor; that of × 1 is the same for all arms."""
    return {row["factor"]: row for row in rows if row["kind"] == "run" and (row["arm"] == arm or row["factor"] == 1)}


def gained(rows: Sequence[Row], arm: str, over: str = "") -> dict[int, tuple[float, float]]:
    """By factor: points of test accuracy above batch × 1, or above another arm at the same batch.

    The mean of the seeds, each compared with itself, and its standard error; no error of a single seed."""
    those, others = runs_of(rows, arm), runs_of(rows, over or arm)
    found = {}
    for factor, row in sorted(those.items()):
        other = others[factor if over else 1]
        points = [100 * (a - b) for a, b in zip(row["accuracies"], other["accuracies"], strict=True)]
        error = statistics.stdev(points) / math.sqrt(len(points)) if len(points) > 1 else 0.0
        found[factor] = statistics.mean(points), error
    return found


def reach(rows: Sequence[Row], arm: str) -> int:
    """The largest factor up to which none lost more than POINTS."""
    kept = 1
    for factor, (points, _) in gained(rows, arm).items():
        if -points > POINTS:
            break
        kept = factor
    return kept


def judge(rows: Sequence[Row]) -> Verdict:
    ruled, same = reach(rows, RULE), reach(rows, WITHOUT)
    last = max(row["factor"] for row in rows if row["kind"] == "run")
    num_seeds = len(next(row["seeds"] for row in rows if row["kind"] == "run"))
    change = {arm: _plus_minus(*gained(rows, arm)[last]) for arm in (RULE, WITHOUT)}
    ends = (
        f"at × {last} test accuracy changes by {change[RULE]} points with the rule, by {change[WITHOUT]} without "
        f"(mean ± standard error of {num_seeds} seeds)"
    )
    more = " ".join(filter(None, (_edge_text(rows), _warmup_text(rows))))
    if ruled == last and same < last:
        text = f"up to × {last}, while the unchanged rate keeps only to × {same}; {ends}"
        return Verdict(word="holds", text=text, more=more)
    if ruled == last:
        text = f"the rule keeps to × {last}, but so does the unchanged rate, without any rule; {ends}"
        return Verdict(word="fails", text=text, more=more)
    if ruled > same:
        text = f"the batch grows no more than × {ruled} (the unchanged rate keeps to × {same}); {ends}"
        return Verdict(word="only if", text=text, more=more)
    text = f"the rule keeps to × {ruled}, the unchanged rate to × {same}; {ends}"
    return Verdict(word="fails", text=text, more=more)


def _edge_text(rows: Sequence[Row]) -> str:
    """Which batches other seeds might put on the other side of the bar."""
    names = {RULE: "with the rule", WITHOUT: "without it"}
    found = [
        f"× {factor} {name} ({_plus_minus(points, error)})"
        for arm, name in names.items()
        for factor, (points, error) in gained(rows, arm).items()
        if factor > 1 and abs(-points - POINTS) < ERRORS * error
    ]
    if not found:
        return ""
    bar = f"the bar of {POINTS:g} point lies within {ERRORS:g} standard errors of what was measured"
    return f"Other seeds might decide otherwise of {' and '.join(found)}: {bar}."


def _warmup_text(rows: Sequence[Row]) -> str:
    """Whether warm-up made a difference as far as the rule keeps with it and without, and what it did beyond."""
    found = gained(rows, RULE, over="at once")
    apart = [factor for factor, (points, error) in found.items() if abs(points) > ERRORS * error]
    end = min(reach(rows, RULE), reach(rows, "at once"), *(factor - 1 for factor in apart))
    alike = [factor for factor in found if 1 < factor <= end]
    told = []
    if alike:
        most = max((found[factor] for factor in alike), key=lambda one: abs(one[0]))
        told.append(f"Warm-up made no difference up to × {alike[-1]} (at most {_plus_minus(*most)} points).")
    others = [
        f"{_plus_minus(*found[factor])} points at × {factor}{'' if factor in apart else ', which might be chance'}"
        for factor in found
        if factor > max(end, 1)
    ]
    if others:
        told.append(f"Against the same rate at once, warm-up changed test accuracy by {'; by '.join(others)}.")
    return " ".join(told)


def _plus_minus(points: float, error: float) -> str:
    """A value that rounds to 0 gets no sign."""
    return f"{f'{points:+.1f}' if abs(points) >= 0.05 else '0.0'} ± {error:.1f}"


def table(rows: Sequence[Row]) -> Table:
    runs = [row for row in rows if row["kind"] == "run"]
    lines = []
    for row in runs:
        percent = [100 * value for value in row["accuracies"]]
        base = row["factor"] == 1
        lines.append([
            f"× {row['factor']}", f"{row['batch']}", f"{row['workers']}", f"{row['steps']:,}",
            "all four" if base else TITLES[row["arm"]], f"{row['peak_lr']:.3g}",
            f"{row['warmup_steps']}" if row["warmup_steps"] else "",
            f"{statistics.mean(percent):.1f} ({min(percent):.1f} to {max(percent):.1f})",
            "" if base else _plus_minus(*gained(rows, row["arm"])[row["factor"]]),
        ])  # fmt: skip
    first = runs[0]
    tried = [row for row in rows if row["kind"] == "grid"]
    num_others = len(tried[0]["seeds"])
    note = (
        f"test accuracy in % after {first['epochs']} epochs over 1,500 digits, SGD with momentum 0.9. Of the {IMAGES} "
        f"test images one is {100 / IMAGES:.2f} points, so the bar of {POINTS:g} point is "
        f"{POINTS * IMAGES / 100:.0f} images. Learning rate at × 1: {first['peak_lr']:g}, the best of "
        f"{', '.join(format(row['lr'], 'g') for row in tried)} on {num_others} other "
        f"{'seed' if num_others == 1 else 'seeds'}{_tie(rows)}. Against × 1, which is judged: points, each seed "
        "compared with itself, mean ± standard error"
    )
    headings = ["batch", "samples", "workers", "steps", "learning rate", "its peak", "warm-up\nsteps", "accuracy, %",
                "against × 1,\npoints"]  # fmt: skip
    repeats = f"{len(first['seeds'])} seeds; mean (least to greatest), or mean ± standard error"
    return Table(headings=headings, lines=lines, note=note, repeats=repeats)


def _tie(rows: Sequence[Row]) -> str:
    """Which learning rates did equally well, if there were several."""
    best = [format(lr, "g") for lr in best_rates(rows)]
    return "" if len(best) == 1 else f", where {', '.join(best[:-1])} and {best[-1]} tied and the smallest was taken"


def draw(rows: Sequence[Row], figure: Any) -> None:
    """What is judged on the left, how well the training samples were learnt on the right."""
    from .figure import dress, line

    left, right = figure.subplots(1, 2)
    colors = {WITHOUT: "tab:orange", "at once": "tab:red", RULE: "tab:blue", "root": "tab:green"}
    factors = sorted(runs_of(rows, WITHOUT))
    left.axhline(-POINTS, color="0.6", linestyle="--", label=f"{POINTS:g} point worse than × 1")
    for number, arm in enumerate(ARMS):
        found, beside = gained(rows, arm), 2 ** (0.08 * (number - (len(ARMS) - 1) / 2))
        means, errors = zip(*found.values(), strict=True)
        left.errorbar([factor * beside for factor in found], means, errors, label=TITLES[arm], color=colors[arm],
                      marker="o", markersize=4, capsize=3)  # fmt: skip
        losses = {float(factor): row["train_losses"] for factor, row in runs_of(rows, arm).items()
                  if all(row["train_losses"])}  # none has diverged beyond numbers  # fmt: skip
        line(right, losses, TITLES[arm], color=colors[arm])
    steps = {factor: row["steps"] for factor, row in runs_of(rows, WITHOUT).items()}
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(factors, [f"× {factor}\n{steps[factor]:,}" for factor in factors])
        axis.minorticks_off()
    right.set_yscale("log")
    reached = f"the rule keeps to × {reach(rows, RULE)}, the unchanged rate to × {reach(rows, WITHOUT)}"
    below = "batch, and steps in all"
    judged = "points of test accuracy against × 1\n(mean ± standard error)"
    dress(left, f"after equal epochs {reached}", below, judged)
    learnt = "training loss at the end, log scale\n(median; bands: all seeds)"
    dress(right, "how well the training samples were learnt", below, learnt)


CLAIM = Claim(
    number=10,
    name="batch",
    says="The linear learning-rate rule with warm-up keeps large batches accurate.",
    rule=(
        f"holds if with the rule and warm-up the mean test accuracy stays within {POINTS:g} point of batch × 1 for "
        "every × 1 … × 32 and without the rule it does not; only if … up to × k, if it stays so up to × k < 32 and "
        "without the rule less far; fails otherwise"
    ),
    needs="two cores; more let it use more workers, which changes nothing",
    minutes=(1, 5),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(11.0, 4.8),
    changed=(
        "The grid of learning rates was moved down once, since its smallest rate had come out best; no batch beyond "
        "× 1 had been measured then at the full length."
    ),
)  # fmt: skip
