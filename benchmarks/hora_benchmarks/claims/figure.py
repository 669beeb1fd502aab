"""Figure: draws the pictures of all claims, with one colour per strategy and a footer that names the machine."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .claim import Claim
from .record import Record

COLORS = {
    "ideal": "0.6",
    "ring": "tab:blue",
    "star": "tab:red",
    "ddp": "tab:orange",
    "sync": "tab:purple",
    "ssp": "tab:olive",
    "async": "tab:green",
    "local": "tab:cyan",
    "diloco": "tab:pink",
}
FOOTER = 7.5


def save(claim: Claim, record: Record, path: pathlib.Path) -> str:
    """Draws a record as a PNG. Returns what is missing if it cannot be drawn, else an empty text."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (pip install hora[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=claim.figure_size, layout="constrained")
    try:
        claim.draw(record.rows, figure)
        figure.supxlabel(f"{record.command} · {record.date} · {record.machine}", fontsize=FOOTER, color="0.4")
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
    return ""


def line(axis: Any, points: Mapping[float, Sequence[float]], label: str, **style: Any) -> None:
    """A line through the medians at each x, with a band from the least to the greatest value."""
    places = sorted(points)
    (drawn,) = axis.plot(places, [statistics.median(points[x]) for x in places], marker="o", markersize=4, label=label,
                         **style)  # fmt: skip
    low, high = ([worst(points[x]) for x in places] for worst in (min, max))
    axis.fill_between(places, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def dress(axis: Any, title: str, x: str, y: str, legend: bool = True) -> None:
    """Title, names of the axes, a grid, and the legend."""
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if legend:
        axis.legend(fontsize=8)
