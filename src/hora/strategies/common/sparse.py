"""Sparse gradients (nn.Embedding(sparse=True)): the rows of all workers are gathered and added up."""

from __future__ import annotations

import torch

from ...collectives.group import Group
from ...errors import HoraError


def mean(group: Group, parameter: torch.Tensor, name: str, weight: float) -> torch.Tensor:
    """Collective: the mean of all workers' `parameter.grad`; this worker's counts `weight`."""
    grad = parameter.grad
    if grad is not None and grad.layout is not torch.sparse_coo:
        raise HoraError(f"the gradient of {name} was sparse in the first backward() and is not now")
    if grad is None:
        rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
    else:
        grad = grad.detach().coalesce()
        rows, values = grad.indices(), grad.values()
    all_rows = group.all_gather(rows.t().contiguous(), name=f"rows of {name}")
    all_values = group.all_gather(values * (weight / group.size), name=f"values of {name}")
    return torch.sparse_coo_tensor(
        torch.cat(all_rows).t(), torch.cat(all_values), parameter.shape, check_invariants=False
    ).coalesce()
