"""Listing: runs as a table for people."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import click

from ..runs.digest import RunDigest
from ..terminal.format import duration, harmless, number, rate

_BAD = ("failed", "rank killed", "broken off")


def listing(runs: Sequence[RunDigest]) -> str:
    """One line for each; what is unknown stays empty."""
    rows = []
    for run in runs:
        rows.append(
            [
                f"{'●' if run.live else ' '} {harmless(run.name, 64)}",
                when(run.started),
                run.state,
                harmless(run.strategy, 32),
                "" if run.workers is None else str(run.workers),
                f"{run.steps:,}" if run.steps else "",
                number(run.values["loss"]) if "loss" in run.values else "",
                rate(run.samples_per_s) if run.samples_per_s else "",
                duration(run.seconds) if run.seconds is not None else "",
            ]
        )
    heads = ["  run", "started", "state", "strategy", "workers", "steps", "loss", "samples/s", "time"]
    lines = table(heads, rows, left=4)
    styled = [click.style(lines[0], dim=True)]
    for run, line in zip(runs, lines[1:], strict=True):
        color = "green" if run.live else "red" if run.state in _BAD else None
        styled.append(click.style(line, fg=color) if color else line)
    return "\n".join(styled)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of aligned columns, the first `left` of them at their left edge. Columns without any content stay out."""
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    widths = {column: max(cells(row[column]) for row in (heads, *rows)) for column in kept}
    lines = []
    for row in (heads, *rows):
        parts = []
        for column in kept:
            gap = " " * (widths[column] - cells(row[column]))
            parts.append(row[column] + gap if column < left else gap + row[column])
        lines.append("  ".join(parts).rstrip())
    return lines


def cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def when(started: str) -> str:
    """The local date and time of an ISO time, to the minute."""
    try:
        return f"{datetime.datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return ""
