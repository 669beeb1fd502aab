"""The command `hora claims`."""

from __future__ import annotations

import pathlib
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hora.runs import exit_codes

if TYPE_CHECKING:
    from .claim import Claim
    from .record import Record

INTO = "hora-claims"


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listing", is_flag=True, help="List the claims. E.g. hora claims --list.")
@click.option(
    "--quick",
    is_flag=True,
    help="Measure for minutes only; without a name, all claims. E.g. --quick.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Measure all claims in full, which takes more than an hour. E.g. --all."
)
@click.option(
    "--into",
    "folder",
    metavar="DIR",
    default=INTO,
    help=f"Folder of records and figures. E.g. --into docs/claims. Default: {INTO}.",
)
@click.option(
    "--redraw",
    is_flag=True,
    help="Measure nothing: judge and draw the records in DIR again. E.g. overlap --redraw.",
)
@click.option(
    "--page", "page_path", metavar="FILE.md", help="Write a page of all records in DIR. E.g. --page docs/CLAIMS.md."
)
def claims(
    names: tuple[str, ...],
    listing: bool,
    quick: bool,
    everything: bool,
    folder: str,
    redraw: bool,
    page_path: str | None,
) -> int:
    """Test a textbook claim on this machine: measure, draw, judge.

    \b
      hora claims --list
      hora claims overlap --quick
      hora claims master servers --into results
      hora claims --redraw --into results --page results/CLAIMS.md
    """
    from . import catalogue

    try:
        if listing:
            _list()
            return exit_codes.OK
        if not (names or quick or everything or redraw or page_path):
            raise click.UsageError("give a claim, e.g. hora claims overlap --quick; hora claims --list shows them all")
        if everything and (names or quick or redraw):
            raise click.UsageError("--all is all claims in full: leave names, --quick and --redraw out")
        if page_path and quick:
            raise click.UsageError("--page shows full records only; leave --quick out")
        for name in names:
            catalogue.find(name)
        into, failed = pathlib.Path(folder), False
        if redraw:
            _redraw(names, into, quick)
        elif names or quick or everything:
            failed = _measure(names or catalogue.names(), into, quick)
        if page_path:
            _write_page(into, pathlib.Path(page_path))
        return exit_codes.SCRIPT_FAILED if failed else exit_codes.OK
    except (ValueError, OSError) as error:
        raise click.UsageError(str(error)) from None


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from . import catalogue

    table = Table(show_lines=True)
    for heading in ("", "name", "what textbooks say", "in full", "minutes,\nquick / full"):
        table.add_column(heading)
    for name in catalogue.names():
        claim = catalogue.find(name)
        minutes = " / ".join(f"{value:g}" for value in claim.minutes)
        table.add_row(str(claim.number), name, claim.says, claim.needs, minutes)
    Console(width=None if sys.stdout.isatty() else 130, highlight=False).print(table)


def _measure(names: Sequence[str], into: pathlib.Path, quick: bool) -> bool:
    """Measures each claim in turn; returns whether one failed. One that cannot be measured does not stop the others."""
    from hora.launch.launched import ending_on_signals

    from . import catalogue, record

    into.mkdir(parents=True, exist_ok=True)
    commit, failed = record.commit(), False
    for name in names:
        claim = catalogue.find(name)
        print(f"{claim.number}. {name}: {claim.says}", file=sys.stderr)
        print(f"   about {claim.minutes[0 if quick else 1]:g} minutes on two cores", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            obstacle = claim.obstacle(quick)
            if obstacle:
                raise RuntimeError(obstacle)
            with ending_on_signals():
                rows = claim.measure(quick)
        except Exception as error:
            if not isinstance(error, RuntimeError):  # a defect of the claim, not of what it measures
                traceback.print_exc()
            print(f"hora claims: {name} could not be measured: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        command = f"hora claims {name}{' --quick' if quick else ''}"
        found = record.measured(name, command, rows, time.monotonic() - begin, commit=commit, quick=quick)
        print(f"written: {found.write(into)}", file=sys.stderr)
        _show(claim, found, into)
    return failed


def _redraw(names: Sequence[str], into: pathlib.Path, quick: bool) -> None:
    from . import catalogue, record

    found = [one for one in record.read_all(into) if (not names or one.claim in names) and one.quick == quick]
    if not found:
        wanted = f" of {', '.join(names)}" if names else ""
        raise ValueError(
            f"there is no {'quick ' if quick else ''}record{wanted} in {into}; measure first, without --redraw"
        )
    for one in found:
        _show(catalogue.find(one.claim), one, into)


def _write_page(into: pathlib.Path, path: pathlib.Path) -> None:
    from . import page, record

    found = [one for one in record.read_all(into) if not one.quick]
    if not found:
        raise ValueError(f"there is no full record in {into} to write a page of; measure first, without --quick")
    page.write(found, into, path)
    print(f"written: {path}", file=sys.stderr)


def _show(claim: Claim, found: Record, into: pathlib.Path) -> None:
    """Table and verdict on the terminal, the figure as a file."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from . import figure

    told = claim.table(found.rows)
    table = Table(title=escape(f"{claim.number}. {claim.says}"), title_justify="left", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(told.headings):
        table.add_column(escape(heading), justify="right" if number else "left")
    for cells in told.lines:
        table.add_row(*map(escape, cells))
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    console.print(table)
    verdict = claim.judge(found.rows)
    console.print(escape(f"{told.note}\n{told.repeats}\n{found.machine}, {found.date}"), style="dim")
    console.print(escape(f"Rule: {claim.rule}"), style="dim")
    console.print(f"[bold]{escape(str(verdict))}[/bold]")
    if verdict.more:
        console.print(escape(verdict.more))
    path = into / f"{found.stem}.png"
    missing = figure.save(claim, found, path)
    console.print(f"no figure: {missing}" if missing else f"figure: {path}")
