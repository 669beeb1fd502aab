"""Claim 11: the parts of a model that is split over processes wait for each other.

Two processes with one thread each train one GPT (4 blocks of width 192, 1.8 M parameters, batch of 32 windows of 64
letters) as a pipeline of two stages, two blocks each, and as data parallel; pipeline_rank.py says how. A rank is busy
while it computes forward, backward, loss or update; idle is the rest of a step: waiting for the other, and moving data.
Of the ring it is what its communication was not hidden behind backward; DDP does not tell that. Theory gives a pipeline
of p equal stages and m micro-batches an idle share of (p − 1) / (m + p − 1), by GPipe (all forwards, then all
backwards) and by 1F1B (in turn; needs m ≥ p) alike: 1F1B saves memory, not time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hora.launch.launched import launched

from .claim import Claim, Row, Table, Verdict, Word, spread
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
    def on_line(said: str) -> bool:
        if f"] {ROUND} " in said:
            print(f"   pipeline: {said.partition('] ')[2]}", end="", file=sys.stderr, flush=True)
            return True
        return False

    rows: list[Row] = launched(
        ("-m", "hora_benchmarks.claims.pipeline_rank"),
        *(QUICK if quick else FULL),
        size=STAGES,
        strategy="ring",
        on_line=on_line,
    )
    return rows


def computing(row: Row) -> list[float]:
    """Seconds of a step, the mean of both ranks, in each round."""
    return [statistics.mean(busy) for busy in row["busy_s"]]


def idle(row: Row) -> list[float]:
    """The mean share of both ranks, in each round."""
    return [1 - busy / step for step, busy in zip(row["step_s"], computing(row), strict=True)]


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
    word, bad = _ruled(found, rival)
    best = {m: _best(found, m) for m in MICRO_BATCHES}
    fastest = max(MICRO_BATCHES, key=lambda m: _middle(speed(best[m])))
    waits = {m: _per_cent(idle(row)) for m, row in best.items()}
    fast = {m: _per_cent(_relative(row, found[rival, 1])) for m, row in best.items()}
    few, many = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    text = f"with {few} micro-batch a stage is idle {waits[few]} of a step, at {fast[few]} of data parallel's speed"
    if word == "only if":
        enough = MICRO_BATCHES[MICRO_BATCHES.index(bad[-1]) + 1]
        text = f"a batch is cut into fewer than {enough} micro-batches: {text}; with {enough}, idle {waits[enough]} "
        text += f"at {fast[enough]}"
    elif word == "fails" and bad:
        text = f"already {text}"
    else:
        text = f"{'a stage never waits too much: ' if word == 'fails' else ''}{text}"
        for m in sorted({fastest, many} - {few}):
            text += f"; {'at best, ' if m == fastest else ''}with {m}, idle {waits[m]} at {fast[m]}"
        if _computes_longer(best[many], best[fastest]):
            text += ", where computing takes longer too"
    return Verdict(word=word, text=text, more=_more(found, rival, bad, fastest))


def _ruled(found: Mapping[tuple[str, int], Row], rival: str) -> tuple[Word, list[int]]:
    """The word, if speed is compared with this rival's; the numbers of micro-batches with which a stage waits too much.

    If it fails though there are some, then because of one micro-batch alone.
    """
    few, many = MICRO_BATCHES[0], MICRO_BATCHES[-1]
    waits = _middle(idle(found["ring", 1]))
    best = {m: _best(found, m) for m in MICRO_BATCHES}
    idles = {m: _middle(idle(row)) for m, row in best.items()}
    speeds = {m: _middle(_relative(row, found[rival, 1])) for m, row in best.items()}
    bad = [m for m in MICRO_BATCHES if speeds[m] < NEAR and idles[m] >= TIMES * waits]
    if not bad or idles[few] < IDLE_AT_ONE or speeds[few] >= NEAR:
        return "fails", bad
    return "holds" if many in bad else "only if", bad


def _more(found: Mapping[tuple[str, int], Row], rival: str, bad: Sequence[int], fastest: int) -> str:
    """Which rival a figure is compared with, what the spread leaves open, and what is not waiting."""
    ring, many = found["ring", 1], MICRO_BATCHES[-1]
    best = {m: _best(found, m) for m in MICRO_BATCHES}
    said = [
        f"Speed is compared with the faster data parallel, {RIVALS[rival]}: {_samples(found[rival, 1])}; idle with the "
        f"ring, {_per_cent(idle(ring))}" + (", since what DDP waits is not measured." if rival != "ring" else ".")
    ]
    if rival != "ring":
        shares = [f"{_per_cent(_relative(best[m], ring))} of it with {m}" for m in sorted({fastest, many})]
        word, before = _ruled(found, "ring")[0], _ruled(found, rival)[0]
        said.append(
            f"Compared with the ring's speed too, {_samples(ring)}, the pipeline has {' and '.join(shares)} "
            f"micro-batches, and the verdict is {'the same' if word == before else f'another: {word}'}."
        )
    most = TIMES * max(idle(ring))
    within = [m for m in bad if _middle(idle(best[m])) < most]
    if within:
        said.append(
            f"By the ring's greatest idle share the bar would be {100 * most:.0f} %, above the pipeline's share with "
            f"{' and '.join(map(str, within))} micro-batches: there a stage waits too much by the medians only."
        )
    if _computes_longer(best[many], best[fastest]):
        longer, shorter = ([1e3 * one for one in computing(best[m])] for m in (many, fastest))
        apart = "" if min(longer) > max(shorter) else ", by the medians (the ranges overlap)"
        said.append(
            f"With {many} micro-batches computing takes {spread(longer, '.0f')} ms of a step, against "
            f"{spread(shorter, '.0f')} with {fastest}: smaller ones compute slower{apart}, and that is not waiting."
        )
    return " ".join(said)


def _computes_longer(row: Row, other: Row) -> bool:
    return _middle(computing(row)) > _middle(computing(other))


def _relative(row: Row, rival: Row) -> list[float]:
    """The speed in each round, as a share of the rival's median."""
    return [one / _middle(speed(rival)) for one in speed(row)]


