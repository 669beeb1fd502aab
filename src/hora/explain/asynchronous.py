"""Explanation of asynchronous training: workers race for one server, tick by tick.

Versions, lags and values are those of the real server (race.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..server.state import Rules
from .race import RATE, START, RaceEvent, WorkerPace, race
from .text import facts, heading, rule, title, wrap

MIN_WORKERS, MAX_WORKERS = 2, 4
STALENESS = 1
SYNC_EVERY = 2
DC_LAMBDA = 1 / START**2
MOMENTA = (0.0, 0.5, 0.9)
NEAR = 1.0
MAX_UPDATES = 400
_EASY_WORKERS = 2  # up to here the cells spell everything out

Events = Sequence[RaceEvent]


def lines(workers: int) -> list[str]:
    """ValueError for fewer than `MIN_WORKERS` or more than `MAX_WORKERS`."""
    if not MIN_WORKERS <= workers <= MAX_WORKERS:
        raise ValueError(f"explain async draws {MIN_WORKERS} to {MAX_WORKERS} workers, got {workers}")
    even, uneven, ticks = even_paces(workers), uneven_paces(workers), 5 * workers - 1
    sync, asynchronous = race(even, Rules(mode="sync"), ticks), race(even, Rules(mode="async"), ticks)
    slow = uneven[-1].ticks
    late, late_sync = (race(uneven, Rules(mode=mode), slow + 7) for mode in ("async", "sync"))
    bounded = race(uneven, Rules(mode="ssp", staleness=STALENESS), 2 * slow + 1)
    unbounded = race(uneven, Rules(mode="async"), bounded[-1].time)
    periodic = race(uneven, Rules(mode="async", sync_every=SYNC_EVERY), 2 * slow + 2)
    parts = [
        ("A. Synchronous: the server waits for all workers", _SYNC, table(sync),
         f"After {ticks} ticks: {_outcome(sync)}. Every gradient was computed on the version it updated."),
        ("B. Asynchronous: the server waits for no worker", _ASYNC, table(asynchronous),
         f"After {ticks} ticks: {_outcome(asynchronous)}: as many gradients as in A, more updates, and "
         f"{_nearer(asynchronous, sync)}. All workers are equally fast, and still every gradient but each worker's "
         f"first comes {_late_by(workers - 1)}: so many others push in between."),
        ("C. A slow worker", _SLOW.format(slow=workers - 1, ticks=slow), table(late),
         f"{_setback(late, workers - 1)} Synchronous, these workers would have computed {_count(late_sync)} in these "
         f"{late[-1].time} ticks instead of {_count(late)}, and w would be {number(late_sync[-1].w)} instead of "
         f"{number(late[-1].w)}."),
        (f"D. Bounded staleness: ps:mode=ssp,staleness={STALENESS}", _SSP.format(s=STALENESS), table(bounded),
         f"The largest lag was {_largest_lag(bounded)}; without the bound it would have been {_largest_lag(unbounded)} "
         "in as many ticks. However slow the slowest is, it is at most (n − 1)(2s + 1) = "
         f"{(workers - 1) * (2 * STALENESS + 1)}. The price is the time that fast workers wait."),
        (f"E. Periodic synchronisation: ps:mode=async,sync_every={SYNC_EVERY}", _EVERY.format(k=SYNC_EVERY),
         table(periodic),
         "After a synchronisation all workers have one version, and no gradient from before it is left: no lag reaches "
         "across."),
        ("F. Momentum makes it worse", _MOMENTUM, _momentum(even), ""),
        ("G. Corrections", _CORRECT, _corrections(uneven), ""),
    ]  # fmt: skip
    lines = [*title(f"asynchronous training: the race of {workers} workers for one server"), ""]
    lines += [*wrap(_IDEA.format(start=number(START), rate=RATE)), "", *_picture(workers), ""]
    lines += [*wrap(_LEGEND if workers <= _EASY_WORKERS else _SHORT_LEGEND), ""]
    for head, text, rows, comment in parts:
        lines += [rule(head), "", *wrap(text), "", *rows, "", *wrap(comment), *([""] if comment else [])]
    return [*lines, *heading("Summary"), "", *facts(_summary(workers, late_sync, late))]


def even_paces(workers: int) -> list[WorkerPace]:
    """All equally fast, one tick after another."""
    return [WorkerPace(ticks=workers, start=rank) for rank in range(workers)]


def uneven_paces(workers: int) -> list[WorkerPace]:
    """The last one is slow: the others together push four times before its first gradient."""
    fast = [WorkerPace(ticks=2 * (workers - 1), start=2 * rank) for rank in range(workers - 1)]
    return [*fast, WorkerPace(ticks=2 * (workers - 1) + 7)]


def table(events: Events) -> list[str]:
    """A line for each tick at which a worker read or pushed."""
    workers = max(rank for event in events for rank in event.reads) + 1
    base: dict[int, int] = {}
    rows = [["time", *(f"worker {rank}" for rank in range(workers)), "server"]]
    for event in events:
        cells = [_cell(event, rank, base.get(rank), workers <= _EASY_WORKERS) for rank in range(workers)]
        rows.append([f"{event.time:>4}", *cells, f"v{event.version:<3} w = {number(event.w)}"])
        base |= event.reads
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "   ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cell(event: RaceEvent, rank: int, base: int | None, easy: bool) -> str:
    """What one worker does at that tick; `base` is the version that it computes on."""
    push, waits = event.pushes.get(rank), rank in event.waits
    if push is not None:
        text = f"{number(push.gradient)} of v{push.base}, lag {push.lag}"
        if easy:
            return f"pushes {text}{', waits' if waits else ''}"
        return f"{text} ‖" if waits else text
    if rank in event.reads:
        return f"reads v{event.reads[rank]}"
    if waits:
        return "waits" if easy else "‖"
    if base is None:
        return ""
    return f"computes on v{base}" if easy else f"· v{base}"


def number(value: float) -> str:
    """Three digits, with a true minus."""
    return f"{round(value, 9) + 0.0:.3g}".replace("-", "−")


def _picture(workers: int) -> list[str]:
    names = "   ".join(f"worker {rank}" for rank in range(workers))
    middle = len(names) // 2
    lines = [
        names,
        f"{'gradients │'.rjust(middle)} ▲ parameters",
        f"{'▼'.rjust(middle)} │",
        f"{' ' * (middle - 4)}server    version: updates so far",
    ]
    return [" " * 16 + line for line in lines]


def _count(events: Events) -> str:
    return f"{sum(len(event.pushes) for event in events)} gradients"


def _outcome(events: Events) -> str:
    return f"{_count(events)}, {events[-1].version} updates, w = {number(events[-1].w)}"


def _largest_lag(events: Events) -> int:
    return max(push.lag for event in events for push in event.pushes.values())


def _late_by(lag: int) -> str:
    return "one update late" if lag == 1 else f"{lag} updates late"


def _nearer(these: Events, those: Events) -> str:
    here, there = abs(these[-1].w), abs(those[-1].w)
    word = "nearer to" if here < there else "no nearer to" if here == there else "further from"
    return f"{word} the minimum at the end"


def _setback(events: Events, slow: int) -> str:
    """What the slow worker's first gradient did."""
    before, event = next((a, b) for a, b in itertools.pairwise(events) if slow in b.pushes)
    push = event.pushes[slow]
    back = next((e.version for e in events if e.time > event.time and abs(e.w) <= abs(before.w)), None)
    until = f"it takes until v{back}" if back is not None else "it takes longer than is drawn here"
    return (
        f"At tick {event.time} the slow gradient arrives: {number(push.gradient)}, correct when w was "
        f"{number(push.gradient)}, {_late_by(push.lag)}. A fresh one would have been {number(before.w)}. It moves w "
        f"from {number(before.w)} to {number(event.w)}, and {until} before w is as near to the minimum again."
    )


