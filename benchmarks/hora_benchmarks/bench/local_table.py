"""What `hora bench local` shows: samples/s, bytes, and how many times the ring's; and a plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hora_benchmarks.bench.bench_table import Row

WIDTH = 106  # beside the names
BASE = "ring"
TARGETS = {("mlp", "100mbit", "local:every=8"): 6.0, ("mlp", "100mbit", "diloco:every=32"): 15.0}
"""How many times the ring's samples/s are to be reached with 4 workers."""
PEERS = ("no communication", "ddp/gloo")


def print_rates(rows: Sequence[Row], title: str, note: str) -> None:
    """A line per contestant of one rate; `note` says what stood for the links."""
    base = next((row["samples_per_s"] for row in rows if row["name"] == BASE), None)
    table = Table(title=title, title_justify="left")
    table.add_column("name", no_wrap=True)
    headings = (
        "rounds",
        "samples/s: median (min to max)",
        "wire MB/step",
        "sent MB/step",
        "link use",
        "× ring",
        "target",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        low, high = row["samples_per_s_min"], row["samples_per_s_max"]
        target = TARGETS.get((row["model"], row["rate"], row["name"])) if row["workers"] == 4 else None
        times = row["samples_per_s"] / base if base else None
        reached = "" if target is None or times is None else " reached" if times >= target else " missed"
        table.add_row(
            row["name"],
            f"{row['rounds']} × {row['every']}",
            f"{per_s_text(row['samples_per_s'])} [dim]({per_s_text(low)} to {per_s_text(high)})[/dim]",
            megabytes_text(row["wire_bytes"]),
            megabytes_text(row["sent_bytes"]),
            f"{row['link_use']:.0%}",
            "" if times is None else f"{times:.2f}",
            "" if target is None else f"{target:g}{reached}",
        )
    table.caption = (
        f"{note}; samples/s: of all workers, over whole rounds (rounds × steps) in each repeat; wire: what the kernel "
        "saw leave a worker, headers included; sent: what Hora counts; link use: of the rate, the busiest worker's; no "
        "communication: workers that train on their own, with Hora's hold on memory"
    )
    table.caption_justify = "left"
    Console(width=WIDTH + max(len(row["name"]) for row in rows), highlight=False).print(table)


def plot_rates(rows: Sequence[Row], title: str, path: str) -> str | None:
    """A panel per rate, a bar per contestant, whiskers from min to max. Returns what is missing if it cannot be
    drawn."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (pip install hora[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = list(dict.fromkeys(row["rate"] for row in rows))
    most = max(sum(row["rate"] == rate for row in rows) for rate in rates)
    figure, panels = pyplot.subplots(
        1, len(rates), figsize=(2 + 5.5 * len(rates), 1.8 + 0.45 * most), sharex=True, squeeze=False
    )
    for axes, rate in zip(panels[0], rates, strict=True):
        those = [row for row in rows if row["rate"] == rate]
        for place, row in enumerate(those):
            middle, low, high = (row[f"samples_per_s{which}"] for which in ("", "_min", "_max"))
            axes.barh(place, middle, color="tab:orange" if row["name"] in PEERS else "tab:blue", alpha=0.75)
            axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
            count = row["wire_bytes"] if row["wire_bytes"] is not None else row["sent_bytes"]
            text = f"{per_s_text(middle)}, {megabytes_text(count)} MB/step"
            axes.annotate(text, (high, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set_yticks(range(len(those)), [row["name"] for row in those])
        axes.invert_yaxis()
        axes.margins(x=0.45)
        axes.set_xlim(left=0)
        axes.set_xlabel("samples/s of all workers (median; whiskers: min to max)")
        axes.set_title(f"links of {rate}", fontsize=10)
        axes.grid(True, axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(f"{title}\n{rows[0]['links']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def per_s_text(per_s: float) -> str:
    """Three significant digits."""
    return f"{per_s:.{2 if per_s < 10 else 1 if per_s < 100 else 0}f}"


def megabytes_text(num_bytes: float | None) -> str:
    """Three figures, of a million bytes; nothing for what was not counted."""
    if num_bytes is None:
        return ""
    megabytes = num_bytes / 1e6
    return f"{megabytes:.{1 if megabytes >= 100 else 2 if megabytes >= 10 else 3}f}"
