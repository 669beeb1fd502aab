"""A worker knows how much each other worker has had from it, and what the servers told it of lags."""

from __future__ import annotations

from typing import Any

import pytest

import ranks
import trainings
from hora.training import Training

NUM_BYTES = 4 * (6 * 24 + 24 + 24 * 24 + 24 + 24 * 3 + 3)  # of trainings.net()
STEPS = 4


def trained(size: int, strategy: str, transport: str) -> list[tuple[Training, dict[int, int]]]:
    """Every rank's training, and what each peer had of it in STEPS steps; the first, with what it measures, aside."""

    def work(group: Any) -> tuple[Training, dict[int, int]]:
        one = trainings.training(group, strategy)
        told: list[dict[int, int]] = []

        def look(one: Training, _: Any) -> None:
            assert one.sync is not None
            told.append(one.sync.describe().sent_to)

        trainings.fit(one, steps=STEPS + 1, each=look)
        assert told[0].keys() == told[-1].keys()
        return one, {peer: count - told[0][peer] for peer, count in told[-1].items()}

    return ranks.run(size, work, transport)


def test_a_ring_sends_what_is_large_to_the_next_alone() -> None:
    for rank, (_, peers) in enumerate(trained(3, "ring", "tcp")):
        assert peers.keys() == {0, 1, 2} - {rank}
        after, before = peers[(rank + 1) % 3], peers[(rank - 1) % 3]
        assert after >= STEPS * 4 * NUM_BYTES // 3 - 100 > 2 * before, "twice two thirds of the gradient, at every step"


def shown(workers: list[tuple[Training, dict[int, int]]]) -> int:
    """Without what was sent."""
    total = 0
    for one, peers in workers:
        for armed in one.sync._plans._plans.values():  # type: ignore[union-attr]
            total += sum(armed.reducer.shown(peer) for peer in peers)
    return total


@pytest.mark.parametrize("size", [2, 3])
def test_in_shared_memory_every_peer_reads_its_share_and_the_result(size: int) -> None:
    workers = trained(size, "shared", "shm")
    for rank, (_, peers) in enumerate(workers):
        assert peers.keys() == set(range(size)) - {rank}
        assert all(count > 0 for count in peers.values())
    assert shown(workers) == 2 * (size - 1) * NUM_BYTES * (STEPS + 1), "as much as a ring sends"


def test_of_shares_alone_it_is_half_of_that() -> None:
    assert shown(trained(2, "shared:update=sharded", "shm")) == NUM_BYTES * (STEPS + 1)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_rounds_are_counted_over_any_transport(transport: str) -> None:
    for rank, (_, peers) in enumerate(trained(2, "local:every=2", transport)):
        assert peers.keys() == {1 - rank}
        assert peers[1 - rank] >= 2 * NUM_BYTES, "two rounds"


def test_what_servers_get_goes_to_no_worker_and_lags_are_told_as_often_as_they_are_asked_for() -> None:
    for one, peers in trained(2, "ps:mode=async/1", "memory"):
        assert peers == {}
        assert one.sync is not None
        assert one.sync.describe().figures["lag"] >= 0
        assert one.sync.describe().figures == one.sync.describe().figures
        assert one.sync.describe().figures.keys() == one.sync.describe().figures.keys()
    for one, peers in trained(2, "ps/1", "memory"):
        assert peers == {}
        assert one.sync is not None and one.sync.describe().figures == {}


@pytest.mark.parametrize("strategy", ["ring", "local:every=2"])
def test_one_worker_alone_has_no_peers(strategy: str) -> None:
    assert trained(1, strategy, "memory")[0][1] == {}
