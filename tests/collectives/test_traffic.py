"""The algorithms keep their own promises: messages and bytes really sent, against the schedule and the formulas."""

from __future__ import annotations

import pytest
import torch

from hora.collectives import Group
from hora.collectives.schedule import SCHEDULES, bounds, ceil_log2
from ranks import run


def traffic(size: int, algorithm: str, numel: int) -> list[tuple[list[int], list[int], int]]:
    """Per rank: messages and bytes sent to each peer, and elements added, in one all_reduce of float32."""

    def work(group: Group) -> tuple[list[int], list[int], int]:
        messages, sent = list(group.transport.sent_messages), list(group.transport.sent_bytes)
        added = 0
        take = group.recv_chunk

        def counting(peer: int, flat: torch.Tensor, combine: object = None) -> object:
            nonlocal added
            added += flat.numel() if combine is not None else 0
            return take(peer, flat, combine)  # type: ignore[arg-type]

        group.recv_chunk = counting  # type: ignore[method-assign, assignment]
        group.all_reduce(torch.ones(numel), algorithm=algorithm)
        return (
            [a - b for a, b in zip(group.transport.sent_messages, messages, strict=True)],
            [a - b for a, b in zip(group.transport.sent_bytes, sent, strict=True)],
            added,
        )

    return run(size, work)


@pytest.mark.parametrize("algorithm", ["star", "ring", "tree", "halving"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16])
def test_what_is_sent_is_what_the_schedule_says(algorithm: str, size: int) -> None:
    numel = 1003
    schedule = SCHEDULES[algorithm](size)
    cut = bounds(numel, schedule.parts)
    for rank, (messages, sent, added) in enumerate(traffic(size, algorithm, numel)):
        wanted_messages, wanted_bytes = [0] * size, [0] * size
        for transfer in schedule.sends(rank):
            wanted_messages[transfer.target] += 1
            wanted_bytes[transfer.target] += 4 * (cut[transfer.stop - 1][1] - cut[transfer.start][0])
        assert messages == wanted_messages
        assert sent == wanted_bytes
        assert added == sum(cut[t.stop - 1][1] - cut[t.start][0] for t in schedule.receives(rank) if t.reduce)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16])
def test_ring_sends_2_n_minus_1_over_n_of_the_data_to_one_neighbour(size: int) -> None:
    numel = size * 100
    for rank, (messages, sent, _) in enumerate(traffic(size, "ring", numel)):
        right = (rank + 1) % size
        assert sum(messages) == messages[right] == 2 * (size - 1)
        assert sum(sent) == sent[right] == 2 * (size - 1) * numel * 4 // size


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_halving_sends_as_little_as_the_ring_in_as_few_steps_as_the_tree(size: int) -> None:
    numel = size * 100
    for messages, sent, _ in traffic(size, "halving", numel):
        assert sum(messages) == 2 * ceil_log2(size)
        assert sum(sent) == 2 * (size - 1) * numel * 4 // size


def test_the_stars_root_carries_a_load_that_grows_with_the_ranks_and_the_rings_does_not() -> None:
    loads = {a: [traffic(n, a, 4800)[0] for n in (2, 4, 8)] for a in ("star", "ring")}
    star_bytes = [sum(sent) for _, sent, _ in loads["star"]]
    star_added = [added for _, _, added in loads["star"]]
    ring_bytes = [sum(sent) for _, sent, _ in loads["ring"]]
    assert star_bytes == [4800 * 4 * (n - 1) for n in (2, 4, 8)]
    assert star_added == [4800 * (n - 1) for n in (2, 4, 8)]
    assert all(sent < 2 * 4800 * 4 for sent in ring_bytes)


def test_shared_sends_no_message_at_all() -> None:
    assert all(messages == [0, 0, 0] for messages, _, _ in traffic(3, "shared", 100_000))
