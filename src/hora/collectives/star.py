"""Star all-reduce: all ranks send to rank 0, which reduces in rank order and sends the result back.

        1   2   3
         ╲  │  ╱        phase "reduce at the root": rank 0 takes the vectors of ranks 1 … n−1, one after the other
            0           phase "send back": rank 0 sends the result to each

Steps: 2(n−1). Root: n−1 vectors received, n−1 additions, n−1 vectors sent; every other rank 1 sent, 1 received. Half
precision is summed in float32 at the root and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .reduction import HALVES, Operation

if TYPE_CHECKING:
    from .group import Group


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    if group.rank:
        group.send_chunk(0, flat).wait()
        group.recv_chunk(0, flat).wait()
        return
    # reduce at the root
    total = flat.float() if flat.dtype in HALVES else flat
    for peer in range(1, group.size):
        if total is flat:
            group.recv_chunk(peer, flat, operation.combine).wait()
        else:
            part = torch.empty_like(flat)
            group.recv_chunk(peer, part).wait()
            operation.combine(total, part.float())
    operation.finish(total, group.size)
    if total is not flat:
        flat.copy_(total)
    # send back
    for transfer in [group.send_chunk(peer, flat) for peer in range(1, group.size)]:
        transfer.wait()
