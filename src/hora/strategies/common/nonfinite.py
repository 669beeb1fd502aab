"""Gradients that are NaN or infinite: detecting and naming them, and passing them to a GradScaler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...collectives.group import Group
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flatten

MOST_NAMED = 4
ADVICE = (
    "(NaN or infinite). The step was not taken. Look at that worker's batch and loss; with fp16 give the GradScaler to "
    "job.prepare(scaler=…); hora.init(on_nonfinite='skip') leaves such steps out"
)


def sentence(
    group: Group, registry: ParameterRegistry, nonfinite_grads: Sequence[tuple[int, int]], what: str = "gradient"
) -> str:
    """Collective: every worker gives the (rank, parameter) that it knows of; all get the same sentence."""
    mine = torch.tensor(nonfinite_grads, dtype=torch.int64).view(-1, 2)
    found = sorted({tuple(pair) for part in group.all_gather(mine, name="nonfinite_grads") for pair in part.tolist()})
    names = [f"{registry.names[index]} on {group.transport.name_of(rank)}" for rank, index in found]
    return f"the {what} of {listed(names, '; ')} is not finite"


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of these names."""
    return separator.join(names[:MOST_NAMED]) + (" and others" if len(names) > MOST_NAMED else "")


def poison(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Puts an infinity where each worker's scaler looks: it then skips the step on all of them."""
    for optimizer in optimizers:
        grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        first = next(grads, None)
        if first is not None:
            values = first._values() if first.layout is torch.sparse_coo else first
            flatten(values.detach())[:1].fill_(float("inf"))


def is_finite(values: torch.Tensor) -> bool:
    """Of a tensor, dense or sparse. The sum tells, with one pass and no memory, unless it is merely large."""
    dense = values._values() if values.layout is torch.sparse_coo else values
    if not (dense.is_floating_point() or dense.is_complex()):
        return True
    if dense.itemsize == 1:
        dense = dense.float()  # torch does not ask float8 whether it is finite
    wide = torch.promote_types(dense.dtype, torch.float32)
    return bool(torch.isfinite(dense.sum(dtype=wide))) or bool(torch.isfinite(dense).all())
