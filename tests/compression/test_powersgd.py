"""PowerSGD: exact where the rank suffices, and over time nothing is lost where it does not."""

from __future__ import annotations

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.compression.compressor import Compressor
from hora.compression.powersgd import Matrix, orthonormal, product, total
from leaders import add_up, numbers

N, M = 40, 30


def low(rank: int, seed: int, rows: int = N, columns: int = M) -> torch.Tensor:
    return numbers(rows * rank, seed).view(rows, rank) @ numbers(rank * columns, seed + 99).view(rank, columns)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_matrix_of_low_rank_is_exact_after_a_few_calls(size: int) -> None:
    """Every leader's has rank 1, their sum at most rank 3."""

    def script(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        exchange = Compressor("powersgd", rank=4).sum_for(0, N * M, [Matrix(0, N, M)])
        first = add_up(group, exchange, low(1, group.rank).view(-1))
        for _ in range(3):
            last = add_up(group, exchange, low(1, group.rank).view(-1))
        return first, last

    found = ranks.run(size, script)
    wanted = sum((low(1, rank) for rank in range(size)), torch.zeros(N, M)).view(-1)
    for first, last in found:
        assert last.equal(found[0][1]) and first.equal(found[0][0])
        assert torch.allclose(last, wanted, atol=1e-4)


def test_what_the_rank_does_not_hold_arrives_in_time() -> None:
    """A matrix of full rank, the same in every call, through rank 2: the mean of what arrives becomes the sum."""

    def script(group: Group) -> list[float]:
        exchange = Compressor("powersgd", rank=2).sum_for(0, N * M, [Matrix(0, N, M)])
        mine, wanted = numbers(N * M, group.rank), numbers(N * M, 0) + numbers(N * M, 1)
        arrived, errors = torch.zeros(N * M), []
        for number in range(1, 121):
            arrived += add_up(group, exchange, mine)
            errors.append(((arrived / number - wanted).norm() / wanted.norm()).item())
        return errors

    for errors in ranks.run(2, script):
        assert errors[0] > 0.5, "one call holds little of it"
        assert errors[-1] < 0.25 and errors[-1] < 0.6 * errors[len(errors) // 2 - 1] + 0.02


def test_what_is_no_matrix_or_would_not_shrink_is_exact() -> None:
    """5 numbers, a matrix, a matrix that is too small, 7 numbers."""
    matrices = [Matrix(5, N, M), Matrix(5 + N * M, 4, 4)]
    numel = 5 + N * M + 16 + 7
    apart = [*range(5), *range(5 + N * M, numel)]

    def script(group: Group) -> torch.Tensor:
        return add_up(group, Compressor("powersgd").sum_for(0, numel, matrices), numbers(numel, group.rank).round())

    wanted = numbers(numel, 0).round() + numbers(numel, 1).round()
    for found in ranks.run(2, script):
        assert found[apart].equal(wanted[apart])
        assert not found.equal(wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bytes_are_those_of_two_rings_of_thin_matrices(size: int) -> None:
    rank, rows, columns, rest = 3, 24 * size, 12 * size, 12 * size
    numel = rows * columns + rest

    def script(group: Group) -> tuple[int, int]:
        wire = Compressor("powersgd", rank=rank)
        add_up(group, wire.sum_for(0, numel, [Matrix(0, rows, columns)]), numbers(numel, group.rank))
        return wire.savings.sent_bytes, wire.savings.plain_bytes

    for sent, plain in ranks.run(size, script):
        assert sent == 2 * (size - 1) * 4 * (rank * (rows + columns) + rest) // size
        assert plain == 2 * (size - 1) * 4 * numel // size


def test_without_a_matrix_it_is_a_ring() -> None:
    def script(group: Group) -> torch.Tensor:
        wire = Compressor("powersgd")
        found = add_up(group, wire.sum_for(0, 500), numbers(500, group.rank).round())
        assert wire.savings.sent_bytes == wire.savings.plain_bytes > 0
        return found

    for found in ranks.run(2, script):
        assert found.equal(numbers(500, 0).round() + numbers(500, 1).round())


@pytest.mark.parametrize("scale", [1e-25, 1e-10, 1.0, 1e10, 1e25])
def test_size_does_not_matter(scale: float) -> None:
    def script(group: Group) -> torch.Tensor:
        exchange = Compressor("powersgd").sum_for(0, N * M, [Matrix(0, N, M)])
        for _ in range(3):
            found = add_up(group, exchange, low(1, group.rank).view(-1) * scale)
        return found

    for found in ranks.run(2, script):
        assert torch.allclose(found / scale, (low(1, 0) + low(1, 1)).view(-1), atol=1e-3)


def test_zeros_and_what_is_not_finite_leave_no_trace() -> None:
    """A layer without a gradient, then a NaN, then as before."""

    def script(group: Group) -> torch.Tensor:
        exchange = Compressor("powersgd").sum_for(0, N * M, [Matrix(0, N, M)])
        assert not bool(add_up(group, exchange, torch.zeros(N * M)).any())
        bad = low(1, group.rank).view(-1)
        bad[7] = float("nan") if group.rank else 1.0
        assert not bool(add_up(group, exchange, bad)[7].isfinite())
        for _ in range(4):
            found = add_up(group, exchange, low(1, group.rank).view(-1))
        return found

    for found in ranks.run(2, script):
        assert torch.allclose(found, (low(1, 0) + low(1, 1)).view(-1), atol=1e-4)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (100, 8), (4, 4), (3, 5)])
def test_columns_are_orthonormal_and_span_the_same(rows: int, columns: int) -> None:
    matrix = numbers(rows * columns, 3).view(rows, columns)
    found = orthonormal(matrix)
    held = min(rows, columns)
    assert torch.allclose(
        found.t() @ found, torch.diag(torch.tensor([1.0] * held + [0.0] * (columns - held))), atol=1e-5
    )
    assert torch.allclose(found @ (found.t() @ matrix), matrix, atol=1e-5)


def test_columns_that_add_nothing_are_zeros() -> None:
    matrix = torch.stack([numbers(50, 1), 3 * numbers(50, 1), torch.zeros(50), numbers(50, 2)], 1)
    found = orthonormal(matrix)
    assert not bool(found[:, 1].any()) and not bool(found[:, 2].any())
    assert torch.allclose(found[:, [0, 3]].t() @ found[:, [0, 3]], torch.eye(2), atol=1e-5)


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 64, 1001])
def test_a_total_is_the_sum(numel: int) -> None:
    rows = numbers(2 * numel).view(numel, 2).mul(8).round()
    assert total(rows).equal(rows.sum(0))


def test_a_product_is_the_matrix_product() -> None:
    left, right, out = numbers(20, 1).view(5, 4), numbers(12, 2).view(3, 4), torch.empty(5, 3)
    product(left, right, out)
    assert torch.allclose(out, left @ right.t(), atol=1e-5)


def test_double_precision_without_a_matrix_goes_through_float32() -> None:
    """The exchange sends less than a ring of doubles would, though nothing in it shrinks."""

    def script(group: Group) -> torch.Tensor:
        return add_up(group, Compressor("powersgd").sum_for(0, 500), numbers(500, group.rank).round().double())

    for found in ranks.run(2, script):
        assert found.equal((numbers(500, 0).round() + numbers(500, 1).round()).double())
