"""The collectives besides all-reduce, as functions over a Group; tensors are contiguous and on the CPU.

What is sent per rank, of S bytes each:

    broadcast       binomial tree: ⌈log2 n⌉ steps, S to each child
    reduce          the same tree upwards: S once
    all_gather      ring: n − 1 steps, (n−1) S
    reduce_scatter  ring: n − 1 steps, (n−1)/n of S
    gather, scatter straight to and from the root
    all_to_all      n − 1 pairwise exchanges
    barrier         ⌈log2 n⌉ rounds of empty messages (dissemination), or one epoch of shared memory

Where data flows one way only (broadcast, reduce, gather, scatter) a rank could be done before it receives anything from
a rank that made another call. So these begin with a barrier, in which all compare the call's fingerprint.
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
    headers = [torch.zeros(MAX_DIMS + 2, dtype=torch.int64) for _ in range(group.size)]
    headers[group.rank] = _header(tensor)
    ring.all_gather(group, headers)
    parts = [tensor.clone() if rank == group.rank else _allocate(header) for rank, header in enumerate(headers)]
    ring.all_gather(group, [part.view(-1) for part in parts])
    return parts


def reduce_scatter(group: Group, tensor: torch.Tensor, operation: Operation) -> torch.Tensor:
    """The share is a part of `tensor`, whose other rows are overwritten."""
    shares = [tensor[start:stop] for start, stop in bounds(tensor.shape[0], group.size)]
    ring.scatter_reduce(group, [share.view(-1) for share in shares], operation)
    mine = shares[group.rank]
    operation.finish(mine, group.size)
    return mine


def gather(group: Group, tensor: torch.Tensor, root: int) -> list[torch.Tensor] | None:
    barrier(group)
    if group.rank != root:
        _send(group, root, tensor)
        return None
    return [tensor.clone() if peer == root else _recv(group, peer) for peer in range(group.size)]


def scatter(group: Group, parts: Sequence[torch.Tensor] | None, root: int) -> torch.Tensor:
    barrier(group)
    if group.rank != root:
        return _recv(group, root)
    assert parts is not None
    for peer in group.others:
        _send(group, peer, parts[peer].contiguous())
    return parts[root].clone()


def all_to_all(group: Group, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    received = list(parts)
    received[group.rank] = parts[group.rank].clone()
    for distance in range(1, group.size):
        target, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        part = parts[target].contiguous()
        sending = [group.send_chunk(target, _header(part)), group.send_chunk(target, part.view(-1))]
        received[source] = _recv(group, source)
        for transfer in sending:
            transfer.wait()
    return received


def barrier(group: Group) -> None:
    if group.transport.shares_memory:
        buffer = group.staging.buffer
        epoch = buffer.epoch
        buffer.epoch = epoch + 1
        group.arrive_and_wait(buffer, epoch)
        return
    nothing = torch.empty(0, dtype=torch.uint8)
    reach = 1
    while reach < group.size:
        sending = group.send_chunk((group.rank + reach) % group.size, nothing)
        group.recv_chunk((group.rank - reach) % group.size, nothing).wait()
        sending.wait()
        reach *= 2


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """Dtype and shape as numbers, for a receiver that does not know them."""
    check_dtype(tensor.dtype)
    if tensor.dim() > MAX_DIMS:
        raise ValueError(f"tensor has {tensor.dim()} dimensions; at most {MAX_DIMS} are supported")
    header = [DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    return torch.tensor(header + [0] * (MAX_DIMS + 2 - len(header)), dtype=torch.int64)


def _allocate(header: torch.Tensor) -> torch.Tensor:
    code, dims, *shape = header.tolist()
    return torch.empty(shape[:dims], dtype=DTYPES[code])


def _send(group: Group, peer: int, tensor: torch.Tensor) -> None:
    for transfer in [group.send_chunk(peer, _header(tensor)), group.send_chunk(peer, tensor.view(-1))]:
        transfer.wait()


def _recv(group: Group, peer: int) -> torch.Tensor:
    header = torch.empty(MAX_DIMS + 2, dtype=torch.int64)
    group.recv_chunk(peer, header).wait()
    tensor = _allocate(header)
    group.recv_chunk(peer, tensor.view(-1)).wait()
    return tensor
