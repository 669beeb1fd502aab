"""Panel: a run at one moment as a few lines for a terminal.

     mnist-3  ring, 4 workers                                                         running for 2 min 14 s
     step 1,284   epoch 2 of 3   ━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  43 %   2 min 58 s left
     loss 0.3124   accuracy 0.9131                                            12,840 samples/s   10.1 steps/s
     rank 0  ████████████████▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  412 ms   3,210/s
     rank 1  ████████████████████████████████████████████████████████▒▒▒▒▒▒▒▒  412 ms   3,210/s  ▲ slow: 4.1×
     ! 12 s ago  rank 1 (host a, pid 7) is slow: 412 ms of compute per step, the others 101 ms
     http://127.0.0.1:8320/runs/mnist-3                          █ compute   ▒ communication   ░ waiting

Pure: the same Now gives the same lines. Whatever came from the run's own code is made harmless first.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hora.monitor.status import RunEvent, RunStatus

from .bars import BLOCKS, QUIET, bars, num_rows
from .format import clock, count, happening, harmless, number, percent, rate

MAX_WIDTH = 100
MAX_EVENTS = 2
MAX_VALUES = 6
_MORE = len("   … 99 more")
_BAD = {"died": "red", "slow": "yellow", "skipped": "yellow", "stop": "yellow"}


def render(
    now: RunStatus, *, width: int, address: str | None, color: bool, height: int = 24, events: Sequence[RunEvent] = ()
) -> list[str]:
    """The panel's lines, none wider than `width`, of which 40 are enough. With the cursor's line above them they take
    at most half of the terminal's `height`; workers that have no place are counted. The newest of `events` is last."""
    wide = max(20, min(width, MAX_WIDTH) - 1)  # the last column stays free: some terminals wrap there
    room = max(3, height // 2 - 1)
    address_line, legend = _foot(now, address, wide)
    parts = {
        "head": [_head(now, wide)],
        "top": [_progress(now, wide), _values(now, wide)],
        "bars": [],
        "more": [line for line in (_rounds(now), _lags(now)) if line is not None],
        "events": _events(list(events)[-MAX_EVENTS:], now),
        "address": address_line,
        "legend": legend,
    }

    def left() -> int:
        return room - sum(map(len, parts.values()))

    rows = num_rows(now)
    least = min(rows, 4 if now.servers else 2)
    for name, keep, wanted in (
        ("legend", 0, rows),
        ("events", 1, rows),
        ("events", 0, least),
        ("more", 0, least),
        ("head", 0, min(1, rows)),
    ):
        if left() < wanted:  # then this goes, for the workers' sake
            del parts[name][: max(0, len(parts[name]) - keep)]
    parts["bars"] = bars(now, max(0, left()), wide)
    return _print([line for part in parts.values() for line in part][:room], wide, color)


# -- the lines -----------------------------------------------------------------------------------------------------


def _head(now: RunStatus, wide: int) -> Text:
    left = Text.assemble(" ", (harmless(now.run, 40) or "run", "bold"))
    strategy, algorithm = harmless(now.strategy, 40), harmless(now.algorithm, 20)
    how = [f"{strategy} ({algorithm})" if strategy and algorithm not in ("", strategy) else strategy or algorithm]
    crew = [count(many, noun) for many, noun in ((now.size, "worker"), (len(now.servers), "server")) if many]
    left.append(f"  {', '.join(filter(None, [*how, *crew]))}", QUIET)
    took = clock(now.seconds)
    if now.state != "running":
        state = [f"{now.state}: {now.waiting}"] * bool(now.waiting and now.state == "starting") + [now.state]
        return _ends(left, [Text(harmless(each, 60), QUIET) for each in state], wide)
    return _ends(left, [Text(text, "green") for text in (f"running for {took}", f"running {took}", took)], wide)


def _progress(now: RunStatus, wide: int) -> Text:
    left = Text.assemble(" step ", (f"{now.step:,}", "bold"))
    if now.epoch is not None:  # they are counted from 0
        word, of = ("epoch ", " of ") if wide >= 60 else ("", "/")
        left.append(f"   {word}{now.epoch + 1:,}" + (f"{of}{now.epochs:,}" if now.epochs else ""))
    if now.progress is None:
        return left
    done = min(1.0, max(0.0, now.progress))
    told = Text(f"{percent(done):>5}")
    right = [told]
    if now.eta_s is not None and done < 1:
        until = clock(now.eta_s)
        right = [Text.assemble(told, (f"{gap}{until} left", QUIET)) for gap in ("   ", "  ")] + right
    length = wide - left.cell_len - right[0].cell_len - 5
    if length < 6:
        return _ends(left, right, wide)
    full = int(done * length * 2)  # in halves of a column
    bar = Text("━" * (full // 2), "green")
    if full < 2 * length:
        bar.append("╸" if full % 2 else "", "green")
        bar.append("─" * (length - full // 2 - full % 2), QUIET)
    return _ends(Text.assemble(left, "   ", bar), right[:1], wide)


def _values(now: RunStatus, wide: int) -> Text:
    """What was logged, the loss first; and the speed, which gives way."""
    speeds = [Text()]
    if now.samples_per_s > 0:
        samples = Text.assemble((rate(now.samples_per_s), "bold"), " samples/s")
        steps = Text(f"   {rate(now.steps_per_s)} steps/s", QUIET)
        speeds = [Text.assemble(samples, steps), samples, Text(f"{rate(now.samples_per_s)}/s", "bold")]
        if now.steps_per_s <= 0 or wide < 70:
            del speeds[0]
    names = sorted(now.values, key=lambda name: (name != "loss", "loss" not in name))
    if not names:
        quiet = "nothing logged" if now.state == "ended" else "nothing logged yet"
        return _ends(Text(f" {quiet}", QUIET), speeds, wide)
    pieces = [_value(name, now.values[name]) for name in names[:MAX_VALUES]]
    speed = next((text for text in speeds if pieces[0].cell_len + text.cell_len + 3 <= wide), Text())
    room = wide - speed.cell_len - 3
    shown = len(pieces)
    while shown > 1 and sum(piece.cell_len + 2 for piece in pieces[:shown]) + _MORE * (shown < len(names)) > room:
        shown -= 1
    line = Text("  ").join(pieces[:shown])
    if shown < len(names) and line.cell_len + _MORE <= room:
        line.append(f"   … {len(names) - shown} more", QUIET)
    return _ends(line, [speed], wide)


def _value(name: str, value: float) -> Text:
    return Text.assemble(" ", harmless(name, 20), " ", (number(value), "bold" if math.isfinite(value) else "bold red"))


def _rounds(now: RunStatus) -> Text | None:
    if now.rounds is None:
        return None
    steps = [worker.local_steps for worker in now.workers if worker.state == "alive"] or [0]
    low, high = min(steps), max(steps)
    many = count(high, "local step") if low == high else f"{low} to {high} local steps"
    line = Text.assemble(" ", (count(now.rounds, "round"), "bold"))
    return line.append(f", {many} since the last", QUIET)


def _lags(now: RunStatus) -> Text | None:
    """How late updates came, in words: a lag is how many were applied between a gradient's pull and its push."""
    total = sum(now.lags.values())
    if not total:
        return None
    half, most = (_quantile(now.lags, total, share) for share in (0.5, 0.95))
    line = Text.assemble(" lag ", (f"{half}", "bold"))
    return line.append(f" at the median, 95 % within {most}, {max(now.lags)} at most", QUIET)


def _quantile(lags: dict[int, int], total: int, share: float) -> int:
    seen = 0
    for lag in sorted(lags):
        seen += lags[lag]
        if seen >= share * total:
            break
    return lag


def _events(events: Sequence[RunEvent], now: RunStatus) -> list[Text]:
    whens = []
    for event in events:
        ago = max(0.0, now.seconds - event.at)
        whens.append("just now" if ago < 1 else f"{clock(ago)} ago")
    wide = max(map(len, whens), default=0)
    lines = []
    for event, when in zip(events, whens, strict=True):
        words = happening(event.kind, event.who, event.text)
        lines.append(Text.assemble((f" {when:<{wide}}  ", QUIET), (words, _BAD.get(event.kind, ""))))
    return lines


def _foot(now: RunStatus, address: str | None, wide: int) -> tuple[list[Text], list[Text]]:
    """The addresses of the page and of the predictor, and what the blocks mean; in one line where that has room."""
    legend = Text("  ").join(Text.assemble((sign, style), " ", (word, QUIET)) for sign, word, style in BLOCKS)
    links = [harmless(link, 120) for link in (address, now.serving) if link]
    told = Text(f" {'   '.join(links)}", "blue")
    if not any(worker.state == "alive" for worker in now.workers):
        return [told] * bool(links), []
    if not links:
        return [], [Text.assemble(" ", legend)]
    both = _ends(told, [legend], wide)
    return ([both], []) if both is not told else ([told], [Text.assemble(" ", legend)])


# -- printing ------------------------------------------------------------------------------------------------------


def _ends(left: Text, rights: Sequence[Text], wide: int) -> Text:
    """One at the left, and at the right end the first of `rights` that has a place there; perhaps none has."""
    for right in rights:
        gap = wide - left.cell_len - right.cell_len
        if gap >= 2:
            return Text.assemble(left, " " * gap, right)
    return left


def _print(lines: Sequence[Text], wide: int, color: bool) -> list[str]:
    console, paper = _console(color)
    paper.seek(0)
    paper.truncate()
    for line in lines:
        line.truncate(wide, overflow="ellipsis")
        console.print(line, no_wrap=True, crop=False, overflow="ignore", highlight=False, markup=False)
    return [line.rstrip() for line in paper.getvalue().split("\n")[: len(lines)]]


@functools.lru_cache(maxsize=2)
def _console(color: bool) -> tuple[Console, io.StringIO]:
    paper = io.StringIO()
    console = Console(
        file=paper,
        width=4 * MAX_WIDTH,
        color_system="standard" if color else None,
        force_terminal=color,
        legacy_windows=False,
        _environ={},
    )
    return console, paper
