"""Claim 6: a straggler holds synchronous training back; bounded staleness and backup workers help.

Four workers (eight where there are sixteen cores) go through the same data, each strategy in a run of its own, with
three loops: all alike (the control), a lasting straggler, passing ones. Compute is paced by sleeping, as if an
accelerator did it, so that two cores are enough; model, gradients and updates are real. Loopback, nothing shaped.

    lasting    the last worker takes 4 times as long, always
    passing    spells of 3 steps; in every second one, on average, one worker takes 4 to 8 times as long. Worker, factor
               and spell are drawn anew for each repeat, so that all workers are slow equally often

How slow a worker is depends on how many steps it has taken itself, the same for every strategy. A gradient that was
dropped counts for nothing: shares are of samples whose gradients were used. Where no worker is slow a strategy does not
reach all that is possible either; what a straggler takes from it is told by its share of what the control reaches.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import figure as pictures
from .claim import Claim, Row, Table, Verdict, spread
from .uneven import SLOWNESS, Factors, Loop, ideal_samples_per_s, lasting, run

SYNC = ("ring", "ps")
BOUNDED = ("ps:mode=ssp,staleness=2", "ps:mode=ssp,staleness=8")
BACKUP = "ps:backup=1"
ASYNC = "ps:mode=async"
QUICK = (*SYNC, BACKUP, *BOUNDED, ASYNC)
STRATEGIES = (*QUICK, "local:every=8", "local:every=8,pace=time")
EVEN = "even"
KINDS = (EVEN, "lasting", "passing")
WORDS = {"lasting": "a lasting straggler", "passing": "passing ones"}
COLORS = {"ring": "ring", "ps": "sync", BACKUP: "sync", ASYNC: "async", **dict.fromkeys(BOUNDED, "ssp")}
DRAWN = ("ring", BOUNDED[0], ASYNC)  # whose steps are shown one by one
DRAWN_PACES = 42  # for so long

REPEATS = 3
PACE_S = 0.02
BATCH = 5
STEPS, QUICK_STEPS = 72, 24  # of a worker, if all take as many: at most so many, and whole turns
SPELL = 3
PASSING_FACTORS = (4.0, 8.0, 5.0, 7.0)
HELD_BACK = 0.6
GAIN = 0.2
HEADINGS = (
    "strategy", "straggler", "% of what is possible", "kept, %", "seconds", "samples used", "dropped", "passed over",
    "% idle, by worker",
)  # fmt: skip


def measure(quick: bool) -> list[Row]:
    from hora.net.machine import num_cores

    size = 8 if num_cores() >= 16 else 4
    turn = SPELL * 2 * size
    steps = turn * max(1, (QUICK_STEPS if quick else STEPS) // turn)
    strategies, repeats = (QUICK, 1) if quick else (STRATEGIES, REPEATS)
    rows = {(strategy, kind): _row(strategy, kind, size, steps) for strategy in strategies for kind in KINDS}
    for repeat in range(repeats):
        loops = [[[1.0]] * size, lasting(size), passing(size, steps, repeat)]
        for strategy in (*strategies[repeat:], *strategies[:repeat]):
            print(f"repeat {repeat + 1} of {repeats}: {strategy}", file=sys.stderr, flush=True)
            found = run(strategy, loops, num_samples=steps * size * BATCH, batch=BATCH, pace_s=PACE_S)
            for kind, factors, loop in zip(KINDS, loops, found, strict=True):
                _add(rows[strategy, kind], loop, factors)
    return list(rows.values())


def passing(size: int, steps: int, seed: int) -> Factors:
    """In every 2 `size` spells each worker is slow in one, alone; in the others none is."""
    dice = random.Random(seed)
    slow: list[list[float]] = [[] for _ in range(size)]
    for _ in range(steps // (SPELL * 2 * size)):
        turns: list[int | None] = [*range(size), *[None] * size]
        factors = [PASSING_FACTORS[number % len(PASSING_FACTORS)] for number in range(size)]
        dice.shuffle(turns)
        dice.shuffle(factors)
        for turn in turns:
            for rank in range(size):
                slow[rank] += [factors[rank] if rank == turn else 1.0] * SPELL
    return slow


def _row(strategy: str, kind: str, size: int, steps: int) -> Row:
    lists: Row = {name: [] for name in ("seconds", "shares", "used", "dropped", "never_computed", "idle")}
    return {"strategy": strategy, "kind": kind, "workers": size, "steps": steps, "samples": steps * size * BATCH,
            "pace_s": PACE_S, **lists, "timeline": []}  # fmt: skip


def _add(row: Row, loop: Loop, factors: Factors) -> None:
    """One repeat: `idle` is the share of its time that each worker did not compute."""
    dropped = loop.dropped * BATCH
    used = loop.num_samples - dropped
    row["seconds"].append(loop.seconds)
    row["shares"].append(used / loop.seconds / ideal_samples_per_s(factors, BATCH, PACE_S))
    row["used"].append(used)
    row["dropped"].append(dropped)
    row["never_computed"].append(row["samples"] - loop.num_samples)
    row["idle"].append([1 - worker.busy_s / loop.seconds for worker in loop.workers])
    if not row["timeline"] and row["strategy"] in DRAWN and row["kind"] == "lasting":
        row["timeline"] = [
            [
                [round(began, 4), round(computed, 4)]
                for began, computed, _ in worker.steps
                if began < DRAWN_PACES * PACE_S
            ]
            for worker in loop.workers
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """Under a kind of straggler: `possible` are the shares of what is possible if no worker waits, by repeat; `kept` is
    how much their median is of the same strategy's without a straggler."""

    possible: list[float]
    kept: float

    @property
    def share(self) -> float:
        return statistics.median(self.possible)

    def helps(self, than: Reached) -> bool:
        return min(self.share / than.share, self.kept / than.kept) >= 1 + GAIN


