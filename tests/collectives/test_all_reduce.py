"""all_reduce gives the same sum by every algorithm, on every dtype, shape and number of ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hora.collectives import Group
from ranks import failures, run

OWN = ("star", "ring", "tree", "halving", "shared", "auto")


def part(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small integers: their sums and products are exact in any order."""
    values = (torch.arange(numel) * 7 + rank * 3 + salt) % 5
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def expected(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    result = parts[0].double() if parts[0].is_floating_point() else parts[0].clone()
    for other in parts[1:]:
        other = other.to(result.dtype)
        if op in ("sum", "mean"):
            result = result + other
        elif op == "prod":
            result = result * other
        elif op in ("min", "max"):
            result = torch.minimum(result, other) if op == "min" else torch.maximum(result, other)
        else:
            result = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}[op](result, other)
    if op == "mean":
        result = result / len(parts)
    return result.to(parts[0].dtype)


@pytest.mark.parametrize("algorithm", OWN)
@pytest.mark.parametrize("size", range(1, 17))
def test_every_algorithm_sums_on_any_number_of_ranks(algorithm: str, size: int) -> None:
    def work(group: Group) -> None:
        for numel in (0, 1, size - 1, size, 1000, 4097):
            tensor = part(group.rank, numel, torch.float32, numel)
            assert group.all_reduce(tensor, algorithm=algorithm) is tensor
            assert torch.equal(tensor, expected("sum", [part(r, numel, torch.float32, numel) for r in range(size)]))

    run(size, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_every_operation_on_floats(op: str, dtype: torch.dtype) -> None:
    def work(group: Group) -> None:
        for algorithm in OWN:
            tensor = part(group.rank, 103, dtype)
            group.all_reduce(tensor, op, algorithm)
            assert torch.equal(tensor, expected(op, [part(r, 103, dtype) for r in range(4)])), algorithm

    run(4, work)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "and", "or", "xor"])
def test_every_operation_on_integers_and_bools(op: str, dtype: torch.dtype) -> None:
    if dtype is torch.bool and op in ("sum", "prod"):
        pytest.skip("a sum of bools is no bool; refusing it is tested elsewhere")

    def work(group: Group) -> None:
        for algorithm in OWN:
            tensor = part(group.rank, 103, dtype)
            group.all_reduce(tensor, op, algorithm)
            assert torch.equal(tensor, expected(op, [part(r, 103, dtype) for r in range(3)])), algorithm

    run(3, work)


@pytest.mark.cases(2)
def test_all_algorithms_agree_over_every_transport(transport: str) -> None:
    def work(group: Group) -> None:
        algorithms = [a for a in (*OWN, "engine") if a != "shared" or group.transport.shares_memory]
        for numel in (5, 70_000, 600_001):
            for algorithm in algorithms:
                tensor = part(group.rank, numel, torch.float32)
                group.all_reduce(tensor, algorithm=algorithm)
                assert torch.equal(tensor, expected("sum", [part(r, numel, torch.float32) for r in range(3)])), (
                    algorithm
                )

    run(3, work, transport)


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max", "and", "or", "xor"])
def test_the_engine_knows_the_same_operations(op: str) -> None:
    dtype = torch.int32 if op in ("and", "or", "xor") else torch.float32

    def work(group: Group) -> None:
        tensor = part(group.rank, 33, dtype)
        group.all_reduce(tensor, op, "engine")
        assert torch.equal(tensor, expected(op, [part(r, 33, dtype) for r in range(2)]))

    run(2, work)


@pytest.mark.parametrize("algorithm", OWN)
def test_any_shape_and_layout_is_reduced_in_place(algorithm: str) -> None:
    def work(group: Group) -> None:
        base = torch.arange(24.0).view(2, 3, 4) + group.rank
        for view in (
            lambda t: t,
            lambda t: t.permute(2, 0, 1),
            lambda t: t[:, ::2],
            lambda t: t[1, 1, 1],
            lambda t: t.transpose(0, 2),
        ):
            tensor = base.clone()
            group.all_reduce(view(tensor), algorithm=algorithm)
            reference = torch.arange(24.0).view(2, 3, 4) + group.rank
            part = view(reference)
            part.copy_(3 * (part - group.rank) + 3)
            assert torch.equal(tensor, reference)

    run(3, work)


def test_a_leaf_that_requires_grad_is_reduced_in_place() -> None:
    def work(group: Group) -> None:
        leaf = torch.nn.Parameter(torch.ones(5))
        group.all_reduce(leaf)
        assert leaf.requires_grad and leaf.tolist() == [2.0] * 5

    run(2, work)


