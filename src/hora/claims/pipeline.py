"""Claim 11: the parts of a model that is split over processes wait for each other.

Two processes with one thread each train one GPT (4 blocks of width 192, 1.8 M parameters, batch of 32 windows of 64
letters) as a pipeline of two stages, two blocks each, and as data parallel; pipeline_rank.py says how. A rank is busy
while it computes forward, backward, loss or update; idle is the rest of a step: waiting for the other, and moving data.
Of data parallel it is what its communication was not hidden behind backward. Theory gives a pipeline of p equal stages
and m micro-batches an idle share of (p − 1) / (m + p − 1), by GPipe (all forwards, then all backwards) and by 1F1B (in
turn; needs m ≥ p) alike: 1F1B saves memory, not time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ..bench.launched import launched
from .claim import Claim, Row, Table, Verdict, spread
from .figure import COLORS, dress, line

STAGES = 2
BATCH = 32
MICRO_BATCHES = (1, 2, 4, 8)
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
RIVALS = {"ring": "ring", "ddp": "DDP"}  # data parallel
FREE = "free"  # data parallel that never speaks: the ideal
WAYS = (
    *(("gpipe", m) for m in MICRO_BATCHES), *(("1f1b", m) for m in MICRO_BATCHES if m >= STAGES),
    ("ring", 1), ("ddp", 1), (FREE, 1),
)  # fmt: skip
DRAWN = ("GPipe, m = 1", "GPipe, m = 4", "1F1B, m = 4")
ROUND = "round"
FULL, QUICK = (5, 8), (2, 2)  # rounds, and timed steps of each
IDLE_AT_ONE = 1 / 3
TIMES = 2.0
NEAR = 0.9
STAGE_COLORS = {"forward": "tab:blue", "backward": "tab:orange", "loss, update": "tab:green"}


def name_of(schedule: str, micro_batches: int) -> str:
    if schedule in SCHEDULES:
        return f"{SCHEDULES[schedule]}, m = {micro_batches}"
    return f"data parallel, {RIVALS[schedule]}" if schedule in RIVALS else "no communication"


def theory(micro_batches: int, stages: int = STAGES) -> float:
    """The idle share of equal stages."""
    return (stages - 1) / (micro_batches + stages - 1)


def measure(quick: bool) -> list[Row]:
    def hear(said: str) -> bool:
        if f"] {ROUND} " in said:
            print(f"   pipeline: {said.partition('] ')[2]}", end="", file=sys.stderr, flush=True)
            return True
        return False

    rows: list[Row] = launched(
        ("-m", "hora.claims.pipeline_rank"), *(QUICK if quick else FULL), size=STAGES, strategy="ring", hear=hear
    )
    return rows


def idle(row: Row) -> list[float]:
    """The mean share of both ranks, in each round."""
    return [1 - statistics.mean(busy) / step for step, busy in zip(row["step_s"], row["busy_s"], strict=True)]


def speed(row: Row) -> list[float]:
    """Samples per second, in each round."""
    return [BATCH / step for step in row["step_s"]]


def _by_way(rows: Sequence[Row]) -> dict[tuple[str, int], Row]:
    return {(row["schedule"], row["micro_batches"]): row for row in rows}


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


def judge(rows: Sequence[Row]) -> Verdict:
    found = _by_way(rows)
    rival = _rival(found)
    top = _middle(speed(found[rival, 1]))
    waits = _middle(idle(found["ring", 1]))
    best = {m: _best(found, m) for m in MICRO_BATCHES}
    idles = {m: _middle(idle(row)) for m, row in best.items()}
    speeds = {m: _middle(speed(row)) / top for m, row in best.items()}
    told = {
        m: f"a stage is idle {100 * idles[m]:.0f} % of the time, and the pipeline has {100 * speeds[m]:.0f} % of data "
        "parallel's speed"
        for m in MICRO_BATCHES
    }
    against = f"(the faster data parallel: {RIVALS[rival]}; the ring is idle {100 * waits:.0f} %)"
    few, many = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    if idles[few] < IDLE_AT_ONE or speeds[few] >= NEAR:
        return Verdict(word="fails", text=f"already with {few} micro-batch {told[few]} {against}")
    bad = [m for m in MICRO_BATCHES if speeds[m] < NEAR and idles[m] >= TIMES * waits]
    if not bad:
        return Verdict(
            word="fails",
            text=f"the pipeline waits less than {TIMES:.0f} times as much as data parallel does, or is as fast: with "
            f"{few} micro-batch {told[few]}; with {many} {told[many]} {against}",
        )
    if many in bad:
        return Verdict(
            word="holds",
            text=f"with {few} micro-batch {told[few]}; with {many} still {told[many]} {against}",
        )
    enough = next(m for m in MICRO_BATCHES if m > bad[-1])
    return Verdict(
        word="only if",
        text=f"a batch is cut into fewer than {enough} micro-batches: with {few} {told[few]}; with {enough} "
        f"{told[enough]} {against}",
    )


def _rival(found: Mapping[tuple[str, int], Row]) -> str:
    """The faster data parallel."""
    return max(RIVALS, key=lambda name: _middle(speed(found[name, 1])))


def _best(found: Mapping[tuple[str, int], Row], micro_batches: int) -> Row:
    """The faster schedule's."""
    there = [found[name, micro_batches] for name in SCHEDULES if (name, micro_batches) in found]
    return max(there, key=lambda row: _middle(speed(row)))


