"""Claim 8: rare rounds cost quality and save bytes; and how much the averaged model oscillates.

Ring, Local SGD with H = 1 … 64 steps in a round, and DiLoCo with the outer momentum that docs/LOCAL.md recommends, with
four workers (quick: two), on the tasks of `hora bench quality`: handwritten digits, three seeds, and a small character
GPT, two seeds. All see the same samples in the same order, with AdamW at one learning rate for all: the ring's best of
a sweep over other seeds (docs/results/2026-11-15-local.md). That sweep had two workers, longer runs and a cosine, and
of the H here only 8 and 32; no other rate was tried for this claim, which handicaps Local SGD. The rate stays constant
for two thirds of the steps and then falls to 0 (local_rank.py).

How much a model oscillates is asked while the rate is constant, since then nothing but the noise of samples moves it to
and fro: every 4 steps the loss on held-out data is taken, and the oscillation is the mean distance of a loss from the
middle between its two neighbours, |L(t) - (L(t-4) + L(t+4)) / 2|, so that a steady fall counts nothing. Of Local SGD it
is asked of the mean of all workers' models at each of these steps, and of one worker's own model.

Runs are deterministic up to rounding: seeds, not repeats, show how far to trust them. Quality is judged by the mean of
the seeds; where the edge of the band lies within two standard errors of the differences to the ring, seed by seed, it
is said that other seeds might decide otherwise, and of one seed that it is one. Oscillation is told by the median of
the seeds; where they leave open whether it is more or less than the ring's, that it cannot be told. Bytes are exact.
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
WORKER = ("-m", "hora_benchmarks.claims.local_rank")
RATES = {"digits": 2e-3, "gpt": 1.2e-2}
STEPS = {"digits": 384, "gpt": 768}
SEEDS = {"digits": 3, "gpt": 2}
QUICK_STEPS = 128
BAND = {"digits": 1.0, "gpt": 3.0}  # points of accuracy, per cent of the loss
UNITS = {"digits": "points", "gpt": "%"}
WITHIN = {"digits": "1 point of the ring's accuracy", "gpt": "3 % of the ring's loss"}
ERRORS = 2.0
ALIKE = 0.2  # oscillations that differ by less are alike
EVEN, OPEN = "as much as the ring's", "cannot be told"
EXACT = 0.01


# -- measuring ---------------------------------------------------------------------------------------------------------


def plan(quick: bool) -> list[tuple[str, int, int, list[str]]]:
    """Each task, with how many workers and steps, under which strategies."""
    local = "local:every={}"
    if quick:
        return [("digits", 2, QUICK_STEPS, [RING, local.format(8), local.format(64), DILOCO.format(32)])]
    every = [RING, *(local.format(interval) for interval in INTERVALS), DILOCO.format(32), DILOCO.format(64)]
    some = [RING, *(local.format(interval) for interval in (2, 4, 8, 32, 64)), DILOCO.format(32)]
    return [("digits", 4, STEPS["digits"], every), ("gpt", 4, STEPS["gpt"], some)]


def measure(quick: bool) -> list[Row]:
    rows = []
    for task, workers, steps, strategies in plan(quick):
        for strategy in strategies:
            print(f"   {task}: {strategy}", file=sys.stderr, flush=True)
            rows.append(run(task, strategy, workers, steps, 1 if quick else SEEDS[task]))
    return rows


def run(task: str, strategy: str, workers: int, steps: int, num_seeds: int) -> Row:
    from hora.launch.launched import launched

    told: Row = launched(WORKER, task, RATES[task], steps, *range(num_seeds), size=workers, strategy=strategy)
    return {"task": task, "strategy": strategy, "workers": workers, "lr": RATES[task], "steps": steps, **told}


# -- evaluating the rows -----------------------------------------------------------------------------------------------


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


def differences(row: Row, ring: Row) -> list[float]:
    """To the ring, by seed: of accuracies in points, of losses in per cent."""
    pairs = zip(values(row), values(ring), strict=True)
    return [here - there if row["task"] == "digits" else 100 * (here / there - 1) for here, there in pairs]


def difference(row: Row, ring: Row) -> float:
    """The same of the means of the seeds."""
    here, there = statistics.mean(values(row)), statistics.mean(values(ring))
    return here - there if row["task"] == "digits" else 100 * (here / there - 1)


def worse(row: Row, ring: Row) -> float:
    """By how much the mean of the seeds is worse than the ring's, in the units of the band; negative: better."""
    return -difference(row, ring) if row["task"] == "digits" else difference(row, ring)


