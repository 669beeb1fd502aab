"""How a model is cut among servers."""

from __future__ import annotations

import random

import pytest
import torch

from hora.server.layout import ALIGN_BYTES, BlockLayout, cut


class OwnSGD(torch.optim.SGD):
    """Not torch's own type: it may do anything with a whole parameter."""


def random_model(seed: int) -> list[torch.nn.Parameter]:
    dice = random.Random(seed)
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    num_dims = [dice.randint(1, 3) for _ in range(dice.randint(3, 12))]
    shapes = [tuple(dice.choice([1, 3, 16, 200]) for _ in range(each)) for each in num_dims]
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dice.choice(dtypes))) for shape in shapes]


def loads(layout: BlockLayout, parameters: list[torch.nn.Parameter]) -> list[int]:
    return [sum(b.numel * parameters[b.index].element_size() for b in part.blocks) for part in layout.parts]


@pytest.mark.parametrize("seed", range(40))
def test_every_element_is_in_one_block_of_one_parameter_and_servers_differ_by_one_block_at_most(seed: int) -> None:
    dice = random.Random(seed)
    parameters = random_model(seed)
    half = len(parameters) // 2
    optimizers = [torch.optim.SGD(parameters[:half], lr=0.1), torch.optim.AdamW(parameters[half:])]
    layout = cut(parameters, optimizers, dice.randint(1, 3), dice.choice([1 << 12, 1 << 16, 1 << 20]))
    covered = [torch.zeros(p.numel(), dtype=torch.int64) for p in parameters]
    largest = 0
    for part in layout.parts:
        assert [block.number for block in part.blocks] == list(range(len(part.blocks)))
        assert [chunk.number for chunk in part.chunks] == list(range(len(part.chunks)))
        end = 0
        for chunk in part.chunks:
            assert {0 if block.index < half else 1 for block in chunk.blocks} == {chunk.optimizer}
            assert len({parameters[block.index].dtype for block in chunk.blocks}) == 1
            for block in chunk.blocks:
                num_bytes = block.numel * parameters[block.index].element_size()
                covered[block.index][block.start : block.stop] += 1
                assert block.whole == (block.numel == parameters[block.index].numel())
                assert block.offset % ALIGN_BYTES == 0 and end <= block.offset, "two blocks share a cache line"
                assert chunk.offset <= block.offset and block.offset + num_bytes <= chunk.offset + chunk.num_bytes
                end = block.offset + num_bytes
                largest = max(largest, num_bytes)
        assert end <= part.num_bytes
    assert all(bool((count == 1).all()) for count in covered)
    sizes = loads(layout, parameters)
    assert max(sizes) - min(sizes) <= largest


def test_a_single_huge_embedding_is_split_evenly() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(100_000, 16)), torch.nn.Parameter(torch.zeros(10))]
    layout = cut(parameters, [torch.optim.SGD(parameters, lr=0.1)], 4, 1 << 20)
    sizes = loads(layout, parameters)
    assert max(sizes) - min(sizes) <= 1 << 20 and min(sizes) > sum(sizes) / 5


def test_sparse_tables_are_cut_by_rows_and_travel_alone() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1000, 24)), torch.nn.Parameter(torch.zeros(10))]
    optimizers = [torch.optim.SparseAdam([parameters[0]]), torch.optim.SGD([parameters[1]], lr=0.1)]
    layout = cut(parameters, optimizers, 2, 4096, frozenset({0}))
    chunks = [chunk for part in layout.parts for chunk in part.chunks]
    assert all(chunk.row_numel == (24 if chunk.blocks[0].index == 0 else 0) for chunk in chunks)
    assert all(
        len(p.blocks) == 1 and p.blocks[0].start % 24 == p.blocks[0].numel % 24 == 0 for p in chunks if p.row_numel
    )
    assert sum(bool(chunk.row_numel) for chunk in chunks) > 10


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop])
def test_torchs_own_elementwise_optimizers_get_slices(kind: type[torch.optim.Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 17))]
    layout = cut(parameters, [kind(parameters, lr=0.1)], 2, 1 << 16)  # type: ignore[call-arg]
    assert all(not block.whole for part in layout.parts for block in part.blocks)


@pytest.mark.parametrize("kind", [OwnSGD, torch.optim.LBFGS])
def test_any_other_class_gets_whole_parameters(kind: type[torch.optim.Optimizer]) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 17)), torch.nn.Parameter(torch.zeros(5))]
    layout = cut(parameters, [kind(parameters, lr=0.1)], 2, 1 << 16)  # type: ignore[call-arg]
    assert all(block.whole for part in layout.parts for block in part.blocks)


def test_more_servers_than_blocks_says_how_many_there_may_be() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"3 servers for a model of 2 blocks: .* --servers 2 or fewer"):
        cut(parameters, [torch.optim.SGD(parameters, lr=0.1)], 3, 1 << 20)
    with pytest.raises(ValueError, match=r"2 servers for a model of 1 block: .* --servers 1 or fewer"):
        cut(parameters, [torch.optim.SGD(parameters[:1], lr=0.1)], 2, 1 << 20)


def test_two_optimizers_with_one_parameter_are_refused() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3, 2))]
    with pytest.raises(ValueError, match=r"two optimizers hold one parameter of shape \[3, 2\]"):
        cut(parameters, [torch.optim.SGD(parameters, lr=0.1), torch.optim.AdamW(parameters)], 1, 1 << 20)


@pytest.mark.parametrize("seed", range(10))
def test_the_cut_is_the_same_whatever_the_values(seed: int) -> None:
    prints = set()
    for _ in range(2):
        parameters = random_model(seed)
        for parameter in parameters:
            parameter.data.normal_()
        prints.add(cut(parameters, [torch.optim.SGD(parameters, lr=0.1)], 2, 1 << 14).fingerprint)
    assert len(prints) == 1
    other = [*random_model(seed), torch.nn.Parameter(torch.zeros(77))]
    assert cut(other, [torch.optim.SGD(other, lr=0.1)], 2, 1 << 14).fingerprint not in prints


def test_parameters_without_an_optimizer_are_nobodys() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (8, 8, 0)]
    layout = cut(parameters, [torch.optim.SGD([parameters[0], parameters[2]], lr=0.1)], 1, 1 << 20)
    assert layout.served == {0} and {block.index for block in layout.parts[0].blocks} == {0}
