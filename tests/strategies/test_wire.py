"""The wire of DiLoCo: fewer bytes, the same bits on every worker, and nothing that rounding takes away is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ranks
from hora.collectives import Group
from hora.strategies.wire import BLOCK, Feedback, decode, encode
from rounds import SMALL, Crew, diloco, even, uneven, work
from trainings import batch, building, loss_of, mlp, parameters_of, part, training

WIRES = ("bfloat16", "int8")
LENGTHS = (0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 7)


def numbers(numel: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_what_is_decoded_is_what_was_encoded_up_to_one_rounding(wire: str, numel: int) -> None:
    vector = numbers(numel)
    data = encode(vector, wire)
    assert data.dtype == torch.uint8
    assert len(data) == (2 * numel if wire == "bfloat16" else numel + 4 * -(-numel // BLOCK))
    found = decode(data, numel, wire)
    if wire == "bfloat16":
        assert found.equal(vector.bfloat16().float())
    for block, original in zip(found.split(BLOCK), vector.split(BLOCK), strict=True):
        if len(block):
            step = original.abs().max() / 127 if wire == "int8" else original.abs().max() / 128
            assert (block - original).abs().max() <= step * 0.5001


@pytest.mark.parametrize("wire", WIRES)
def test_zeros_and_the_smallest_and_largest_numbers_stay_finite(wire: str) -> None:
    tiny = torch.finfo(torch.float32).tiny
    for value in (0.0, tiny, tiny / 1024, 1e-30, 1e30, 3e38, -3e38):
        vector = torch.full((BLOCK + 5,), value)
        found = decode(encode(vector, wire), len(vector), wire)
        assert bool(torch.isfinite(found).all()), value
        assert (found - vector).abs().max() <= abs(value) / 100 + 2 * tiny, value


@pytest.mark.parametrize("wire", WIRES)
def test_blocks_have_scales_of_their_own(wire: str) -> None:
    """A large number spoils no other block."""
    vector = numbers(3 * BLOCK)
    vector[BLOCK + 3] = 1e6
    found = decode(encode(vector, wire), len(vector), wire)
    for at in (0, 2):
        assert (found - vector)[at * BLOCK : (at + 1) * BLOCK].abs().max() < 0.04


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_does_not_get_lost(wire: str, value: float) -> None:
    vector = numbers(2 * BLOCK)
    vector[5] = value
    assert not bool(torch.isfinite(decode(encode(vector, wire), len(vector), wire)).all())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", LENGTHS)
def test_all_get_the_same_bits_close_to_the_mean(wire: str, size: int, numel: int) -> None:
    shares = [(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]

    def script(group: Group) -> torch.Tensor:
        mine = numbers(numel, group.rank)
        before = mine.clone()
        found = Feedback(group, numel, wire).mean(mine, shares)
        assert mine.equal(before), "the vector stays as it is"
        return found

    found = ranks.run(size, script)
    wanted = sum((numbers(numel, rank) * share for rank, share in enumerate(shares)), torch.zeros(numel))
    for each in found:
        assert each.equal(found[0])
        if numel:
            assert (each - wanted).abs().max() <= (0.04 if wire == "int8" else 0.025)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [2, 3])
def test_the_sum_of_what_arrived_tracks_the_sum_of_what_was_sent(wire: str, size: int) -> None:
    """Each vector is small numbers beside large ones, so that rounding takes always the same away; over 200 rounds it
    arrives nevertheless, with an error that does not grow. Workers count by other shares in every round."""
    numel, num_rounds = BLOCK + 300, 200
    shares = [
        [(1 + (rank + number) % size) / (size * (size + 1) / 2) for rank in range(size)] for number in range(size)
    ]

    def given(rank: int, number: int) -> torch.Tensor:
        vector = numbers(numel, 1000 * rank + number, 1e-4) + 1e-3
        vector[::97] = 1.003 + rank
        return vector

    def script(group: Group) -> tuple[float, float, float]:
        feedback = Feedback(group, numel, wire)
        arrived, errors = torch.zeros(numel, dtype=torch.float64), []
        sent = torch.zeros(numel, dtype=torch.float64)
        for number in range(num_rounds):
            now = shares[number % size]
            arrived += feedback.mean(given(group.rank, number), now)
            sent += sum(given(rank, number).double() * now[rank] for rank in range(size))
            errors.append((arrived - sent).abs().max().item())
        plain = decode(encode(given(0, 0), wire), numel, wire)
        return errors[num_rounds // 3], errors[-1], (plain - given(0, 0)).abs().max().item()

    for early, late, alone in ranks.run(size, script):
        bound = 2 * (1.0 + size) / 127
        assert early < bound and late < bound
        assert alone * num_rounds > 3 * bound, "without feedback it would have grown far beyond"


@pytest.mark.parametrize("wire", WIRES)
def test_who_has_no_share_gives_nothing_and_loses_nothing(wire: str) -> None:
    """Rank 1 takes part with share 0 in every second round, with whatever in its hands: no error is lost or doubled."""
    numel = BLOCK

    def script(group: Group) -> float:
        feedback = Feedback(group, numel, wire)
        arrived, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for number in range(200):
            both = number % 2 == 0
            vectors = [numbers(numel, 7 * rank + 1, 1e-3) + 2e-3 for rank in range(2)]
            for vector in vectors:
                vector[0] = 1.0
            mine = vectors[group.rank] if both or group.rank == 0 else torch.full((numel,), float("nan"))
            shares = [0.5, 0.5] if both else [1.0, 0.0]
            arrived += feedback.mean(mine, shares)
            sent += vectors[0] * shares[0] + vectors[1] * shares[1]
        return (arrived - sent).abs().max().item()

    assert max(ranks.run(2, script)) < 6 / 127


# -- in training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("more", ["", ",fragments=2", ",overlap=2", ",fragments=2,overlap=1", ",warmup=3"])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_agree_bit_for_bit_and_come_close_to_what_full_precision_gives(wire: str, more: str, size: int) -> None:
    found = ranks.run(size, lambda g: work(g, f"diloco:every=4{more},wire={wire}", 14, uneven(size)))
    full = ranks.run(size, lambda g: work(g, f"diloco:every=4{more}", 14, uneven(size)))
    begin = parameters_of(mlp(SMALL))
    for rank in range(size):
        assert all(a.equal(b) for a, b in zip(found[rank], found[0], strict=True))
    way = torch.cat([(a - b).view(-1) for a, b in zip(full[0], begin, strict=True)]).norm()
    off = torch.cat([(a - b).view(-1) for a, b in zip(full[0], found[0], strict=True)]).norm()
    assert 0 < off < 0.05 * way


def test_feedback_carries_drifts_that_one_rounding_would_swallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose drift is a 500th of another's, in one block of int8: it arrives all the same, in time."""

    def script(group: Group) -> list[float]:
        one = training(group, "diloco:every=1,outer_lr=1.0,outer_momentum=0.0,wire=int8")
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        one.prepare(model, optimizer)
        for _ in range(100):
            optimizer.zero_grad()
            (model.weight * torch.tensor([[1.0, 2e-3]])).sum().backward()
            optimizer.step()
        return model.weight.flatten().tolist()

    for large, small in ranks.run(2, script):
        assert large == pytest.approx(-100.0, rel=0.01) and small == pytest.approx(-0.2, rel=0.1)
    monkeypatch.setattr("hora.strategies.means.Feedback.mean", without_feedback)
    assert all(small == 0.0 for _, small in ranks.run(2, script)), "the test could not fail"


