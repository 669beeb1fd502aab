"""broadcast, reduce, gather, scatter and the rest, over every transport."""

from __future__ import annotations

import os

import pytest
import torch

from hora.collectives import Group
from ranks import failures, run


def test_broadcast_gives_everybody_the_roots_tensor(transport: str) -> None:
    def work(group: Group) -> None:
        for root in range(group.size):
            for shape in ((0,), (3,), (5, 7), (200_003,)):
                tensor = torch.full(shape, float(group.rank))
                assert group.broadcast(tensor, root=root) is tensor
                assert bool((tensor == root).all())

    run(3, work, transport)


def test_reduce_changes_the_root_alone(transport: str) -> None:
    def work(group: Group) -> None:
        for root in range(group.size):
            tensor = torch.full((1001,), float(group.rank + 1))
            group.reduce(tensor, root=root, op="mean" if root == 1 else "sum")
            wanted = {0: 6.0, 1: 2.0, 2: 6.0}[root] if group.rank == root else group.rank + 1
            assert bool((tensor == wanted).all())

    run(3, work, transport)


def test_all_gather_accepts_different_first_dimensions(transport: str) -> None:
    def work(group: Group) -> None:
        parts = group.all_gather(torch.full((group.rank * 2, 3), float(group.rank)))
        assert [tuple(p.shape) for p in parts] == [(0, 3), (2, 3), (4, 3)]
        assert [float(p.sum()) for p in parts] == [0.0, 6.0, 24.0]
        assert [int(p) for p in group.all_gather(torch.tensor(group.rank))] == [0, 1, 2]

    run(3, work, transport)


@pytest.mark.parametrize("size", range(1, 8))
def test_reduce_scatter_deals_rows_that_differ_by_at_most_one(size: int) -> None:
    def work(group: Group) -> torch.Tensor:
        rows = torch.arange(10.0).view(10, 1).expand(10, 3)
        before = rows.clone()
        share = group.reduce_scatter(rows + group.rank, op="sum")
        assert torch.equal(rows, before)
        return share

    shares = run(size, work)
    lengths = [len(s) for s in shares]
    assert max(lengths) - min(lengths) <= 1
    whole = torch.cat(shares)
    assert torch.equal(whole, size * torch.arange(10.0).view(10, 1).expand(10, 3) + sum(range(size)))


def test_reduce_scatter_into_the_tensor_itself_makes_no_copy(transport: str) -> None:
    def work(group: Group) -> None:
        rows = torch.arange(8.0).view(4, 2) + group.rank
        kept = group.reduce_scatter(rows, op="mean")
        assert kept.untyped_storage().nbytes() == kept.numel() * 4
        share = group.reduce_scatter(rows, op="mean", overwrite=True)
        assert torch.equal(share, kept) and torch.equal(kept, torch.arange(8.0).view(4, 2).chunk(2)[group.rank] + 0.5)
        assert share.data_ptr() == rows[2 * group.rank :].data_ptr()

    run(2, work, transport)


def test_gather_and_scatter_meet_at_the_root(transport: str) -> None:
    def work(group: Group) -> None:
        parts = group.gather(torch.full((group.rank + 1,), group.rank), root=1)
        assert (parts is None) == (group.rank != 1)
        if parts is not None:
            assert [p.tolist() for p in parts] == [[0], [1, 1], [2, 2, 2]]
        given = [torch.full((r, 2), float(r)) for r in range(3)] if group.rank == 2 else None
        mine = group.scatter(given, root=2)
        assert tuple(mine.shape) == (group.rank, 2) and bool((mine == group.rank).all())

    run(3, work, transport)


def test_all_to_all_sends_part_r_to_rank_r(transport: str) -> None:
    def work(group: Group) -> None:
        parts = [torch.full((r + 1,), 10 * group.rank + r) for r in range(3)]
        got = group.all_to_all(parts)
        assert [p.tolist() for p in got] == [[10 * r + group.rank] * (group.rank + 1) for r in range(3)]
        rows = torch.arange(6).view(6, 1) + 100 * group.rank
        got = group.all_to_all(rows, splits=[1, 2, 3])
        start = [0, 1, 3][group.rank]
        wanted = [[[100 * r + start + i] for i in range(group.rank + 1)] for r in range(3)]
        assert [p.tolist() for p in got] == wanted
        assert [len(p) for p in group.all_to_all(torch.arange(7))] == [[3, 2, 2][group.rank]] * 3

    run(3, work, transport)


def test_send_and_recv_pair_up_between_two_ranks(transport: str) -> None:
    def work(group: Group) -> None:
        other = 1 - group.rank
        mine, theirs = torch.full((70_000,), float(group.rank)), torch.empty(70_000)
        sending = group.send(mine, to=other, wait=False)
        assert group.recv(theirs, source=other) is theirs
        assert sending.wait() is mine
        assert bool((theirs == other).all())
        strided = torch.zeros(4, 6)[:, ::2]
        handle = group.recv(strided, source=other, wait=False)
        group.send(torch.ones(4, 3), to=other)
        handle.wait()
        assert bool((strided == 1).all())

    run(2, work, transport)


