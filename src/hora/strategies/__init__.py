"""Strategies: one word chooses the architecture."""

from __future__ import annotations

from . import base
from .allreduce.config import Auto, Engine, Halving, Ring, Shared, Star, Tree
from .base import Strategy
from .local.config import DiLoCo, LocalSGD
from .ps.config import PS

KNOWN: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Auto, DiLoCo, Engine, Halving, LocalSGD, PS, Ring, Shared, Star, Tree)
}


def parse(text: str) -> Strategy:
    """The strategy that `--strategy TEXT` means; ValueError says what is wrong and what exists."""
    return base.parse(text, KNOWN)


__all__ = [
    "KNOWN",
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
    "parse",
]
