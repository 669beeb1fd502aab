"""Panel: a RunStatus as a few lines for a terminal.

     mnist-3  ring, 4 workers                                                         running for 2 min 14 s
     step 1,284   epoch 2 of 3   ━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  43 %   2 min 58 s left
     loss 0.3124   accuracy 0.9131                                            12,840 samples/s   10.1 steps/s
     rank 0  ████████████████▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  412 ms   3,210/s
     rank 1  ████████████████████████████████████████████████████████▒▒▒▒▒▒▒▒  412 ms   3,210/s  ▲ slow: 4.1×
     ! 12 s ago  rank 1 (host a, pid 7) is slow: 412 ms of compute per step, the others 101 ms
     http://127.0.0.1:8320/runs/mnist-3                          █ compute   ▒ communication   ░ waiting

Pure: the same status gives the same lines. Text from the user's script is sanitised first.
"""

from __future__ import annotations

import bisect
import functools
import io
import itertools
import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hora.monitor.status import RunEvent, RunStatus

from .bars import BLOCKS, QUIET, bars, num_rows
from .format import clock, count, event_text, number, percent, rate, sanitize

MAX_WIDTH = 100
MAX_EVENTS = 2
MAX_VALUES = 6
_MORE = len("   … 99 more")
_BAD = {"died": "red", "slow": "yellow", "skipped": "yellow", "stop": "yellow"}


