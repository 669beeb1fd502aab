"""Tables and plot of `hora bench train`: steps, and their cost over processes that never communicate."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from hora_benchmarks.bench.bench_table import Row, time_text

WIDTH = 120
PEERS = ("single", "single/kept", "independent", "independent/kept", "ddp/gloo")
TARGETS = {
    ("mlp", "shared/sharded"): ("percent", 2.0),
    ("mlp", "shared"): ("share", 0.25),
    ("mlp", "ring"): ("share", 0.5),
    ("gpt", "shared/sharded"): ("percent", 1.5),
    ("gpt", "shared"): ("share", 0.5),
    ("gpt", "ring"): ("share", 0.75),
    ("mlp", "hora/1"): ("percent", 2.0),
    ("gpt", "hora/1"): ("percent", 2.0),
    ("cnn", "hora/1"): ("percent", 2.0),
}
"""What is to be reached with 2 workers: percent over `independent` (hora/1: over `single`), or a share of DDP's."""


def print_steps(rows: list[Row], title: str) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("name")
    for heading in ("ranks", "ms: median (p10 to p90)", "comm ms", "hidden", "samples/s", "efficiency"):
        table.add_column(heading, justify="right")
    for row in rows:
        alone = row["ranks"] == 1  # no peer
        table.add_row(
            row["name"],
            str(row["ranks"]),
            f"{time_text(row['step_median_s'])} "
            f"[dim]({time_text(row['step_p10_s'])} to {time_text(row['step_p90_s'])})[/dim]",
            "" if alone else _or_nothing(row["comm_s"], time_text),
            "" if alone else _or_nothing(row["hidden"], "{:.0%}".format),
            f"{row['samples_per_s']:.0f}",
            _or_nothing(row["efficiency"], "{:.1%}".format),
        )
    table.caption = "efficiency: samples/s of each rank against single's; hidden: communication beside computation"
    table.caption_justify = "left"
    Console(width=WIDTH).print(table)


def print_overheads(rows: list[Row]) -> None:
    """What each costs per step over processes that never communicate, from the medians of this run, beside the targets.

    Hora keeps freed memory (hora.parameters.allocator), which is a gain of its own: over plain processes that keep
    theirs too stands what is left without it.
    """
    named = {row["name"]: row for row in rows}
    ddp = _overhead(named, "ddp/gloo")
    table = Table(title="overhead over independent (one rank: over single)", title_justify="left")
    table.add_column("name")
    for heading in ("ms", "%", "of DDP's", "ms over kept", "% over kept", "target", "reached"):
        table.add_column(heading, justify="right")
    for name, row in named.items():
        overhead, over_kept = _overhead(named, name), _overhead(named, name, "/kept")
        if overhead is None or name in ("single", "independent"):
            continue
        percent = _percent(row, overhead)
        share = overhead / ddp if ddp and ddp > 0 and row["ranks"] > 1 else None
        kind, limit = TARGETS.get((row["model"], name), ("", 0.0))
        value = {"percent": percent, "share": share}.get(kind)
        target = {"percent": f"{limit:g} %", "share": f"{limit:.0%} of DDP's"}.get(kind, "")
        table.add_row(
            name,
            f"{overhead * 1e3:+.2f}",
            f"{percent:+.1f}",
            _or_nothing(share, lambda part: f"{part:.0%}" if abs(part) < 10 else "–"),  # DDP's is next to nothing
            _or_nothing(over_kept, lambda seconds: f"{seconds * 1e3:+.2f}"),
            "" if over_kept is None else f"{_percent(row, over_kept):+.1f}",
            f"at most {target}" if target else "",
            "" if value is None else "yes" if value <= limit else "[bold]no[/bold]",
        )
    if table.row_count:
        Console(width=WIDTH).print(table)


def plot_steps(rows: list[Row], title: str, path: str) -> str | None:
    """A bar for each median, whiskers from p10 to p90, the peers above Hora. Returns what is missing if it cannot be
    drawn."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (pip install hora[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {
        "peers": ([row for row in rows if row["name"] in PEERS], "tab:orange"),
        "Hora": ([row for row in rows if row["name"] not in PEERS], "tab:blue"),
    }
    figure, axes = pyplot.subplots(figsize=(9, 2 + 0.4 * len(rows)))
    place, places = 0.0, []
    for group, (those, color) in groups.items():
        for row in those:
            median, low, high = (row[f"step_{which}_s"] * 1e3 for which in ("median", "p10", "p90"))
            axes.barh(place, median, color=color, alpha=0.75, label=group if row is those[0] else None)
            axes.errorbar(median, place, xerr=[[median - low], [high - median]], color="black", capsize=3, linewidth=1)
            axes.annotate(
                time_text(row["step_median_s"]), (high, place), (6, 0), textcoords="offset points", va="center"
            )
            places.append((place, f"{row['name']}, {row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"))
            place += 1
        place += 0.6 if those else 0
    axes.set_yticks([at for at, _ in places], [text for _, text in places])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds per step (median; whiskers: p10 to p90)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def _overhead(named: dict[str, Row], name: str, kept: str = "") -> float | None:
    """Seconds per step over what costs no communication; None for itself, or where one of the two was not measured."""
    if name not in named:
        return None
    base = ("single" if name in ("hora/1", "single/kept") else "independent") + kept
    if base not in named or base == name:
        return None
    return float(named[name]["step_median_s"] - named[base]["step_median_s"])


def _percent(row: Row, overhead: float) -> float:
    return float(100 * overhead / (row["step_median_s"] - overhead))


def _or_nothing(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else text(value)
