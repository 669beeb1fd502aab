"""The collectives as functions: `hora.all_reduce(t)` is `job.group.all_reduce(t)`. See Group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..collectives.group import Group
from .job import current


def _on(group: Group | None) -> Group:
    return group if group is not None else current().group


def all_reduce(
    tensor: Tensor,
    op: str = "sum",
    algorithm: str = "auto",
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    return _on(group).all_reduce(tensor, op, algorithm, name, wait)


def broadcast(
    tensor: Tensor, root: int = 0, group: Group | None = None, name: str | None = None, wait: bool = True
) -> Any:
    return _on(group).broadcast(tensor, root, name, wait)


def reduce(
    tensor: Tensor,
    root: int = 0,
    op: str = "sum",
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    return _on(group).reduce(tensor, root, op, name, wait)


def all_gather(tensor: Tensor, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    return _on(group).all_gather(tensor, name, wait)


def reduce_scatter(
    tensor: Tensor, op: str = "sum", group: Group | None = None, name: str | None = None, wait: bool = True
) -> Any:
    return _on(group).reduce_scatter(tensor, op, name, wait)


def gather(
    tensor: Tensor, root: int = 0, group: Group | None = None, name: str | None = None, wait: bool = True
) -> Any:
    return _on(group).gather(tensor, root, name, wait)


def scatter(
    parts: Sequence[Tensor] | None,
    root: int = 0,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    return _on(group).scatter(parts, root, name, wait)


def all_to_all(
    parts: Tensor | Sequence[Tensor],
    splits: Sequence[int] | None = None,
    group: Group | None = None,
    name: str | None = None,
    wait: bool = True,
) -> Any:
    return _on(group).all_to_all(parts, splits, name, wait)


def barrier(group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    return _on(group).barrier(name, wait)


def send(tensor: Tensor, to: int, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    return _on(group).send(tensor, to, name, wait)


def recv(tensor: Tensor, source: int, group: Group | None = None, name: str | None = None, wait: bool = True) -> Any:
    return _on(group).recv(tensor, source, name, wait)


def new_group(ranks: Sequence[int], transport: str = "auto", group: Group | None = None) -> Any:
    return _on(group).new_group(ranks, transport)