def judge(rows: Sequence[Row]) -> Verdict:
    sync = {kind: _best(rows, SYNC, kind) for kind in WORDS}
    remedies = {
        remedy: {kind: _best(rows, strategies, kind) for kind in WORDS}
        for remedy, strategies in (("bounded staleness", BOUNDED), ("a backup worker", (BACKUP,)))
    }
    held_back = [kind for kind, reached in sync.items() if reached.kept < HELD_BACK]
    helped = {remedy: [kind for kind in held_back if of[kind].helps(sync[kind])] for remedy, of in remedies.items()}
    shares = " and ".join(f"{_possible(reached)} under {WORDS[kind]}" for kind, reached in sync.items())
    found = [f"{remedy} {' and '.join(map(_possible, of.values()))}" for remedy, of in remedies.items()]
    text = (
        f"in % of what is possible synchronous training reaches {shares}, {', '.join(found)}, leaving out "
        f"{_price(rows)} of the samples"
    )
    more = _more(rows, sync, remedies, helped)
    if all(len(kinds) == len(sync) for kinds in helped.values()):
        return Verdict(word="holds", text=text, more=more)
    if not any(helped.values()):
        return Verdict(word="fails", text=text, more=more)
    return Verdict(word="only if", text=f"the remedy fits: {text}", more=more)


def _best(rows: Sequence[Row], strategies: Sequence[str], kind: str) -> Reached:
    """What the one of them reaches that is the fastest under this kind."""
    best = max(strategies, key=lambda strategy: statistics.median(_shares(rows, strategy, kind)))
    return Reached(possible=_shares(rows, best, kind), kept=_kept(rows, best, kind))


def _kept(rows: Sequence[Row], strategy: str, kind: str) -> float:
    share, control = (statistics.median(_shares(rows, strategy, each)) for each in (kind, EVEN))
    return share / control


def _shares(rows: Sequence[Row], strategy: str, kind: str) -> list[float]:
    (row,) = (row for row in rows if (row["strategy"], row["kind"]) == (strategy, kind))
    return list(row["shares"])


def _possible(reached: Reached) -> str:
    return spread([100 * share for share in reached.possible], ".0f")


