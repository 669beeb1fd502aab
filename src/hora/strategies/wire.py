"""Wire: the mean of everybody's vector with fewer bytes than it has, and what rounding takes away kept for later.

    encode      each rank rounds its vector times its share, and keeps the error to add it to the next one
    scatter     part r of every rank's goes to rank r, which adds them up in float32
    encode      rank r rounds its part of the mean, and keeps that error too
    gather      everybody gets everybody's part: the same bits on every rank

Bytes per rank: 2(n−1)/n of the vector, as in a ring, at 2 bytes (bfloat16) or 1 byte and a 256th (int8) per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.base import Group

BLOCK = 1024  # elements of int8 that share a scale


def encode(vector: torch.Tensor, wire: str) -> torch.Tensor:
    """The vector of float32 in bytes."""
    if wire == "bfloat16":
        return vector.to(torch.bfloat16).view(torch.uint8)
    blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1).div_(127.0)
    codes = blocks.div(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), codes.view(-1)[: len(vector)].view(torch.uint8)])


def decode(data: torch.Tensor, numel: int, wire: str) -> torch.Tensor:
    """The vector of float32 that was encoded."""
    if wire == "bfloat16":
        return data.view(torch.bfloat16).float()
    num_blocks = -(-numel // BLOCK)
    scales = data[: 4 * num_blocks].clone().view(torch.float32)
    codes = torch.nn.functional.pad(data[4 * num_blocks :].view(torch.int8).float(), (0, -numel % BLOCK))
    return codes.view(-1, BLOCK).mul_(scales[:, None]).view(-1)[:numel]


class Feedback:
    """One rank's memory of what rounding took from one vector, and how that vector's mean is taken."""

    def __init__(self, group: Group, numel: int, wire: str) -> None:
        self._group = group
        self._wire = wire
        edges = [min(numel, -(-numel * rank // (group.size * BLOCK)) * BLOCK) for rank in range(group.size)] + [numel]
        self._bounds = [(edges[rank], edges[rank + 1]) for rank in range(group.size)]
        start, stop = self._bounds[group.rank]
        self._mine = torch.zeros(numel)  # of what this rank gives
        self._part = torch.zeros(stop - start)  # of its part of the mean

    def mean(self, vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        """Collective: the sum of everybody's vector times its share. The vector stays as it is."""
        group, wire = self._group, self._wire
        share = shares[group.rank]  # it goes in before rounding: an error counts the same whenever it is fed back
        given = self._mine + vector.cpu().float() * share if share else self._mine
        parts = [encode(given[start:stop], wire) for start, stop in self._bounds]
        rounded = [decode(p, stop - start, wire) for p, (start, stop) in zip(parts, self._bounds, strict=True)]
        self._mine = given - torch.cat(rounded)
        total = self._part
        for part in group.all_to_all(parts, name="drifts"):
            total = total + decode(part, len(total), wire)
        coded = encode(total, wire)
        self._part = total - decode(coded, len(total), wire)
        everybody = group.all_gather(coded, name="mean drift")
        pieces = [decode(p, stop - start, wire) for p, (start, stop) in zip(everybody, self._bounds, strict=True)]
        return torch.cat(pieces).to(vector)
