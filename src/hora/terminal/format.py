"""Text for terminals: numbers in readable units, aligned tables, and untrusted text without control characters."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..monitor.status import RunEvent

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_X].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]", re.S
)
_MAX_MARKS = 2
_BEGINNINGS = {"checkpoint": "checkpoint", "restore": "restored", "skipped": "skipped:", "stop": "stopping:"}


def sanitize(text: object, limit: int = 200) -> str:
    """Untrusted text as one line without escape sequences, control and bidirectional characters, or stacked accents. A
    line longer than `limit` is cut and ends with …."""
    raw = str(text)[: 8 * limit]
    if raw.isascii() and raw.isprintable():
        kept = raw
    else:
        kept, marks = "", 0
        for sign in _ESCAPE.sub("", raw):
            kind = unicodedata.category(sign)
            marks = marks + 1 if kind in ("Mn", "Me") else 0
            if sign in "\t\n\r\v\f" or kind in ("Zl", "Zp"):
                kept += " "
            elif kind[0] != "C" and marks <= _MAX_MARKS:
                kept += sign
        kept = " ".join(kept.split())
    return kept if len(kept) <= limit else f"{kept[: limit - 1]}…"


def duration(seconds: float) -> str:
    """As 0.42 s, 12.3 s, 2 min 14 s, 1 h 02 min, 3 d 4 h."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if hours < 1:
        return f"{minutes} min {whole % 60:02d} s"
    return f"{hours} h {minutes % 60:02d} min" if days < 1 else f"{days} d {hours % 24} h"


def clock(seconds: float) -> str:
    """A duration in whole seconds, for what counts up: 12 s, 2 min 14 s."""
    return f"{seconds:.0f} s" if 0 <= seconds < 59.5 else duration(max(60.0, seconds) if seconds > 0 else seconds)


def number(value: float) -> str:
    """A logged value, in four significant digits."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return f"{int(value):,}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"


def rate(value: float) -> str:
    """A number per second: 3,210 or 4.2 or 0.031."""
    if not math.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def milliseconds(seconds: float) -> str:
    """As 0.42 ms, 103 ms, 2.31 s."""
    if not math.isfinite(seconds):
        return "?"
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
    ms = seconds * 1e3
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms" if ms >= 1 else f"{ms:.2f} ms"


def size(num_bytes: float) -> str:
    """As 512 B, 1.2 MB, 3.4 GB; thousands, as networks count."""
    if not math.isfinite(num_bytes):
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 99.95 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def percent(share: float) -> str:
    """As 43 %; 100 % only for all of it."""
    return f"{99 if 0.985 < share < 1 else round(share * 100)} %"


def count(amount: int, noun: str) -> str:
    """As 1 worker, 2 workers, 1,024 samples."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def event_text(event: RunEvent) -> str:
    """An event of a run as one sanitised line. The kind is added where the text alone does not say it."""
    kind, text = event.kind, event.text
    if kind in ("joined", "left", "died"):
        text = f"{event.who} {kind}" + (f": {text}" if text else "")
    elif kind in _BEGINNINGS and not text.startswith(_BEGINNINGS[kind]):
        text = f"{_BEGINNINGS[kind]} {text}"
    return sanitize((text or f"{event.who} {kind}").strip(), 300)


def num_cells(text: str) -> int:
    """Columns of a terminal that a text takes; escape sequences take none."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    from rich.cells import cell_len

    return cell_len(_ESCAPE.sub("", text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Lines of aligned columns, the first `left` of them left-aligned. Empty columns are left out."""
    kept = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    widths = {column: max(num_cells(row[column]) for row in (heads, *rows)) for column in kept}
    lines = []
    for row in (heads, *rows):
        parts = []
        for column in kept:
            gap = " " * (widths[column] - num_cells(row[column]))
            parts.append(row[column] + gap if column < left else gap + row[column])
        lines.append("  ".join(parts).rstrip())
    return lines