def is_scattered(row: Row, ring: Row) -> bool:
    """Whether other seeds might put it on the other side of the band's edge. One seed says nothing about it."""
    found = differences(row, ring)
    if len(found) == 1:
        return False
    error = statistics.stdev(found) / math.sqrt(len(found))
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


def restless_word(times: Sequence[float]) -> str:
    """In words: whether a model oscillates more or less than the ring's, from the ratios by seed."""
    if min(times) >= 1 - ALIKE and max(times) <= 1 + ALIKE:
        return EVEN
    if min(times) <= 1 <= max(times):
        return OPEN
    middle = statistics.median(times)
    if middle < 1 - ALIKE:
        return "less than the ring's"
    return "more than the ring's" if middle > 1 + ALIKE else EVEN


def judge(rows: Sequence[Row]) -> Verdict:
    reach = {task: _reach(rows, task) for task in dict.fromkeys(row["task"] for row in rows)}
    told = "; ".join(_reach_text(rows, task) for task in sorted(reach, key=lambda task: reach[task]))
    texts = (_scatter_text, _worst_text, _oscillation_text, _diloco_text)
    more = " ".join(filter(None, (_bytes_text(rows), *(text(rows, task) for text in texts for task in reach))))
    wrong = [row for row in rows if is_local(row) and not is_exact(row, ring_of(rows, row))]
    if wrong:
        found = ", ".join(f"H = {interval(row)} {share(row, ring_of(rows, row)):.1%}" for row in wrong)
        return Verdict(
            word="fails", text=f"bytes do not fall as 1/H: {found} of the ring's", more=f"Quality: {told}. {more}"
        )
    most = min(reach.values())
    if most >= max(INTERVALS):
        return Verdict(word="holds", text=f"{told}; bytes fall as 1/H", more=more)
    if most <= 1:
        return Verdict(word="fails", text=f"{told}; bytes fall as 1/H", more=more)
    return Verdict(word="only if", text=f"H is small, at most {most}: {told}; bytes fall as 1/H", more=more)


def _locals(rows: Sequence[Row], task: str) -> list[Row]:
    """Those of Local SGD in the order of H."""
    return sorted((row for row in rows if row["task"] == task and is_local(row)), key=interval)


def _reach(rows: Sequence[Row], task: str) -> int:
    """The greatest H up to which all are of the same quality; 0 if the first is not."""
    same = [interval(row) for row in _deciding(rows, task) if is_same(row, ring_of(rows, row))]
    return max(same, default=0)


def _deciding(rows: Sequence[Row], task: str) -> list[Row]:
    """Those of Local SGD in the order of H, up to the first that is not of the same quality."""
    found = []
    for row in _locals(rows, task):
        found.append(row)
        if not is_same(row, ring_of(rows, row)):
            break
    return found


def _worst(rows: Sequence[Row], task: str) -> Row:
    return max(_locals(rows, task), key=lambda row: worse(row, ring_of(rows, row)))


def _reach_text(rows: Sequence[Row], task: str) -> str:
    """Up to which H the quality is the same, and what decided."""
    *before, last = _deciding(rows, task)
    if is_same(last, ring_of(rows, last)):
        worst = _worst(rows, task)
        where = f"at worst {_difference_text(rows, worst)}, at H = {interval(worst)}"
        return f"on {task} all up to {interval(last)} are within {WITHIN[task]} ({where})"
    if not before:
        return f"on {task} not even H = {interval(last)} is within {WITHIN[task]} ({_difference_text(rows, last)})"
    kept = before[-1]
    return (
        f"on {task} {interval(kept)} is within {WITHIN[task]} ({_difference_text(rows, kept)}) and {interval(last)} "
        f"is not ({_difference_text(rows, last)})"
    )


