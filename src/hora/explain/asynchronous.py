"""The race of asynchronous workers, tick by tick: who computes on which version, and what its gradient does in the end.

Versions, lags and values are those of the real server (race.py).
"""

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
MOST_UPDATES = 400
_ROOMY = 2  # up to so many workers the cells spell everything out


def lines(workers: int) -> list[str]:
    """Raises ValueError for fewer than `MIN_WORKERS` or more than `MAX_WORKERS`."""
    if not MIN_WORKERS <= workers <= MAX_WORKERS:
        raise ValueError(f"explain async draws {MIN_WORKERS} to {MAX_WORKERS} workers, got {workers}")
    even, uneven, ticks = even_paces(workers), uneven_paces(workers), 5 * workers - 1
    together, apart = race(even, Rules(mode="sync"), ticks), race(even, Rules(mode="async"), ticks)
    slow = uneven[-1].ticks
    late, waited = (race(uneven, Rules(mode=mode), slow + 7) for mode in ("async", "sync"))
    bounded = race(uneven, Rules(mode="ssp", staleness=STALENESS), 2 * slow + 1)
    unbounded = race(uneven, Rules(mode="async"), bounded[-1].time)
    meeting = race(uneven, Rules(mode="async", sync_every=SYNC_EVERY), 2 * slow + 2)
    most = (workers - 1) * (2 * STALENESS + 1)
    return [
        *title(f"asynchronous training: the race of {workers} workers for one server"), "",
        *wrap(_IDEA.format(start=number(START), rate=RATE)), "",
        *_picture(workers), "",
        *wrap(_LEGEND if workers <= _ROOMY else _SHORT_LEGEND), "",
        *_part("A. Synchronous: the server waits for all", _SYNC, together),
        *wrap(f"After {ticks} ticks: {_count(together)}, {_updates(together)}, w = {number(together[-1].w)}. Every "
              "gradient was computed on the version that it changed."), "",
        *_part("B. Asynchronous: the server waits for nobody", _ASYNC, apart),
        *wrap(f"After {ticks} ticks: {_count(apart)}, {_updates(apart)}, w = {number(apart[-1].w)}: as many gradients "
              f"as in A, more updates, and {_nearer(apart, together)}. All workers are equally fast, and still every "
              f"gradient but each worker's first comes {_late_by(workers - 1)}: so many others push in between."), "",
        *_part("C. A slow worker", _SLOW.format(slow=workers - 1, ticks=slow), late),
        *_undoing(late, workers - 1), "",
        *wrap(f"Synchronous, these workers would have got through {_count(waited)} in these {late[-1].time} ticks, "
              f"here they got through {_count(late)}. w would be {number(waited[-1].w)}, here it is "
              f"{number(late[-1].w)}."), "",
        *_part(f"D. Bounded staleness: ps:mode=ssp,staleness={STALENESS}", _SSP.format(s=STALENESS), bounded),
        *wrap(f"The largest lag was {_largest(bounded)}; without the bound it would have been {_largest(unbounded)} in "
              f"as many ticks. However slow the slowest is, it is at most (n − 1)(2s + 1) = {most}. The price is the "
              "time in which the fast wait."), "",
        *_part(f"E. Meeting now and then: ps:mode=async,sync_every={SYNC_EVERY}", _EVERY.format(k=SYNC_EVERY), meeting),
        *wrap("After a meeting all workers stand on one version, and what was read before it is forgotten: no lag "
              "reaches across."), "",
        *_part_without_table("F. Momentum makes it worse", _MOMENTUM), *_momentum(even), "",
        *_part_without_table("G. Corrections", _CORRECT), *_corrections(uneven), "",
        *heading("Summary"), "", *facts(_summary(workers, waited, late)),
    ]  # fmt: skip


def even_paces(workers: int) -> list[WorkerPace]:
    """All equally fast, one tick after another."""
    return [WorkerPace(ticks=workers, start=rank) for rank in range(workers)]


def uneven_paces(workers: int) -> list[WorkerPace]:
    """The last one is slow: the others together push four times before its first gradient is there."""
    fast = [WorkerPace(ticks=2 * (workers - 1), start=2 * rank) for rank in range(workers - 1)]
    return [*fast, WorkerPace(ticks=2 * (workers - 1) + 7)]


# ── the tables ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _part(head: str, text: str, moments: Sequence[RaceEvent]) -> list[str]:
    return [*_part_without_table(head, text), *table(moments), ""]


def _part_without_table(head: str, text: str) -> list[str]:
    return [rule(head), "", *wrap(text), ""]


