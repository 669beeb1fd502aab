"""Codecs: so many bytes, one rounding, nothing infinite that was not, and data of another length refused."""

from __future__ import annotations

import math
import random

import pytest
import torch

from hora.compression.codec import BLOCK, make_codec
from hora.compression.names import NAMES

LENGTHS = (0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 7)
DENSE = ("fp16", "bf16", "int8")
PRECISION = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5001 / 127}  # of a block's largest value
TINY, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def numbers(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def again(name: str, vector: torch.Tensor, topk: float = 0.01) -> torch.Tensor:
    """The vector after its journey."""
    chosen = make_codec(name, topk)
    return chosen.decode(chosen.encode(vector), len(vector))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_it_takes_as_many_bytes_as_the_formula_says(name: str, numel: int) -> None:
    blocks = math.ceil(numel / BLOCK)
    wanted = {
        "fp32": 4 * numel,
        "fp16": 2 * numel + 4 * blocks,
        "bf16": 2 * numel,
        "int8": numel + 4 * blocks,
        "topk": 8 * math.ceil(0.03 * numel),
    }[name]
    chosen = make_codec(name, topk=0.03)
    data = chosen.encode(numbers(numel))
    assert data.dtype == torch.uint8 and data.dim() == 1
    assert len(data) == chosen.num_bytes(numel) == wanted


@pytest.mark.parametrize("name", DENSE)
def test_one_rounding_is_all_that_is_lost(name: str) -> None:
    lots = random.Random(7)
    for seed in range(60):
        numel, size = lots.randrange(4 * BLOCK), 10.0 ** lots.uniform(-30, 30)
        vector = numbers(numel, seed) * size
        found = again(name, vector)
        for block, original in zip(found.split(BLOCK), vector.split(BLOCK), strict=True):
            if len(block):
                assert (block - original).abs().max() <= original.abs().max() * PRECISION[name], (seed, numel, size)


def test_float32_is_what_it_was() -> None:
    assert again("fp32", numbers(5000)).equal(numbers(5000))


def test_16_bits_are_those_of_torch() -> None:
    vector = numbers(3 * BLOCK + 5)
    assert again("bf16", vector).equal(vector.bfloat16().float())
    assert again("fp16", vector).equal(vector.half().float()), "a scale that is a power of two changes nothing"


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_largest_numbers_stay_finite(name: str) -> None:
    for value in (0.0, TINY, TINY / 1024, 1e-30, 1e30, 65504.0, 65520.0, 3e38, -3e38, LARGEST, -LARGEST):
        vector = torch.full((BLOCK + 5,), value)
        found = again(name, vector, topk=1.0)
        assert bool(found.isfinite().all()), value
        assert (found - vector).abs().max() <= abs(value) / 100 + 2 * TINY, value


def test_what_is_tiny_everywhere_keeps_its_bits_in_fp16() -> None:
    """Plain float16 has nothing below 6e-8."""
    vector = numbers(BLOCK) * 1e-20
    assert (again("fp16", vector) - vector).abs().max() <= vector.abs().max() * 2.0**-11
    assert not bool(vector.half().any())


@pytest.mark.parametrize("name", DENSE)
def test_a_large_number_spoils_no_other_block(name: str) -> None:
    vector = numbers(3 * BLOCK)
    vector[BLOCK + 3] = 1e6
    found = again(name, vector)
    for at in (0, 2):
        assert (found - vector)[at * BLOCK : (at + 1) * BLOCK].abs().max() < 0.04


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_get_lost(name: str, value: float) -> None:
    vector = numbers(2 * BLOCK)
    vector[5] = value
    found = again(name, vector)
    assert not math.isfinite(found[5])
    assert bool(found[BLOCK:].isfinite().all()), "another block is not touched"


def test_topk_takes_the_largest_by_magnitude_and_nothing_else() -> None:
    for seed, (numel, share) in enumerate([(1, 0.01), (7, 0.3), (1000, 0.05), (4097, 0.01), (300, 1.0)]):
        vector = numbers(numel, seed)
        found = again("topk", vector, share)
        kept = found != 0
        assert int(kept.sum()) == math.ceil(share * numel)
        assert found[kept].equal(vector[kept])
        assert numel == int(kept.sum()) or vector[kept].abs().min() >= vector[~kept].abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_adding_is_decoding_and_adding(name: str) -> None:
    chosen, vector = make_codec(name, 0.1), numbers(2 * BLOCK + 9)
    total = numbers(len(vector), 1)
    wanted = total + chosen.decode(chosen.encode(vector), len(vector))
    chosen.add(chosen.encode(vector), total)
    assert total.equal(wanted)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_may_begin_anywhere(name: str) -> None:
    """As they do behind the header of a message."""
    chosen, vector = make_codec(name, 0.1), numbers(BLOCK + 3)
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), chosen.encode(vector)])[3:]
    assert chosen.decode(data, len(vector)).equal(again(name, vector, 0.1))


@pytest.mark.parametrize("name", NAMES)
def test_data_of_another_length_is_refused(name: str) -> None:
    chosen = make_codec(name, 0.1)
    data = chosen.encode(numbers(3000))
    for wrong in (data[:-1], data[:0], torch.cat([data, data[:4]]), data.float()):
        with pytest.raises(ValueError, match=f"3000 elements of {name} are uint8"):
            chosen.decode(wrong, 3000)


@pytest.mark.parametrize("index", [-1, 100, 2**31 - 1])
def test_a_selection_of_elements_that_are_not_there_is_refused(index: int) -> None:
    chosen = make_codec("topk", 0.02)
    data = torch.cat([torch.tensor([3, index], dtype=torch.int32).view(torch.uint8), torch.ones(2).view(torch.uint8)])
    with pytest.raises(ValueError, match="indices outside of a vector of 100 elements"):
        chosen.decode(data, 100)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int4", "wire='int4' is unknown; there are: fp32, fp16, bf16, int8, topk"),
        ("bfloat16", "did you mean bf16?"),
        ("float32", "did you mean fp32?"),
        ("", "there are"),
    ],
)
def test_an_unknown_name_is_told_what_exists(name: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        make_codec(name)
    assert said in str(caught.value)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, math.nan])
def test_a_share_of_elements_is_above_0_and_up_to_1(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and up to 1"):
        make_codec("topk", share)
