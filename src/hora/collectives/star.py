"""Star: everyone sends to rank 0, which reduces in rank order and sends the result back.

        1   2   3
         ╲  │  ╱        phase "reduce at the root": rank 0 takes the vectors of ranks 1 … n−1, one after the other
            0           phase "send back": rank 0 sends the result to each

Steps: 2(n−1). Root: n−1 vectors received, n−1 additions, n−1 vectors sent; everyone else 1 sent, 1 received. Half
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
        group.give(0, flat).wait()
        group.take(0, flat).wait()
        return
    # reduce at the root
    total = flat.float() if flat.dtype in HALVES else flat
    for peer in range(1, group.size):
        if total is flat:
            group.take(peer, flat, operation.combine).wait()
        else:
            part = torch.empty_like(flat)
            group.take(peer, part).wait()
            operation.combine(total, part.float())
    operation.finish(total, group.size)
    if total is not flat:
        flat.copy_(total)
    # send back
    for handle in [group.give(peer, flat) for peer in range(1, group.size)]:
        handle.wait()
