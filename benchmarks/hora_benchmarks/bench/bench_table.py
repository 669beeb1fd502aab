"""Tables and plots of times by message size, and the rows that all benchmarks write."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
STRONG = {"auto": "tab:red", "gloo": "tab:orange", "mpi": "tab:green"}


def size_text(num_bytes: int) -> str:
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}"
    return str(num_bytes)


def time_text(seconds: float) -> str:
    """Three figures, in milliseconds."""
    milliseconds = seconds * 1e3
    digits = 4 if milliseconds < 0.1 else 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1
    return f"{milliseconds:.{digits}f}"


def by_name(rows: list[Row]) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["bytes"]] = row
    return found


def print_times(rows: list[Row], title: str) -> None:
    """Median and spread (10th to 90th percentile) per size; the fastest of each column stands out."""
    named = by_name(rows)
    sizes = sorted({row["bytes"] for row in rows})
    table = Table(title=title, title_justify="left")
    table.add_column("ms: median (p10 to p90)")
    for size in sizes:
        table.add_column(size_text(size), justify="right")
    best = {size: min(cells[size]["median_s"] for cells in named.values() if size in cells) for size in sizes}
    for name, cells in named.items():
        texts = []
        for size in sizes:
            row = cells.get(size)
            if row is None:
                texts.append("")
                continue
            text = time_text(row["median_s"])
            text = f"[bold]{text}[/bold]" if row["median_s"] == best[size] else text
            texts.append(f"{text} [dim]({time_text(row['p10_s'])} to {time_text(row['p90_s'])})[/dim]")
        table.add_row(name, *texts)
    Console(width=max(100, 24 + 30 * len(sizes))).print(table)


def print_ratios(rows: list[Row], ours: list[str], peers: list[str]) -> None:
    """How many times faster than each peer, from the medians of this run."""
    named = by_name(rows)
    sizes = sorted({row["bytes"] for row in rows})
    table = Table(title="times faster (medians of this run)", title_justify="left")
    table.add_column("")
    for size in sizes:
        table.add_column(size_text(size), justify="right")
    for name in ours:
        for peer in peers:
            if name in named and peer in named:
                both = [(named[name].get(size), named[peer].get(size)) for size in sizes]
                cells = [f"{b['median_s'] / a['median_s']:.2f}" if a and b else "" for a, b in both]
                table.add_row(f"{name} against {peer}", *cells)
    Console(width=100).print(table)


def plot_times(rows: list[Row], title: str, path: str) -> str | None:
    """Median over size, both logarithmic, as a PNG. Returns what is missing if it cannot be drawn."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (pip install hora[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    quiet = iter(pyplot.get_cmap("tab20b").colors)
    for name, cells in by_name(rows).items():
        sizes = sorted(cells)
        medians = [cells[size]["median_s"] * 1e3 for size in sizes]
        low = [cells[size]["p10_s"] * 1e3 for size in sizes]
        high = [cells[size]["p90_s"] * 1e3 for size in sizes]
        strong = name in STRONG
        color = STRONG[name] if strong else next(quiet, "grey")
        axes.plot(
            sizes, medians, marker="o", markersize=4, linewidth=2.4 if strong else 1.0, color=color, label=name,
            linestyle="--" if name in ("gloo", "mpi") else ":" if name.endswith("/tcp") else "-",
        )  # fmt: skip
        if strong:
            axes.fill_between(sizes, low, high, color=color, alpha=0.12)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row["bytes"] for row in rows})
    axes.set_xticks(ticks, [size_text(size) for size in ticks])
    axes.set_xlabel("bytes per rank")
    axes.set_ylabel("milliseconds per all-reduce (median; band: p10 to p90)")
    axes.set_title(title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None
