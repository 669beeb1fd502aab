"""Claim 14: data can be handed from slow nodes to fast ones.

One epoch with four workers, the last of which takes 4 times as long for a step, paced by sleeping as if an accelerator
computed, so that two cores are enough. Dealt, every worker has the same number of samples before the epoch begins: then
it cannot end before the slow one has done its part, whether the others wait for it at each step, as under the ring, or
only every eighth, as under local:every=8. Leased, whoever is free takes the next block from the coordinator's book; a
block that a prefetching loader has taken ahead of time is taken over by a worker that has nothing left. Several
strategies lease: that helps only as far as the strategy lets a fast worker go ahead. Handed over is what the slow
worker has less than an equal share.

Before each step every worker asks `job.ledger()` for the two views: how many blocks are done, leased and pending, all
workers together, and which it holds itself. `hora show RUN --data` prints the same of a run under way.
"""

from __future__ import annotations

import bisect
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from . import figure as pictures
from .claim import Claim, Row, Table, Verdict, spread
from .uneven import SLOWNESS, Loop, ideal_samples_per_s, lasting, run

ASYNC = "ps:mode=async"
PREFETCHING = "ps:mode=async, prefetching"
WAYS = {  # the strategy, and how the samples are given out
    "ring": ("ring", "dealt"),
    "local:every=8": ("local:every=8", "dealt"),
    ASYNC: (ASYNC, "leased"),
    PREFETCHING: (ASYNC, "leased"),
    "local:every=8,pace=time": ("local:every=8,pace=time", "leased"),
    "ps:mode=ssp,staleness=2": ("ps:mode=ssp,staleness=2", "leased"),
}
DRAWN = ("ring", ASYNC)  # of which the views are kept
DRAWN_PACES = 24
WORKERS = 4
BATCH = 5
REPEATS = 3
SAMPLES, QUICK_SAMPLES = 1500, 1000
PACE_S, QUICK_PACE_S = 0.04, 0.03
NEAR_IDEAL = 1.15
HEADINGS = (
    "strategy", "samples are", "seconds", "ideal", "% of ideal", "samples by worker, slow one last", "handed over",
    "blocks taken over", "exactly once",
)  # fmt: skip


def measure(quick: bool) -> list[Row]:
    num_samples, pace_s, repeats = (QUICK_SAMPLES, QUICK_PACE_S, 1) if quick else (SAMPLES, PACE_S, REPEATS)
    return epochs(num_samples, pace_s, repeats)


def epochs(num_samples: int, pace_s: float, repeats: int, ways: Sequence[str] = tuple(WAYS)) -> list[Row]:
    """A row for each way, of `repeats` epochs, which are interleaved."""
    factors = lasting(WORKERS)
    ideal_s = num_samples / ideal_samples_per_s(factors, BATCH, pace_s)
    given = {"num_samples": num_samples, "batch": BATCH, "pace_s": pace_s, "ideal_s": ideal_s}
    rows = {name: {"way": name, "data": WAYS[name][1], **given, **_empty()} for name in ways}
    for repeat in range(repeats):
        for name in (*ways[repeat:], *ways[:repeat]):
            print(f"repeat {repeat + 1} of {repeats}: {name}", file=sys.stderr, flush=True)
            (loop,) = run(WAYS[name][0], [factors], num_samples=num_samples, batch=BATCH, pace_s=pace_s,
                          readers=int(name == PREFETCHING), views=True)  # fmt: skip
            row = rows[name]
            row["taken_over"].append(taken_over(loop) if row["data"] == "leased" else 0)
            row["seconds"].append(loop.seconds)
            row["exactly_once"].append(loop.exactly_once and loop.num_samples == num_samples)
            row["samples"].append([worker.num_samples for worker in loop.workers])
            if name in DRAWN and not repeat:
                row.update(_views(loop))
    return list(rows.values())


def _empty() -> Row:
    return {name: [] for name in ("seconds", "exactly_once", "samples", "taken_over", "views", "held")}


