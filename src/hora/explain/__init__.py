"""`hora explain`: an algorithm in text, step by step, computed by the code that runs."""

from __future__ import annotations

from . import collective
from .collective import MAX_RANKS, NAMES

__all__ = ["ASYNC", "MAX_RANKS", "NAMES", "explain"]

ASYNC = "async"


def explain(name: str, ranks: int) -> str:
    """The explanation of a collective (one of `NAMES`) on so many ranks, or of `ASYNC` with so many workers, as plain
    text. ValueError for another name, and for a number of ranks that cannot be drawn."""
    if name not in (*NAMES, ASYNC):
        raise ValueError(f"there is no explanation of {name!r}; there are: {', '.join((*NAMES, ASYNC))}")
    if name == ASYNC:
        from .asynchronous import lines as async_lines  # imports torch

        lines = async_lines(ranks)
    else:
        lines = collective.lines(name, ranks)
    return "\n".join(line.rstrip() for line in lines) + "\n"
