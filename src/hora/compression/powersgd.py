"""PowerSGD (Vogels, Karimireddy and Jaggi 2019): matrices are sent as products of two thin ones.

For every matrix M of n × m in the vector, its residual included, and Q of m × rank from the last call (warm start; at
first random, the same on all leaders):

    P           each leader's M·Q, summed by a ring, then made orthonormal by each leader
    Q           each leader's Mᵀ·P, summed by a ring: P·Qᵀ is the sum's best approximation in the space of P
    residual    what of a leader's own M that space does not hold, M − P·(Mᵀ·P)ᵀ

What is not a matrix, or would not shrink (rank·(n + m) ≥ n·m), is sent with P as it is.

Sent by each leader: 2(h−1)/h of 4 bytes for rank·(n + m) numbers per matrix and for each element of the rest.

What all leaders must compute alike uses single additions, multiplications, divisions and roots of float32, which give
the same bits on any processor. Matrix products, which do not, are only taken of what is then summed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..collectives import ring
from ..collectives.group import Group
from .compressed_sum import SUM, CompressedSum, CompressionSavings

NEGLIGIBLE = 1e-5  # a column of which less than this is new holds rounding errors only
SEED = 1

State = tuple[list[torch.Tensor], list[torch.Tensor] | None]  # by matrix: Q for the next call, and the residual


@dataclasses.dataclass(frozen=True)
class Matrix:
    """`rows` × `columns` elements of a vector from `offset` on."""

    offset: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.offset + self.rows * self.columns

    def shrinks(self, rank: int) -> bool:
        return rank * (self.rows + self.columns) < self.rows * self.columns

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """A view."""
        return vector[self.offset : self.stop].view(self.rows, self.columns)


class PowerSGDSum(CompressedSum):
    """`matrices` are in the order of the vector, contiguous or not."""

    def __init__(
        self, name: str, numel: int, savings: CompressionSavings, matrices: Sequence[Matrix], rank: int
    ) -> None:
        self._rank = rank
        self._matrices = [matrix for matrix in matrices if matrix.shrinks(rank)]
        edges = [0, *(edge for matrix in self._matrices for edge in (matrix.offset, matrix.stop)), numel]
        self._rest = [(start, stop) for start, stop in list(pairwise(edges))[::2] if start < stop]
        super().__init__(name, numel, savings)

    def _initial_state(self) -> State:
        self._random = torch.Generator().manual_seed(SEED)
        return [self._draw(matrix.columns, self._rank) for matrix in self._matrices], None

    def num_bytes(self, num_hosts: int) -> int:
        thin = sum(self._rank * (matrix.rows + matrix.columns) for matrix in self._matrices)
        return 2 * (num_hosts - 1) * 4 * (thin + sum(stop - start for start, stop in self._rest)) // num_hosts

    def _sum(self, leaders: Group, vector: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        starts, residuals = state
        given = [matrix.of(vector) for matrix in self._matrices]
        if residuals is not None:
            given = [m + residual for m, residual in zip(given, residuals, strict=True)]
        rest = [vector[start:stop] for start, stop in self._rest]
        summed = _all_reduce(leaders, [*(m @ start for m, start in zip(given, starts, strict=True)), *rest])
        left = [orthonormal(p) for p in summed[: len(given)]]
        mine = [m.t() @ p for m, p in zip(given, left, strict=True)]
        right = _all_reduce(leaders, mine) if mine else []
        total = torch.empty(self.numel)
        for matrix, p, q in zip(self._matrices, left, right, strict=True):
            product(p, q, matrix.of(total))
        for (start, stop), part in zip(self._rest, summed[len(given) :], strict=True):
            total[start:stop] = part
        residuals = [m - p @ q.t() for m, p, q in zip(given, left, mine, strict=True)]
        return total, ([self._next_start(q) for q in right], residuals)

    def _next_start(self, q: torch.Tensor) -> torch.Tensor:
        """The columns scaled to one size; random ones for those that are zero, which would stay zero."""
        largest = q.abs().amax(0)
        others = self._draw(*q.shape) if not bool(largest.all()) else q
        return torch.where(largest > 0, q / largest, others)

    def _draw(self, rows: int, columns: int) -> torch.Tensor:
        """Random numbers: the same on all leaders, which draw equally often."""
        return torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=self._random).float().div_(1 << 15)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns for the same space (Gram and Schmidt, twice); zeros for those that add nothing to it."""
    found = torch.zeros_like(matrix)
    for number in range(matrix.shape[1]):
        column = matrix[:, number]
        column = column / column.abs().max()
        before = total(column * column).sqrt()
        for _ in range(2):
            shares = total(found[:, :number] * column[:, None])
            for other, share in zip(found[:, :number].unbind(1), shares, strict=True):
                column = column - other * share
        length = total(column * column).sqrt()
        if bool(length > NEGLIGIBLE * before):
            found[:, number] = column / length
    return found


def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """left · rightᵀ, column by column."""
    torch.mul(left[:, :1], right[:, 0], out=out)
    for number in range(1, left.shape[1]):
        out += left[:, number : number + 1] * right[:, number]


def total(rows: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, by halves: always in the same order."""
    while len(rows) > 1:
        half = len(rows) // 2
        sums = rows[:half] + rows[half : 2 * half]
        rows = torch.cat([sums, rows[2 * half :]])
    return rows[0]


def _all_reduce(leaders: Group, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Collective: each of these summed over all leaders."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    ring.all_reduce(leaders, flat, SUM)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
