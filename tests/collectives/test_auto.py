"""auto: rank 0 decides, everybody follows."""

from __future__ import annotations

import torch

from hora.collectives import Group
from hora.collectives.auto import FIXED, AlgorithmTable
from ranks import run


def test_ranks_that_share_memory_use_it_at_every_size() -> None:
    def work(group: Group) -> object:
        group.all_reduce(torch.ones(3))
        return group.auto_table

    assert run(2, work, "shm") == [AlgorithmTable(((0, "shared"),))] * 2


def test_elsewhere_rank_0_measures_and_all_ranks_hold_its_table() -> None:
    def work(group: Group) -> object:
        for numel in (1, 5000, 2_000_000):
            assert group.all_reduce(torch.ones(numel)).sum() == 3 * numel
        return group.auto_table

    tables = run(3, work, "tcp")
    assert tables[0] == tables[1] == tables[2]
    assert tables[0].measured and tables[0].rows[-1][0] == 0


def test_deterministic_takes_fixed_thresholds() -> None:
    def work(group: Group) -> object:
        group.all_reduce(torch.ones(3))
        return group.auto_table

    assert run(2, work, "tcp", deterministic=True) == [AlgorithmTable(FIXED)] * 2


def test_the_first_row_whose_limit_is_not_passed_is_chosen() -> None:
    table = AlgorithmTable(((100, "tree"), (1000, "halving"), (0, "ring")))
    assert [table.choose(n) for n in (0, 100, 101, 1000, 1001, 10**9)] == [
        "tree", "tree", "halving", "halving", "ring", "ring",
    ]  # fmt: skip


def test_a_runs_strategy_is_what_auto_stands_for() -> None:
    def work(group: Group) -> int:
        group.all_reduce(torch.ones(8))
        return sum(group.transport.sent_messages)

    assert run(4, work, algorithm="ring") == [6] * 4
    assert run(4, work, algorithm="shared") == [0] * 4
