"""Strategies: one word chooses the architecture.

A strategy is a frozen dataclass that describes itself (base.py) and makes its Sync. It is found by registration: every
module `strategies/NAME.py` and every `strategies/FAMILY/config.py` is imported once, and a dataclass with a `name` is
known from then on. Other distributions add theirs through the entry-point group `hora.strategies`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil

from . import base
from .allreduce.config import Auto, Engine, Halving, Ring, Shared, Star, Tree
from .base import Strategy
from .local.config import DiLoCo, LocalSGD
from .ps.config import PS

ENTRY_POINTS = "hora.strategies"


def known() -> dict[str, type[Strategy]]:
    """All strategies of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        name = f".{module.name}.config" if module.ispkg else f".{module.name}"
        if importlib.util.find_spec(name, __name__) is not None:
            importlib.import_module(name, __name__)
    return dict(sorted(base.REGISTERED.items()))


def parse(text: str) -> Strategy:
    """The strategy that `--strategy TEXT` means; ValueError says what is wrong and what exists."""
    found = known()
    if text.strip().partition(":")[0] not in found:
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            point.load()
        found = known()
    return base.parse(text, found)


__all__ = [
    "PS",
    "Auto",
    "DiLoCo",
    "Engine",
    "Halving",
    "LocalSGD",
    "Ring",
    "Shared",
    "Star",
    "Strategy",
    "Tree",
    "known",
    "parse",
]