def _more(
    rows: Sequence[Row],
    sync: Mapping[str, Reached],
    remedies: Mapping[str, Mapping[str, Reached]],
    helped: Mapping[str, Sequence[str]],
) -> str:
    """Whom each remedy helps against, and what is kept."""
    parts = []
    for remedy, of in remedies.items():
        gains = [f"{100 * (of[kind].share / than.share - 1):+.0f} % samples/s under {WORDS[kind]}"
                 for kind, than in sync.items()]  # fmt: skip
        parts.append(f"{remedy[0].upper()}{remedy[1:]} helps {_against(helped[remedy])}: {', '.join(gains)}.")
    kept = [f"{name} {' and '.join(f'{100 * reached.kept:.0f} %' for reached in of.values())}"
            for name, of in {"synchronous training": sync, **remedies}.items()]  # fmt: skip
    parts.append(f"Of its own share without a straggler each keeps, in the same order: {'; '.join(kept)}.")
    if max(reached.kept for reached in remedies["a backup worker"].values()) > 1:
        control = 100 * statistics.median(_shares(rows, BACKUP, EVEN))
        parts.append(
            "Kept can exceed 100 %: with a backup worker the last gradient of every step is left out even where all "
            f"workers are alike, so that it reaches only {control:.0f} % of what is possible there; with a straggler "
            "it is mostly the slow one's, which is a smaller part of what is possible."
        )
    return " ".join(parts)


def _against(kinds: Sequence[str]) -> str:
    if not kinds:
        return "against neither"
    return "against both" if len(kinds) > 1 else f"against {WORDS[kinds[0]]} only"


