"""The collectives that move data without reducing it, and those that reduce to one rank or to shares.

Each is a function over a Group; tensors are contiguous and on the CPU. What travels, per rank, of S bytes each:

    broadcast       binomial tree: ⌈log2 n⌉ steps, S to each child
    reduce          the same tree upwards: S once
    all_gather      ring: n − 1 steps, everybody's S but one's own passes through each rank
    reduce_scatter  ring: n − 1 steps, (n−1)/n of S
    gather, scatter straight to and from the root
    all_to_all      n − 1 pairwise exchanges
    barrier         ⌈log2 n⌉ rounds of empty messages (dissemination), or one turn at shared memory

Where data flows one way only (broadcast, reduce, gather, scatter) a rank could be done before it meets another that
means something else. So these begin with a barrier: it carries the call's stamp past everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from . import ring, tree
from .reduction import DTYPES, Operation, check_dtype
from .schedule import bounds

if TYPE_CHECKING:
    from .group import Group

MAX_DIMS = 14


def broadcast(group: Group, flat: torch.Tensor, root: int) -> None:
    barrier(group)
    tree.down(group, flat, root)


def reduce(group: Group, flat: torch.Tensor, operation: Operation, root: int) -> None:
    """The root's `flat` becomes the result; the others' are left as they are."""
    barrier(group)
    work = flat if group.rank == root or group.size == 1 else flat.clone()
    tree.up(group, work, operation, root)
    if group.rank == root:
        operation.finish(flat, group.size)


def all_gather(group: Group, tensor: torch.Tensor) -> list[torch.Tensor]:
    heads = [torch.zeros(MAX_DIMS + 2, dtype=torch.int64) for _ in range(group.size)]
    heads[group.rank] = _head(tensor)
    ring.all_gather(group, heads, owner_shift=0)
    parts = [tensor.clone() if rank == group.rank else _room(head) for rank, head in enumerate(heads)]
    ring.all_gather(group, [part.view(-1) for part in parts], owner_shift=0)
    return parts


def reduce_scatter(group: Group, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
    """The share is a part of `tensor`, whose other rows are overwritten."""
    shares = [tensor[start:stop] for start, stop in bounds(tensor.shape[0], group.size)]
    ring.scatter_reduce(group, [share.view(-1) for share in shares], operation, owner_shift=0)
    mine = shares[group.rank]
    operation.finish(mine, group.size)
    return mine


def gather(group: Group, tensor: torch.Tensor, root: int) -> list[torch.Tensor] | None:
    barrier(group)
    if group.rank != root:
        _give_whole(group, root, tensor)
        return None
    return [tensor.clone() if peer == root else _take_whole(group, peer) for peer in range(group.size)]


def scatter(group: Group, parts: Sequence[torch.Tensor] | None, root: int) -> torch.Tensor:
    barrier(group)
    if group.rank != root:
        return _take_whole(group, root)
    assert parts is not None
    for peer in group.others:
        _give_whole(group, peer, parts[peer].contiguous())
    return parts[root].clone()


def all_to_all(group: Group, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    received = list(parts)
    received[group.rank] = parts[group.rank].clone()
    for distance in range(1, group.size):
        target, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        part = parts[target].contiguous()
        sending = [group.give(target, _head(part)), group.give(target, part.view(-1))]
        received[source] = _take_whole(group, source)
        for handle in sending:
            handle.wait()
    return received


def barrier(group: Group) -> None:
    if group.transport.shares_memory:
        registered = group.staging.registered
        turn = registered.turn
        registered.turn = turn + 1
        group.meet(registered, turn)
        return
    nothing = torch.empty(0, dtype=torch.uint8)
    reach = 1
    while reach < group.size:
        sending = group.give((group.rank + reach) % group.size, nothing)
        group.take((group.rank - reach) % group.size, nothing).wait()
        sending.wait()
        reach *= 2


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """Dtype and shape as numbers, for a receiver that does not know them."""
    check_dtype(tensor.dtype)
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions; {MAX_DIMS} are the most that travel")
    head = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(head + [0] * (MAX_DIMS + 2 - len(head)), dtype=torch.int64)


def _room(head: torch.Tensor) -> torch.Tensor:
    code, dims, *shape = head.tolist()
    return torch.empty(shape[:dims], dtype=DTYPES[code])


def _give_whole(group: Group, peer: int, tensor: torch.Tensor) -> None:
    first, second = group.give(peer, _head(tensor)), group.give(peer, tensor.view(-1))
    first.wait()
    second.wait()


def _take_whole(group: Group, peer: int) -> torch.Tensor:
    head = torch.empty(MAX_DIMS + 2, dtype=torch.int64)
    group.take(peer, head).wait()
    tensor = _room(head)
    group.take(peer, tensor.view(-1)).wait()
    return tensor
