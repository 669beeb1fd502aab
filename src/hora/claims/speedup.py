"""Claim: speed is proportional to the number of workers. Where it bends, and who is to blame: machine or communication.

One host, one thread per worker, AdamW, the two models of bench/models.py: mlp (20.0 M parameters, little arithmetic for
each) and gpt (10.8 M, much). Every worker has a batch of its own, so that the ideal speed of n workers is n times that
of one. Measured are the ring, shared memory (what `auto` takes on one host), parameter servers in the workers' own
processes, DDP on Gloo, and processes that never talk. These last are the machine's own limit: what they lose to memory
bandwidth, caches and clock no way of communicating can win back.

For each number of workers all are started side by side, together with one worker alone, and take turns; every round's
speeds are divided by the speed of the one worker in the same round. All keep freed memory (memory.py), DDP too, so that
one and the same worker is the measure of all.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .claim import Claim, Row, Table, Verdict, spread

if TYPE_CHECKING:
    from ..bench.train_conductor import Answer, Contestant

NEAR = 0.9  # of ideal: from here on it counts as proportional
MODELS = {"mlp": "little arithmetic for each parameter", "gpt": "much arithmetic for each parameter"}
SIZES = {"mlp": (2, 4, 8, 12, 16), "gpt": (4, 8, 16)}  # workers; fewer for gpt, whose steps take a second
FEW_CORES = 4  # on so many or less, twice as many workers show what comes beyond the cores
TALKING = ("ring", "shared", "ps", "ddp")
ALONE, SILENT = "one", "independent"
LABELS = {"ring": "ring", "shared": "shared memory", "ps": "servers, colocated", "ddp": "DDP on Gloo",
          SILENT: "processes that never talk"}  # fmt: skip
STEPS = {"mlp": 2, "gpt": 1}  # in each round, after one that is not timed
ROUNDS = {"mlp": 4, "gpt": 3}


def measure(quick: bool) -> list[Row]:
    from ..bench.train import num_cores

    cores = num_cores()
    names = (SILENT, "ring", "ddp") if quick else (SILENT, *TALKING)
    rows = []
    for model in MODELS:
        for workers in (min(cores, 4),) if quick else sizes(model, cores):
            rows += measured(model, workers, names, cores, STEPS[model], 2 if quick else ROUNDS[model])
    return rows


def sizes(model: str, cores: int) -> list[int]:
    """Up to the cores, and where these are few, beyond them."""
    found = {size for size in SIZES[model] if size <= cores} | {min(cores, max(SIZES[model]))}
    return sorted(found | ({2 * cores} if cores <= FEW_CORES else set()))


def measured(model: str, workers: int, names: Sequence[str], cores: int, steps: int, rounds: int) -> list[Row]:
    """A row for each of `names`, with its speed and that of the one worker in each round."""
    from ..bench import train
    from ..bench.train_conductor import Contestant
    from ..memory import ENV

    there = train.contestants(workers)
    known = {SILENT: SILENT, "ps": "ps/colocated", "ddp": "ddp/gloo"}
    those = [Contestant(name=ALONE, ranks=1, env=ENV)]
    those += [dataclasses.replace(there[known.get(name, name)], name=name, env=ENV) for name in names]
    print(f"{model}, {workers} workers", file=sys.stderr, flush=True)
    turns, batch_size, failures = train.take(those, model, steps, rounds, warm_up=1)
    if failures:
        raise RuntimeError("\n".join(failures))
    one = [speed(answers, batch_size) for answers in turns[ALONE]]
    return [
        row_of(contestant, model, cores, turns[contestant.name], batch_size, one)
        for contestant in those
        if contestant.name != ALONE
    ]


def row_of(
    contestant: Contestant, model: str, cores: int, turns: Sequence[Sequence[Answer]], batch_size: int, one: list[float]
) -> Row:
    """`speeds` and `one`, in samples/s, are by round; `exposed_s` is per step, the mean over ranks.

    Whoever talks waits for the slowest worker in every step. Who does not need not: for these `lockstep` has the speed
    as if they did.
    """
    by_slowest = [speed(answers, batch_size) for answers in turns]
    row = {
        "model": model, "name": contestant.name, "workers": contestant.ranks, "cores": cores, "one": one,
        "speeds": by_slowest, "rounds": len(turns), "steps": len(turns[0][0]["seconds"]), "exposed_s": None,
    }  # fmt: skip
    answers = [answer for ranks in turns for answer in ranks]
    if contestant.how == "hora":
        row["exposed_s"] = statistics.mean(answer["exposed_s"] / len(answer["seconds"]) for answer in answers)
    if contestant.name == SILENT:
        row |= {"lockstep": by_slowest, "speeds": [sum(speed([one], batch_size) for one in ranks) for ranks in turns]}
    return row


def speed(answers: Sequence[Answer], batch_size: int) -> float:
    """Samples/s of ranks whose steps take as long as the slowest of them."""
    seconds = [max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True)]
    return len(answers) * batch_size * len(seconds) / sum(seconds)


def obstacle(quick: bool) -> str:
    from ..bench.train import num_cores

    return "" if num_cores() > 1 else "one core has no speed to share: run it where this process may use two or more"


def speedups(row: Row, key: str = "speeds") -> list[float]:
    """How many times as fast as one worker, by round."""
    return [many / one for many, one in zip(row[key], row["one"], strict=True)]


def share(row: Row, key: str = "speeds") -> float:
    """Of the ideal, in the median round."""
    return statistics.median(speedups(row, key)) / row["workers"]


def judge(rows: Sequence[Row]) -> Verdict:
    reached, texts = {}, []
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    for model in models:
        best = best_of(rows, model)
        bends = bend(best)
        before = [workers for workers in best if bends is None or workers < bends]
        reached[model] = before[-1] if before else 1
        where = bends or max(best)
        how = f"reaches {reached[model]} workers" if bends is None else f"bends at {bends} workers"
        found = f"{model} {how}, with {share(best[where]):.0%} of ideal at best ({best[where]['name']})"
        if bends is not None and bends < max(best):
            found += f" and {share(best[max(best)]):.0%} at {max(best)}"
        texts.append(f"{found}; {blame(rows, best[where])}")
    told = ". ".join(texts)
    full = [model for model in models if reached[model] == max(best_of(rows, model))]
    if len(full) == len(models):
        return Verdict(word="holds", text=told)
    if full:
        return Verdict(word="only if", text=f"there is {' or '.join(MODELS[model] for model in full)}: {told}")
    if max(reached.values()) > 1:
        few = " and ".join(f"up to {most} with {MODELS[model]}" for model, most in reached.items() if most > 1)
        return Verdict(word="only if", text=f"there are few workers, {few}: {told}")
    return Verdict(word="fails", text=told)


def best_of(rows: Sequence[Row], model: str) -> dict[int, Row]:
    """By number of workers, up to the cores, the row of whoever talks and is fastest."""
    mine = [row for row in rows if row["model"] == model and row["name"] in TALKING and row["workers"] <= row["cores"]]
    counts = sorted({row["workers"] for row in mine})
    return {count: max((row for row in mine if row["workers"] == count), key=share) for count in counts}


def bend(best: Mapping[int, Row]) -> int | None:
    """The first number of workers that falls short of what counts as proportional."""
    return next((workers for workers, row in best.items() if share(row) < NEAR), None)


def losses(rows: Sequence[Row], row: Row) -> dict[str, float]:
    """What of the ideal is lost to the machine, to waiting for the slowest worker, and to communication; it adds up."""
    silent = next(
        one for one in rows if (one["model"], one["workers"], one["name"]) == (row["model"], row["workers"], SILENT)
    )
    machine, lockstep = share(silent), share(silent, "lockstep")
    return {"machine": 1 - machine, "slowest": machine - lockstep, "communication": lockstep - share(row)}


def blame(rows: Sequence[Row], row: Row) -> str:
    points = {name: 100 * value for name, value in losses(rows, row).items()}
    return (
        f"lost are {100 * (1 - share(row)):.0f} points, of which processes that never talk lose "
        f"{points['machine']:.0f} as well (the machine), waiting for the slowest takes {points['slowest']:.0f}, "
        f"communication {points['communication']:.0f}"
    )


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        exposed = "" if row["exposed_s"] is None else f"{1e3 * row['exposed_s']:.0f}"
        form = ",.0f" if min(row["speeds"]) >= 100 else ".1f"
        lines.append([
            f"{row['model']}, {row['workers']} workers, {LABELS[row['name']]}", spread(row["speeds"], form),
            spread(speedups(row), ".2f"), f"{share(row):.0%}", exposed,
        ])  # fmt: skip
    rounds = {row["model"]: f"{row['model']}: {row['rounds']} rounds of {row['steps']}" for row in rows}
    cores = rows[0]["cores"]
    beyond = f"; with more workers than the {cores} cores nothing is to be expected, and nothing is judged"
    return Table(
        headings=["", "samples/s", "speed-up", "of ideal", "communication that training waits for: ms/step"],
        lines=lines,
        note=f"median (least to greatest) of interleaved rounds of steps ({', '.join(rounds.values())}), one thread "
        "per worker, one host" + (beyond if any(row["workers"] > cores for row in rows) else ""),
    )


def draw(rows: Sequence[Row], figure: Any) -> None:
    from .figure import COLORS, dress, line

    colors = {"ring": COLORS["ring"], "shared": "tab:green", "ps": COLORS["sync"], "ddp": COLORS["ddp"], SILENT: "0.3"}
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    for axis, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        mine = [row for row in rows if row["model"] == model]
        last, cores = max(row["workers"] for row in mine), mine[0]["cores"]
        axis.plot([1, last], [1, last], color=COLORS["ideal"], linestyle=":", label="ideal: n")
        if last > cores:
            axis.axvline(cores, color="0.8", linewidth=1)
            axis.annotate(f"{cores} cores", (cores, last), xytext=(3, 0), textcoords="offset points", va="top",
                          fontsize=8, color="0.4")  # fmt: skip
        for name in LABELS:
            points = {row["workers"]: speedups(row) for row in mine if row["name"] == name}
            style = "--" if name == SILENT else "-"
            if points:
                line(axis, {1: [1.0], **points}, LABELS[name], color=colors[name], linestyle=style)
        best = best_of(rows, model)
        where = f"bends at {bends} workers" if (bends := bend(best)) else f"reaches {max(best)} workers"
        dress(axis, f"{model}, {MODELS[model]}: {where}", "n, workers", "times as fast as one worker")
        axis.set_xticks(sorted({1, *(row["workers"] for row in mine)}))
        axis.set_ylim(bottom=0)


CLAIM = Claim(
    number=3,
    name="speedup",
    says="Speed is proportional to the number of workers",
    rule=f"holds if, for both models and every number of workers that have a core each, the fastest strategy reaches "
    f"{NEAR:.0%} of n times one worker's speed; only if it does so for one model, or up to some number of workers; "
    "fails if already the fewest workers are too many for both",
    needs="two cores or more: it takes as many workers as there are cores, up to 16",
    minutes=(1, 4),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    obstacle=obstacle,
    figure_size=(11.0, 4.8),
)
