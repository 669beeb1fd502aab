"""Recursive halving and doubling (Rabenseifner 2004): all-reduce in the tree's number of steps with the ring's data.

        0 ⇄ 2, 1 ⇄ 3   exchange halves          then   0 ⇄ 1, 2 ⇄ 3   exchange quarters          … and back

Let p be the largest power of two ≤ n, e = n − p. Phases:

- *fold in* (if e > 0): ranks 1, 3, … 2e − 1 send their vector to the even neighbour below and wait. The p others are
  renumbered 0 … p − 1 in order.
- *halving*, round k: participant v exchanges with v XOR p/2^(k+1) one half of the range both still hold; the one with
  that bit clear keeps the lower half. After it v owns chunk v of p.
- *doubling*: the same rounds backwards, sending what is owned.
- *fold out* (if e > 0): the even neighbour sends the result back.

Steps: 2⌈log2 n⌉. Sent by a participant: 2(p−1)/p of the data, plus one vector if it folds; by a folded rank: one
vector. Half precision is rounded at every hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .reduction import Operation
from .schedule import bounds

if TYPE_CHECKING:
    from .group import Group


def all_reduce(group: Group, flat: torch.Tensor, operation: Operation) -> None:
    power = 1 << (group.size.bit_length() - 1)
    folded = group.size - power
    folds = group.rank < 2 * folded
    # fold in
    if folds and group.rank % 2:
        group.send_chunk(group.rank - 1, flat).wait()
        group.recv_chunk(group.rank - 1, flat).wait()  # fold out
        return
    if folds:
        group.recv_chunk(group.rank + 1, flat, operation.combine).wait()
    me = group.rank // 2 if folds else group.rank - folded

    def rank_of(participant: int) -> int:
        return 2 * participant if participant < folded else participant + folded

    cut = bounds(flat.numel(), power)
    edges = [start for start, _ in cut] + [flat.numel()]
    # halving
    low, high = 0, power
    rounds: list[tuple[int, int, int]] = []
    distance = power // 2
    while distance:
        middle = (low + high) // 2
        keep, give = ((low, middle), (middle, high)) if not me & distance else ((middle, high), (low, middle))
        peer = rank_of(me ^ distance)
        sending = group.send_chunk(peer, flat[edges[give[0]] : edges[give[1]]])
        group.recv_chunk(peer, flat[edges[keep[0]] : edges[keep[1]]], operation.combine).wait()
        sending.wait()
        rounds.append((peer, *give))
        low, high = keep
        distance //= 2
    operation.finish(flat[edges[low] : edges[high]], group.size)
    # doubling
    for peer, start, stop in reversed(rounds):
        sending = group.send_chunk(peer, flat[edges[low] : edges[high]])
        group.recv_chunk(peer, flat[edges[start] : edges[stop]]).wait()
        sending.wait()
        low, high = min(low, start), max(high, stop)
    # fold out
    if folds:
        group.send_chunk(group.rank + 1, flat).wait()
