"""Feedback: sums of encoded vectors, where nothing that the encoding takes away is lost.

`Scattered`, for codecs that say something about every element (h is the number of hosts):

    encode      each leader encodes its vector and what it owes, and owes what that took away
    scatter     part r of every leader's goes to leader r, which adds them up in float32
    encode      leader r encodes its part of the sum and what it owes of it, and owes what that took away
    gather      everybody gets everybody's part: the same bits everywhere

Sent by each leader: 2(h−1)/h of what the codec makes of the vector, as in a ring.

`Gathered`, for topk, whose sum has more elements than its parts:

    encode      as above
    gather      everybody gets everybody's selection, and adds them up in order of rank

Sent by each leader: (h−1) times what the codec makes of the vector.

What workers count by, their shares, is in their vectors before they are encoded: what is owed counts the same whenever
it is paid.
"""

from __future__ import annotations

import torch

from ..collectives import ring
from ..collectives.group import Group
from .codec import BLOCK, Codec
from .exchange import CompressedSum, is_finite
from .savings import CompressionSavings


class ScatteredSum(CompressedSum):
    def __init__(self, name: str, numel: int, tally: CompressionSavings, codec: Codec) -> None:
        super().__init__(name, numel, tally)
        self._codec = codec
        self.forget()

    def forget(self) -> None:
        self._owed: torch.Tensor | None = None  # of what this leader gives
        self._owed_part: torch.Tensor | None = None  # of its part of the sum
        self._before: tuple[torch.Tensor | None, torch.Tensor | None] | None = None  # both, until a call is settled

    def settle(self, counts: bool) -> None:
        if self._before is not None and not counts:
            self._owed, self._owed_part = self._before
        self._before = None

    def num_bytes(self, num_hosts: int) -> int:
        return 2 * (num_hosts - 1) * self._codec.num_bytes(self.numel) // num_hosts

    def _sum(self, leaders: Group, vector: torch.Tensor) -> torch.Tensor:
        codec, me = self._codec, leaders.rank
        cut = bounds(self.numel, leaders.size)
        start, stop = cut[me]
        given = vector.clone() if self._owed is None else self._owed + vector
        parts = [codec.encode(given[a:b]) for a, b in cut]
        part = torch.zeros(stop - start) if self._owed_part is None else self._owed_part.clone()
        for coded in _scatter(leaders, parts, codec.num_bytes(stop - start)):
            codec.add(coded, part)
        pieces = [torch.empty(codec.num_bytes(b - a), dtype=torch.uint8) for a, b in cut]
        pieces[me] = codec.encode(part)
        ring.all_gather(leaders, pieces, owner_shift=0)
        total = torch.cat([codec.decode(piece, b - a) for piece, (a, b) in zip(pieces, cut, strict=True)])
        if is_finite(total):
            for coded, (a, b) in zip(parts, cut, strict=True):
                given[a:b] -= codec.decode(coded, b - a)
            self._before = (self._owed, self._owed_part)
            self._owed, self._owed_part = given, part.sub_(total[start:stop])
        return total


class GatheredSum(CompressedSum):
    def __init__(self, name: str, numel: int, tally: CompressionSavings, codec: Codec) -> None:
        super().__init__(name, numel, tally)
        self._codec = codec
        self.forget()

    def forget(self) -> None:
        self._owed: torch.Tensor | None = None
        self._before: tuple[torch.Tensor | None] | None = None  # the same, until a call is settled

    def settle(self, counts: bool) -> None:
        if self._before is not None and not counts:
            (self._owed,) = self._before
        self._before = None

    def num_bytes(self, num_hosts: int) -> int:
        return (num_hosts - 1) * self._codec.num_bytes(self.numel)

    def _sum(self, leaders: Group, vector: torch.Tensor) -> torch.Tensor:
        codec = self._codec
        given = vector.clone() if self._owed is None else self._owed + vector
        mine = codec.encode(given)
        pieces = [torch.empty_like(mine) for _ in range(leaders.size)]
        pieces[leaders.rank] = mine
        ring.all_gather(leaders, pieces, owner_shift=0)
        total = torch.zeros(self.numel)
        for piece in pieces:
            codec.add(piece, total)
        if is_finite(total):
            self._before = (self._owed,)
            self._owed = given.sub_(codec.decode(mine, self.numel))
        return total


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Contiguous (start, stop) pieces that begin where a codec's block does, as even as that allows."""
    edges = [min(numel, -(-numel * part // (parts * BLOCK)) * BLOCK) for part in range(parts)] + [numel]
    return [(edges[part], edges[part + 1]) for part in range(parts)]


def _scatter(leaders: Group, parts: list[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
    """Part r goes to leader r; everybody's part for this one, of so many bytes each, in order of rank."""
    sending = [leaders.give(peer, parts[peer]) for peer in leaders.others]
    came = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(leaders.size)]
    came[leaders.rank] = parts[leaders.rank]
    for distance in range(1, leaders.size):
        peer = (leaders.rank - distance) % leaders.size
        leaders.take(peer, came[peer]).wait()
    for handle in sending:
        handle.wait()
    return came