def _difference_text(rows: Sequence[Row], row: Row) -> str:
    """Of the means to the ring's, and of each seed."""
    ring = ring_of(rows, row)
    found = differences(row, ring)
    seeds = "one seed" if len(found) == 1 else f"seeds {_range(_signed(min(found)), _signed(max(found)))}"
    return f"{_signed(difference(row, ring))} {UNITS[row['task']]}, {seeds}"


def _signed(value: float) -> str:
    """A value that rounds to 0 gets no sign."""
    return f"{value:+.1f}" if abs(value) >= 0.05 else "0.0"


def _range(least: str, greatest: str) -> str:
    return least if least == greatest else f"{least} to {greatest}"


def _bytes_text(rows: Sequence[Row]) -> str:
    row = max((row for row in rows if is_local(row)), key=interval)
    return f"At H = {interval(row)} a worker sends {share(row, ring_of(rows, row)):.1%} of the ring's bytes."


def _scatter_text(rows: Sequence[Row], task: str) -> str:
    """How far the reach is to be trusted."""
    scattered = [str(interval(row)) for row in _deciding(rows, task) if is_scattered(row, ring_of(rows, row))]
    if not scattered:
        return ""
    edge = f"the edge of the band lies within {ERRORS:g} standard errors of it"
    return f"On {task} other seeds might decide otherwise of H = {', '.join(scattered)}: {edge}."


def _worst_text(rows: Sequence[Row], task: str) -> str:
    """How far off it gets where quality is not the same."""
    worst = _worst(rows, task)
    if is_same(worst, ring_of(rows, worst)):
        return ""
    return f"On {task} the worst is H = {interval(worst)} ({_difference_text(rows, worst)})."


def _oscillation_text(rows: Sequence[Row], task: str) -> str:
    by_word: dict[str, dict[int, list[float]]] = {}
    for row in _locals(rows, task):
        times = restlessness(row, ring_of(rows, row))
        by_word.setdefault(restless_word(times), {})[interval(row)] = times
    unknown = by_word.pop(OPEN, {})
    known, told = [], []
    for word, ones in by_word.items():
        middles = [statistics.median(times) for times in ones.values()]
        found = _range(f"{min(middles):.2f}", f"{max(middles):.2f}")
        known.append(f"{word} at H = {', '.join(map(str, ones))} ({found} times)")
    if known:
        told.append(f"On {task} the averaged model oscillates {', '.join(known)}.")
    if unknown:
        found = " and ".join(f"H = {place} ({_times_text(times)})" for place, times in unknown.items())
        told.append(f"Whether it oscillates more or less on {task} {OPEN} at {found}.")
    own = {
        interval(row): statistics.median(restlessness(row, ring_of(rows, row), "own")) for row in _locals(rows, task)
    }
    most = max(own, key=lambda place: own[place])
    told.append(f"One worker's own model oscillates up to {own[most]:.2f} times as much as the ring's, at H = {most}.")
    return " ".join(told)


def _times_text(times: Sequence[float]) -> str:
    """The median, and the seeds."""
    seeds = "" if len(times) == 1 else f", seeds {_range(f'{min(times):.2f}', f'{max(times):.2f}')}"
    return f"{statistics.median(times):.2f} times{seeds}"


