"""Tree all-reduce: reduce up a binomial tree to rank 0, broadcast down it.

        0                    phase "up", round k = 0 … : ranks r with r mod 2^(k+1) = 2^k send the vector to r − 2^k
        ├── 1                phase "down": the same rounds backwards, the other way
        └── 2
            └── 3

Steps: 2⌈log2 n⌉ of the whole vector; a rank sends it once up and once to each child. For small messages, where the
number of steps counts and the amount does not. Half precision is rounded at every hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .reduction import Operation

if TYPE_CHECKING:
    from .group import Group


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    up(group, flat, operation, root=0)
    operation.finish(flat, group.size)
    down(group, flat, root=0)


def up(group: Group, flat: torch.Tensor, operation: Operation, root: int) -> None:
    """After it the root's `flat` holds the result and the others' hold partial sums."""
    n = group.size
    place = (group.rank - root) % n  # in a tree whose root is 0
    reach = 1
    while reach < n:
        if place % (2 * reach) == reach:
            group.send_chunk((place - reach + root) % n, flat).wait()
            return
        if place + reach < n:
            group.recv_chunk((place + reach + root) % n, flat, operation.combine).wait()
        reach *= 2


def down(group: Group, flat: torch.Tensor, root: int) -> None:
    """After it every rank's `flat` is the root's."""
    n = group.size
    place = (group.rank - root) % n
    reach = 1 << (n - 1).bit_length()
    while reach > 1:
        reach //= 2
        if place % (2 * reach) == reach:
            group.recv_chunk((place - reach + root) % n, flat).wait()
        elif place % (2 * reach) == 0 and place + reach < n:
            group.send_chunk((place + reach + root) % n, flat).wait()