def render(
    status: RunStatus, *, width: int, height: int, address: str | None, color: bool, events: Sequence[RunEvent] = ()
) -> list[str]:
    """The panel's lines, none wider than `width` (at least 40). With the cursor's line they take at most half of the
    terminal's `height`; workers without a line are counted. The newest of `events` is last."""
    width = max(20, min(width, MAX_WIDTH) - 1)  # the last column stays free: some terminals wrap there
    room = max(3, height // 2 - 1)
    address_line, legend = _foot(status, address, width)
    parts = {
        "head": [_head(status, width)],
        "top": [_progress(status, width), _values(status, width)],
        "bars": [],
        "more": [line for line in (_rounds(status), _lags(status)) if line is not None],
        "events": _events(list(events)[-MAX_EVENTS:], status),
        "address": address_line,
        "legend": legend,
    }

    def left() -> int:
        return room - sum(map(len, parts.values()))

    rows = num_rows(status)
    least = min(rows, 4 if status.servers else 2)
    shortened = (
        ("legend", 0, rows),
        ("events", 1, rows),
        ("events", 0, least),
        ("more", 0, least),
        ("head", 0, min(1, rows)),
    )
    for name, keep, wanted in shortened:
        if left() < wanted:  # this part makes room for the workers
            del parts[name][: max(0, len(parts[name]) - keep)]
    parts["bars"] = bars(status, max(0, left()), width)
    return _print([line for part in parts.values() for line in part][:room], width, color)


# -- the lines -----------------------------------------------------------------------------------------------------


def _head(status: RunStatus, width: int) -> Text:
    left = Text.assemble(" ", (sanitize(status.run, 40) or "run", "bold"))
    strategy, algorithm = sanitize(status.strategy, 40), sanitize(status.algorithm, 20)
    how = [f"{strategy} ({algorithm})" if strategy and algorithm not in ("", strategy) else strategy or algorithm]
    numbers = {"worker": status.size, "server": len(status.servers)}
    processes = [count(number, noun) for noun, number in numbers.items() if number]
    left.append(f"  {', '.join(filter(None, [*how, *processes]))}", QUIET)
    took = clock(status.seconds)
    if status.state != "running":
        waits = status.waiting and status.state == "starting"
        state = [f"starting: {status.waiting}", "starting"] if waits else [status.state]
        return _ends(left, [Text(sanitize(each, 60), QUIET) for each in state], width)
    return _ends(left, [Text(text, "green") for text in (f"running for {took}", f"running {took}", took)], width)


def _progress(status: RunStatus, width: int) -> Text:
    left = Text.assemble(" step ", (f"{status.step:,}", "bold"))
    if status.epoch is not None:  # they are counted from 0
        word, of = ("epoch ", " of ") if width >= 60 else ("", "/")
        left.append(f"   {word}{status.epoch + 1:,}" + (f"{of}{status.epochs:,}" if status.epochs else ""))
    if status.progress is None:
        return left
    done = min(1.0, max(0.0, status.progress))
    share = Text(f"{percent(done):>5}")
    right = [share]
    if status.eta_s is not None and done < 1:
        until = clock(status.eta_s)
        right = [Text.assemble(share, (f"{gap}{until} left", QUIET)) for gap in ("   ", "  ")] + right
    length = width - left.cell_len - right[0].cell_len - 5
    if length < 6:
        return _ends(left, right, width)
    full = int(done * length * 2)  # in halves of a column
    bar = Text("━" * (full // 2), "green")
    if full < 2 * length:
        bar.append("╸" if full % 2 else "", "green")
        bar.append("─" * (length - full // 2 - full % 2), QUIET)
    return _ends(Text.assemble(left, "   ", bar), right[:1], width)


def _values(status: RunStatus, width: int) -> Text:
    """Logged values, the loss first, and the speed, which is shortened or dropped if there is no room."""
    speeds = [Text()]
    if status.samples_per_s > 0:
        samples = Text.assemble((rate(status.samples_per_s), "bold"), " samples/s")
        steps = Text(f"   {rate(status.steps_per_s)} steps/s", QUIET)
        speeds = [Text.assemble(samples, steps), samples, Text(f"{rate(status.samples_per_s)}/s", "bold")]
        if status.steps_per_s <= 0 or width < 70:
            del speeds[0]
    names = sorted(status.values, key=lambda name: (name != "loss", "loss" not in name))
    if not names:
        quiet = "nothing logged" if status.state == "ended" else "nothing logged yet"
        return _ends(Text(f" {quiet}", QUIET), speeds, width)
    pieces = [_value(name, status.values[name]) for name in names[:MAX_VALUES]]
    speed = next((text for text in speeds if pieces[0].cell_len + text.cell_len + 3 <= width), Text())
    room = width - speed.cell_len - 3
    shown = len(pieces)
    while shown > 1 and sum(piece.cell_len + 2 for piece in pieces[:shown]) + _MORE * (shown < len(names)) > room:
        shown -= 1
    line = Text("  ").join(pieces[:shown])
    if shown < len(names) and line.cell_len + _MORE <= room:
        line.append(f"   … {len(names) - shown} more", QUIET)
    return _ends(line, [speed], width)


def _value(name: str, value: float) -> Text:
    return Text.assemble(" ", sanitize(name, 20), " ", (number(value), "bold" if math.isfinite(value) else "bold red"))


def _rounds(status: RunStatus) -> Text | None:
    if status.rounds is None:
        return None
    steps = [worker.local_steps for worker in status.workers if worker.state == "alive"] or [0]
    low, high = min(steps), max(steps)
    many = count(high, "local step") if low == high else f"{low} to {high} local steps"
    line = Text.assemble(" ", (count(status.rounds, "round"), "bold"))
    return line.append(f", {many} since the last", QUIET)


def _lags(status: RunStatus) -> Text | None:
    """Lag of updates: how many others were applied between a gradient's pull and its push."""
    total = sum(status.lags.values())
    if not total:
        return None
    lags = sorted(status.lags)
    seen = list(itertools.accumulate(status.lags[lag] for lag in lags))
    median, most = (lags[bisect.bisect_left(seen, share * total)] for share in (0.5, 0.95))
    line = Text.assemble(" lag ", (f"{median}", "bold"))
    return line.append(f" at the median, 95 % within {most}, {lags[-1]} at most", QUIET)


def _events(events: Sequence[RunEvent], status: RunStatus) -> list[Text]:
    ages = [max(0.0, status.seconds - event.at) for event in events]
    whens = ["just now" if age < 1 else f"{clock(age)} ago" for age in ages]
    width = max(map(len, whens), default=0)
    return [
        Text.assemble((f" {when:<{width}}  ", QUIET), (event_text(event), _BAD.get(event.kind, "")))
        for event, when in zip(events, whens, strict=True)
    ]


def _foot(status: RunStatus, address: str | None, width: int) -> tuple[list[Text], list[Text]]:
    """Addresses of the dashboard and of the predictor, and the legend of the bars; in one line if it is wide enough."""
    legend = Text("  ").join(Text.assemble((sign, style), " ", (word, QUIET)) for sign, word, style in BLOCKS)
    links = [sanitize(link, 120) for link in (address, status.serving) if link]
    addresses = Text(f" {'   '.join(links)}", "blue")
    if not any(worker.state == "alive" for worker in status.workers):
        return [addresses] * bool(links), []
    if not links:
        return [], [Text.assemble(" ", legend)]
    both = _ends(addresses, [legend], width)
    return ([both], []) if both is not addresses else ([addresses], [Text.assemble(" ", legend)])


# -- printing ------------------------------------------------------------------------------------------------------


def _ends(left: Text, rights: Sequence[Text], width: int) -> Text:
    """A line with `left` at its left end and the first of `rights` that fits, if any, at its right end."""
    for right in rights:
        gap = width - left.cell_len - right.cell_len
        if gap >= 2:
            return Text.assemble(left, " " * gap, right)
    return left


def _print(lines: Sequence[Text], width: int, color: bool) -> list[str]:
    console = _console(color)
    with console.capture() as captured:
        for line in lines:
            line.truncate(width, overflow="ellipsis")
            console.print(line, no_wrap=True, crop=False, overflow="ignore", highlight=False, markup=False)
    return [line.rstrip() for line in captured.get().split("\n")[: len(lines)]]


@functools.lru_cache(maxsize=2)
def _console(color: bool) -> Console:
    """One that ignores the launcher's own terminal and environment."""
    return Console(
        file=io.StringIO(), width=4 * MAX_WIDTH, color_system="standard" if color else None, force_terminal=color,
        legacy_windows=False, _environ={},
    )  # fmt: skip