def _price(rows: Sequence[Row]) -> str:
    """How many of the samples do not count with a backup worker, dropped or passed over: under each kind, if they
    differ."""
    found = [
        f"{100 * statistics.median(1 - used / row['samples'] for used in row['used']):.0f} %"
        for row in rows
        if row["strategy"] == BACKUP and row["kind"] != EVEN
    ]
    return " and ".join(dict.fromkeys(found))


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        idle = [statistics.median(each) for each in zip(*row["idle"], strict=True)]
        kept = f"{100 * _kept(rows, row['strategy'], row['kind']):.0f}"
        lines.append([
            row["strategy"], "none" if row["kind"] == EVEN else row["kind"],
            spread([100 * share for share in row["shares"]], ".0f"), "" if row["kind"] == EVEN else kept,
            spread(row["seconds"], ".2f"), f"{statistics.median(row['used']):,.0f}",
            f"{statistics.median(row['dropped']):,.0f}", f"{statistics.median(row['never_computed']):,.0f}",
            " ".join(f"{100 * share:.0f}" for share in idle),
        ])  # fmt: skip
    first, repeats = rows[0], len(rows[0]["shares"])
    low, high = min(PASSING_FACTORS), max(PASSING_FACTORS)
    return Table(
        headings=HEADINGS,
        lines=lines,
        note=f"{first['workers']} workers, {first['steps']} steps each of {1000 * first['pace_s']:.0f} ms, paced by "
        f"sleeping. Straggler: none (the control); lasting, the last worker takes {SLOWNESS:g} times as long, always; "
        f"passing, spells of {SPELL} steps, in every second one, on average, one worker takes {low:g} to {high:g} "
        "times as long, each worker in its turn. What is possible: the sum of the workers' own speeds, none waiting. "
        "Kept: that share as a part of the same strategy's without a straggler; above 100 % where it loses more "
        "without one, as a backup worker does, which leaves out a gradient of every step. Dropped: computed, but too "
        "late; passed over: never computed, the others had gone on; idle: not computing",
        repeats=f"median of {repeats} repeats (least to greatest), interleaved" if repeats > 1 else "1 repeat",
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    axes = above.subplots(1, 2, sharey=True, sharex=True)
    titles = {
        "lasting": "a lasting straggler: one worker 4 times slower, always",
        "passing": "passing stragglers: now one, now another 4 to 8 times slower",
    }
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        _draw_bars(axis, rows, kind)
        pictures.dress(axis, title, "samples used per second, % of what is possible", "", legend=False)
    axes[0].set_ylim(len({row["strategy"] for row in rows}) + 0.3, -0.6)  # downwards, with room for the legend
    axes[1].legend(fontsize=8, loc="lower right", ncols=2)
    shown = [row for row in rows if row["timeline"]]
    below.suptitle("the lasting straggler: who computes (coloured) and who waits (blank)", fontsize=10)
    for axis, row in zip(below.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        _draw_timeline(axis, row)
        pictures.dress(axis, row["strategy"], "seconds", "", legend=False)


def _draw_bars(axis: Any, rows: Sequence[Row], kind: str) -> None:
    of_kind = [row for row in rows if row["kind"] == kind]
    names = [row["strategy"] for row in of_kind]
    shares = [100 * statistics.median(row["shares"]) for row in of_kind]
    low, high = ([100 * worst(row["shares"]) for row in of_kind] for worst in (min, max))
    away = [
        [m - each for m, each in zip(shares, low, strict=True)],
        [each - m for m, each in zip(shares, high, strict=True)],
    ]
    colors = [pictures.COLORS[COLORS.get(name, "local")] for name in names]
    axis.barh(names, shares, color=colors, height=0.6)
    lost = [share * statistics.median(row["dropped"]) / max(1, statistics.median(row["used"]))
            for share, row in zip(shares, of_kind, strict=True)]  # fmt: skip
    axis.barh(names, lost, left=shares, color="white", edgecolor="0.4", hatch="////", height=0.6, linewidth=0.5,
              label="computed, but dropped")  # fmt: skip
    axis.errorbar(shares, names, xerr=away, fmt="none", ecolor="black", capsize=3, linewidth=1)
    even = [100 * statistics.median(row["shares"]) for row in rows if row["kind"] == EVEN]
    axis.plot(even, names, linestyle="", marker="D", markersize=4, color="0.25", label="without a straggler")
    axis.axvline(100, color=pictures.COLORS["ideal"], linestyle="--", linewidth=1)
    for name, share in zip(names, shares, strict=True):
        axis.text(1.5, name, f"{share:.0f}", va="center", fontsize=8, color="white", fontweight="bold")
    axis.set_axisbelow(True)
    axis.set_xlim(0, 112)


def _draw_timeline(axis: Any, row: Row) -> None:
    color = pictures.COLORS[COLORS.get(row["strategy"], "local")]
    for rank, steps in enumerate(row["timeline"]):
        bars = [(began, computed - began) for began, computed in steps]
        axis.broken_barh(bars, (rank - 0.35, 0.7), facecolor=color, edgecolor="white", linewidth=0.5)
    slow = len(row["timeline"]) - 1
    axis.set_yticks(range(slow + 1), [f"worker {rank}{', slow' if rank == slow else ''}" for rank in range(slow + 1)])
    axis.set_xlim(0, DRAWN_PACES * row["pace_s"])
    axis.set_ylim(slow + 0.6, -0.6)


CLAIM = Claim(
    number=6,
    name="straggler",
    says="A straggler holds synchronous training back; bounded staleness and backup workers help",
    rule="shares are of what is possible if no worker waits; kept is what a strategy's share under a straggler is of "
    f"its share without. Holds if synchronous training (the faster of ring and ps) keeps less than {HELD_BACK:.0%} "
    "under a lasting and under a passing straggler, and bounded staleness (the faster of two bounds) and a backup "
    f"worker each add at least {GAIN:.0%} under both, to the share and to what is kept; only if: at least one of them "
    "does under at least one kind that holds synchronous training back; fails otherwise. Medians; dropped gradients do "
    "not count",
    needs="nothing special; 4 workers, 8 where there are 16 cores",
    minutes=(1, 9),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(11.0, 7.5),
    changed="At first synchronous training had to stay below 60 % of what is possible, and a remedy had to add 20 % to "
    "that share alone. After a full record had been made, a review asked not to count what a strategy lacks without a "
    "straggler too, and “kept” came into the rule. That record has the same word by both rules.",
)
