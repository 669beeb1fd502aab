"""Claim: all-reduce still needs a coordinator, but it carries almost nothing.

Runs whose coordinator lives in this process and counts (coordinator_run.py): all bytes that it receives and sends,
against the bytes of tensors that the workers give to others. The processes are those of `hora run`, with its metrics: a
job.log in every step, and reports four times a second. Counted apart: what passes before the first step, in the steps,
and at the end. A turn of steps is counted from its first to its last, right after others that are not counted, half as
many, and has no pause in it: so it holds as many reports, and as much in each, as a run that goes on. Of what is pulled
from servers nothing is counted as tensors, so that the coordinator's share under `ps` is taken too large rather than
too small.

Reports go by the clock: a longer step holds more of them, whatever is trained. So there are runs without metrics too,
where only what the steps themselves need is left.

`needed` means that no process begins without it: hora.init() returns when the coordinator has seen all join, and it is
where the processes learn each other's addresses. So this half of the sentence follows from Hora's design and could
not have come out otherwise; only the bytes are measured.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from .claim import Claim, Row, Table, Verdict, spread

SHARE = 0.01  # of the bytes of tensors
LARGE = 1_000_000  # parameters: from here on the share counts
STRATEGIES = {"ring": 0, "ps": 2, "ps:mode=async": 2, "local:every=8": 0}  # with so many servers
COLORS = {"ring": "ring", "ps": "sync", "ps:mode=async": "async", "local:every=8": "local"}
QUICK = ((2, 100_000, True, 64), (2, 1_000_000, True, 64))
FULL = (
    (2, 1_000_000, True, 96), (4, 100_000, True, 96), (4, 1_000_000, True, 64), (4, 1_000_000, False, 64),
    (4, 10_000_000, True, 16), (8, 1_000_000, True, 32),
)  # workers, parameters, with metrics, steps: several reports long, and half as many are rounds of local  # fmt: skip
REPORTS, SAMPLES = ("report",), ("take", "begin", "done")
DESIGN = (
    "That the coordinator is needed is so by design, not a finding: hora.init() returns when it has seen all processes."
)


def measure(quick: bool) -> list[Row]:
    rows = []
    for workers, params, metrics, steps in QUICK if quick else FULL:
        rows += measured(list(STRATEGIES), workers, params, metrics, steps=steps, rounds=1 if quick else 3)
    return rows


def measured(names: Sequence[str], workers: int, params: int, metrics: bool, *, steps: int, rounds: int) -> list[Row]:
    """A row for each strategy. All are started, then they take turns, the order rotated."""
    from .coordinator_run import Setting, opened

    text = f"{workers} workers, {params / 1e6:g} M parameters{'' if metrics else ', no metrics'}"
    with contextlib.ExitStack() as stack:
        runs, rows = [], []
        for name in names:
            print(f"{text}: starting {name}", file=sys.stderr, flush=True)
            servers = STRATEGIES[name]
            setting = Setting(strategy=name, workers=workers, params=params, metrics=metrics, servers=servers)
            runs.append(stack.enter_context(opened(setting)))
            row: Row = {"strategy": name, "workers": workers, "servers": servers, "params": params, "metrics": metrics}
            rows.append(row | {"steps": steps, "meeting": runs[-1].start(), "repeats": []})
        for round in range(rounds):
            print(f"{text}: round {round + 1} of {rounds}", file=sys.stderr, flush=True)
            for index in range(len(names)):
                at = (round + index) % len(names)
                rows[at]["repeats"].append(runs[at].ask(steps, lead=steps // 2))
        for run, row in zip(runs, rows, strict=True):
            row["leaving"] = run.stop()
    return rows


def judge(rows: Sequence[Row]) -> Verdict:
    strangers = [row for row in rows if joined(row) < row["workers"] + row["servers"]]
    if strangers:
        return Verdict(word="fails", text=f"not all processes met through it, e.g. under {strangers[0]['strategy']}")
    large = [row for row in rows if row["params"] >= LARGE and row["metrics"]]
    most = {name: max(share(row) for row in large if row["strategy"] == name) for name in _names(large)}
    largest = {name: max((row for row in large if row["strategy"] == name), key=share) for name in most}
    figures = ", ".join(f"{_percents(shares(row))} under {name}" for name, row in largest.items())
    told = (
        f"of the tensors' bytes it carries, with {LARGE / 1e6:g} M parameters or more, at most {figures}; the bar is "
        f"{100 * SHARE:g} %"
    )
    more = " ".join(filter(None, [DESIGN, _set_up_text(rows), _reports_text(rows), _bare_text(rows)]))
    little = [name for name, value in most.items() if value < SHARE]
    if len(little) == len(most):
        return Verdict(word="holds", text=told, more=more)
    if little:
        return Verdict(word="only if", text=f"the strategy is {' or '.join(little)}: {told}", more=more)
    return Verdict(word="fails", text=told, more=more)


def _set_up_text(rows: Sequence[Row]) -> str:
    """How what passes before the first step grows with the workers of the ring; empty if their number is one only."""
    found = set_up(rows)
    if len(found) < 2:
        return ""
    few, many = min(found), max(found)
    power = math.log(found[many] / found[few]) / math.log(many / few)
    how = "nearly with the square of" if power >= 1.5 else "faster than" if power >= 1.1 else "no faster than"
    sizes = ", ".join(f"{value / 1e3:.1f} kB with {workers}" for workers, value in found.items())
    each = " and ".join(f"{found[workers] / workers / 1e3:.1f} kB with {workers}" for workers in (few, many))
    return (
        f"Set-up grows {how} the workers (to the power of {power:.1f}): before the first step of the ring {sizes} pass "
        f"through it, for each worker {each}."
    )


def set_up(rows: Sequence[Row]) -> dict[int, float]:
    """Bytes before the first step of the ring, by the number of workers, with the commonest size of model."""
    ring = [row for row in rows if row["strategy"] == "ring" and row["metrics"]]
    params = _commonest([row["params"] for row in ring])
    alike = sorted((row for row in ring if row["params"] == params), key=lambda row: row["workers"])
    return {row["workers"]: row["meeting"]["bytes"] for row in alike}


def _reports_text(rows: Sequence[Row]) -> str:
    """Reports are sent by the clock."""
    watched = [row for row in rows if row["metrics"]]
    rate = statistics.median(
        repeat["by_kind"].get("report", [0, 0])[0] / repeat["seconds"] / (row["workers"] + row["servers"])
        for row in watched
        for repeat in row["repeats"]
    )
    ring = [row for row in watched if row["strategy"] == "ring"]
    workers = _commonest([row["workers"] for row in ring])
    short, long = (of((row for row in ring if row["workers"] == workers), key=step_s) for of in (min, max))
    example = " and ".join(
        f"{statistics.median(per_step(row, REPORTS)):.0f} bytes in a step of {1e3 * step_s(row):.0f} ms"
        for row in (short, long)
    )
    return (
        f"Reports go by the clock, whatever is trained: {rate:.1f} a second from each process, so that a longer step "
        f"holds more of them: under the ring with {workers} workers {example}."
    )


def _bare_text(rows: Sequence[Row]) -> str:
    bare = [row for row in rows if not row["metrics"]]
    told = ", ".join(f"{row['strategy']} {statistics.median(per_step(row)):.0f}" for row in bare)
    return f"Without metrics, what is left in a step of all workers, in bytes: {told}." if bare else ""


def joined(row: Row) -> int:
    """How many processes joined the coordinator before the first step."""
    found: int = row["meeting"]["by_kind"].get("join", [0, 0])[0]
    return found


def per_step(row: Row, kinds: Sequence[str] | None = None) -> list[float]:
    """Bytes through the coordinator in one step of all workers, in each repeat; of these kinds, or all."""
    if kinds is None:
        return [repeat["bytes"] / row["steps"] for repeat in row["repeats"]]
    return [sum(repeat["by_kind"].get(kind, [0, 0])[1] for kind in kinds) / row["steps"] for repeat in row["repeats"]]


def shares(row: Row) -> list[float]:
    """Of the bytes of tensors, in each repeat."""
    return [repeat["bytes"] / repeat["tensor_bytes"] for repeat in row["repeats"]]


def share(row: Row) -> float:
    """Of the bytes of tensors, in the median repeat."""
    return statistics.median(shares(row))


def tensors(row: Row) -> float:
    """Bytes that the workers give to others in one step of all of them, in the median repeat."""
    return statistics.median(repeat["tensor_bytes"] for repeat in row["repeats"]) / row["steps"]


def step_s(row: Row) -> float:
    return statistics.median(repeat["seconds"] for repeat in row["repeats"]) / row["steps"]


def table(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        name = f"{row['strategy']}, {row['workers']} × {row['params'] / 1e6:g} M"
        met, reports, samples = row["meeting"], per_step(row, REPORTS), per_step(row, SAMPLES)
        lines.append([
            name if row["metrics"] else f"{name}, no metrics", str(_messages(met)), f"{met['bytes'] / 1e3:.1f}",
            spread(per_step(row), ".0f"), f"{statistics.median(reports):.0f}", f"{statistics.median(samples):.0f}",
            f"{tensors(row) / 1e6:.2f}", _percents(shares(row)),
            spread([1e3 * repeat["seconds"] / row["steps"] for repeat in row["repeats"]], ".0f"),
        ])  # fmt: skip
    first = rows[0]
    asked = ", ".join(f"{kind} {messages}" for kind, (messages, _) in first["meeting"]["by_kind"].items())
    return Table(
        headings=["strategy, workers × parameters", "set-up: requests", "set-up: kB", "bytes in a step",
                  "of these: reports", "of these: samples on lease", "MB of tensors in a step", "share", "step: ms"],
        lines=lines,
        note="What passes through the coordinator, in and out, of all workers together. Set-up: until the first step "
        f"can begin, the requests of all processes and the bytes of these and their answers (of {first['strategy']} "
        f"with {first['workers']} workers: {asked}). Bytes in a step: counted over whole turns, until the last step is "
        "over; reports are the metrics that every process sends by the clock, samples on lease the blocks that "
        "workers ask for and give back, medians. Tensors: what the workers send to others, without what they pull "
        f"from servers. Share: bytes in a step over these. ps has {STRATEGIES['ps']} servers",
        repeats=f"{_turns(rows)}, interleaved; median (least to greatest)",
    )  # fmt: skip


def draw(rows: Sequence[Row], figure: Any) -> None:
    by_workers, by_params, kinds = figure.subplots(1, 3)
    watched = [row for row in rows if row["metrics"]]
    params, workers = (_commonest([row[key] for row in watched]) for key in ("params", "workers"))
    alike = [row for row in watched if row["params"] == params]
    most = f"{params / 1e6:g} M parameters: at most\n{_percent(max(map(share, alike)))} of the tensors' bytes"
    _lines(by_workers, alike, "workers", most, "workers")
    by_workers.set_xticks(sorted({row["workers"] for row in watched}))
    by_workers.legend(fontsize=8, title="dashed: tensors between workers\nsolid: through the coordinator",
                      title_fontsize=8, loc="center right")  # fmt: skip
    alike = [row for row in watched if row["workers"] == workers]
    ring = sorted((row for row in alike if row["strategy"] == "ring"), key=lambda row: row["params"])
    grown, longer, passed = (
        value(ring[-1]) / value(ring[0]) for value in (tensors, step_s, lambda row: statistics.median(per_step(row)))
    )
    growth = (
        f"{workers} workers, by the model's size: the ring's tensors × {grown:.0f},\n"
        f"its steps × {longer:.1f} as long, its coordinator's bytes × {passed:.1f}"
    )
    _lines(by_params, alike, "params", growth, "parameters")
    by_params.set_xscale("log")
    _bars(kinds, [row for row in rows if (row["params"], row["workers"]) == (params, workers)])
    kinds.set_title(f"What passes through it:\n{workers} workers, {params / 1e6:g} M parameters", fontsize=10)


def _lines(axis: Any, rows: Sequence[Row], key: str, title: str, x: str) -> None:
    from . import figure

    for number, name in enumerate(_names(rows)):
        mine = sorted((row for row in rows if row["strategy"] == name), key=lambda row: row[key])
        color = figure.COLORS[COLORS[name]]
        odd = number % 2  # neighbours may lie on each other: dashes fill each other's gaps, thin lines thick ones
        figure.line(axis, {row[key]: per_step(row) for row in mine}, name, color=color, linewidth=1.2 if odd else 2.5)
        axis.plot([row[key] for row in mine], list(map(tensors, mine)), linestyle=(4 * odd, (4, 4)), marker="o",
                  markersize=7 if odd else 3.5, color=color, linewidth=1.5)  # fmt: skip
    figure.dress(axis, title, x, "bytes in a step of all workers", legend=False)
    axis.set_yscale("log")


def _bars(axis: Any, rows: Sequence[Row]) -> None:
    """What passes in a step, by kind, with metrics and without."""
    labels = [row["strategy"] if row["metrics"] else f"{row['strategy']},\nno metrics" for row in rows]
    left = [0.0] * len(rows)
    for label, kinds in (("reports", REPORTS), ("samples on lease", SAMPLES), ("the rest", None)):
        if kinds is None:
            values = [statistics.median(per_step(row)) - before for row, before in zip(rows, left, strict=True)]
        else:
            values = [statistics.median(per_step(row, kinds)) for row in rows]
        axis.barh(range(len(rows)), values, left=left, label=label)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axis.annotate(f"{total:.0f}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_xlabel("bytes in a step of all workers")
    axis.grid(alpha=0.3, axis="x")
    axis.legend(fontsize=8)


def _turns(rows: Sequence[Row]) -> str:
    repeats, least, most = len(rows[0]["repeats"]), *(worst(row["steps"] for row in rows) for worst in (min, max))
    return f"{repeats} turn{'s' * (repeats > 1)} of {least if least == most else f'{least} to {most}'} steps"


def _messages(passed: Row) -> int:
    """Requests of all kinds."""
    return sum(messages for messages, _ in passed["by_kind"].values())


def _commonest(values: Sequence[int]) -> int:
    """The larger one of several."""
    return max(set(values), key=lambda value: (values.count(value), value))


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["strategy"] for row in rows))


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value == 0 or value >= 1e-6 else "less than 0.0001 %"


def _percents(values: Sequence[float]) -> str:
    """Median with least and greatest, unless these are equal."""
    middle, low, high = (f"{100 * of(values):.2g}" for of in (statistics.median, min, max))
    return f"{middle} %" if low == high else f"{middle} % ({low} to {high})"


CLAIM = Claim(
    number=13,
    name="coordinator",
    says="A coordinator is still needed by all-reduce, but carries almost nothing.",
    rule="holds if every process of every run meets the others through it, and what passes through it in a step, in "
    f"and out, with metrics, is less than {SHARE:.0%} of the bytes of tensors that the workers send in it, wherever "
    f"the model has {LARGE / 1e6:g} M parameters or more; only if, where some strategies do so; fails otherwise. That "
    "all processes meet through it follows from the design (hora.init() returns no sooner) and is only checked: what "
    "is measured, and decides, are the bytes.",
    needs="nothing: 2, 4 and 8 workers, which take turns",
    minutes=(1, 6),
    measure=measure,
    judge=judge,
    table=table,
    draw=draw,
    figure_size=(13.0, 4.8),
    changed="After a quick trial (16 steps a turn; the ring at most 0.0038 %, local:every=8 0.014 %) turns were made "
    "longer and got a lead of steps that are not counted, so that a turn holds as many reports as a run that goes on. "
    "Since then the rule says that being needed follows from the design; neither could have changed the verdict.",
)
