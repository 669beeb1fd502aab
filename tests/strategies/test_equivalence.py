"""All ways of the sum are one training: every strategy on n workers == plain PyTorch on the whole batch.

Tolerances: parameters in float64 after 50 steps agree to 1e-9 relative (1e-11 absolute): only the order of summation
differs. In float32, as users train, to 2e-4 relative and 2e-5 absolute. Between ranks there is none: bits are equal.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import ranks
from trainings import (
    FAMILY,
    OPTIMIZERS,
    SHARDED,
    batch,
    building,
    loss_of,
    mlp,
    net,
    parameters_of,
    part,
    same,
    train,
    training,
)  # fmt: skip

ALGORITHMS = ("ring", "tree", "halving", "star", "shared", "auto", *SHARDED)


def script(one: Any, optimizer: str = "sgd", steps: int = 50, width: int = 24) -> list[torch.Tensor]:
    model = mlp(width)
    chosen = OPTIMIZERS[optimizer](model.parameters())
    one.prepare(model, chosen)
    for step in range(steps):
        chosen.zero_grad()
        loss_of(model, part(one, batch(step))).backward()
        chosen.step()
    return parameters_of(model)


def all_optimizers(one: Any) -> list[torch.Tensor]:
    """Four models side by side, each with an optimizer of its own: 50 steps of each in one run."""
    models = [mlp(seed=seed)[:3] for seed in range(len(OPTIMIZERS))]
    chosen = [make(model.parameters()) for make, model in zip(OPTIMIZERS.values(), models, strict=True)]
    one.prepare(models, chosen)
    for step in range(50):
        x = part(one, batch(step))
        for optimizer in chosen:
            optimizer.zero_grad()
        sum(loss_of(model, x) for model in models).backward()
        for optimizer in chosen:
            optimizer.step()
    return parameters_of(*models)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ALGORITHMS)
def test_every_strategy_equals_one_process_on_the_whole_batch(strategy: str, size: int) -> None:
    """SGD, momentum, Adam and fused AdamW, parameter by parameter after 50 steps."""
    same(all_optimizers, strategy, size, rtol=1e-9, atol=1e-11)


@functools.cache
def whole_batch(optimizer: str) -> list[torch.Tensor]:
    """A group without peers, on the batches that job.shard deals out."""
    return train(1, "shared", optimizer=optimizer, width=192)[0]


@pytest.mark.cases(8)
@pytest.mark.parametrize(
    ("optimizer", "size"), [("sgd", 2), ("momentum", 3), ("adam", 4), ("adamw", 2), ("adamw", 3), ("adamw", 4)]
)
@pytest.mark.parametrize("strategy", FAMILY)
def test_dealt_data_and_sliced_shares_train_as_one_process(strategy: str, optimizer: str, size: int) -> None:
    """In float32 through job.shard, wide enough that shares are slices of parameters; 50 steps."""
    results = train(size, strategy, optimizer=optimizer, width=192)
    for found in results:
        for mine, first, wanted in zip(found, results[0], whole_batch(optimizer), strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("strategy", SHARDED)
def test_a_large_parameter_is_cut_into_slices_and_a_small_one_is_not(strategy: str) -> None:
    def look(group: Any) -> list[list[tuple[int, int, int]]]:
        one = training(group, strategy)
        with building():
            model = net(width=192)
        one.prepare(model, torch.optim.Adam(model.parameters()))
        return [[(lane.owner, lane.start, lane.stop) for lane in lanes] for lanes in one.sync._shards_of]

    found = ranks.run(3, look)
    assert found[0] == found[1] == found[2]
    cut = found[0][2]
    assert [owner for owner, _, _ in cut] == [0, 1, 2]
    assert [start for _, start, _ in cut] == [0, *(stop for _, _, stop in cut[:-1])] and cut[-1][2] == 192 * 192
    assert all(len(lanes) == 1 for number, lanes in enumerate(found[0]) if number != 2)


@pytest.mark.parametrize("strategy", ["shared", *SHARDED])
@pytest.mark.parametrize("size", [2, 3])
def test_two_runs_have_the_same_bits(strategy: str, size: int) -> None:
    first, second = (train(size, strategy, optimizer="adam", width=192, steps=15) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


@pytest.mark.parametrize("strategy", FAMILY)
@pytest.mark.parametrize("bucket_bytes", [8192, 65536])
def test_overlap_changes_no_bit(strategy: str, bucket_bytes: int) -> None:
    joint = ("," if ":" in strategy else ":") + f"bucket_bytes={bucket_bytes}"
    with_overlap = train(3, strategy + joint, optimizer="momentum", width=130, steps=6)
    without = train(3, strategy + joint + ",overlap=false", optimizer="momentum", width=130, steps=6)
    assert all(torch.equal(a, b) for a, b in zip(with_overlap[0], without[0], strict=True))


@pytest.mark.parametrize("strategy", FAMILY)
def test_the_size_of_buckets_does_not_matter(strategy: str) -> None:
    joint = "," if ":" in strategy else ":"
    for bucket_bytes in (1024, 9000):
        same(
            lambda one: script(one, "adam", 3, width=100),
            f"{strategy}{joint}bucket_bytes={bucket_bytes}",
            3,
            rtol=1e-9,
            atol=1e-11,
        )


@pytest.mark.parametrize(
    ("transport", "strategy"),
    [
        ("shm", "shared"), ("shm", "ring"), ("shm", "shared:update=sharded"), ("shm", "auto"), ("tcp", "ring"),
        ("tcp", "ring:update=sharded"), ("tcp", "auto"), ("tcp", "auto:update=sharded"), ("memory", "engine"),
        ("memory", "engine:update=sharded"), ("shm", "engine"), ("engine", "ring"), ("engine", "ring:update=sharded"),
    ],
)  # fmt: skip
def test_the_transport_does_not_matter(transport: str, strategy: str) -> None:
    same(lambda one: script(one, "adamw", 12, width=120), strategy, 3, transport, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("strategy", ["shared", "shared:update=sharded"])
def test_a_thread_that_carries_the_mail_changes_no_bit(
    strategy: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(3, strategy, transport, optimizer="adamw", steps=12, width=192)
    monkeypatch.setattr("hora.strategies.allreduce.bucket_plans.num_cores", lambda: 64)
    helped = train(3, strategy, transport, optimizer="adamw", steps=12, width=192)
    for mine, theirs in zip(alone, helped, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