def test_autograd_notices_that_a_tensor_was_reduced(transport: str) -> None:
    def work(group: Group) -> None:
        for numel in (10, 200_000):
            leaf = torch.ones(numel, requires_grad=True)
            saved = leaf * 2
            product = saved * saved
            group.all_reduce(saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()

    run(2, work, transport)


def test_half_precision_is_summed_in_float32_by_star_and_shared() -> None:
    """1 + 2⁻⁹ + 2⁻⁹ + … is lost in bfloat16 at every hop, and kept when it is rounded once."""

    def work(group: Group) -> None:
        for algorithm in ("star", "shared"):
            tensor = torch.full((300_000,), 1.0 if group.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
            group.all_reduce(tensor, algorithm=algorithm)
            assert float(tensor[0]) == float(tensor[-1]) == 1.0 + 2.0**-7, algorithm

    run(5, work)


def test_shared_gives_the_same_bits_every_time_and_on_every_rank(sharing: str = "shm") -> None:
    def work(group: Group) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(group.rank)
        data = torch.randn(700_001, generator=generator)
        results = [group.all_reduce(data.clone(), algorithm="shared") for _ in range(3)]
        return results

    results = run(4, work, sharing)
    for other in [*results[0][1:], *results[1], *results[2], *results[3]]:
        assert torch.equal(results[0][0], other)
    ordered = sum(torch.randn(700_001, generator=torch.Generator().manual_seed(r)) for r in range(4))
    assert torch.equal(results[0][0], ordered)  # the order of the ranks, whatever the cut


def test_changing_values_back_to_back_never_mix() -> None:
    """Four ranks on two cores, thousands of calls without a pause: a slot rewritten too early would give old sums."""

    def work(group: Group) -> None:
        small, large = torch.empty(257), torch.empty(280_000)  # one turn, and two turns of two phases
        for call in range(1500):
            small.fill_(float(call + group.rank))
            group.all_reduce(small, algorithm="shared")
            wanted = 4 * call + 6
            assert float(small[0]) == float(small[-1]) == wanted
            if call % 10 == 0:
                large.fill_(float(call * 2 + group.rank))
                group.all_reduce(large, algorithm="shared")
                assert bool((large == 8 * call + 6).all())

    run(4, work, "shm")


def test_handles_keep_their_order_and_overlap_other_work(transport: str) -> None:
    def work(group: Group) -> None:
        tensors = [torch.full((1000 * (i + 1),), float(group.rank + i)) for i in range(8)]
        handles = [group.all_reduce(t, wait=False) for t in tensors]
        blocking = group.all_reduce(torch.ones(3))  # keeps its place behind the handles
        assert blocking.tolist() == [2.0] * 3
        for i, (handle, tensor) in enumerate(zip(handles, tensors, strict=True)):
            assert handle.wait() is tensor and handle.done
            assert bool((tensor == 2 * i + 1).all())
        gathered = group.all_gather(torch.tensor([group.rank]), wait=False)
        assert [int(t) for t in gathered.wait()] == [0, 1]

    run(2, work, transport)


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [
        ("sum", torch.complex64, "unsupported dtype complex64; supported: float32"),
        ("median", torch.float32, "unknown operation 'median'; there are: sum"),
        ("mean", torch.int64, "would lose its fraction"),
        ("and", torch.float32, "works on the bits of integers"),
        ("sum", torch.bool, "use 'or' / 'and'"),
    ],
)
def test_what_cannot_be_reduced_is_refused_with_the_way_out(op: str, dtype: torch.dtype, said: str) -> None:
    errors = failures(2, lambda group: group.all_reduce(torch.ones(3).to(dtype), op))
    assert all(isinstance(error, ValueError) and said in str(error) for error in errors)


def test_an_unknown_algorithm_is_refused_naming_those_there_are() -> None:
    (error,) = failures(1, lambda group: group.all_reduce(torch.ones(3), algorithm="circle"))
    assert isinstance(error, ValueError) and "unknown algorithm 'circle'" in str(error) and "ring" in str(error)


def test_inference_tensors_and_negated_views_are_reduced_too() -> None:
    def work(group: Group) -> None:
        with torch.inference_mode():
            for wait in (True, False):
                tensor = torch.ones(300_000)
                handle = group.all_reduce(tensor, wait=wait)
                assert bool(((handle if wait else handle.wait()) == 2).all())
        for numel in (10, 400_000):
            negative = torch.complex(torch.zeros(numel), torch.ones(numel)).conj().imag
            assert negative.is_neg()
            group.all_reduce(negative)
            assert bool((negative == -2).all())

    run(2, work, "shm")


def test_an_expanded_tensor_is_refused_with_the_way_out() -> None:
    errors = failures(2, lambda group: group.all_reduce(torch.ones(1).expand(5)))
    assert all(isinstance(error, ValueError) and "call .clone() first" in str(error) for error in errors)


def test_a_call_that_is_not_waited_for_is_only_queued_while_another_is_under_way(transport: str) -> None:
    queued = threading.Event()

    def work(group: Group) -> list[list[float]]:
        if group.rank == 1:
            assert queued.wait(20), "rank 0 waited for rank 1 before it had queued all its calls"
        tensors = [torch.full((3,), float(number)) for number in range(4)]
        handles = []
        for tensor in tensors:
            handles.append(group.all_reduce(tensor, wait=False))
            time.sleep(0.05)  # the first is under way by now, and waits for rank 1
        queued.set()
        return [handle.wait().tolist() for handle in handles]

    assert run(2, work, transport) == [[[2.0 * number] * 3 for number in range(4)]] * 2
