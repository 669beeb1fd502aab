"""What `hora bench hosts` shows: a table per part with what is to be reached, a plot of the parts, and the picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hora_benchmarks.bench.bench_table import Row, size_text, time_text

WIDTH = 132
OF_LIMIT = 0.94  # what an all-reduce with one rank on each host is to reach of the links
OVER_LIMIT = 1.15  # what a push and pull may take of both ways
PEER, DDP = "gloo", "ddp/gloo"
PEERS = (PEER, DDP, "mpi", "mpi/ring")
FORMULAS = {"star": "2(n−1)·S/B", "ring": "2(n−1)/n·S/B"}
COLORS = {"star": "tab:red", "ring": "tab:blue"}


def print_rows(rows: Sequence[Row]) -> None:
    """Every part in a table of its own; all-reduces with several ranks per host in another."""
    for per_host in sorted({row["per_host"] for row in rows if row["part"] == "allreduce"}):
        _show(all_reduces([row for row in rows if row["part"] == "allreduce" and row["per_host"] == per_host]))
    for part, make in (("train", steps), ("ps", push_pulls), ("picture", growth)):
        those = [row for row in rows if row["part"] == part]
        if those:
            _show(make(those))


def all_reduces(rows: Sequence[Row]) -> Table:
    """A line per contestant, two columns per size."""
    hosts, per_host = rows[0]["hosts"], rows[0]["per_host"]
    table = _table(f"all-reduce of float32, {hosts} hosts × {per_host}, links of {rows[0]['rate']}", rows)
    sizes = sorted({row["bytes"] for row in rows})
    for size in sizes:
        table.add_column(f"{size_text(size)}: ms, median (p10 to p90)", justify="right")
        table.add_column("of limit", justify="right")
    table.add_column("leaves a host", justify="right")
    table.add_column("to reach", justify="right")
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = {row["bytes"]: row for row in rows if row["name"] == name}
        cells = []
        for size in sizes:
            cells += [_times(mine[size]), f"{mine[size]['of_limit']:.1%}"] if size in mine else ["", ""]
        wire = statistics.mean(row["wire_bytes"] / row["bytes"] for row in mine.values())
        table.add_row(name, *cells, f"{wire:.3f} × S", _verdict(all_reduce_reached(rows, name)))
    table.caption = (
        f"limit: 2(h−1)/h·S/B with h = {hosts} hosts, the links alone; TCP's headers take 4 to 5 % of it. To reach: "
        + (f"{OF_LIMIT:.0%} of it" if per_host == 1 else "Gloo's flat ring over all ranks")
    )
    return table


def all_reduce_reached(rows: Sequence[Row], name: str) -> bool | None:
    """At every size; None for peers, and if there is no peer to compare with."""
    mine = [row for row in rows if row["name"] == name]
    if name in PEERS:
        return None
    if rows[0]["per_host"] == 1:
        return all(row["of_limit"] >= OF_LIMIT for row in mine)
    theirs = {row["bytes"]: row["median_s"] for row in rows if row["name"] == PEER}
    return all(row["median_s"] <= theirs[row["bytes"]] for row in mine) if theirs else None


def steps(rows: Sequence[Row]) -> Table:
    table = _table(f"training step of {rows[0]['model']}, {rows[0]['hosts']} hosts, links of {rows[0]['rate']}", rows)
    for heading in ("ms: median (p10 to p90)", "leaves a host: MB/step", "times faster than DDP", "to reach"):
        table.add_column(heading, justify="right")
    base = next((row["median_s"] for row in rows if row["name"] == DDP), None)
    for row in rows:
        times = base / row["median_s"] if base else None
        reached = None if times is None or row["name"] == DDP else times > 1
        cells = [_times(row), f"{row['wire_bytes'] / 1e6:.1f}", "" if times is None else f"{times:.2f}"]
        table.add_row(row["name"], *cells, _verdict(reached))
    table.caption = "to reach: faster than DDP on Gloo"
    return table


def push_pulls(rows: Sequence[Row]) -> Table:
    first = rows[0]
    title = f"push and pull of {first['bytes'] / 1e6:g} MB, {first['workers']} workers, links of {first['rate']}"
    table = _table(title, rows)
    headings = ("ms: median (p10 to p90)", "one way: ms", "over one way", "both ways: ms", "over both ways", "to reach")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        over = row["median_s"] / row["limit_s"]
        alone = row["median_s"] / row["one_way_s"]
        cells = [time_text(row["one_way_s"]), f"{alone - 1:+.1%}", time_text(row["limit_s"]), f"{over - 1:+.1%}"]
        table.add_row(_with_servers(row), _times(row), *cells, _verdict(over <= OVER_LIMIT))
    table.caption = (
        "one way: n·S/(k·B), n workers and k servers, each on a host of its own; both: push, then pull. Links carry "
        f"both ways at once, so that less than both is possible. To reach: at most {OVER_LIMIT - 1:.0%} over both"
    )
    return table


def growth(rows: Sequence[Row]) -> Table:
    table = _table(f"all-reduce of {size_text(rows[0]['bytes'])} float32, links of {rows[0]['rate']}", rows)
    table.columns[0].header = "hosts"
    names = list(dict.fromkeys(row["name"] for row in rows))
    for name in names:
        table.add_column(f"{name}: ms, median (p10 to p90)", justify="right")
        table.add_column(f"{FORMULAS[name]}: ms", justify="right")
    for hosts in sorted({row["hosts"] for row in rows}):
        cells = []
        for name in names:
            row = next((row for row in rows if (row["name"], row["hosts"]) == (name, hosts)), None)
            cells += [_times(row), time_text(row["limit_s"])] if row else ["", ""]
        table.add_row(str(hosts), *cells)
    return table


def plot_rows(rows: Sequence[Row], path: str) -> str | None:
    """A panel per part but the picture, a bar per contestant, whiskers from p10 to p90. Returns what is missing if it
    cannot be drawn."""
    panels = []
    for per_host in (1, 2):
        those = [row for row in rows if row["part"] == "allreduce" and row["per_host"] == per_host]
        if those:
            bars = [(f"{row['name']}, {size_text(row['bytes'])}", row) for row in those]
            panels.append(
                (f"all-reduce, {those[0]['hosts']} hosts × {per_host} at {those[0]['rate']}", bars, "of_limit")
            )
    those = [row for row in rows if row["part"] == "train"]
    if those:
        title = f"training step of {those[0]['model']}, {those[0]['hosts']} hosts at {those[0]['rate']}"
        panels.append((title, [(row["name"], row) for row in those], "ms"))
    those = [row for row in rows if row["part"] == "ps"]
    if those:
        title = f"push and pull, {those[0]['workers']} workers at {those[0]['rate']}"
        panels.append((title, [(_with_servers(row), row) for row in those], "ms"))
    if not panels:
        return "nothing but the picture was measured"
    pyplot = _pyplot()
    if isinstance(pyplot, str):
        return pyplot
    heights = [len(bars) for _, bars, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(9, 1.2 * len(panels) + 0.34 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (title, bars, unit) in zip(axes[:, 0], panels, strict=True):
        for place, (_, row) in enumerate(bars):
            scale = 100 * row["limit_s"] if unit == "of_limit" else 1e3
            middle, low, high = (
                scale / row[key] if unit == "of_limit" else scale * row[key] for key in ("median_s", "p90_s", "p10_s")
            )
            low, high = sorted((low, high))
            axis.barh(place, middle, color="tab:orange" if row["name"] in PEERS else "tab:blue", alpha=0.75)
            axis.errorbar(middle, place, xerr=[[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
            text = f"{middle:.1f} %" if unit == "of_limit" else f"{middle:.0f} ms"
            end = max(high, scale * row["limit_s"]) if unit == "ms" and row.get("limit_s") else high
            axis.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
            if unit == "ms" and row.get("limit_s"):
                axis.plot([scale * row["limit_s"]] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.2)
        axis.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_xlim(left=0)
        words = "% of the limit 2(h−1)/h·S/B" if unit == "of_limit" else "milliseconds"
        limited = unit == "ms" and any(row.get("limit_s") for _, row in bars)
        axis.set_xlabel(f"{words} (median; whiskers: p10 to p90{'; line: 2·n·S/(k·B)' if limited else ''})", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.grid(True, axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def plot_picture(rows: Sequence[Row], path: str) -> str | None:
    """Time over the number of hosts: the star's grows with it, the ring's does not. Returns what is missing if it
    cannot be drawn."""
    those = [row for row in rows if row["part"] == "picture"]
    if not those:
        return "the picture was not measured"
    pyplot = _pyplot()
    if isinstance(pyplot, str):
        return pyplot
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for name in dict.fromkeys(row["name"] for row in those):
        mine = sorted((row for row in those if row["name"] == name), key=lambda row: row["hosts"])
        hosts = [row["hosts"] for row in mine]
        medians = [row["median_s"] for row in mine]
        whiskers = [
            [row["median_s"] - row["p10_s"] for row in mine], [row["p90_s"] - row["median_s"] for row in mine]
        ]  # fmt: skip
        axis.errorbar(
            hosts, medians, yerr=whiskers, color=COLORS[name], marker="o", capsize=3, linewidth=2.2,
            label=f"{name}, measured",
        )  # fmt: skip
        axis.plot(
            hosts, [row["limit_s"] for row in mine], color=COLORS[name], linestyle="--", linewidth=1,
            label=f"{name}, the links alone: {FORMULAS[name]}",
        )  # fmt: skip
        axis.annotate(
            f"{name}: {medians[-1]:.2f} s", (hosts[-1], medians[-1]), (-8, 8), textcoords="offset points", ha="right",
            color=COLORS[name],
        )  # fmt: skip
    axis.set_xticks(sorted({row["hosts"] for row in those}))
    axis.set_xlabel("n, the number of hosts")
    axis.set_ylabel("seconds per all-reduce (median; whiskers: p10 to p90)")
    size, rate = size_text(those[0]["bytes"]), those[0]["rate"]
    axis.set_title(
        f"All-reduce of S = {size} float32 bytes over links of B = {rate}"
        "\nthe star's root carries the data of all ranks; in the ring every link carries the same",
        fontsize=10,
    )
    axis.set_ylim(0, 1.12 * max(row["p90_s"] for row in those))
    axis.grid(True, alpha=0.3)
    axis.legend(loc="upper left", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return None


def _pyplot() -> Any:
    """The library, or what is missing."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (pip install hora[plot])"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _table(title: str, rows: Sequence[Row]) -> Table:
    rounds = rows[0]["rounds"]
    table = Table(title=f"{title}, {rounds} round{'s' if rounds > 1 else ''}", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.caption_justify = "left"
    return table


def _show(table: Table) -> None:
    Console(width=WIDTH, highlight=False).print(table)


def _times(row: Row) -> str:
    return f"{time_text(row['median_s'])} [dim]({time_text(row['p10_s'])} to {time_text(row['p90_s'])})[/dim]"


def _with_servers(row: Row) -> str:
    return f"{row['name']}, {row['servers']} server{'s' if row['servers'] > 1 else ''}"


def _verdict(reached: bool | None) -> str:
    return "" if reached is None else "reached" if reached else "missed"
