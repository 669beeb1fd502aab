"""The exceptions of a run. Every message names the rank, what happened and what to do next.

`ValueError` is for a caller's mistake, `assert` for our invariants; these are for what happens between ranks.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HoraError(RuntimeError):
    """The base class."""


class PeerLost(HoraError):
    """A rank that others need has died or left: one of `ranks`. `secondary`: this rank failed only because of it."""

    def __init__(self, message: str, ranks: tuple[int, ...] = (), secondary: bool = False) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.secondary = secondary


class Timeout(HoraError, TimeoutError):
    """A wait took longer than `timeout_s`; the message names the ranks that were missing."""


class Mismatch(HoraError):
    """Ranks called different operations, or the same one on different shapes, dtypes or names."""


class Unauthorized(HoraError):
    """The other end of a connection did not prove that it has this run's token."""


class OutOfMemory(HoraError, MemoryError):
    """Shared memory was not allocated: the cgroup's limit or the host's free memory is too small."""


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint for an error message, `did you mean 'ring'? ` with a space at its end; empty if no choice is close."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}? " if close else ""