def _diloco_text(rows: Sequence[Row], task: str) -> str:
    told = []
    for row in rows:
        if row["task"] == task and row["strategy"].startswith("diloco"):
            times = restlessness(row, ring_of(rows, row))
            told.append(
                f"DiLoCo with H = {interval(row)} on {task}: {_difference_text(rows, row)}; it oscillates "
                f"{restless_word(times).replace(OPEN, f'more or less, which {OPEN}')} ({_times_text(times)})."
            )
    return " ".join(told)


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        ring = ring_of(rows, row)
        form = ".1f" if row["task"] == "digits" else ".3f"
        reached, against = values(row), differences(row, ring)
        lines.append([
            row["task"], row["strategy"],
            _with_range(*(format(value, form) for value in (statistics.mean(reached), min(reached), max(reached)))),
            "" if row is ring else
            f"{_with_range(*map(_signed, (difference(row, ring), min(against), max(against))))} {UNITS[row['task']]}",
            f"{row['sent_bytes'] / 1e6:,.2f}", f"{share(row, ring):.2%}", str(row["rounds"]),
            spread([1000 * value for value in oscillation(row)], ".1f"),
            "" if row is ring else spread(restlessness(row, ring), ".2f"),
            "" if row is ring else spread(restlessness(row, ring, "own"), ".2f"),
        ])  # fmt: skip
    headings = ("task", "strategy", "accuracy, %,\nor loss", "against\nthe ring", "MB sent\nper worker",
                "of the\nring's", "rounds", "oscillation\n× 1000", "× the ring's", "one worker's\nown")  # fmt: skip
    tasks = {row["task"]: row for row in rows}
    settings = "; ".join(
        f"{task}: {row['workers']} workers, {row['steps']} steps, learning rate {row['lr']:g}"
        for task, row in tasks.items()
    )
    seeds = ", ".join(
        f"{task} {len(row['losses'])} {'seed' if len(row['losses']) == 1 else 'seeds'}" for task, row in tasks.items()
    )
    note = (
        f"{settings}. All H share the ring's best learning rate and no other was tried, which handicaps Local SGD. "
        "Accuracy, loss and their difference to the ring, which is judged: the mean of the seeds. Oscillation: of the "
        "loss at a constant rate, of the mean of all workers' models and of one worker's own, the median of the seeds; "
        "it is looked at every 4 steps, when rounds of 1, 2 and 4 steps have just ended and the two are one"
    )
    repeats = f"{seeds}; quality: mean, oscillation: median (least to greatest)"
    return Table(headings=headings, lines=lines, note=note, repeats=repeats)


def _with_range(middle: str, least: str, greatest: str) -> str:
    return middle if middle == least == greatest else f"{middle} ({least} to {greatest})"


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
            _means(quality, points, kind, color=COLORS[kind])
        _means(quality, {100.0: values(ring)}, RING, color=COLORS["ring"], linestyle="none")
        middle, band = statistics.mean(values(ring)), BAND[task]
        low, high = (middle - band, middle + band) if task == "digits" else (
            middle * (1 - band / 100), middle * (1 + band / 100))  # fmt: skip
        quality.axhspan(low, high, color=COLORS["ring"], alpha=0.12, linewidth=0, label="same quality")
        shares = sorted({round(100 * share(row, ring), 1) for row in those})
        quality.set_xscale("log")
        quality.set_xticks(shares, [f"{value:.3g}" for value in shares])
        quality.minorticks_off()
        dress(quality, f"{task}: what is reached, mean of the seeds", "bytes sent, % of the ring's", label)
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
        restless.set_ylim(0, 1.35 * restless.get_ylim()[1])  # with room for the legend
        restless.set_xticks(places, [str(place) for place in places])
        dress(restless, f"{task}: oscillation at a constant rate, median", "steps in a round, H", "times the ring's")
        _losses(losses, task, those)


def _means(axis: Any, points: dict[float, list[float]], label: str, **style: Any) -> None:
    """The means, with a bar from the least to the greatest of the seeds."""
    places = sorted(points)
    means = [statistics.mean(points[x]) for x in places]
    below = [mean - min(points[x]) for x, mean in zip(places, means, strict=True)]
    above = [max(points[x]) - mean for x, mean in zip(places, means, strict=True)]
    axis.errorbar(places, means, [below, above], label=label, marker="o", markersize=4, capsize=3, **style)


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
        "than the ring's, by a fifth at least (median of the seeds), and what DiLoCo does."
    ),
    needs="two cores",
    minutes=(1, 16),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(13.0, 7.0),
    changed=(
        "A first run, with H = 2, 8, 32 and 64 and one seed on gpt, had ended in 'only if H ≤ 2'; H = 4 and a second "
        "seed were added there, since between 2 and 8 it could not say where the edge lies, and moved it to 4. "
        "Oscillation, which is told and not judged, was told by the mean of the seeds, and is now by their median."
    ),
)
