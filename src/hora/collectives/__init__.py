"""Collectives: a Group and the algorithms behind its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .group import Group

__all__ = ["Group"]


def __getattr__(name: str) -> object:
    # Lazy, so that schedule.py can be read without torch.
    if name == "Group":
        from .group import Group

        return Group
    raise AttributeError(name)
