"""Compare: several runs in a table, and one logged value of them as curves over samples and over time."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..runs.digest import RunDigest, digest, reading
from ..runs.run_directory import RunRecord
from ..terminal.format import duration, harmless, number, rate
from .listing import table

SMOOTH = 20
_PREFIX = "value/"
_OVER_TIME = "seconds since its first value"


class ComparedCurve(NamedTuple):
    """A value of one run: its means, and between what it moved."""

    samples: list[float]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class Comparison:
    """Runs side by side. ValueError if none of them has logged `value`; what only some have is said in `notes`."""

    def __init__(self, runs: Sequence[RunRecord], value: str | None = None) -> None:
        self.runs = [digest(found) for found in runs]
        self.labels = _labels(self.runs)
        self.notes: list[str] = []
        curves: list[dict[str, Any]] = []
        for label, found in zip(self.labels, runs, strict=True):
            curves.append(self._read(label, found))
        logged = [set(run.values) | set(known) for run, known in zip(self.runs, curves, strict=True)]
        self.value = self._choose(value, logged)
        self.curves: dict[str, ComparedCurve] = {}
        for label, names, known in zip(self.labels, logged, curves, strict=True):
            if self.value in known:
                self.curves[label] = _curve(known[self.value]["points"])
            elif self.value and self.value not in names:
                told = ", ".join(harmless(name, 40) for name in sorted(names)) or "nothing"
                self.notes.append(f"{label} has not logged {harmless(self.value)}; it has logged: {told}")
        self._tell_differences(logged)

    def table(self) -> str:
        """The runs in lines of text."""
        rows = []
        for label, run in zip(self.labels, self.runs, strict=True):
            curve = self.curves.get(label)
            last = run.values.get(self.value, math.nan)
            rows.append(
                [
                    label,
                    run.state,
                    harmless(run.strategy, 32),
                    "" if run.workers is None else str(run.workers),
                    f"{run.steps:,}" if run.steps else "",
                    f"{run.samples:,}" if run.samples else "",
                    duration(run.seconds) if run.seconds is not None else "",
                    rate(run.samples_per_s) if run.samples_per_s else "",
                    "" if self.value not in run.values else number(last),
                    _extreme(curve, min),
                    _extreme(curve, max),
                ]
            )
        value = harmless(self.value, 24)
        heads = [
            "run",
            "state",
            "strategy",
            "workers",
            "steps",
            "samples",
            "time",
            "samples/s",
            value,
            "lowest",
            "highest",
        ]
        return "\n".join(table(heads, rows, left=3))

    def _read(self, label: str, found: RunRecord) -> dict[str, Any]:
        """The run's logged values as curves, by name."""
        try:
            with reading(found) as memory:
                if memory is None:
                    self.notes.append(f"{label} has no memory of its curves: {found.path}")
                    return {}
                _, known = memory.curves()
        except ValueError as problem:
            self.notes.append(f"{label} has no curves to show: {problem}")
            return {}
        return {name[len(_PREFIX) :]: curve for name, curve in known.items() if name.startswith(_PREFIX)}

    def _choose(self, value: str | None, logged: Sequence[set[str]]) -> str:
        everything = sorted({name for names in logged for name in names})
        if value is None:
            if not everything:
                self.notes.append("none of these runs has logged anything: job.log(loss=loss) does")
                return ""
            common = [name for name in everything if all(name in names for names in logged)] or everything
            return "loss" if "loss" in everything else common[0]
        if value in everything:
            return value
        near = difflib.get_close_matches(value, everything, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        there = f"they have logged: {', '.join(everything)}" if everything else "they have logged nothing"
        raise ValueError(harmless(f"none of these runs has logged {value!r}; {hint}{there}", 400))

    def _tell_differences(self, logged: Sequence[set[str]]) -> None:
        everything = sorted({name for names in logged for name in names} - {self.value})
        some = [name for name in everything if not all(name in names for names in logged)]
        if some:
            told = []
            for name in some[:8]:
                who = [label for label, names in zip(self.labels, logged, strict=True) if name in names]
                told.append(f"{harmless(name, 40)} ({', '.join(who)})")
            self.notes.append(f"logged by some only: {', '.join(told)}{', …' if len(some) > 8 else ''}")


def picture(comparison: Comparison, path: str) -> None:
    """Draws the curves, over samples and over time side by side; ValueError if that cannot be done."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("no picture: matplotlib is not installed; pip install 'hora[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    value = _plain(comparison.value)
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    try:
        for axis, kind, label in zip(axes, ("samples", "seconds"), ("samples", _OVER_TIME), strict=True):
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
    """One run's curve, as it was and smoothed. Workers that do not wait tell of their steps in any order."""
    xs = getattr(curve, kind)
    first = min((x for x in xs if math.isfinite(x)), default=0.0) if kind == "seconds" else 0.0
    points = sorted((x - first, *rest) for x, *rest in zip(xs, curve.mean, curve.low, curve.high, strict=True))
    x, mean, low, high = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [], [])
    (line,) = axis.plot(x, smooth(mean), label=label, linewidth=2.2, marker="o" if len(x) == 1 else None, zorder=3)
    axis.plot(x, mean, color=line.get_color(), alpha=0.3, linewidth=0.8)
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.1, linewidth=0)


def smooth(values: Sequence[float]) -> list[float]:
    """Means over the neighbourhood of each: one part in SMOOTH of all; what is no number is left out."""
    reach = len(values) // SMOOTH // 2
    means = []
    for index in range(len(values)):
        near = [each for each in values[max(0, index - reach) : index + reach + 1] if math.isfinite(each)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def _labels(runs: Sequence[RunDigest]) -> list[str]:
    """Their names; of two with one name, the paths."""
    names = [run.name for run in runs]
    return [harmless(run.name if names.count(run.name) == 1 else run.path, 120) for run in runs]


def _curve(points: Sequence[Sequence[Any]]) -> ComparedCurve:
    """Points as hora.monitor keeps them: start, steps, at, samples, mean, low, high, last, count."""
    columns: list[list[float]] = [[_number(point[index]) for point in points] for index in (3, 2, 4, 5, 6)]
    return ComparedCurve(*columns)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _extreme(curve: ComparedCurve | None, which: Any) -> str:
    known = [value for value in (curve.low if which is min else curve.high) if math.isfinite(value)] if curve else []
    return number(which(known)) if known else ""


def _plain(text: str) -> str:
    """Text that matplotlib takes as it is: no formula, and no name that hides from the legend."""
    return harmless(text, 60).replace("$", r"\$").lstrip("_") or "?"
