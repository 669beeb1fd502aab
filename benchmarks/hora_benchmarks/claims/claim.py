"""Claim: a sentence of the textbooks, with its measurement, the rule that judges it, its table and its figure.

    measure ──▶ rows ──▶ judge ──▶ verdict
                  └────▶ table, draw

Only `measure` runs anything. What it returns are plain rows, kept as a record (record.py); verdict, table and figure
are functions of the rows alone, so that a record can be judged and drawn again on any machine. `rule` is fixed
before the measurement that is shown and is what `judge` computes: the verdict is never chosen by hand.

Modules of claims load neither torch nor matplotlib when they are imported: `hora claims --list` reads them all.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

Row = dict[str, Any]
Word = Literal["holds", "fails", "only if"]
MAX_TEXT = 300  # characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """`text` goes on after the word: 'holds: …', 'fails: …', 'only if …': one sentence with the figures that decided
    and their spread, short enough for a row of a table (MAX_TEXT). `more`: what else the rows tell, in sentences."""

    word: Word
    text: str
    more: str = ""

    def __str__(self) -> str:
        return f"{self.word} {self.text}" if self.word == "only if" else f"{self.word}: {self.text}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text, for the terminal and for the page. `repeats`: how many and which spread is shown, in a few words;
    `note`: what was measured and what the columns mean."""

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str
    repeats: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """`measure(quick)` and `draw(rows, figure)` may take their time; `judge` and `table` are pure.

    `obstacle(quick)` says why it cannot be measured here, with a way out; empty if it can. `minutes`: about how long
    the quick and the full one take on two cores. `changed`: what was changed in rule or setting after results had been
    seen, and what that did. A failed measurement raises RuntimeError with the cause.
    """

    number: int
    name: str
    says: str
    rule: str
    needs: str
    minutes: tuple[float, float]
    measure: Callable[[bool], list[Row]]
    judge: Callable[[Sequence[Row]], Verdict]
    table: Callable[[Sequence[Row]], Table]
    draw: Callable[[Sequence[Row], Any], None]
    obstacle: Callable[[bool], str] = lambda quick: ""
    figure_size: tuple[float, float] = (9.0, 4.5)
    changed: str = ""


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """The median and, in brackets, the least and the greatest of several; a single value alone."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)} to {format(max(values), form)})"
