"""Fragments: the parts of a model that are exchanged one after the other."""

from __future__ import annotations

from collections.abc import Sequence


def cut(indices: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """These parameters, in the model's order, in `count` parts of about the same size; none of them is divided."""
    parts: list[list[int]] = [[] for _ in range(count)]
    total, at = max(1, sum(sizes[index] for index in indices)), 0
    for index in indices:
        parts[min(count - 1, at * count // total)].append(index)
        at += sizes[index]
    return parts