def table(rows: Sequence[Row]) -> Table:
    found = _by_way(rows)
    free = _middle(speed(found[FREE, 1]))
    lines = []
    for (schedule, m), row in found.items():
        split = schedule in SCHEDULES
        known = split or schedule == "ring"
        busy = [_middle(values) * 1e3 for values in zip(*row["busy_s"], strict=True)]
        lines.append([
            name_of(schedule, m),
            spread([100 * share for share in idle(row)], ".0f") if known else "–",
            f"{100 * theory(m):.0f}" if split else "–",
            " / ".join(f"{value:.0f}" for value in busy) if known else "–",
            spread([1e3 * step for step in row["step_s"]], ".0f"),
            spread(speed(row), ".1f"),
            f"{100 * _middle(speed(row)) / free:.0f}",
        ])  # fmt: skip
    return Table(
        headings=[
            "how", "idle, %", "theory, %", "computing by rank, ms", "step, ms", "samples/s", "% of no communication",
        ],
        lines=lines,
        note=f"Two processes, one thread each, {BATCH} windows per step in all of them; median of "
        f"{len(rows[0]['step_s'])} rounds in turn (least to greatest). Idle: share of a step in which a rank neither "
        "computes forward, backward, loss nor update, mean of both ranks.",
    )  # fmt: skip


def draw(rows: Sequence[Row], figure: Any) -> None:
    found = _by_way(rows)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.4))
    above, below = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    expected = [100 * theory(m) for m in MICRO_BATCHES]
    above.plot(MICRO_BATCHES, expected, "--", color=COLORS["ideal"], label="theory: 1 / (m + 1)")
    rival = _rival(found)
    top = _middle(speed(found[rival, 1]))
    for axis, value in ((above, idle), (below, lambda row: [one / top for one in speed(row)])):
        for schedule, color in zip(SCHEDULES, ("tab:red", "tab:purple"), strict=True):
            points = {
                float(m): [100 * one for one in value(row)] for (name, m), row in found.items() if name == schedule
            }
            line(axis, points, SCHEDULES[schedule], color=color)
        level = 100 * _middle(value(found["ring", 1]))
        axis.axhline(level, color=COLORS["ring"], label=name_of("ring", 1))
        axis.set_xscale("log", base=2)
        axis.set_xticks(MICRO_BATCHES, [str(m) for m in MICRO_BATCHES])
    ddp = 100 * _middle(speed(found["ddp", 1])) / top
    below.axhline(ddp, color=COLORS["ddp"], label=name_of("ddp", 1))
    above.set_ylim(bottom=0)
    below.set_ylim(bottom=0)
    dress(above, "How long a stage waits", "", "idle, % of a step")
    dress(
        below, f"Samples per second, in per cent of data parallel's ({RIVALS[rival]})", "micro-batches of a batch", "%"
    )
    _draw_timelines(figure.add_subplot(grid[:, 1]), found)


def _draw_timelines(axis: Any, found: Mapping[tuple[str, int], Row]) -> None:
    """A step of each, from its first forward; both stages on the same clock."""
    ticks = []
    for place, row in enumerate(row for row in found.values() if "timeline" in row):
        start = min(begin for spans in row["timeline"] for _, _, begin, _ in spans)
        for stage, spans in enumerate(row["timeline"]):
            height = -(3 * place + stage)
            ticks.append((height, f"stage {stage}"))
            for kind, part, begin, end in spans:
                color = list(STAGE_COLORS.values())[int(kind)]
                look = {"color": color, "edgecolor": "white", "linewidth": 0.5, "height": 0.85}
                axis.barh(height, end - begin, left=begin - start, **look)
                if int(kind) < 2:
                    axis.text((begin + end) / 2 - start, height, str(int(part)), ha="center", va="center", fontsize=7)
        axis.text(0, 0.55 - 3 * place, name_of(row["schedule"], row["micro_batches"]), fontsize=9, va="bottom")
    for label, color in STAGE_COLORS.items():
        axis.barh(0, 0, color=color, label=label)
    axis.set_yticks(*zip(*ticks, strict=True))
    axis.set_ylim(top=1.4)
    dress(axis, "One step: white is waiting (numbers: micro-batches)", "seconds", "")
    axis.legend(fontsize=8, loc="lower right")


def obstacle(quick: bool) -> str:
    from ..transport.base import num_cores

    cores = num_cores()
    return "" if cores >= STAGES else f"the two stages need a core each, and there is {cores}"


CLAIM = Claim(
    number=11,
    name="pipeline",
    says="Model parallelism is inefficient because its parts wait for each other",
    rule="a stage waits too much where it is idle at least twice the share of time that data parallel's ring is, and "
    "the pipeline, by the faster schedule, trains more than 10 % slower than the faster data parallel. Fails if a "
    "stage never waits too much or, with one micro-batch, is idle less than a third of the time or the pipeline within "
    "10 %; holds if a stage waits too much even with 8 micro-batches; else only if there are fewer micro-batches than "
    "it takes.",
    needs="two cores, one for each stage",
    minutes=(0.7, 4),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    obstacle=obstacle,
    figure_size=(11.0, 5.5),
)
