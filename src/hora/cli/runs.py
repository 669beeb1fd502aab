"""`hora runs`: a table of all runs, live and ended."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Sequence

import click

from ..runs import exit_codes, run_directory
from ..runs.digest import RunDigest, digest
from ..terminal.format import duration, number, rate, sanitize, table
from .options import PositiveInt

SHOWN = 20
_BAD = ("failed", "rank killed", "broken off")


@click.command()
@click.option("-n", "most", type=PositiveInt(), default=SHOWN, help=f"Show at most N. E.g. -n 5. Default: {SHOWN}.")
@click.option("--all", "everything", is_flag=True, help="Show all runs. E.g. hora runs --all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON. E.g. hora runs --json.")
@click.option(
    "--run-dir", "directories", multiple=True, metavar="DIR",
    help="Include a run that was started with --run-dir; repeatable. E.g. --run-dir runs/mnist-3.",
)  # fmt: skip
def runs(most: int, everything: bool, as_json: bool, directories: tuple[str, ...]) -> int:
    """List runs, newest first; live ones are marked.

    \b
      hora runs
      hora runs -n 5
    """
    found = run_directory.all_runs(directories)
    shown = [digest(each) for each in itertools.islice(found, None if everything else most)]
    if as_json:
        click.echo(json.dumps([each.as_json() for each in shown], indent=2))
    elif not shown:
        click.echo(f"no runs in {run_directory.home()}; start the first one: hora run -n 2 train.py")
    else:
        click.echo(listing(shown))
        if hidden := sum(1 for _ in found):
            click.echo(f"… {hidden} more: hora runs --all")
    return exit_codes.OK


def listing(runs: Sequence[RunDigest]) -> str:
    """One line per run, coloured by state; unknown values are left empty."""
    rows = [
        [
            f"{'●' if run.live else ' '} {sanitize(run.name, 64)}",
            local_time(run.started),
            *digest_cells(run),
            number(run.values["loss"]) if "loss" in run.values else "",
            rate(run.samples_per_s) if run.samples_per_s else "",
            duration(run.seconds) if run.seconds is not None else "",
        ]
        for run in runs
    ]
    heads = ["  run", "started", "state", "strategy", "workers", "steps", "loss", "samples/s", "time"]
    lines = table(heads, rows, left=4)
    styled = [click.style(lines[0], dim=True)]
    for run, line in zip(runs, lines[1:], strict=True):
        color = "green" if run.live else "red" if run.state in _BAD else None
        styled.append(click.style(line, fg=color) if color else line)
    return "\n".join(styled)


def digest_cells(run: RunDigest) -> list[str]:
    """State, strategy, workers and steps of a run as cells of a table."""
    workers = "" if run.workers is None else str(run.workers)
    return [run.state, sanitize(run.strategy, 32), workers, f"{run.steps:,}" if run.steps else ""]


def local_time(started: str) -> str:
    """Local date and time of an ISO time, to the minute; empty if it is none."""
    try:
        return f"{datetime.datetime.fromisoformat(started).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return ""
