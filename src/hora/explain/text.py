"""The lines that every explanation is made of: plain text of at most 100 columns."""

from __future__ import annotations

import re
import textwrap


def title(text: str) -> list[str]:
    return [text, "═" * len(text)]


def heading(text: str) -> list[str]:
    return [text, "─" * len(text)]


def rule(text: str) -> str:
    return f"── {text} ".ljust(100, "─")


def wrap(text: str, first: str = "", rest: str = "") -> list[str]:
    """Lines of at most 100 columns that never break inside a formula such as (j + 1) mod n."""
    glued = re.sub(r" (\+|−|=|mod|XOR) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(glued, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def facts(pairs: list[tuple[str, str]]) -> list[str]:
    """A summary: what, and beside it what is to be said of it."""
    lines: list[str] = []
    for name, text in pairs:
        lines += wrap(text, first=f"  {name:<13}", rest=" " * 15)
    return lines