def taken_over(loop: Loop) -> int:
    """Blocks that one worker held and another computed."""
    computed = [{batch[0] // BATCH for batch in worker.samples} for worker in loop.workers]
    held = [{block for view in worker.views for block in view[4]} for worker in loop.workers]
    return sum(len(had - did) for had, did in zip(held, computed, strict=True))


def _views(loop: Loop) -> Row:
    """The global view over time, as all workers were told it; what each held, from when, computed until when, and
    until when."""
    told = sorted(
        (moment, done, leased, pending) for worker in loop.workers for moment, done, leased, pending, _ in worker.views
    )
    return {
        "views": [[round(moment, 4), *counts] for moment, *counts in told],
        "held": [
            [
                [round(view[0], 4), round(step[1], 4), round(step[2], 4), view[4]]
                for view, step in zip(worker.views, worker.steps, strict=True)
            ]
            for worker in loop.workers
        ],
    }


def handed_over(row: Row) -> list[float]:
    """By how many samples the slow worker has less than an equal share, in each repeat."""
    return [row["num_samples"] / len(samples) - samples[-1] for samples in row["samples"]]


def judge(rows: Sequence[Row]) -> Verdict:
    took = {row["way"]: statistics.median(row["seconds"]) / row["ideal_s"] for row in rows}
    dealt, leased = ({row["way"]: took[row["way"]] for row in rows if row["data"] == how}
                     for how in ("dealt", "leased"))  # fmt: skip
    handed = {row["way"]: statistics.median(handed_over(row)) for row in rows if row["data"] == "leased"}
    near = {
        name: share
        for name, share in leased.items()
        if share <= NEAR_IDEAL and share < min(dealt.values()) and handed[name] > 0
    }
    far = {name: share for name, share in leased.items() if name not in near}
    repeated = [row["way"] for row in rows if not all(row["exactly_once"])]
    if repeated:
        return Verdict(word="fails", text=f"not every sample was computed exactly once under {', '.join(repeated)}")
    gave = ", ".join(f"{count:.0f} ({name})" for name, count in handed.items())
    equal = rows[0]["num_samples"] / len(rows[0]["samples"][0])
    once = (
        f"every sample is computed exactly once, and of an equal share of {equal:.0f} samples the slow worker hands "
        f"over {gave} where they are leased"
    )
    facts = f"dealt, the epoch takes {_told(dealt)} of the ideal; leased, {_told(leased)}"
    if not near:
        return Verdict(word="fails", text=f"{once}; but {facts}")
    if far:
        text = (
            f"leased in the right way: the epoch takes {_told(near)} of the ideal, but {_told(far)} although leased too"
        )
        return Verdict(word="only if", text=f"{text}, and dealt {_told(dealt)}; {once}")
    return Verdict(word="holds", text=f"{once}; {facts}")


def _told(shares: dict[str, float]) -> str:
    return ", ".join(f"{share:.0%} ({name})" for name, share in shares.items())


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        samples = [statistics.median(each) for each in zip(*row["samples"], strict=True)]
        lines.append([
            row["way"], row["data"], spread(row["seconds"], ".2f"), f"{row['ideal_s']:.2f}",
            spread([100 * seconds / row["ideal_s"] for seconds in row["seconds"]], ".0f"),
            " ".join(f"{each:.0f}" for each in samples), spread(handed_over(row), ".0f"),
            spread(row["taken_over"], ".0f"), "yes" if all(row["exactly_once"]) else "no",
        ])  # fmt: skip
    first = rows[0]
    return Table(
        headings=HEADINGS,
        lines=lines,
        note=f"{len(first['samples'][0])} workers, the last {SLOWNESS:g} times slower, {first['num_samples']:,} "
        f"samples in batches of {first['batch']}, {1000 * first['pace_s']:.0f} ms each, paced by sleeping; median "
        f"(least to greatest) of {len(first['seconds'])} repeats, interleaved. Ideal: all work, divided by the "
        "sum of speeds. Handed over: samples that the slow worker has less than an equal share; blocks taken over: one "
        "worker had taken them, another computed them",
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.15])
    left, right = above.subplots(1, 2, width_ratios=[1, 1.4])
    by_name = {row["way"]: row for row in rows}
    dealt, leased = (by_name[name] for name in DRAWN)
    _draw_global(left, leased)
    pictures.dress(left, f"{leased['way']}, all workers: where the epoch's samples are", "seconds", "samples")
    _draw_samples(right, rows)
    pictures.dress(right, "who computed how many samples; how long the epoch took, in % of the ideal", "", "samples")
    strips = below.subplots(2, 1, sharex=True)
    for axis, row in zip(strips, (dealt, leased), strict=True):
        _draw_held(axis, row)
        what = "the batch" if row["data"] == "dealt" else "the block"
        title = f"{row['way']}, {row['data']}: {what} that each worker holds (dark: computes; pale: waits)"
        pictures.dress(axis, title, "seconds" if axis is strips[-1] else "", "", legend=False)


def _color(rank: int, size: int) -> str:
    return "tab:red" if rank == size - 1 else ("tab:blue", "tab:cyan", "tab:green")[rank % 3]


def _draw_global(axis: Any, row: Row) -> None:
    """Done, by worker, then leased, then pending: from below, they add up to all."""
    size, end, total = len(row["held"]), row["seconds"][0], row["num_samples"]
    moments = sorted({0.0, end, *(view[0] for view in row["views"])})
    told = [view[0] for view in row["views"]]
    ends = [[until for _, _, until, _ in held] for held in row["held"]]
    done = [[row["batch"] * bisect.bisect(of_one, moment) for moment in moments] for of_one in ends]
    places = [bisect.bisect(told, moment) - 1 for moment in moments]
    pending = [row["views"][place][3] * row["batch"] if place >= 0 else total for place in places]
    leased = [total - sum(each) for each in zip(pending, *done, strict=True)]
    labels = [f"done by worker {rank}{', slow' if rank == size - 1 else ''}" for rank in range(size)]
    axis.stackplot(moments, *done, leased, pending, labels=[*labels, "leased", "pending"],
                   colors=[*(_color(rank, size) for rank in range(size)), "black", "0.9"], step="post")  # fmt: skip
    axis.axvline(row["ideal_s"], color=pictures.COLORS["ideal"], linestyle="--", linewidth=1, label="ideal end")
    axis.set_xlim(0, max(end, row["ideal_s"]))
    axis.set_ylim(0, total)


def _draw_samples(axis: Any, rows: Sequence[Row]) -> None:
    size = len(rows[0]["samples"][0])
    most = 0.0
    for number, row in enumerate(rows):
        for rank, counts in enumerate(zip(*row["samples"], strict=True)):
            middle = statistics.median(counts)
            most = max(most, middle)
            axis.bar(number + (rank - size / 2 + 0.5) * 0.2, middle, 0.18, color=_color(rank, size),
                     yerr=[[middle - min(counts)], [max(counts) - middle]], capsize=2,
                     label=f"worker {rank}{', slow' if rank == size - 1 else ''}" if not number else None)  # fmt: skip
    names = []
    for row in rows:
        seconds = statistics.median(row["seconds"])
        took = f"{seconds:.1f} s, {seconds / row['ideal_s']:.0%}"
        names.append("\n".join([row["way"].replace(",", ",\n"), row["data"], took]))
    axis.set_xticks(range(len(rows)), names, fontsize=6.5)
    axis.set_ylim(0, most * 1.35)


def _draw_held(axis: Any, row: Row) -> None:
    size, end = len(row["held"]), DRAWN_PACES * row["pace_s"]
    for rank, held in enumerate(row["held"]):
        shown = [each for each in held if each[0] < end]
        for where, alpha in ((2, 0.25), (1, 0.9)):
            bars = [(each[0], each[where] - each[0]) for each in shown]
            axis.broken_barh(bars, (rank - 0.4, 0.8), facecolor=_color(rank, size), alpha=alpha, edgecolor="white")
        for began, computed, _, batches in shown:
            axis.text((began + computed) / 2, rank, ",".join(map(str, batches)), ha="center", va="center", fontsize=7,
                      color="white", clip_on=True)  # fmt: skip
    axis.set_yticks(range(size), [f"worker {rank}{', slow' if rank == size - 1 else ''}" for rank in range(size)])
    axis.set_xlim(0, end)
    axis.set_ylim(size - 0.5, -0.5)


CLAIM = Claim(
    number=14,
    name="ledger",
    says="Data can be handed from slow nodes to fast ones",
    rule=f"holds if every sample is computed exactly once and, with one worker {SLOWNESS:g} times slower, the epoch "
    f"takes at most {NEAR_IDEAL:.0%} of the ideal (all work, divided by the sum of speeds) in every way of leasing "
    "samples that is tried and the slow worker has less than an equal share there, while dealt evenly it takes longer "
    "in every way; only if: in some of them; fails otherwise. Medians",
    needs="nothing special; 4 workers, paced by sleeping",
    minutes=(1.2, 4.3),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(11.0, 8.0),
)
