"""What `hora bench ps` makes of its measurements: a row per contestant and size, a table, and JSON lines."""

from __future__ import annotations

import decimal
import json
import re
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from hora_benchmarks.bench.bench_table import Row, time_text

from .process_pool import Result
from .ps_copy import NAME as LIMIT

WIDTH = 120
UNITS = {"G": 10**9, "M": 10**6, "K": 10**3, "": 1}


def params_of(text: str) -> int:
    """10M, 2.5M, 400K or a plain number, in thousands as models are counted. ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]?)", text.upper())
    # Decimal: as floats, 2.3 times a million is no whole number.
    params = decimal.Decimal(match[1]) * UNITS[match[2]] if match else decimal.Decimal(0)
    if params < 1 or params != int(params):
        raise ValueError(f"{text!r} is no number of parameters; write for example 10M, 400K or 123456")
    return int(params)


def params_text(params: int) -> str:
    letter = next(letter for letter, unit in UNITS.items() if params % unit == 0)
    return f"{params // UNITS[letter]}{letter}"


def row_of(results: Sequence[Result]) -> Row:
    """One JSON line: medians over the rounds of one contestant, and the spread of its updates/s."""
    rates = sorted(result.updates_per_s for result in results)
    first = results[0]
    row: Row = {
        "name": first.name,
        "workers": first.workers,
        "servers": first.servers,
        "params": first.params,
        "updates_per_s": statistics.median(rates),
        "gb_per_s": statistics.median(result.gb_per_s for result in results),
        "latency_s": statistics.median(result.latency_s for result in results),
        "updates_per_s_p10": rates[len(rates) // 10],
        "updates_per_s_p90": rates[(len(rates) * 9) // 10],
        "rounds": len(rates),
    }
    for key in ("server_cpu", "wire_gb_per_s"):
        values = [value for result in results if (value := getattr(result, key)) is not None]
        row[key] = statistics.median(values) if values else None
    return row


def json_text(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def print_rates(rows: Sequence[Row], title: str) -> None:
    """A line per contestant; the last column holds its share of the memory limit, from the medians of this run."""
    limits = {row["params"]: row["updates_per_s"] for row in rows if row["name"] == LIMIT}
    table = Table(title=title, title_justify="left")
    table.add_column("name")
    for heading in ("params", "servers", "updates/s: median (p10 to p90)", "GB/s", "ms", "server CPU", "of the limit"):
        table.add_column(heading, justify="right")
    sizes = sorted({row["params"] for row in rows})
    for size in sizes:
        for row in (row for row in rows if row["params"] == size):
            limit, cpu = limits.get(size), row["server_cpu"]
            low, high = row["updates_per_s_p10"], row["updates_per_s_p90"]
            table.add_row(
                row["name"],
                params_text(size),
                str(row["servers"] or ""),
                f"{rate_text(row['updates_per_s'])} [dim]({rate_text(low)} to {rate_text(high)})[/dim]",
                f"{row['gb_per_s']:.2f}",
                time_text(row["latency_s"]),
                "" if cpu is None else f"{cpu:.0%}",
                f"{row['updates_per_s'] / limit:.0%}" if limit else "",
            )
        table.add_section()
    table.caption = (
        "updates/s: of all workers together; ms: one push-pull as a worker sees it; memory limit: only the two copies"
    )
    table.caption_justify = "left"
    Console(width=WIDTH).print(table)


def print_ratios(rows: Sequence[Row], ours: Sequence[str], peers: Sequence[str]) -> None:
    """How many times the updates/s of each peer, from the medians of this run."""
    named = {(row["name"], row["params"]): row["updates_per_s"] for row in rows}
    sizes = sorted({row["params"] for row in rows})
    table = Table(title="times the updates/s (medians of this run)", title_justify="left")
    table.add_column("")
    for size in sizes:
        table.add_column(params_text(size), justify="right")
    for name in ours:
        for peer in peers:
            both = [(named.get((name, size)), named.get((peer, size))) for size in sizes]
            cells = [f"{a / b:.2f}" if a and b else "" for a, b in both]
            if any(cells):
                table.add_row(f"{name} against {peer}", *cells)
    if table.row_count:
        Console(width=WIDTH).print(table)


def rate_text(per_s: float) -> str:
    """Three significant digits."""
    return f"{per_s:.{2 if per_s < 10 else 1 if per_s < 100 else 0}f}"
