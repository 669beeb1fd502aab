"""All-reduce algorithms by name, and which one a vector takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import auto, engine, halving, ring, shared, star, tree
from .hierarchy import BETWEEN, Between
from .reduction import Operation

if TYPE_CHECKING:
    from .group import Group

Algorithm = Callable[["Group", torch.Tensor, Operation], None]
ALGORITHMS: dict[str, Algorithm] = {
    "star": star.all_reduce,
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving": halving.all_reduce,
    "shared": shared.all_reduce,
    "engine": engine.all_reduce,
    "auto": auto.all_reduce,
}


def choose(group: Group, name: str, tensor: torch.Tensor, between: Between | None) -> tuple[Algorithm, bool]:
    """The algorithm for such tensors, and whether it takes them on their own device. Does not block."""
    chosen = _on_cpu(group, name, tensor.numel() * tensor.element_size(), between)
    if name == "engine":
        return chosen, True
    if tensor.is_cuda and between is None and name in BETWEEN:
        return functools.partial(engine.all_reduce_cuda, on_cpu=chosen), True
    return chosen, False


def _on_cpu(group: Group, name: str, num_bytes: int, between: Between | None) -> Algorithm:
    if group.num_hosts > 1:
        if between is not None:
            return functools.partial(_by_host, between=between)
        if name in BETWEEN:
            if group.num_hosts < group.size:
                return functools.partial(_by_host, between=BETWEEN[name])
            name = "ring" if name == "shared" else name
    if name == "shared":
        _ = group.staging  # refuses here, before any rank has sent anything
    table = auto.known_table(group) if name == "auto" else None
    return ALGORITHMS[table.choose(num_bytes) if table else name]


def _by_host(group: Group, flat: torch.Tensor, operation: Operation, between: Between) -> None:
    group.hierarchy.all_reduce(group, flat, operation, between)
