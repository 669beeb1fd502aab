"""Commands of other distributions, found through the entry-point group `hora.commands`.

`hora claims` and every `hora bench` but `start` are such commands: they come with the repository's benchmarks folder.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pathlib
import sys

import click

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


def missing(what: str) -> click.UsageError:
    return click.UsageError(
        f"{what} is not installed: it comes with Hora's repository; there, run pip install ./benchmarks"
    )


def _add_checkout() -> bool:
    """Whether Hora runs from a checkout; then its benchmarks can be imported, by ranks too."""
    folder = pathlib.Path(__file__).resolve().parents[3] / "benchmarks"
    if not (folder / "hora_benchmarks").is_dir():
        return False
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    return True
