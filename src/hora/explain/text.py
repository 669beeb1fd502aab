"""Layout of explanations: titles, rules and paragraphs as plain text of at most 100 columns."""

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
    """Lines of at most 100 columns, with no break inside a formula such as (j + 1) mod n."""
    glued = re.sub(r" (\+|−|=|mod|XOR) ", "\N{NO-BREAK SPACE}\\1\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(glued, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def facts(pairs: list[tuple[str, str]]) -> list[str]:
    """A table of names and paragraphs."""
    return [line for name, text in pairs for line in wrap(text, first=f"  {name:<13}", rest=" " * 15)]
