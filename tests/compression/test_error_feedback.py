"""Exchanges between leaders: the same bits everywhere, close to the sum, and over time nothing is lost."""

from __future__ import annotations

import itertools

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.compression.codec import BLOCK, make_codec
from hora.compression.compressor import Compressor
from hora.compression.error_feedback import bounds
from leaders import add_up, numbers

CODECS = ("fp16", "bf16", "int8", "topk")
LENGTHS = (0, 1, 3, BLOCK - 1, BLOCK + 1, 5 * BLOCK + 7)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_get_the_same_bits_close_to_the_sum(name: str, size: int) -> None:
    for numel in LENGTHS:

        def script(group: Group, numel: int = numel) -> torch.Tensor:
            return add_up(
                group, Compressor(name, 0.2 if name == "topk" else None).sum_for(0, numel), numbers(numel, group.rank)
            )

        found = ranks.run(size, script)
        wanted = sum((numbers(numel, rank) for rank in range(size)), torch.zeros(numel))
        for each in found:
            assert each.equal(found[0])
            if numel and name != "topk":
                assert (each - wanted).abs().max() <= 0.04 * size


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [2, 3])
def test_what_arrives_in_the_end_is_what_was_sent(name: str, size: int) -> None:
    """Small numbers beside large ones, the same in every call, so that encoding takes always the same away: the mean of
    what arrives becomes the exact sum nevertheless, and the error of the sum of all calls does not grow."""
    numel, num_calls = BLOCK + 300, 300

    def given(rank: int) -> torch.Tensor:
        vector = numbers(numel, rank, 1e-4) + 1e-3
        vector[::97] = 1.003 + rank
        return vector

    def script(group: Group) -> tuple[list[float], float]:
        exchange = Compressor(name, 0.05 if name == "topk" else None).sum_for("it", numel)
        wanted = sum((given(rank).double() for rank in range(size)), torch.zeros(numel, dtype=torch.float64))
        arrived, errors = torch.zeros(numel, dtype=torch.float64), []
        for number in range(1, num_calls + 1):
            arrived += add_up(group, exchange, given(group.rank))
            errors.append((arrived - number * wanted).abs().max().item())
        chosen = make_codec(name, 0.05)
        once = chosen.decode(chosen.encode(given(0)), numel)
        return errors, (once - given(0)).abs().max().item()

    for errors, alone in ranks.run(size, script):
        third = max(errors[: num_calls // 3])
        assert max(errors) <= 1.5 * third, "it grows"
        assert errors[-1] < 0.5 * num_calls * alone, "without feedback it would be this"


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_comes_out_and_spoils_no_later_call(name: str) -> None:
    numel = 2 * BLOCK

    def script(group: Group) -> None:
        exchange = Compressor(name, 0.05 if name == "topk" else None).sum_for("it", numel)
        arrived, sent = torch.zeros(numel), torch.zeros(numel)
        for number in range(60):
            vectors = [numbers(numel, rank, 1e-3) + 1e-2 for rank in range(2)]
            if number == 7:
                vectors[1][3] = float("nan")
                assert not bool(add_up(group, exchange, vectors[group.rank]).isfinite().all())
                continue
            arrived += add_up(group, exchange, vectors[group.rank])
            sent += vectors[0] + vectors[1]
        assert bool(arrived.isfinite().all())
        assert (arrived - sent).abs().max() < (0.6 if name == "topk" else 1e-2)

    ranks.run(2, script)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_go_through_float32_and_keep_their_own(dtype: torch.dtype) -> None:
    def script(group: Group) -> torch.Tensor:
        return add_up(group, Compressor("int8").sum_for(0, 3000), numbers(3000, group.rank).to(dtype))

    found = ranks.run(3, script)
    assert all(each.dtype == dtype and each.equal(found[0]) for each in found)
    assert (found[0].double() - sum(numbers(3000, rank).double() for rank in range(3))).abs().max() < 0.15


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_bytes_are_counted_as_they_were_sent(name: str, size: int, transport: str) -> None:
    """Of a vector that is cut evenly: 2(h−1)/h of what the codec makes of it, or (h−1) times that for a selection."""
    numel = 2 * size * BLOCK

    def script(group: Group) -> tuple[int, int, int]:
        wire = Compressor(name)
        before = sum(group.transport.sent_bytes)
        for _ in range(2):
            add_up(group, wire.sum_for(0, numel), numbers(numel, group.rank))
        return sum(group.transport.sent_bytes) - before, wire.savings.sent_bytes, wire.savings.plain_bytes

    coded = make_codec(name).num_bytes(numel)
    each = (size - 1) * coded if name == "topk" else 2 * (size - 1) * coded // size
    for sent, counted, plain in ranks.run(size, script, transport):
        assert sent == counted == 2 * each
        assert plain == 2 * 2 * (size - 1) * 4 * numel // size


@pytest.mark.parametrize(("name", "topk", "dtype"), [("topk", 0.5, torch.float32), ("fp16", None, torch.float16)])
def test_what_would_not_shrink_goes_as_it_is(name: str, topk: float | None, dtype: torch.dtype) -> None:
    def script(group: Group) -> torch.Tensor:
        wire = Compressor(name, topk)
        vector = torch.arange(2048).remainder(64).to(dtype) + group.rank
        found = add_up(group, wire.sum_for(0, 2048), vector)
        assert wire.savings.sent_bytes == wire.savings.plain_bytes
        return found

    for found in ranks.run(2, script):
        assert found.equal((2 * torch.arange(2048).remainder(64) + 1).to(dtype))


@pytest.mark.parametrize("numel", [0, 1, BLOCK, 7 * BLOCK + 3, 100_000])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_begin_where_blocks_do(numel: int, parts: int) -> None:
    cut = bounds(numel, parts)
    assert cut[0][0] == 0 and cut[-1][1] == numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cut))
    assert all(start % BLOCK == 0 or start == numel for start, _ in cut)
    assert max(stop - start for start, stop in cut) <= numel / parts + BLOCK


def test_what_is_owed_can_be_forgotten() -> None:
    def script(group: Group) -> None:
        wire = Compressor("int8")
        exchange = wire.sum_for("a", 3000)
        first = add_up(group, exchange, numbers(3000, group.rank))
        assert wire.sum_for("a", 3000) is exchange and wire.sum_for("b", 3000) is not exchange
        assert not add_up(group, exchange, numbers(3000, group.rank)).equal(first)
        wire.reset()
        assert add_up(group, exchange, numbers(3000, group.rank)).equal(first)

    ranks.run(2, script)
    assert Compressor("fp32").sum_for("a", 10) is None


def test_savings_are_said_per_step() -> None:
    wire = Compressor("int8")
    assert wire.savings.describe("int8", 10, "step") == ""
    wire.savings.sent_bytes, wire.savings.plain_bytes = 254_000_000, 1_000_000_000
    assert wire.savings.describe("int8", 10, "step") == "wire=int8: 25.4 MB instead of 100.0 MB per step between hosts"
    assert wire.savings.describe("int8", 0, "step") == ""