def test_messages_and_collectives_do_not_get_in_each_others_way(transport: str) -> None:
    def work(group: Group) -> None:
        other = 1 - group.rank
        sending = group.send(torch.full((10,), 7.0), to=other, wait=False)
        assert group.all_reduce(torch.ones(10)).tolist() == [2.0] * 10
        got = torch.zeros(10)
        group.recv(got, source=other)
        sending.wait()
        assert got.tolist() == [7.0] * 10

    run(2, work, transport)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_passes_a_barrier_before_all_have_come(size: int, transport: str) -> None:
    if size > 3 and transport == "engine":
        pytest.skip("the engine's ranks as threads are slow; three show it")
    came = [0] * size

    def work(group: Group) -> None:
        for round in range(1, 6):
            came[group.rank] = round
            group.barrier()
            assert min(came) >= round

    run(size, work, transport)


def test_a_new_group_has_ranks_of_its_own_and_leaves_the_others_out(transport: str) -> None:
    def work(group: Group) -> None:
        evens = group.new_group([0, 2])
        rest = group.new_group([1])
        assert bool(evens) == (group.rank != 1) and bool(rest) == (group.rank == 1)
        if evens:
            assert (evens.rank, evens.size) == (group.rank // 2, 2)
            assert evens.all_reduce(torch.tensor([group.rank])).tolist() == [2]
        if rest:
            assert rest.all_reduce(torch.tensor([5])).tolist() == [5]
        over = group.new_group([0, 1, 2], transport="tcp" if transport != "memory" else "memory")
        assert over is not None and over.all_reduce(torch.ones(1000)).sum() == 3000
        group.barrier()

    run(3, work, transport)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda g: g.broadcast(torch.ones(1), root=2), "root 2 is not a rank"),
        (lambda g: g.send(torch.ones(1), to=g.rank), "cannot exchange with rank"),
        (lambda g: g.scatter([torch.ones(1)] * 2, root=1 - g.rank), "gives the parts and the others give None"),
        (lambda g: g.all_to_all([torch.ones(1)]), "1 parts for 2 ranks"),
        (lambda g: g.all_to_all(torch.ones(3), splits=[1, 1]), "do not cut 3 rows"),
        (lambda g: g.reduce_scatter(torch.tensor(1.0)), "a scalar has none"),
        (lambda g: g.new_group([0, 0]), "not distinct ranks"),
        (lambda g: g.new_group([0, 7]), "not distinct ranks"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(call: object, said: str) -> None:
    errors = failures(2, call)  # type: ignore[arg-type]
    assert all(isinstance(error, ValueError) and said in str(error) for error in errors), errors


def test_a_rank_outside_a_group_is_told_so_instead_of_joining_in_with_everybody() -> None:
    def work(group: Group) -> None:
        some = group.new_group([0, 1])
        if group.rank == 2:
            with pytest.raises(ValueError, match=r"rank 2 is not in this group of ranks \[0, 1\]"):
                some.all_reduce(torch.ones(2))
        else:
            assert some.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]

    run(3, work)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1.0, 2.0], "expected a torch tensor, got list"),
        (3.0, "expected a torch tensor, got float"),
        (torch.ones(3).to_sparse(), "got a sparse_coo one"),
        (torch.ones(3, device="meta"), "got a meta one"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_with_the_way_out(value: object, said: str) -> None:
    for call in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "reduce"):
        (error,) = failures(1, lambda group, call=call: getattr(group, call)(value))
        assert isinstance(error, ValueError) and said in str(error), (call, error)


def test_a_large_message_goes_on_while_its_rank_is_in_a_collective(transport: str) -> None:
    def work(group: Group) -> None:
        other = 1 - group.rank
        got = torch.empty(3_000_000)
        sending = group.send(torch.full((3_000_000,), float(group.rank)), to=other, wait=False)
        receiving = group.recv(got, source=other, wait=False) if group.rank else None
        assert group.all_reduce(torch.ones(10)).tolist() == [2.0] * 10
        sending.wait() if receiving is None else receiving.wait()
        if receiving is None:
            group.recv(got, source=other)
        else:
            sending.wait()
        assert bool((got == other).all())

    run(2, work, transport)


def test_an_unknown_transport_is_refused() -> None:
    errors = failures(2, lambda group: group.new_group([0, 1], transport="pigeon"), "tcp")
    assert all("unknown transport 'pigeon'" in str(error) for error in errors)


def test_groups_that_are_closed_give_their_descriptors_back() -> None:
    def work(group: Group) -> int:
        for _ in range(3):
            group.new_group([0, 1], transport="shm").close()
        group.barrier()
        before = len(os.listdir("/proc/self/fd"))
        group.barrier()
        for _ in range(10):
            group.new_group([0, 1], transport="shm").close()
        group.barrier()
        return len(os.listdir("/proc/self/fd")) - before

    assert max(run(2, work, "shm")) < 10
