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
smallest, which the table's note says where it was so; at × 1 all four are one.
The grid was moved down once, since its smallest rate had come out best; no batch beyond × 1 had been measured then at
the full length.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict, spread

BATCH = 8
FACTORS = (1, 2, 4, 8, 16, 32)
EPOCHS = 15
WARMUP = 0.1  # of the epochs
SEEDS = (0, 1, 2, 3, 4)
GRID = (0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
GRID_SEEDS = (100, 101)
POINTS = 1.0
RULE = "warm-up"
WITHOUT = "same"
ARMS = (WITHOUT, "at once", RULE, "root")
TITLES = {
    WITHOUT: "the rate of × 1",
    "at once": "× k at once",
    RULE: "× k with warm-up (the rule)",
    "root": "× √k with warm-up",
}
WORKER = ("-m", "hora.claims.batch_rank")

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
    from ..bench.launched import launched
    from ..transport.base import num_cores

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


# -- what the rows say -------------------------------------------------------------------------------------------------


def best_rates(rows: Sequence[Row]) -> list[float]:
    """Those of the grid with the greatest mean accuracy; several if they are equal but for rounding."""
    means = {row["lr"]: statistics.mean(row["accuracies"]) for row in rows if row["kind"] == "grid"}
    return [lr for lr, mean in means.items() if math.isclose(mean, max(means.values()))]


def runs_of(rows: Sequence[Row], arm: str) -> dict[int, Row]:
    """By factor; that of × 1 is the same for all arms."""
    return {row["factor"]: row for row in rows if row["kind"] == "run" and (row["arm"] == arm or row["factor"] == 1)}


def lost(rows: Sequence[Row], arm: str) -> dict[int, float]:
    """Points of test accuracy below batch × 1, the mean of the seeds, by factor."""
    means = {factor: 100 * statistics.mean(row["accuracies"]) for factor, row in runs_of(rows, arm).items()}
    return {factor: means[1] - mean for factor, mean in sorted(means.items())}


def reach(rows: Sequence[Row], arm: str) -> int:
    """The largest factor up to which none lost more than POINTS."""
    kept = 1
    for factor, points in lost(rows, arm).items():
        if points > POINTS:
            break
        kept = factor
    return kept


def judge(rows: Sequence[Row]) -> Verdict:
    ruled, same, at_once = (reach(rows, arm) for arm in (RULE, WITHOUT, "at once"))
    last = max(row["factor"] for row in rows if row["kind"] == "run")
    worst = {arm: lost(rows, arm)[last] for arm in (RULE, WITHOUT)}
    ends = f"at × {last} the rule loses {worst[RULE]:.1f} points, the unchanged rate {worst[WITHOUT]:.1f}"
    warmup = f"without warm-up the rule keeps to × {at_once}, with it to × {ruled}"
    if ruled == last and same < last:
        return Verdict(
            word="holds", text=f"up to × {last}, while the unchanged rate keeps only to × {same}; {ends}; {warmup}"
        )
    if ruled == last:
        return Verdict(
            word="fails",
            text=f"the rule keeps to × {last}, but so does the unchanged rate, without any rule; {ends}; {warmup}",
        )
    if ruled > same:
        return Verdict(
            word="only if",
            text=f"the batch grows no more than × {ruled} (the unchanged rate keeps to × {same}); {ends}; {warmup}",
        )
    return Verdict(word="fails", text=f"the rule keeps to × {ruled}, the unchanged rate to × {same}; {ends}; {warmup}")


def table(rows: Sequence[Row]) -> Table:
    runs = [row for row in rows if row["kind"] == "run"]
    lines = []
    for factor in sorted({row["factor"] for row in runs}):
        those = {arm: runs_of(rows, arm)[factor] for arm in ARMS}
        first = those[WITHOUT]
        cells = [spread([100 * value for value in row["accuracies"]]) for row in those.values()]
        steps = f"{first['steps']:,} ({those[RULE]['warmup_steps']})"
        lines.append([f"× {factor}", f"{first['batch']}", f"{first['workers']}", steps, *cells])
    first = runs[0]
    tried = [row for row in rows if row["kind"] == "grid"]
    note = (
        f"test accuracy in %: median (least to greatest) of {len(first['seeds'])} seeds after {first['epochs']} epochs "
        f"over 1,500 digits, SGD with momentum 0.9; learning rate {first['peak_lr']:g}, the best of "
        f"{', '.join(format(row['lr'], 'g') for row in tried)} at × 1 on {len(tried[0]['seeds'])} other seeds"
        f"{_tie(rows)}. The verdict compares means"
    )
    headings = ["batch", "samples", "workers", "steps (of warm-up)", *(TITLES[arm] for arm in ARMS)]
    return Table(headings=headings, lines=lines, note=note)


def _tie(rows: Sequence[Row]) -> str:
    """Which learning rates did equally well, if there were several."""
    best = [format(lr, "g") for lr in best_rates(rows)]
    return "" if len(best) == 1 else f", where {', '.join(best[:-1])} and {best[-1]} tied and the smallest was taken"


def draw(rows: Sequence[Row], figure: Any) -> None:
    from .figure import dress, line

    left, right = figure.subplots(1, 2)
    colors = {WITHOUT: "tab:orange", "at once": "tab:red", RULE: "tab:blue", "root": "tab:green"}
    factors = sorted(runs_of(rows, WITHOUT))
    base = 100 * (1 - statistics.mean(runs_of(rows, WITHOUT)[1]["accuracies"]))
    left.axhline(base + POINTS, color="0.6", linestyle="--", label=f"{POINTS:g} point worse than × 1")
    for arm in ARMS:
        errors, losses = {}, {}
        for factor, row in runs_of(rows, arm).items():
            errors[float(factor)] = [100 * (1 - value) for value in row["accuracies"]]
            if all(row["train_losses"]):  # none has diverged beyond numbers
                losses[float(factor)] = row["train_losses"]
        line(left, errors, TITLES[arm], color=colors[arm])
        line(right, losses, TITLES[arm], color=colors[arm])
    steps = {factor: row["steps"] for factor, row in runs_of(rows, WITHOUT).items()}
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(factors, [f"× {factor}\n{steps[factor]:,}" for factor in factors])
    ticks = [tick for tick in (1, 2, 3, 5, 7, 10, 20, 50, 90) if left.get_ylim()[0] <= tick <= left.get_ylim()[1]]
    left.set_yticks(ticks, map(str, ticks))
    left.set_yticks([], minor=True)
    dress(left, f"after equal epochs the rule keeps to × {reach(rows, RULE)}, the unchanged rate to "
          f"× {reach(rows, WITHOUT)}", "batch, and steps in all", "test error in % (bands: all seeds)")  # fmt: skip
    dress(
        right,
        "how well the training samples were learnt",
        "batch, and steps in all",
        "training loss at the end",
        legend=False,
    )


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
)  # fmt: skip
