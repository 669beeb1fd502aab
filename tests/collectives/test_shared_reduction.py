"""Mailbox: many vectors, one after the other, exact and without waiting; whoever sent a NaN is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.collectives.shared_reduction import SharedReduction, VectorLayout

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forms_of(size: int, dtype: torch.dtype, seed: int, count: int) -> list[VectorLayout]:
    """Lanes in any order, several of one owner, some owners without any."""
    generator = random.Random(seed)
    forms = []
    for _ in range(count):
        at, lanes = 0, []
        for _ in range(generator.randint(1, 2 * size)):
            length = generator.choice([1, 7, 64, 1000])
            lanes.append((generator.randrange(size), at, length))
            at += length
        forms.append(VectorLayout(dtype, at, tuple(lanes)))
    return forms


def values(form: VectorLayout, rank: int, turn: int, number: int) -> torch.Tensor:
    """Small integers: sums are exact in any order and precision."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * number + rank)
    return torch.randint(-3, 4, (form.numel,), generator=generator).to(form.dtype)


def cut(form: VectorLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[at : at + length] for _, at, length in form.shards]


def in_parts(group: Group, work: Callable[[], Any]) -> Any:
    group.begin_call("a round of letters")
    with group.part_of_call():
        return work()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("keep", [True, False])
def test_sums_are_exact(size: int, dtype: torch.dtype, keep: bool) -> None:
    forms = forms_of(size, dtype, seed=size, count=6)

    def check(group: Group) -> None:
        box = SharedReduction(group, forms, keep)
        for turn in range(3):
            mine = [values(form, group.rank, turn, number) for number, form in enumerate(forms)]

            def work(mine: list[torch.Tensor] = mine) -> None:
                for number, form in enumerate(forms):
                    box.post(number, cut(form, mine[number]), 1.0)
                    if (number + group.rank) % 2:
                        box.advance()
                box.finish()

            in_parts(group, work)
            assert box.nonfinite_shards() == []
            group.barrier("everybody has read it")
            for number, form in enumerate(forms):
                everybody = [values(form, rank, turn, number) for rank in range(size)]
                total = sum(part.double() for part in everybody).to(dtype)
                for (owner, at, length), found in zip(form.shards, cut(form, mine[number]), strict=True):
                    own = keep or owner == group.rank
                    wanted = total if own else everybody[group.rank]
                    assert torch.equal(found, wanted[at : at + length])

    ranks.run(size, check)


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_counts_by_its_own_scale(transport: str, dtype: torch.dtype) -> None:
    """Scales that are powers of two, so that all stays exact."""
    form = VectorLayout(dtype, 300, ((0, 0, 100), (2, 100, 150), (1, 250, 50)))
    scales = [0.25, 0.5, 0.0, 1.0]

    def check(group: Group) -> None:
        box = SharedReduction(group, [form], True)
        mine = values(form, group.rank, 0, 0) * 4

        def work() -> None:
            box.post(0, cut(form, mine), scales[group.rank])
            box.finish()

        in_parts(group, work)
        wanted = sum(4 * values(form, rank, 0, 0).double() * scales[rank] for rank in range(4)).to(dtype)
        assert torch.equal(mine, wanted)

    ranks.run(4, check, transport)


def test_half_precision_is_rounded_once() -> None:
    """1 + 2^-8 · 3 in bfloat16: added one by one each would be rounded away."""
    form = VectorLayout(torch.bfloat16, 4, ((0, 0, 4),))

    def check(group: Group) -> None:
        box = SharedReduction(group, [form], True)
        mine = torch.full((4,), 1.0 if group.rank == 0 else 2.0**-8).bfloat16()

        def work() -> None:
            box.post(0, [mine], 0.25)
            box.finish()

        in_parts(group, work)
        assert torch.equal(mine, torch.full((4,), (1 + 3 * 2.0**-8) / 4).bfloat16())

    ranks.run(4, check)


@pytest.mark.parametrize("keep", [True, False])
def test_forms_may_be_posted_in_any_common_order_and_not_all(keep: bool) -> None:
    forms = forms_of(3, torch.float32, seed=9, count=5)

    def check(group: Group) -> None:
        box = SharedReduction(group, forms, keep)
        for turn, order in enumerate([[4, 0, 2], [1, 3], [0, 1, 2, 3, 4]]):
            mine = {number: values(forms[number], group.rank, turn, number) for number in order}

            def work(order: list[int] = order, mine: dict[int, torch.Tensor] = mine) -> None:
                for number in order:
                    box.post(number, cut(forms[number], mine[number]), 1.0)
                    box.advance()
                box.finish()

            in_parts(group, work)
            group.barrier("everybody has read it")
            for number in order:
                total = sum(values(forms[number], rank, turn, number) for rank in range(3))
                for (owner, at, length), found in zip(
                    forms[number].shards, cut(forms[number], mine[number]), strict=True
                ):
                    if keep or owner == group.rank:
                        assert torch.equal(found, total[at : at + length])

    ranks.run(3, check)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_owner_finds_who_sent_what_is_not_finite(dtype: torch.dtype, keep: bool, culprit: int) -> None:
    form = VectorLayout(dtype, 90, ((0, 0, 30), (1, 30, 30), (2, 60, 30)))

    def check(group: Group) -> list[tuple[int, int, list[int]]]:
        box = SharedReduction(group, [form, form], keep)
        mine = [torch.ones(90, dtype=dtype) for _ in range(2)]
        if group.rank == culprit:
            mine[1][35] = float("nan")  # in lane 1, which rank 1 owns

        def work() -> None:
            for number in range(2):
                box.post(number, cut(form, mine[number]), 1 / 3)
            box.finish()

        in_parts(group, work)
        found = [(number, lane, box.nonfinite_ranks(number, lane)) for number, lane in box.nonfinite_shards()]
        group.barrier("everybody has looked")
        return found

    assert ranks.run(3, check) == [[], [(1, 1, [culprit])], []]
