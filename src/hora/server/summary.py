"""Summary: what a server has done, in one line for people."""

from __future__ import annotations

from typing import Any


def summary(stats: dict[str, Any]) -> str:
    """One line for people about what a server has done."""
    seconds = max(stats["seconds"], 1e-9)
    total = sum(stats["lags"].values())
    text = (f"server {stats['server']} ({stats['load_bytes'] / 1e6:.1f} MB): {stats['updates']} updates, "
            f"{stats['updates'] / seconds:.1f}/s, {stats['bytes_in'] / 1e6:.0f} MB in, "
            f"{stats['bytes_out'] / 1e6:.0f} MB out, busy {100 * stats['busy_s'] / seconds:.0f} %")  # fmt: skip
    if total and set(stats["lags"]) != {"0"}:
        shares = [f"{lag}: {100 * count / total:.0f} %" for lag, count in list(stats["lags"].items())[:8]]
        text += f", lag {', '.join(shares)}{', …' if len(stats['lags']) > 8 else ''}"
    for word in ("dropped", "skipped"):
        if stats[word]:
            text += f", {stats[word]} {word}"
    return text
