"""Ranks on several hosts: sums inside a host through its memory, between hosts by one leader each; one call to all.

The hosts are made up (World's `hosts`); what matters is who shares one. Links between them are memory or TCP.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch

from hora.collectives import Group
from hora.collectives.auto import FIXED, AlgorithmTable
from hora.collectives.hierarchy import STREAM_BYTES
from hora.collectives.reduction import Operation
from hora.errors import HoraError, Mismatch, PeerLost, Timeout
from ranks import Run, failures, run

LAYOUTS = {"3+1": [0, 0, 0, 3], "1+2+1": [0, 1, 1, 3], "mixed": [0, 1, 0, 1, 4], "1+1+1": [0, 1, 2]}
LAYERED = ("ring", "shared", "auto")


def part(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small integers: their sums and products are exact in any order."""
    values = (torch.arange(numel) * 7 + rank * 3) % 5
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def crossed_bytes(group: Group) -> int:
    """What this rank has sent to other hosts."""
    mine = group.hosts[group.rank]
    return sum(sent for sent, host in zip(group.sent_bytes, group.hosts, strict=True) if host != mine)


@pytest.fixture(params=["memory", "auto"])
def links(request: pytest.FixtureRequest) -> str:
    """`auto`: shared memory inside a host and TCP between hosts, as in a real run."""
    return str(request.param)


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_flat_sum(layout: str, links: str) -> None:
    hosts = LAYOUTS[layout]

    def work(group: Group) -> None:
        assert group.num_hosts == len(set(hosts)) and list(group.hosts) == hosts
        for numel in (0, 1, 3, 1000, 300_001, STREAM_BYTES // 2 + 1):
            for op in ("sum", "mean"):
                wanted = group.all_reduce(part(group.rank, numel), op, "tree")
                for algorithm in LAYERED:
                    tensor = part(group.rank, numel)
                    assert group.all_reduce(tensor, op, algorithm) is tensor
                    assert torch.equal(tensor, wanted), (numel, op, algorithm)

    run(len(hosts), work, links, hosts=hosts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_every_operation_on_floats_equals_the_flat_one(op: str, dtype: torch.dtype) -> None:
    def work(group: Group) -> None:
        wanted = group.all_reduce(part(group.rank, 103, dtype), op, "star")
        for algorithm in LAYERED:
            assert torch.equal(group.all_reduce(part(group.rank, 103, dtype), op, algorithm), wanted), algorithm

    run(4, work, hosts=LAYOUTS["3+1"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "and", "or", "xor"])
def test_every_operation_on_integers_and_bools_equals_the_flat_one(op: str, dtype: torch.dtype) -> None:
    if dtype is torch.bool and op in ("sum", "prod"):
        pytest.skip("a sum of bools is no bool; refusing it is tested elsewhere")

    def work(group: Group) -> None:
        wanted = group.all_reduce(part(group.rank, 103, dtype), op, "star")
        for algorithm in LAYERED:
            assert torch.equal(group.all_reduce(part(group.rank, 103, dtype), op, algorithm), wanted), algorithm

    run(4, work, hosts=LAYOUTS["1+2+1"])


def test_half_precision_is_rounded_once_inside_a_host() -> None:
    """1 + 2⁻⁹ + 2⁻⁹ + … is lost in bfloat16 at every hop, and kept when it is rounded once."""

    def work(group: Group) -> float:
        values = [1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9, 0.0]
        tensor = torch.full((300_000,), values[group.rank], dtype=torch.bfloat16)
        return float(group.all_reduce(tensor, algorithm="ring")[-1])

    assert run(6, work, hosts=[0, 0, 0, 0, 0, 5]) == [1.0 + 2.0**-7] * 6


def test_any_layout_of_memory_is_reduced_in_place(links: str) -> None:
    def work(group: Group) -> None:
        tensor = torch.zeros(6, 8) + group.rank
        group.all_reduce(tensor[:, ::2], "mean", "ring")
        assert bool((tensor[:, ::2] == 1.5).all()) and bool((tensor[:, 1::2] == group.rank).all())
        leaf = torch.nn.Parameter(torch.ones(5))
        group.all_reduce(leaf)
        assert leaf.requires_grad and leaf.tolist() == [4.0] * 5

    run(4, work, links, hosts=LAYOUTS["1+2+1"])


def test_handles_keep_their_order(links: str) -> None:
    def work(group: Group) -> None:
        tensors = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(6)]
        handles = [group.all_reduce(t, algorithm=LAYERED[i % 3], wait=False) for i, t in enumerate(tensors)]
        assert group.all_reduce(torch.ones(3)).tolist() == [4.0] * 3
        for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
            assert handle.wait() is tensor and bool((tensor == 4 * i + 6).all())

    run(4, work, links, hosts=LAYOUTS["3+1"])


@pytest.mark.parametrize("layout", ["3+1", "1+2+1", "mixed"])
@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_each_hosts_link_carries_2_h_minus_1_over_h_of_the_data_once(layout: str, algorithm: str, links: str) -> None:
    hosts = LAYOUTS[layout]
    num_hosts, numel = len(set(hosts)), 60_000

    def work(group: Group) -> tuple[list[int], int]:
        group.all_reduce(torch.ones(3), algorithm=algorithm)
        sent, crossed = group.sent_bytes, crossed_bytes(group)
        group.all_reduce(torch.ones(numel), algorithm=algorithm)
        return [now - then for now, then in zip(group.sent_bytes, sent, strict=True)], crossed_bytes(group) - crossed

    leaders = sorted(set(hosts))
    for rank, (sent, crossed) in enumerate(run(len(hosts), work, links, hosts=hosts)):
        if rank not in leaders:
            assert sum(sent) == crossed == 0
            continue
        following = leaders[(leaders.index(rank) + 1) % num_hosts]
        assert sent[following] == sum(sent) == crossed == 2 * (num_hosts - 1) * numel * 4 // num_hosts


def test_what_is_sent_inside_a_host_does_not_cross() -> None:
    def work(group: Group) -> tuple[int, int]:
        if group.rank < 2:
            peer = 1 - group.rank
            tensor = torch.ones(100)
            group.send(tensor, peer) if group.rank else group.recv(tensor, peer)
        return sum(group.sent_bytes), crossed_bytes(group)

    assert run(3, work, hosts=[0, 0, 2]) == [(0, 0), (400, 0), (0, 0)]


@pytest.mark.parametrize("algorithm", ["star", "tree", "halving"])
def test_the_other_algorithms_stay_flat(algorithm: str) -> None:
    def work(group: Group) -> int:
        group.all_reduce(torch.ones(64), algorithm=algorithm)
        assert group.sent_bytes == group.transport.sent_bytes
        return sum(group.sent_bytes)

    assert run(4, work, hosts=LAYOUTS["3+1"]) == run(4, work)


def test_with_one_rank_per_host_no_second_links_are_made() -> None:
    def work(group: Group) -> None:
        for algorithm in LAYERED:
            group.all_reduce(torch.ones(30), algorithm=algorithm)
        group.all_reduce(torch.ones(30), between=doubled)
        assert group.consistency.transports == [group.transport] and group.sent_bytes == group.transport.sent_bytes

    run(3, work, "auto", hosts=LAYOUTS["1+1+1"])


def test_leaders_measure_for_auto_and_rank_0_leaves_the_table_with_the_coordinator() -> None:
    def work(group: Group) -> None:
        for numel in (1, 5000, 500_000):
            assert group.all_reduce(torch.ones(numel)).sum() == 4 * numel

    started = Run(4, "auto", hosts=LAYOUTS["1+2+1"]).start(work).finish()
    assert started.errors == [None] * 4
    (table,) = started.hub.coordinator.values("auto/").values()
    assert json.loads(table)["measured"]


def test_deterministic_leaders_take_fixed_thresholds() -> None:
    def work(group: Group) -> object:
        group.all_reduce(torch.ones(3))
        assert group._hierarchy is not None
        leaders = group._hierarchy.leaders
        return None if leaders is None else leaders.auto_table

    fixed = AlgorithmTable(FIXED)
    assert run(4, work, "auto", hosts=LAYOUTS["3+1"], deterministic=True) == [fixed, None, None, fixed]


# -- between -----------------------------------------------------------------------------------------------------------


def doubled(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
    from hora.collectives import ring

    assert not operation.mean
    ring.all_reduce(leaders, flat, operation)
    flat.mul_(2)


def test_between_is_called_on_leaders_only_and_its_result_is_everybodys(links: str) -> None:
    hosts = LAYOUTS["mixed"]
    called: list[int] = []

    def between(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        called.append(leaders.transport.spec.members[leaders.rank].rank)
        assert leaders.size == 3
        doubled(leaders, flat, operation)

    def work(group: Group) -> None:
        for algorithm in ("auto", "star", "engine"):
            tensor = group.all_reduce(torch.full((1000,), float(group.rank)), "mean", algorithm, between=between)
            assert bool((tensor == 2 * 10 / 5).all())
        assert bool((group.all_reduce(torch.ones(1000), "mean", "ring") == 1).all())  # not the plan with `between`
        assert bool((group.all_reduce(torch.ones(1000), "mean", "ring", between=between) == 2).all())

    run(5, work, links, hosts=hosts)
    assert sorted(called) == sorted([0, 1, 4] * 4)


def test_between_may_use_the_leaders_own_calls_also_behind_handles(links: str) -> None:
    def between(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        parts = leaders.all_gather(flat)
        operation.reduce(parts, flat)

    def work(group: Group) -> None:
        tensors = [torch.full((700,), float(group.rank + i)) for i in range(3)]
        handles = [group.all_reduce(t, between=between, wait=False) for t in tensors]
        for i, handle in enumerate(handles):
            assert bool((handle.wait() == sum(r + i for r in range(group.size))).all())

    run(4, work, links, hosts=LAYOUTS["3+1"])
    run(3, work, links, hosts=LAYOUTS["1+1+1"])


def test_on_one_host_between_is_not_called() -> None:
    def work(group: Group) -> None:
        assert group.all_reduce(torch.ones(3), between=doubled).tolist() == [3.0] * 3

    run(3, work, "shm")


def test_a_refusal_of_between_ends_the_call_on_every_rank() -> None:
    def refuses(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        raise ValueError("no such wire")

    errors = failures(4, lambda group: group.all_reduce(torch.ones(3), between=refuses), hosts=LAYOUTS["3+1"])
    assert all(isinstance(error, HoraError) and "no such wire" in str(error) for error in errors), errors


# -- groups of several hosts -------------------------------------------------------------------------------------------


def test_a_new_group_across_hosts_goes_by_host_too(links: str) -> None:
    def work(group: Group) -> None:
        some = group.new_group([1, 2, 4, 5])
        if some:
            assert some.hosts == (0, 0, 3, 3)
            before = crossed_bytes(some)
            assert bool((some.all_reduce(torch.full((4000,), float(group.rank)), algorithm="ring") == 12).all())
            assert crossed_bytes(some) - before == (16_000 if some.rank in (0, 2) else 0)
            some.close()
        assert bool((group.all_reduce(torch.ones(100)) == 6).all())

    run(6, work, links, hosts=[0, 0, 0, 3, 3, 3])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def settle(group: Group) -> None:
    """The hierarchy is there: what follows goes wrong inside of it."""
    group.all_reduce(torch.ones(4), algorithm="ring")


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("odd", [1, 2, 3])
def test_a_mismatch_is_noticed_on_every_host_with_one_sentence(odd: int, settled: bool, links: str) -> None:
    """Hosts 0, 1, 2 and 3, 4: rank 1 and 2 differ from mates; rank 3, a leader, from its mate and other leaders."""
    took = [0.0] * 5

    def work(group: Group) -> None:
        if settled:
            settle(group)
        group.barrier()
        begin = time.monotonic()
        try:
            group.all_reduce(torch.ones(9 if group.rank == odd else 8), algorithm="ring")
        finally:
            took[group.rank] = time.monotonic() - begin

    errors = failures(5, work, links, hosts=[0, 0, 0, 3, 3])
    assert all(isinstance(error, Mismatch) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert f"rank {odd} (host test" in str(errors[0]) and "float32 [9]" in str(errors[0])
    assert "float32 [8]" in str(errors[0])
    assert max(took) < 2.0  # a second is promised; the rest is two cores for fifteen threads


def test_hosts_that_mean_different_calls_are_told_apart(links: str) -> None:
    def work(group: Group) -> None:
        settle(group)
        group.all_reduce(torch.ones(9 if group.rank > 1 else 8), algorithm="ring")

    errors = failures(4, work, links, hosts=[0, 0, 2, 2])
    assert all(isinstance(error, Mismatch) for error in errors), errors
    assert len({str(error) for error in errors}) == 1 and "rank 0 (host" in str(errors[0]) + str(errors[1])


def test_a_rank_that_makes_a_flat_call_instead_is_told_apart(links: str) -> None:
    def work(group: Group) -> None:
        settle(group)
        group.barrier() if group.rank == 3 else group.all_reduce(torch.ones(8), algorithm="ring")

    errors = failures(4, work, links, hosts=[0, 0, 2, 2])
    assert all(isinstance(error, Mismatch) for error in errors), errors
    assert "barrier" in str(errors[0]) and "rank 3 (host test" in str(errors[0])


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_the_death_of_any_rank_ends_the_call_on_every_host(victim: int, links: str) -> None:
    def work(group: Group) -> float:
        settle(group)
        group.barrier()
        if group.rank == victim:
            time.sleep(0.2)
            started.hub.died(victim, "killed by SIGKILL")
            return 0.0
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="killed by SIGKILL") as caught:
            group.all_reduce(torch.ones(100_000), algorithm="ring")
        assert f"lost rank {victim} (host test" in str(caught.value)
        assert caught.value.ranks == (victim,) and caught.value.secondary
        assert "all_reduce sum of float32 [100000] by ring" in str(caught.value)
        return time.monotonic() - begin

    started = Run(4, links, hosts=[0, 0, 2, 2])
    started.start(work).finish()
    assert started.errors == [None] * 4
    assert max(started.results) < 1.5


def test_a_rank_that_dies_while_the_hierarchy_is_made_is_named(links: str) -> None:
    def work(group: Group) -> None:
        if group.rank == 3:
            time.sleep(0.2)
            started.hub.died(3, "killed by SIGKILL")
            return
        with pytest.raises(PeerLost, match=r"lost rank 3 .* killed by SIGKILL"):
            group.all_reduce(torch.ones(10), algorithm="ring")

    started = Run(4, links, hosts=[0, 0, 2, 2])
    started.start(work).finish()
    assert started.errors == [None] * 4


@pytest.mark.parametrize("leaver", [2, 3])
def test_a_rank_that_has_left_is_named_on_every_host_in_the_groups_own_numbers(leaver: int, links: str) -> None:
    def work(group: Group) -> None:
        settle(group)
        group.barrier()
        if group.rank == leaver:
            started.worlds[leaver].control.leave()  # type: ignore[union-attr]
            return
        with pytest.raises(PeerLost, match="which has left the run") as caught:
            group.all_reduce(torch.ones(1000), algorithm="ring")
        assert caught.value.ranks == (leaver,) and f"rank {leaver} (host test" in str(caught.value)

    started = Run(4, links, hosts=[0, 0, 2, 2])
    started.start(work).finish()
    assert started.errors == [None] * 4


def test_a_timeout_inside_a_host_reaches_the_other_hosts() -> None:
    stay = threading.Event()

    def work(group: Group) -> None:
        settle(group)
        if group.rank == 3:
            stay.wait(15)
            return
        try:
            group.all_reduce(torch.ones(10), algorithm="ring")
        finally:
            if group.rank == 0:
                stay.set()

    errors: list[Any] = failures(4, work, "auto", hosts=[0, 0, 2, 2], timeout_s=1.5)
    assert all(isinstance(error, Timeout) for error in errors[:3]), errors
    assert all("gave up after timeout_s=1.5" in str(error) for error in errors[:3])


def test_an_error_on_a_leader_reaches_those_who_wait_for_it() -> None:
    def broken(leaders: Group, flat: torch.Tensor, operation: Operation) -> None:
        if leaders.rank == 1:
            raise RuntimeError("a disk is full")
        doubled(leaders, flat, operation)

    errors = failures(4, lambda group: group.all_reduce(torch.ones(3), between=broken), "auto", hosts=[0, 0, 2, 2])
    assert isinstance(errors[2], RuntimeError) and str(errors[2]) == "a disk is full"
    for rank in (0, 1, 3):
        assert (
            isinstance(errors[rank], HoraError)
            and "rank 2 (host test" in str(errors[rank])
            and "failed in all_reduce" in str(errors[rank])
        )


def test_after_a_failure_every_call_raises_it_again_and_closing_gives_all_back() -> None:
    def work(group: Group) -> None:
        with pytest.raises(Mismatch) as first:
            settle(group)
            group.all_reduce(torch.ones(3 + group.rank), algorithm="ring")
        with pytest.raises(Mismatch) as second:
            group.all_reduce(torch.ones(3), algorithm="ring")
        assert str(first.value) == str(second.value)
        group.close()

    assert failures(4, work, "auto", hosts=[0, 0, 2, 2]) == [None] * 4