def without_feedback(self: Feedback, vector: torch.Tensor, shares: list[float]) -> torch.Tensor:
    fresh = Feedback(self._group, vector.numel(), self._wire)
    return MEAN(fresh, vector, shares)


MEAN = Feedback.mean


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("wire", "per_element"), [("float32", 4.0), ("bfloat16", 2.0), ("int8", 1.0 + 4 / BLOCK)])
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_bytes_are_those_of_a_ring_at_the_width_of_the_wire(
    size: int, wire: str, per_element: float, transport: str
) -> None:
    def script(group: Group) -> int:
        algorithm = ",algorithm=ring" if wire == "float32" else ""
        one = training(group, f"diloco:every=4,wire={wire}{algorithm}")
        with building():
            model = torch.nn.Linear(64, 96 * size * 4, bias=False)  # whole blocks for every rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        one.prepare(model, optimizer)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return one.sync.traffic.sent_bytes

    numel = 64 * 96 * size * 4
    wanted = 2 * 2 * (size - 1) / size * numel * per_element
    for found in ranks.run(size, script, transport):
        assert found == pytest.approx(wanted, rel=0.01)


def test_double_precision_keeps_its_type_over_a_narrow_wire() -> None:
    found = ranks.run(2, lambda g: work(g, "diloco:every=3,wire=int8", 7))
    assert all(p.dtype == torch.float64 for p in found[0])
    full = diloco(Crew(2, even(2)), 7, 3)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(found[0], full, strict=True))


def test_a_worker_that_leaves_early_lends_a_hand_over_a_narrow_wire() -> None:
    def script(group: Group) -> list[torch.Tensor]:
        one, model = training(group, "diloco:every=3,wire=int8"), mlp(SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        one.prepare(model, optimizer)
        for step in range(4 if group.rank else 17):
            optimizer.zero_grad()
            loss_of(model, part(one, batch(step))).backward()
            optimizer.step()
        one.depart()
        return parameters_of(model)

    found: list[Any] = ranks.run(3, script)
    assert all(a.equal(b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