def _momentum(even: Sequence[WorkerPace]) -> list[str]:
    """The number of updates until w stays near the minimum, synchronous and asynchronous."""
    lines = [f"  {'momentum':<11}{'learning rate':<13}{'sync':>9}{'async':>9}   updates"]
    for momentum in MOMENTA:
        rate = RATE / (len(even) - 1) * (1 - momentum)
        counts = [updates_until_near(even, mode, momentum, rate) for mode in ("sync", "async")]
        lines.append(f"  {momentum:<11g}{number(rate):<13}" + "".join(f"{count:>9}" for count in counts))
    return lines


def updates_until_near(even: Sequence[WorkerPace], mode: str, momentum: float, rate: float) -> int:
    """From that update on |w| stays below `NEAR`."""
    events = race(even, Rules(mode=mode), MAX_UPDATES * len(even), momentum, rate)
    return max(event.version for event in events if abs(event.w) >= NEAR) + 1


def _corrections(uneven: Sequence[WorkerPace]) -> list[str]:
    """The slow worker's first gradient under each correction."""
    lines = [f"  {'':<15}{'comes':>8}{'lag':>6}{'counts as':>12}{'fresh':>9}{'w before':>12}{'w after':>10}"]
    for correct in ("none", "scale", "dc"):
        events = race(uneven, Rules(mode="async", correct=correct, dc_lambda=DC_LAMBDA), uneven[-1].ticks)
        before, after = events[-2:]
        push = after.pushes[len(uneven) - 1]
        applied = (before.w - after.w) / RATE
        cells = f"{number(push.gradient):>8}{push.lag:>6}{number(applied):>12}{number(before.w):>9}"
        lines.append(f"  {f'correct={correct}':<15}{cells}{number(before.w):>12}{number(after.w):>10}")
    return lines