def _samples(row: Row) -> str:
    return f"{spread(speed(row), '.0f')} samples/s"


def _per_cent(shares: Sequence[float]) -> str:
    """As 50 % (49 to 51)."""
    middle, _, rest = spread([100 * share for share in shares], ".0f").partition(" ")
    return f"{middle} % {rest}".strip()


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
            spread([1e3 * value for value in computing(row)], ".0f") if known else "–",
            " / ".join(f"{value:.0f}" for value in busy) if known else "–",
            spread([1e3 * step for step in row["step_s"]], ".0f"),
            spread(speed(row), ".1f"),
            f"{100 * _middle(speed(row)) / free:.0f}",
        ])  # fmt: skip
    return Table(
        headings=[
            "how", "idle, %", "theory, %", "computing, ms", "by rank, ms", "step, ms", "samples/s",
            "% of no communication",
        ],
        lines=lines,
        note=f"Two processes, one thread each, {BATCH} windows per step in all of them, cut into m micro-batches. "
        "Idle: share of a step in which a rank computes neither forward, backward, loss nor update, mean of both ranks "
        "(as is computing); by rank: each one's median. What DDP waits is inside of its backward and not known.",
        repeats=f"{len(rows[0]['step_s'])} rounds, interleaved; median (least to greatest)",
    )  # fmt: skip


def draw(rows: Sequence[Row], figure: Any) -> None:
    found = _by_way(rows)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.4))
    above, below = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[1, 0])
    expected = [100 * theory(m) for m in MICRO_BATCHES]
    above.plot(MICRO_BATCHES, expected, "--", color=COLORS["ideal"], label="theory: 1 / (m + 1)")
    rival = _rival(found)
    for axis, value in ((above, idle), (below, lambda row: _relative(row, found[rival, 1]))):
        for schedule, color in zip(SCHEDULES, ("tab:red", "tab:purple"), strict=True):
            points = {
                float(m): [100 * one for one in value(row)] for (name, m), row in found.items() if name == schedule
            }
            line(axis, points, SCHEDULES[schedule], color=color)
        for place, name in enumerate(RIVALS if axis is below else ("ring",)):
            level = [100 * one for one in value(found[name, 1])]
            axis.axhline(_middle(level), color=COLORS[name], label=name_of(name, 1))
            axis.plot([9 + place] * 2, [min(level), max(level)], color=COLORS[name], linewidth=3)
        axis.set_xscale("log", base=2)
        axis.set_xticks(MICRO_BATCHES, [str(m) for m in MICRO_BATCHES])
        axis.set_xlim(0.9, 11)
        axis.set_ylim(bottom=0)
    dress(above, "How long a stage waits (bands, bars: least to greatest)", "", "idle, % of a step")
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
    from hora.net.machine import num_cores

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
    "it takes. By the medians of the rounds.",
    needs="two cores, one for each stage",
    minutes=(0.7, 4),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    obstacle=obstacle,
    figure_size=(11.0, 5.5),
    changed="that it fails if a stage never waits too much was added after the first record, which holds with and "
    "without it.",
)
