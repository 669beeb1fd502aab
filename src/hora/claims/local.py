"""Local: what rare rounds cost in quality and save in bytes, and how restless the averaged model is.

Ring, Local SGD with H = 1 … 64 steps in a round, and DiLoCo with the outer momentum that docs/LOCAL.md recommends, with
four workers (quick: two), on the tasks of `hora bench quality`: handwritten digits, three seeds, and a small character
GPT, one seed. All see the same samples in the same order, with AdamW at one learning rate for all: the ring's best of a
sweep over other seeds (docs/results/2026-11-15-local.md). That sweep had two workers, longer runs and a cosine, and of
the H here only 8 and 32; no other rate was tried for this claim. The rate stays constant for two thirds of the steps
and then falls to 0 (local_rank.py).

How much a model oscillates is asked while the rate is constant, since then nothing but the noise of samples moves it to
and fro: every 4 steps the loss on held-out data is taken, and the oscillation is the mean distance of a loss from the
middle between its two neighbours, |L(t) - (L(t-4) + L(t+4)) / 2|, so that a steady fall counts nothing. Of Local SGD it
is asked of the mean of all workers' models at each of these steps, and of one worker's own model.

Runs are deterministic up to rounding: seeds, not repeats, show how far to trust them. Where the edge of the band lies
within two standard errors of the differences to the ring, seed by seed, the verdict says that the H which decides is
within the seeds' scatter; of one seed it says that it is one. Bytes are exact.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict, spread

RING = "ring"
INTERVALS = (1, 2, 4, 8, 16, 32, 64)
DILOCO = "diloco:every={},outer_momentum=0.6"
WORKER = ("-m", "hora.claims.local_rank")
RATES = {"digits": 2e-3, "gpt": 1.2e-2}
STEPS = {"digits": 384, "gpt": 768}
SEEDS = {"digits": 3, "gpt": 1}
QUICK_STEPS = 128
BAND = {"digits": 1.0, "gpt": 3.0}  # points of accuracy, per cent of the loss
UNITS = {"digits": "points of accuracy", "gpt": "% of the loss"}
ERRORS = 2.0
ALIKE = 0.2  # oscillations that differ by less are alike
EXACT = 0.01


# -- measuring ---------------------------------------------------------------------------------------------------------


def plan(quick: bool) -> list[tuple[str, int, int, list[str]]]:
    """Each task, with how many workers and steps, under which strategies."""
    local = "local:every={}"
    if quick:
        return [("digits", 2, QUICK_STEPS, [RING, local.format(8), local.format(64), DILOCO.format(32)])]
    every = [RING, *(local.format(interval) for interval in INTERVALS), DILOCO.format(32), DILOCO.format(64)]
    some = [RING, *(local.format(interval) for interval in (2, 8, 32, 64)), DILOCO.format(32)]
    return [("digits", 4, STEPS["digits"], every), ("gpt", 4, STEPS["gpt"], some)]


def measure(quick: bool) -> list[Row]:
    rows = []
    for task, workers, steps, strategies in plan(quick):
        for strategy in strategies:
            print(f"   {task}: {strategy}", file=sys.stderr, flush=True)
            rows.append(run(task, strategy, workers, steps, 1 if quick else SEEDS[task]))
    return rows


def run(task: str, strategy: str, workers: int, steps: int, num_seeds: int) -> Row:
    from ..bench.launched import launched

    told: Row = launched(WORKER, task, RATES[task], steps, *range(num_seeds), size=workers, strategy=strategy)
    return {"task": task, "strategy": strategy, "workers": workers, "lr": RATES[task], "steps": steps, **told}


# -- what the rows say -------------------------------------------------------------------------------------------------


def interval(row: Row) -> int:
    """H; 0 for the ring."""
    return 0 if row["strategy"] == RING else int(row["strategy"].partition("every=")[2].partition(",")[0])


def is_local(row: Row) -> bool:
    return bool(row["strategy"].startswith("local"))


def ring_of(rows: Sequence[Row], row: Row) -> Row:
    return next(one for one in rows if one["task"] == row["task"] and one["strategy"] == RING)


def values(row: Row) -> list[float]:
    """What was reached, by seed: accuracy in per cent, or the loss."""
    return [100 * value for value in row["accuracies"]] if row["task"] == "digits" else list(row["losses"])


def worse(row: Row, ring: Row) -> float:
    """By how much the mean of the seeds is worse than the ring's, in the units of the band; negative: better."""
    here, there = statistics.mean(values(row)), statistics.mean(values(ring))
    return there - here if row["task"] == "digits" else 100 * (here / there - 1)


