"""Warmup: steps with the mean gradient of all workers, before they go their own ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...parameters.registry import ParameterRegistry
from ..common import sparse
from .averager import put, vector_of
from .counted_all_reduce import CountedAllReduce


def mean_gradients(
    bulk: CountedAllReduce,
    registry: ParameterRegistry,
    optimizer: torch.optim.Optimizer,
    shares: Sequence[float] | None,
    leaving: bool,
) -> None:
    """Collective: every gradient of this optimizer becomes the mean over all workers', each by its share.

    None only where it is None on every worker. A worker that is `leaving` lends a hand and keeps what it has."""
    group = bulk.group
    mine = [p for each in optimizer.param_groups for p in each["params"]]
    kept = [parameter.grad for parameter in mine]
    counts = shares is not None and not leaving and bool(shares[group.rank])
    flags = torch.zeros(2, len(mine))
    for number, parameter in enumerate(mine):
        if counts and parameter.grad is not None:
            flags[0, number] = 1
            flags[1, number] = parameter.grad.layout is torch.sparse_coo
    group.all_reduce(flags, name="who has gradients")
    dense = []
    for parameter, holders, rows in zip(mine, *flags.tolist(), strict=True):
        if not counts:
            parameter.grad = None
        if rows:
            assert shares is not None
            name = registry.names[registry.index[id(parameter)]]
            parameter.grad = sparse.mean(group, parameter, name, shares[group.rank] * group.size)
        elif holders:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dense.append(parameter.grad.detach())
    if dense and shares is not None:
        vector = vector_of(dense)
        bulk.weighted_sum(vector, shares, "gradients of the warm-up")
        put(dense, vector)
    if leaving:
        for parameter, grad in zip(mine, kept, strict=True):
            parameter.grad = grad
