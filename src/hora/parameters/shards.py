"""ParameterShard: how a parameter is cut among the ranks, in memory order; and tensors as flat vectors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

CUT_BYTES = 64 << 10  # a smaller parameter belongs to one rank alone
ALIGN = 32  # elements: shards begin on cache lines of their own

# Optimizers that treat every element by itself, by exact type: what they update may be a slice of a parameter.
ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """Elements start to stop of one parameter, which rank `owner` reduces."""

    start: int
    stop: int
    owner: int


def even_shards(numel: int, size: int) -> list[ParameterShard]:
    """One shard per rank, as even as whole cache lines allow."""
    edges = [min(numel, -(-numel * rank // (size * ALIGN)) * ALIGN) for rank in range(size)] + [numel]
    return [ParameterShard(edges[rank], edges[rank + 1], rank) for rank in range(size)]


def whole_shards(parameters: Sequence[torch.Tensor]) -> Callable[[int], list[ParameterShard]]:
    """One shard per parameter, owned by rank 0."""
    return lambda index: [ParameterShard(0, parameters[index].numel(), 0)]


def balanced_shards(parameters: Sequence[torch.Tensor], size: int) -> Callable[[int], list[ParameterShard]]:
    """Cuts large parameters evenly and gives each small one to the rank with least; call it once per parameter, in
    order."""
    loads = [0] * size

    def shards(index: int) -> list[ParameterShard]:
        parameter = parameters[index]
        num_bytes = parameter.numel() * parameter.element_size()
        if num_bytes >= CUT_BYTES:
            return even_shards(parameter.numel(), size)
        owner = loads.index(min(loads))
        loads[owner] += num_bytes
        return [ParameterShard(0, parameter.numel(), owner)]

    return shards


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """The dense tensor as a vector in the order of its memory, whatever its strides; a view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether its elements fill a stretch of memory without gaps or overlaps."""
    expected = 1
    for size, stride in sorted(zip(parameter.shape, parameter.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares its memory. Autograd may hand a parameter a gradient that another branch of the
    same backward still reads, as for a bias that is added through a view. False where torch does not count owners."""
    storage = tensor.untyped_storage()
    return _count is not None and _count(storage._cdata) <= _SINGLE


def _calibrate() -> tuple[Callable[[int], int] | None, int]:
    """torch's count of a storage's owners, and what it returns for a tensor with a single owner."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return None, 0
    lone = torch.empty(1)
    storage = lone.untyped_storage()
    alone = count(storage._cdata)
    view = lone.view(1, 1)
    return (count, alone) if count(storage._cdata) == alone + 1 and view.numel() else (None, 0)


_count, _SINGLE = _calibrate()


def flat_view(parameter: torch.Tensor) -> torch.Tensor:
    """Its elements as a vector: in the order of its memory, a view, if they fill it; else in its own order, a copy."""
    return flatten(parameter.detach()) if is_dense(parameter) else parameter.detach().reshape(-1)
