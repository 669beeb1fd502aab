"""The claims there are, in the order of their numbers. Each lives in the module of its name."""

from __future__ import annotations

import difflib
import importlib

from .claim import Claim

NAMES = (
    "master", "servers", "speedup", "asynchronous", "accuracy", "straggler", "overlap", "local", "memory", "batch",
    "pipeline", "lines", "coordinator", "ledger",
)  # fmt: skip


def find(name: str) -> Claim:
    """ValueError for a name that nobody has, with the nearest one."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no claim is called {name!r}; {hint}there are: {', '.join(NAMES)}")
    claim: Claim = importlib.import_module(f".{name}", __package__).CLAIM
    return claim