def is_scattered(row: Row, ring: Row) -> bool:
    """Whether other seeds might put it on the other side of the band's edge. Of one seed nothing is known."""
    pairs = list(zip(values(row), values(ring), strict=True))
    differences = [there - here if row["task"] == "digits" else 100 * (here / there - 1) for here, there in pairs]
    if len(differences) == 1:
        return False
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return abs(worse(row, ring) - BAND[row["task"]]) < ERRORS * error


def share(row: Row, ring: Row) -> float:
    """Bytes sent per worker, of the ring's."""
    return float(row["sent_bytes"] / ring["sent_bytes"])


def is_exact(row: Row, ring: Row) -> bool:
    """Whether bytes are an H-th of the ring's. A round that the end closes early is one more."""
    due = -(-row["steps"] // interval(row)) / row["steps"]
    return abs(share(row, ring) / due - 1) <= EXACT


def is_same(row: Row, ring: Row) -> bool:
    return worse(row, ring) <= BAND[row["task"]]


def oscillation(row: Row, whose: str = "averaged") -> list[float]:
    """By seed."""
    by_seed = zip(*(point[whose] for point in row["curve"]), strict=True)
    return [
        statistics.mean(abs(b - (a + c) / 2) for a, b, c in zip(curve, curve[1:], curve[2:], strict=False))
        for curve in by_seed
    ]


def restlessness(row: Row, ring: Row, whose: str = "averaged") -> list[float]:
    """How many times as much it oscillates as the ring's model, by seed."""
    return [mine / theirs for mine, theirs in zip(oscillation(row, whose), oscillation(ring), strict=True)]


def judge(rows: Sequence[Row]) -> Verdict:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    reach = {task: _reach(rows, task) for task in tasks}
    told = "; ".join(text(rows, task) for text in (_quality_text, _oscillation_text, _diloco_text) for task in tasks)
    locals_ = [row for row in rows if is_local(row)]
    wrong = [row for row in locals_ if not is_exact(row, ring_of(rows, row))]
    if wrong:
        found = ", ".join(f"{row['strategy']} {share(row, ring_of(rows, row)):.2%}" for row in wrong)
        return Verdict(word="fails", text=f"bytes do not fall as 1/H: {found} of the ring's; {told}")
    most = min(reach.values())
    least = share(row := max(locals_, key=interval), ring_of(rows, row))
    reaches = "; ".join(f"{task} {reach[task]}{_doubt(rows, task)}" for task in tasks)
    sent = f"bytes fall as 1/H exactly, to {least:.1%} of the ring's at H = {interval(row)}; {told}"
    if most >= max(INTERVALS):
        return Verdict(word="holds", text=f"the same quality up to H = {most} ({reaches}): {sent}")
    if most <= 1:
        return Verdict(word="fails", text=f"the same quality at most up to H = {most} ({reaches}): {sent}")
    return Verdict(word="only if", text=f"H ≤ {most} ({reaches}): {sent}")


def _reach(rows: Sequence[Row], task: str) -> int:
    """The greatest H up to which all are of the same quality; 0 if the first is not."""
    same = [interval(row) for row in _deciding(rows, task) if is_same(row, ring_of(rows, row))]
    return max(same, default=0)


def _deciding(rows: Sequence[Row], task: str) -> list[Row]:
    """Those of Local SGD in the order of H, up to the first that is not of the same quality."""
    found = []
    for row in sorted((row for row in rows if row["task"] == task and is_local(row)), key=interval):
        found.append(row)
        if not is_same(row, ring_of(rows, row)):
            break
    return found


def _doubt(rows: Sequence[Row], task: str) -> str:
    """How far the reach is to be trusted."""
    those = _deciding(rows, task)
    if len(values(those[0])) == 1:
        return ", one seed"
    scattered = [str(interval(row)) for row in those if is_scattered(row, ring_of(rows, row))]
    return f", within the seeds' scatter at H = {', '.join(scattered)}" if scattered else ""


def _quality_text(rows: Sequence[Row], task: str) -> str:
    those = [row for row in rows if row["task"] == task and is_local(row)]
    worst = max(those, key=lambda row: worse(row, ring_of(rows, row)))
    return f"{task} at worst {_difference(rows, worst)} {UNITS[task]} against the ring, at H = {interval(worst)}"


def _oscillation_text(rows: Sequence[Row], task: str) -> str:
    those = [row for row in rows if row["task"] == task and is_local(row)]
    by_word: dict[str, dict[int, float]] = {}
    for row in those:
        times = _times(rows, row)
        word = "less" if times < 1 - ALIKE else "more" if times > 1 + ALIKE else "as much"
        by_word.setdefault(word, {})[interval(row)] = times
    found = ", ".join(
        f"{word} at H = {', '.join(map(str, ones))} ({min(ones.values()):.2f} to {max(ones.values()):.2f} times)"
        for word, ones in by_word.items()
    )
    own = max(_times(rows, row, "own") for row in those)
    return f"against the ring's on {task} the averaged model oscillates {found}, one worker's own up to {own:.1f} times"


def _diloco_text(rows: Sequence[Row], task: str) -> str:
    those = [row for row in rows if row["task"] == task and row["strategy"].startswith("diloco")]
    found = ", ".join(
        f"{_difference(rows, row)} at H = {interval(row)}, oscillating {_times(rows, row):.2f} times as much"
        for row in those
    )
    return f"DiLoCo on {task}: {found or 'not measured'}"


def _difference(rows: Sequence[Row], row: Row) -> str:
    """To the ring's accuracy in points, or to its loss in per cent."""
    difference = worse(row, ring_of(rows, row))
    return f"{-difference if row['task'] == 'digits' else difference:+.1f}"


def _times(rows: Sequence[Row], row: Row, whose: str = "averaged") -> float:
    return statistics.mean(restlessness(row, ring_of(rows, row), whose))


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        ring = ring_of(rows, row)
        first = row["task"] == "digits"
        lines.append([
            row["task"], row["strategy"], spread(values(row), ".1f" if first else ".3f") + (" %" if first else ""),
            "" if row is ring else f"{_difference(rows, row)} {'points' if first else '%'}",
            f"{row['sent_bytes'] / 1e6:,.2f}", f"{share(row, ring):.2%}", str(row["rounds"]),
            spread([1000 * value for value in oscillation(row)], ".1f"),
            "" if row is ring else spread(restlessness(row, ring), ".2f"),
            "" if row is ring else spread(restlessness(row, ring, "own"), ".2f"),
        ])  # fmt: skip
    headings = ("task", "strategy", "accuracy\nor loss", "against\nthe ring", "MB sent\nper worker", "of the\nring's",
                "rounds", "oscillation\n× 1000", "× the ring's", "one worker's\nown")  # fmt: skip
    tasks = {row["task"]: row for row in rows}
    settings = "; ".join(
        f"{task}: {row['workers']} workers, {row['steps']} steps, learning rate {row['lr']:g}, "
        f"{len(row['losses'])} {'seed' if len(row['losses']) == 1 else 'seeds (median, least to greatest)'}"
        for task, row in tasks.items()
    )
    return Table(headings=headings, lines=lines, note=f"{settings}.")


def draw(rows: Sequence[Row], figure: Any) -> None:
    """A row for each task: quality over bytes, oscillation over H, and losses while the rate is constant."""
    from .figure import COLORS, dress, line

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    axes = figure.subplots(len(tasks), 3, squeeze=False)
    for (quality, restless, losses), task in zip(axes, tasks, strict=True):
        those = [row for row in rows if row["task"] == task]
        ring = ring_of(rows, those[0])
        label = "test accuracy, %" if task == "digits" else "validation loss"
        for kind in ("local", "diloco"):
            points = {100 * share(row, ring): values(row) for row in those if row["strategy"].startswith(kind)}
            line(quality, points, kind, color=COLORS[kind])
        line(quality, {100.0: values(ring)}, RING, color=COLORS["ring"], linestyle="none")
        middle, band = statistics.mean(values(ring)), BAND[task]
        low, high = (middle - band, middle + band) if task == "digits" else (
            middle * (1 - band / 100), middle * (1 + band / 100))  # fmt: skip
        quality.axhspan(low, high, color=COLORS["ring"], alpha=0.12, linewidth=0, label="same quality")
        shares = sorted({round(100 * share(row, ring), 1) for row in those})
        quality.set_xscale("log")
        quality.set_xticks(shares, [f"{value:.3g}" for value in shares])
        quality.minorticks_off()
        dress(quality, f"{task}: what is reached", "bytes sent, % of the ring's", label)
        for kind, whose, style in (("local", "averaged", "-"), ("local", "own", ":"), ("diloco", "averaged", "-")):
            times = {
                float(interval(row)): restlessness(row, ring, whose)
                for row in those
                if row["strategy"].startswith(kind)
            }
            name = f"{kind}, {'all workers averaged' if whose == 'averaged' else 'one worker alone'}"
            line(restless, times, name, color=COLORS[kind], linestyle=style)
        places = sorted({interval(row) for row in those} - {0})
        restless.axhline(1, color=COLORS["ring"], linestyle="--", label=RING)
        restless.set_xscale("log", base=2)
        restless.set_xticks(places, [str(place) for place in places])
        dress(restless, f"{task}: oscillation at a constant rate", "steps in a round, H", "times the ring's")
        _losses(losses, task, those)


def _losses(axis: Any, task: str, rows: Sequence[Row]) -> None:
    """One seed's losses under the ring and under the longest rounds."""
    from .figure import COLORS, dress

    ring = ring_of(rows, rows[0])
    longest = max((row for row in rows if is_local(row)), key=interval)
    for row, whose, label, color, style in (
        (ring, "averaged", RING, COLORS["ring"], "-"),
        (longest, "averaged", f"local, H = {interval(longest)}, all averaged", COLORS["local"], "-"),
        (longest, "own", f"local, H = {interval(longest)}, one worker alone", COLORS["local"], ":"),
    ):
        places = [point["samples"] for point in row["curve"]]
        axis.plot(places, [point[whose][0] for point in row["curve"]], label=label, color=color, linestyle=style)
    dress(axis, f"{task}: loss at a constant rate, one seed", "samples", "loss on held-out data")


CLAIM = Claim(
    number=8,
    name="local",
    says="Local SGD needs far less communication at the same quality.",
    rule=(
        "The same quality: after the same samples the mean of the seeds is worse than the ring's by at most 1 point of "
        "test accuracy (digits) or 3 % of the validation loss (GPT). Holds if on every task all H up to 64 are of the "
        "same quality and send an H-th of the ring's bytes, to 1 %. Only if H ≤ the greatest up to which that is so on "
        "every task. Fails if that is 1 or none, or if bytes do not fall as 1/H. Told, not judged: where the edge of "
        "that band lies within two standard errors of the seeds, whether the averaged model oscillates less or more "
        "than the ring's, by a fifth at least, and what DiLoCo does."
    ),
    needs="two cores",
    minutes=(1, 6),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(13.0, 7.0),
)
