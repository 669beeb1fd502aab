"""What can go wrong with a run, as a tiny tree: every message names who, what and the next move.

`ValueError` is for a caller's mistake, `assert` for our invariants; these are for what happens between ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoraError(RuntimeError):
    """The root of what a run can raise."""


class PeerLost(HoraError):
    """A rank that others need has died or left. `ranks` holds who; `secondary` tells that another rank failed first."""

    def __init__(self, message: str, ranks: tuple[int, ...] = (), secondary: bool = False) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.secondary = secondary


class Timeout(HoraError, TimeoutError):
    """A wait outlasted `timeout_s`; the message says who waited for whom."""


class Mismatch(HoraError):
    """Ranks called different operations, or the same one on different shapes, dtypes or names."""


class Unauthorized(HoraError):
    """The other end of a connection could not prove that it holds this run's token."""


class OutOfMemory(HoraError, MemoryError):
    """Registered memory was refused: the cgroup's limit or the host's free memory is too small for it."""


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint for an error message, `did you mean 'ring'? ` with a space at its end; empty if no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""
