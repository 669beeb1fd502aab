"""`hora explain`: an algorithm in text, step by step. What is shown is computed by what runs, never typed."""

from __future__ import annotations

from . import collective
from .collective import MAX_RANKS, NAMES

__all__ = ["ASYNC", "MAX_RANKS", "NAMES", "explain"]

ASYNC = "async"


def explain(name: str, ranks: int) -> str:
    """The whole explanation on that many ranks, as plain text ending in a newline: of a collective, one of `NAMES`, or
    of `ASYNC`, the race of so many workers.

    Raises ValueError for another name, and for a number of ranks that cannot be drawn.
    """
    if name not in (*NAMES, ASYNC):
        raise ValueError(f"nothing to explain under {name!r}; there are: {', '.join((*NAMES, ASYNC))}")
    if name == ASYNC:
        from .asynchronous import lines as race_lines  # needs torch: what it shows is the real server's doing

        lines = race_lines(ranks)
    else:
        lines = collective.lines(name, ranks)
    return "\n".join(line.rstrip() for line in lines) + "\n"
