"""`hora compare`: several runs in a table, and one logged value of them as curves over samples and over time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from ..errors import did_you_mean
from ..runs import exit_codes, run_directory
from ..runs.digest import digest
from ..runs.run_directory import RunRecord
from ..terminal.format import duration, number, rate, sanitize, table
from .runs import digest_cells

SMOOTH = 20
_PREFIX = "value/"


@click.command()
@click.argument("names", metavar="RUN RUN...", nargs=-1)
@click.option(
    "--value", metavar="NAME",
    help="Logged value to compare. E.g. --value accuracy. Default: loss, or the first that all runs have logged.",
)  # fmt: skip
@click.option(
    "--png", metavar="FILE",
    help="File of the picture. E.g. --png curves.png. Default: compare-A-B.png in the current directory.",
)  # fmt: skip
@click.pass_context
def compare(ctx: click.Context, names: tuple[str, ...], value: str | None, png: str | None) -> int:
    """Compare runs in a table and a picture of one value.

    The picture shows the value over samples and over time. RUN is a run's name, or the path of its directory.

    \b
      hora compare mnist-3 mnist-4
      hora compare mnist-3 mnist-4 mnist-5 --value accuracy --png accuracy.png
    """
    try:
        if png is not None and not png.lower().endswith(".png"):
            raise ValueError(f"--png {png}: the file name must end in .png, e.g. --png compare.png")
        found = [run_directory.look_up(name) for name in names]
        if len({each.path for each in found}) < 2:
            raise ValueError("at least two different runs, e.g. hora compare mnist-3 mnist-4; hora runs lists them")
        comparison = Comparison(found, value)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from None
    click.echo("\n".join([comparison.table(), *comparison.notes]))
    if not comparison.curves:
        return exit_codes.OK
    path = png or f"compare-{'-'.join(re.sub('[^A-Za-z0-9._-]+', '_', each.name)[:40] for each in found[:4])}.png"
    try:
        picture(comparison, path)
        click.echo(f"{comparison.value} over samples and over time: {path}")
    except ValueError as problem:
        if png is not None:
            raise click.ClickException(str(problem)) from None
        click.echo(problem)
    return exit_codes.OK


class ComparedCurve(NamedTuple):
    """A logged value of one run: means, and the range of each."""

    samples: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class Comparison:
    """Runs side by side. Raises ValueError if none of them has logged `value`; `notes` say what only some have."""

    def __init__(self, runs: Sequence[RunRecord], value: str | None = None) -> None:
        self.runs = [digest(found) for found in runs]
        names = [run.name for run in self.runs]
        self.labels = [  # the path of a run whose name is not unique
            sanitize(run.name if names.count(run.name) == 1 else run.path, 120) for run in self.runs
        ]
        self.notes: list[str] = []
        curves = [self._read(label, found) for label, found in zip(self.labels, runs, strict=True)]
        logged = [set(run.values) | set(known) for run, known in zip(self.runs, curves, strict=True)]
        self.value = self._choose(value, logged)
        self.curves: dict[str, ComparedCurve] = {}
        for label, known_names, known in zip(self.labels, logged, curves, strict=True):
            if self.value in known:
                self.curves[label] = _curve(known[self.value]["points"])
            elif self.value and self.value not in known_names:
                listed = ", ".join(sanitize(name, 40) for name in sorted(known_names)) or "nothing"
                self.notes.append(f"{label} has not logged {sanitize(self.value)}; it has logged: {listed}")
        self._note_differences(logged)

    def table(self) -> str:
        """The runs in lines of text."""
        rows = []
        for label, run in zip(self.labels, self.runs, strict=True):
            curve = self.curves.get(label)
            rows.append(
                [
                    label,
                    *digest_cells(run),
                    f"{run.samples:,}" if run.samples else "",
                    duration(run.seconds) if run.seconds is not None else "",
                    rate(run.samples_per_s) if run.samples_per_s else "",
                    number(run.values[self.value]) if self.value in run.values else "",
                    _extreme(curve.low, min) if curve else "",
                    _extreme(curve.high, max) if curve else "",
                ]
            )
        heads = ["run", "state", "strategy", "workers", "steps", "samples", "time", "samples/s"]
        return "\n".join(table([*heads, sanitize(self.value, 24), "lowest", "highest"], rows, left=3))

    def _read(self, label: str, found: RunRecord) -> dict[str, Any]:
        """The run's logged values as curves, by name."""
        try:
            reader = found.reader()
            if reader is None:
                self.notes.append(f"{label} has no run database, so no curves: {found.path}")
                return {}
            _, known = reader.curves()
        except ValueError as problem:
            self.notes.append(f"{label} has no curves to show: {problem}")
            return {}
        return {name[len(_PREFIX) :]: curve for name, curve in known.items() if name.startswith(_PREFIX)}

    def _choose(self, value: str | None, logged: Sequence[set[str]]) -> str:
        everything = sorted({name for names in logged for name in names})
        if value is None:
            if not everything:
                self.notes.append("none of these runs has logged a value; a script logs one with job.log(loss=loss)")
                return ""
            common = [name for name in everything if all(name in names for names in logged)] or everything
            return "loss" if "loss" in everything else common[0]
        if value in everything:
            return value
        listed = f"they have logged: {', '.join(everything) or 'nothing'}"
        hint = did_you_mean(value, everything)
        raise ValueError(sanitize(f"none of these runs has logged {value!r}; {hint}{listed}", 400))

    def _note_differences(self, logged: Sequence[set[str]]) -> None:
        everything = sorted({name for names in logged for name in names} - {self.value})
        some = [name for name in everything if not all(name in names for names in logged)]
        listed = []
        for name in some[:8]:
            runs = [label for label, names in zip(self.labels, logged, strict=True) if name in names]
            listed.append(f"{sanitize(name, 40)} ({', '.join(runs)})")
        if listed:
            self.notes.append(f"logged by some runs only: {', '.join(listed)}{', …' if len(some) > 8 else ''}")


