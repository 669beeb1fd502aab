"""Commands of other distributions, found through the entry-point group `hora.commands`.

`hora claims` and every `hora bench` but `start` are such commands. They come with the repository's benchmarks folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import sys

import click

from ..errors import did_you_mean

GROUP = "hora.commands"
BENCHMARKS = {"bench": "hora_benchmarks.bench.cli", "claims": "hora_benchmarks.claims.cli"}


def command(name: str) -> click.Command | None:
    """The command that another distribution, or the checkout that Hora runs from, adds under this name."""
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        found: click.Command = point.load()
        return found
    if name in BENCHMARKS and _add_checkout():
        found = getattr(importlib.import_module(BENCHMARKS[name]), name)
        return found
    return None


def not_installed(ctx: click.Context, name: str) -> click.Command | None:
    """Raises the usage error of a command that needs hora_benchmarks; shell completion gets None."""
    if not ctx.resilient_parsing:
        raise click.UsageError(
            f"{name!r} needs the package hora-benchmarks, which is not installed; in a checkout of Hora's repository "
            "run: pip install ./benchmarks",
            ctx,
        )
    return None


def unknown(ctx: click.Context, name: str) -> click.Command | None:
    """Raises the usage error of an unknown command, with what exists; options and shell completion get None."""
    if not ctx.resilient_parsing and not name.startswith("-"):
        assert isinstance(ctx.command, click.Group)
        names = ctx.command.list_commands(ctx)
        hint = did_you_mean(name, names)
        raise click.UsageError(f"no such command {name!r}; {hint}there are: {', '.join(names)}", ctx)
    return None


def _add_checkout() -> bool:
    """Makes the benchmarks of the checkout that Hora runs from importable, also by ranks; False outside a checkout."""
    folder = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
    if not (folder / "hora_benchmarks").is_dir():
        return False
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    return True