def _summary(workers: int, sync: Events, late: Events) -> list[tuple[str, str]]:
    return [
        ("won", f"time: no worker waits. In C {_count(late)} against {_count(sync)} in the same {late[-1].time} ticks; "
         "nothing where all are equally fast."),
        ("lost", "freshness: a gradient is correct for the version it was computed on, and is applied to a later one. "
         f"With n equal workers it comes n − 1 updates late, here {workers - 1}; from a slow one as late as it is "
         f"slow: {_largest_lag(late)} in C."),
        ("the price", "the larger lag times learning rate, the further a late gradient moves the parameters away; "
         "beyond some lag training breaks down. Momentum carries a late gradient on into later updates."),
        ("bounded by", "staleness=s: no worker is more than s steps ahead of the slowest; sync_every=k: all workers "
         "synchronise after every k-th step; fewer workers; a smaller learning rate."),
        ("corrected by", "scale, which never breaks down and is slow; dc, which estimates the fresh gradient and needs "
         "a λ that fits the size of the gradients."),
        ("try it", "hora run -n 4 --strategy ps:mode=async train.py; hora bench staleness; hora claims accuracy."),
    ]  # fmt: skip


_IDEA = (
    "The model is one number, w, and the loss is w²/2, so the gradient at w is w itself and the minimum is at 0. w "
    "begins at {start}, and the server applies a gradient g by w ← w − {rate} g. A gradient is thus the w that its "
    "worker has read. Is it still correct when it arrives? The server here is the one that trains, and the tables "
    "show what it did."
)

_TABLES = (
    "How to read the tables: v3 is version 3, the parameters after three updates. '{push}16 of v0, lag 1' {what} a "
    "gradient of 16, computed on version 0, to which one update has come since. {more}A worker that has pushed reads "
    "the version on the same line and continues with it, unless it waits"
)

_LEGEND = _TABLES.format(push="pushes ", what="is", more="") + "."

_SHORT_LEGEND = _TABLES.format(push="", what="is the push of", more="'· v0' computes on version 0. ") + ", ‖."

_SYNC = "A step takes the mean of all gradients. Early workers wait for the last; then all read the same version."

_ASYNC = "The same workers, equally fast. Each gradient is applied when it arrives, and its worker continues at once."

_SLOW = (
    "Now worker {slow} takes {ticks} ticks for a gradient, like a loaded or older machine. It delays no other worker, "
    "but the parameters have moved on when its gradient arrives."
)

_SSP = (
    "The same workers. A worker that is more than {s} step ahead of the slowest may not read until that one has "
    "pushed, so the slow one cannot fall further behind."
)

_EVERY = (
    "The same workers. After every {k} steps of its own a worker waits until all others have taken as many; in "
    "between they race."
)

_MOMENTUM = (
    "The races of A and B again, at a learning rate that is stable with the lag: 0.5 / (n − 1), times 1 − momentum, "
    "so that a gradient counts the same in the long run. The table shows the number of updates until |w| stays below "
    "1. The server's velocity keeps a late gradient and applies a part of it again and again, each time later still."
)

_CORRECT = (
    "The slow worker's first gradient of C, and what the server makes of it. scale divides by 1 + lag. dc adds λ g² "
    "(w now − w then), an estimate of how the gradient has changed meanwhile; λ is 1/256 here, which is exact at g = "
    "16 and does less for smaller gradients."
)