def table(moments: Sequence[RaceEvent]) -> list[str]:
    """A line for each tick at which somebody read or pushed."""
    workers = max(rank for moment in moments for rank in moment.reads) + 1
    base: dict[int, int] = {}
    rows = [["time", *(f"worker {rank}" for rank in range(workers)), "server"]]
    for moment in moments:
        cells = [_cell(moment, rank, base.get(rank), workers <= _ROOMY) for rank in range(workers)]
        rows.append([f"{moment.time:>4}", *cells, f"v{moment.version:<3} w = {number(moment.w)}"])
        base |= moment.reads
    widths = [max(len(row[column]) for row in rows) for column in range(workers + 1)]
    return ["  " + "   ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows]


def _cell(moment: RaceEvent, rank: int, base: int | None, roomy: bool) -> str:
    """What one worker does at that tick; `base` is what it computes on."""
    push = moment.pushes.get(rank)
    if push is not None:
        text = f"{number(push.gradient)} of v{push.base}, lag {push.lag}"
        if not roomy:
            return f"{text} ‖" if rank in moment.waits else text
        return f"pushes {text}{', waits' if rank in moment.waits else ''}"
    if rank in moment.reads:
        return f"reads v{moment.reads[rank]}"
    if rank in moment.waits:
        return "waits" if roomy else "‖"
    if base is None:
        return ""
    return f"computes on v{base}" if roomy else f"· v{base}"


def number(value: float) -> str:
    """Three digits are enough to see where w goes; a true minus."""
    return f"{round(value, 9) + 0.0:.3g}".replace("-", "−")


def _picture(workers: int) -> list[str]:
    names = "   ".join(f"worker {rank}" for rank in range(workers))
    middle = len(names) // 2
    left = " " * 16
    return [
        f"{left}{names}",
        f"{left}{'gradients │'.rjust(middle)} ▲ parameters",
        f"{left}{'▼'.rjust(middle)} │",
        f"{left}{' ' * (middle - 4)}server    version: updates so far",
    ]


# ── what the races show ────────────────────────────────────────────────────────────────────────────────────────────


def _count(moments: Sequence[RaceEvent]) -> str:
    return f"{sum(len(moment.pushes) for moment in moments)} gradients"


def _updates(moments: Sequence[RaceEvent]) -> str:
    return f"{moments[-1].version} updates"


def _largest(moments: Sequence[RaceEvent]) -> int:
    return max(push.lag for moment in moments for push in moment.pushes.values())


def _late_by(lag: int) -> str:
    return "one update late" if lag == 1 else f"{lag} updates late"


def _nearer(these: Sequence[RaceEvent], those: Sequence[RaceEvent]) -> str:
    """Where they ended, against the others."""
    here, there = abs(these[-1].w), abs(those[-1].w)
    if here < there:
        return "nearer to the minimum at the end"
    return "no nearer to the minimum at the end" if here == there else "further from the minimum at the end"


def _undoing(moments: Sequence[RaceEvent], slow: int) -> list[str]:
    """What the slow worker's first gradient did."""
    before, moment = next((a, b) for a, b in itertools.pairwise(moments) if slow in b.pushes)
    push = moment.pushes[slow]
    back = next((m.version for m in moments if m.time > moment.time and abs(m.w) <= abs(before.w)), None)
    until = f"it takes until v{back}" if back is not None else "it takes longer than is drawn here"
    return wrap(
        f"At tick {moment.time} the slow gradient comes: {number(push.gradient)}, right when w was "
        f"{number(push.gradient)}, {_late_by(push.lag)}. A fresh one would have been {number(before.w)}. It throws w "
        f"from {number(before.w)} to {number(moment.w)}, and {until} before w is as near to the minimum again."
    )


def _momentum(even: Sequence[WorkerPace]) -> list[str]:
    """How many updates it takes until w stays near the minimum, synchronous and asynchronous."""
    found = [f"  {'momentum':<11}{'learning rate':<13}{'sync':>9}{'async':>9}   updates"]
    for momentum in MOMENTA:
        rate = RATE / (len(even) - 1) * (1 - momentum)
        counts = [updates_until_near(even, mode, momentum, rate) for mode in ("sync", "async")]
        found.append(f"  {momentum:<11g}{number(rate):<13}" + "".join(f"{count:>9}" for count in counts))
    return found


def updates_until_near(even: Sequence[WorkerPace], mode: str, momentum: float, rate: float) -> int:
    """From that update on |w| stays below `NEAR`."""
    moments = race(even, Rules(mode=mode), MOST_UPDATES * len(even), momentum, rate)
    return max(moment.version for moment in moments if abs(moment.w) >= NEAR) + 1


def _corrections(uneven: Sequence[WorkerPace]) -> list[str]:
    """The slow worker's first gradient under each correction."""
    slow, rows = len(uneven) - 1, []
    for correct in ("none", "scale", "dc"):
        moments = race(uneven, Rules(mode="async", correct=correct, dc_lambda=DC_LAMBDA), uneven[-1].ticks)
        before, after = moments[-2:]
        push = after.pushes[slow]
        applied = (before.w - after.w) / RATE
        rows.append((f"correct={correct}", push, applied, before.w, after.w))
    lines = [f"  {'':<15}{'comes':>8}{'lag':>6}{'counts as':>12}{'fresh':>9}{'w before':>12}{'w after':>10}"]
    for name, push, applied, before_w, after_w in rows:
        cells = f"{number(push.gradient):>8}{push.lag:>6}{number(applied):>12}{number(before_w):>9}"
        lines.append(f"  {name:<15}{cells}{number(before_w):>12}{number(after_w):>10}")
    return lines


def _summary(workers: int, waited: Sequence[RaceEvent], late: Sequence[RaceEvent]) -> list[tuple[str, str]]:
    return [
        ("won", f"time: nobody waits. In C {_count(late)} against {_count(waited)} in the same {late[-1].time} ticks; "
         "nothing where all are equally fast."),
        ("lost", "freshness: a gradient is right for the version it was computed on, and is applied to a later one. "
         f"With n equal workers it comes n − 1 updates late, here {workers - 1}; from a slow one as late as it is "
         f"slow: {_largest(late)} in C."),
        ("the price", "the larger lag times learning rate, the further a late gradient throws the parameters; beyond "
         "some lag training breaks down. Momentum carries a late gradient on into later updates."),
        ("bounded by", "staleness=s: no worker is more than s steps ahead of the slowest; sync_every=k: all meet after "
         "every k-th step; fewer workers; a smaller learning rate."),
        ("corrected by", "scale, which never breaks down and is slow; dc, which estimates the fresh gradient and wants "
         "its λ to fit the size of the gradients."),
        ("try it", "hora run -n 4 --strategy ps:mode=async train.py; hora bench staleness; hora claims accuracy."),
    ]  # fmt: skip


# ── the words ──────────────────────────────────────────────────────────────────────────────────────────────────────

_IDEA = (
    "The model is one number, w, that is to become 0: the loss is w²/2, so the gradient at w is w itself. It begins at "
    "{start}, and the server takes a gradient g by w ← w − {rate} g. A gradient thus says where its worker stood when "
    "it read. Whether it is still right when it comes is the question. The server here is the one that trains, and "
    "what is shown is what it did."
)

_LEGEND = (
    "How to read the tables: v3 is version 3, the parameters after three updates. 'pushes 16 of v0, lag 1' is a "
    "gradient of 16, computed on version 0, to which one update has come since. Who has pushed reads the version on "
    "the same line and goes on with it, unless it waits."
)

_SHORT_LEGEND = (
    "How to read the tables: v3 is version 3, the parameters after three updates. '16 of v0, lag 1' is the push of a "
    "gradient of 16, computed on version 0, to which one update has come since. '· v0' computes on version 0. Who has "
    "pushed reads the version on the same line and goes on with it, unless it waits, ‖."
)

_SYNC = (
    "A step takes the mean of everybody's gradients. Who is early waits for the last; then all read the same version."
)

_ASYNC = "The same workers, equally fast. Each gradient is applied as it comes, and its worker goes on at once."

_SLOW = (
    "Now worker {slow} takes {ticks} ticks for a gradient, as a loaded or older machine does. It holds nobody back, "
    "but the others have moved on when it comes."
)

_SSP = (
    "The same workers. Who is more than {s} step ahead of the slowest may not read until that one has pushed: so the "
    "slow one cannot fall further behind."
)

_EVERY = (
    "The same workers again. After every {k} steps of its own a worker waits until all others have taken as many; "
    "between two meetings they race."
)

_MOMENTUM = (
    "The races of A and B again, at a learning rate that bears the lag: 0.5 / (n − 1), times 1 − momentum, so that a "
    "gradient counts the same in the long run. Shown is how many updates it takes until |w| stays below 1. The "
    "server's velocity keeps a late gradient and applies a part of it again and again, each time later still."
)

_CORRECT = (
    "The slow worker's first gradient of C, and what the server makes of it. scale divides by 1 + lag. dc adds "
    "λ g² (w now − w then), an estimate of how the gradient has changed meanwhile; λ is 1/256 here, for which it is "
    "exact at g = 16, and for smaller gradients it does less."
)