def picture(comparison: Comparison, path: str) -> None:
    """Draws the curves, over samples and over time side by side. Raises ValueError if it cannot be drawn or written."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("no picture: matplotlib is not installed; pip install 'hora[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    value = _plain(comparison.value)
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    labels = {"samples": "samples", "seconds": "seconds since its first value"}
    try:
        for axis, (kind, label) in zip(axes, labels.items(), strict=True):
            for name, curve in comparison.curves.items():
                _draw(axis, curve, kind, _plain(name))
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.5g}" if abs(x) < 1e5 else f"{x:,.0f}")
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel(value)
        axes[0].legend(frameon=False)
        figure.suptitle(f"{value} over samples and over time (thick: running mean)")
        figure.tight_layout()
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ValueError(f"{os.path.abspath(path)} cannot be written: {error.strerror or error}") from None
    finally:
        pyplot.close(figure)


def _draw(axis: Any, curve: ComparedCurve, kind: str, label: str) -> None:
    """One run's curve, raw and smoothed. Its points are sorted: asynchronous workers report steps in any order."""
    xs = getattr(curve, kind)
    first = min((x for x in xs if math.isfinite(x)), default=0.0) if kind == "seconds" else 0.0
    points = sorted((x - first, *rest) for x, *rest in zip(xs, curve.mean, curve.low, curve.high, strict=True))
    x, mean, low, high = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    (line,) = axis.plot(x, smooth(mean), label=label, linewidth=2.2, marker="o" if len(x) == 1 else None, zorder=3)
    axis.plot(x, mean, color=line.get_color(), alpha=0.3, linewidth=0.8)
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.1, linewidth=0)


def smooth(values: Sequence[float]) -> list[float]:
    """Running mean over a window of 1/SMOOTH of all values; NaN and infinity are skipped."""
    reach = len(values) // SMOOTH // 2
    means = []
    for index in range(len(values)):
        near = [each for each in values[max(0, index - reach) : index + reach + 1] if math.isfinite(each)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _curve(points: Sequence[Sequence[Any]]) -> ComparedCurve:
    """Points as hora.monitor stores them: start, steps, at, samples, mean, low, high, last, count."""
    columns = [
        [float(point[index]) if isinstance(point[index], int | float) else math.nan for point in points]
        for index in (3, 2, 4, 5, 6)
    ]
    return ComparedCurve(*columns)


def _extreme(values: Sequence[float], which: Any) -> str:
    known = [value for value in values if math.isfinite(value)]
    return number(which(known)) if known else ""


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: no formula, and no leading _, which hides a name from the legend."""
    return sanitize(text, 60).replace("$", r"\$").lstrip("_") or "?"
