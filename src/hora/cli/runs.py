"""Past: the commands that look at runs, live ones included: `hora runs`, `hora show`, `hora compare`."""

from __future__ import annotations

import itertools
import json
import re

import click

from ..runs import exit_codes
from .options import PositiveInt

SHOWN = 20


@click.command()
@click.option(
    "-n", "most", type=PositiveInt(), default=SHOWN, help=f"How many at most, e.g. -n 5. Without it: {SHOWN}."
)
@click.option("--all", "everything", is_flag=True, help="All of them, e.g. hora runs --all.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for other programs, e.g. hora runs --json.")
@click.option(
    "--run-dir",
    "directories",
    multiple=True,
    metavar="DIR",
    help="A run that was started with --run-dir, too; may be given again, e.g. --run-dir runs/mnist-3.",
)
def runs(most: int, everything: bool, as_json: bool, directories: tuple[str, ...]) -> int:
    """List runs, the newest first; those that are going on are marked.

    \b
      hora runs
      hora runs -n 5
    """
    from ..runs import run_directory
    from ..runs.digest import digest
    from .listing import listing

    found = run_directory.all_runs(directories)
    shown = [digest(each) for each in itertools.islice(found, None if everything else most)]
    if as_json:
        click.echo(json.dumps([each.as_json() for each in shown], indent=2))
        return exit_codes.OK
    if not shown:
        click.echo(f"no runs in {run_directory.home()}; the first one: hora run -n 2 train.py")
        return exit_codes.OK
    click.echo(listing(shown))
    hidden = sum(1 for _ in found)
    if hidden:
        click.echo(f"… {hidden} more: hora runs --all")
    return exit_codes.OK


@click.command()
@click.argument("name", metavar="RUN")
@click.option(
    "--data",
    is_flag=True,
    help="Which samples are done, lent out or still to do, and who holds which, e.g. hora show mnist-3 --data.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON, for other programs, e.g. hora show mnist-3 --json.")
@click.option(
    "--run-dir",
    metavar="DIR",
    help="Where the run's record is, if it was started with --run-dir, e.g. --run-dir runs/mnist-3.",
)
@click.pass_context
def show(ctx: click.Context, name: str, data: bool, as_json: bool, run_dir: str | None) -> int:
    """Print what is known of a run, while it lives or after its end. RUN is its name, or the path of its directory.

    \b
      hora show mnist-3
      hora show mnist-3 --data
      hora show runs/mnist-3
    """
    from . import show as telling

    if data and as_json:
        raise click.UsageError("--data has no JSON; give --data or --json", ctx)
    try:
        click.echo(telling.as_json(name, run_dir) if as_json else telling.show(name, run_dir, data=data))
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    return exit_codes.OK


@click.command()
@click.argument("names", metavar="RUN RUN...", nargs=-1)
@click.option(
    "--value",
    metavar="NAME",
    help="Which logged value, e.g. --value accuracy. Without it: loss, or the first that all of them have.",
)
@click.option(
    "--png",
    metavar="FILE",
    help="Where the picture goes, e.g. --png curves.png. Without it: compare-A-B.png in the current directory.",
)
@click.pass_context
def compare(ctx: click.Context, names: tuple[str, ...], value: str | None, png: str | None) -> int:
    """Compare runs: a table, and a picture of a logged value over samples and over time. RUN is a run's name, or the
    path of its directory.

    \b
      hora compare mnist-3 mnist-4
      hora compare mnist-3 mnist-4 mnist-5 --value accuracy --png accuracy.png
    """
    from ..runs import run_directory
    from .compare import Comparison, picture

    try:
        if png is not None and not png.lower().endswith(".png"):
            raise ValueError(f"--png {png}: the file's name must end in .png, e.g. --png compare.png")
        found = [run_directory.look_up(name) for name in names]
        if len({each.path for each in found}) < 2:
            raise ValueError("two different runs at least; e.g. hora compare mnist-3 mnist-4, and hora runs lists them")
        comparison = Comparison(found, value)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    click.echo(comparison.table())
    for note in comparison.notes:
        click.echo(note)
    if not comparison.curves:
        return exit_codes.OK
    path = png or f"compare-{'-'.join(re.sub('[^A-Za-z0-9._-]+', '_', each.name)[:40] for each in found[:4])}.png"
    try:
        picture(comparison, path)
    except ValueError as problem:
        if png is not None:
            raise click.ClickException(str(problem)) from None
        click.echo(problem)
        return exit_codes.OK
    click.echo(f"{comparison.value} over samples and over time: {path}")
    return exit_codes.OK
