"""Sums of encoded vectors with error feedback: what an encoding loses is added to the next vector.

`ScatteredSum`, for codecs that encode every element (h is the number of hosts):

    encode      each leader encodes its vector and residual, and keeps what that lost
    scatter     part r of every leader's goes to leader r, which sums them in float32
    encode      leader r encodes its part of the sum and that part's residual, and keeps what that lost
    gather      all leaders get all parts: the same bits everywhere

Sent by each leader: 2(h−1)/h of the encoded vector, as in a ring.

`GatheredSum`, for topk, whose sum has more elements than its terms:

    encode      as above
    gather      all leaders get all selections, and sum them in order of rank

Sent by each leader: (h−1) times the encoded vector.

Workers' weights are in their vectors before these are encoded, so a residual counts the same whenever it is added.
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import ring
from ..collectives.group import Group
from .codec import BLOCK, Codec
from .compressed_sum import CompressedSum, CompressionSavings


class GatheredSum(CompressedSum):
    def __init__(self, name: str, numel: int, savings: CompressionSavings, codec: Codec) -> None:
        super().__init__(name, numel, savings)
        self._codec = codec

    def _initial_state(self) -> Any:
        return None

    def num_bytes(self, num_hosts: int) -> int:
        return (num_hosts - 1) * self._codec.num_bytes(self.numel)

    def _sum(self, leaders: Group, vector: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        codec = self._codec
        given = vector.clone() if state is None else state + vector
        mine = codec.encode(given)
        pieces = [torch.empty_like(mine) for _ in range(leaders.size)]
        pieces[leaders.rank] = mine
        ring.all_gather(leaders, pieces)
        total = torch.zeros(self.numel)
        for piece in pieces:
            codec.add(piece, total)
        return total, given.sub_(codec.decode(mine, self.numel))


class ScatteredSum(GatheredSum):
    """The state has two residuals: of this leader's vector, and of its part of the sum."""

    def _initial_state(self) -> Any:
        return None, None

    def num_bytes(self, num_hosts: int) -> int:
        return 2 * (num_hosts - 1) * self._codec.num_bytes(self.numel) // num_hosts

    def _sum(self, leaders: Group, vector: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        codec, me = self._codec, leaders.rank
        cut = bounds(self.numel, leaders.size)
        start, stop = cut[me]
        mine, of_part = state
        given = vector.clone() if mine is None else mine + vector
        parts = [codec.encode(given[a:b]) for a, b in cut]
        part = torch.zeros(stop - start) if of_part is None else of_part.clone()
        for encoded in _scatter(leaders, parts, codec.num_bytes(stop - start)):
            codec.add(encoded, part)
        pieces = [torch.empty(codec.num_bytes(b - a), dtype=torch.uint8) for a, b in cut]
        pieces[me] = codec.encode(part)
        ring.all_gather(leaders, pieces)
        total = torch.cat([codec.decode(piece, b - a) for piece, (a, b) in zip(pieces, cut, strict=True)])
        for encoded, (a, b) in zip(parts, cut, strict=True):
            given[a:b] -= codec.decode(encoded, b - a)
        return total, (given, part.sub_(total[start:stop]))


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous (start, stop) parts that begin on a codec's block, as even as that allows."""
    edges = [min(numel, -(-numel * part // (parts * BLOCK)) * BLOCK) for part in range(parts)] + [numel]
    return [(edges[part], edges[part + 1]) for part in range(parts)]


def _scatter(leaders: Group, parts: list[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
    """Sends part r to leader r; returns all leaders' parts for this one, of `num_bytes` each, in order of rank."""
    sending = [leaders.send_chunk(peer, parts[peer]) for peer in leaders.others]
    received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(leaders.size)]
    received[leaders.rank] = parts[leaders.rank]
    for distance in range(1, leaders.size):
        peer = (leaders.rank - distance) % leaders.size
        leaders.recv_chunk(peer, received[peer]).wait()
    for handle in sending:
        handle.wait()
    return received
