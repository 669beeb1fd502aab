"""Ranks that do not mean the same call are told apart within a second, both sides named, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hora.collectives import Group
from hora.errors import HoraError, Mismatch, PeerLost
from ranks import Run, failures

Call = Callable[[Group], Any]

CASES: dict[str, tuple[Call, Call]] = {
    "shapes": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(9))),
    "shapes of equal size": (lambda g: g.all_reduce(torch.ones(2, 3)), lambda g: g.all_reduce(torch.ones(3, 2))),
    "dtypes": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(8).int())),
    "operations": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_reduce(torch.ones(8), "max")),
    "names": (lambda g: g.all_reduce(torch.ones(8), name="a"), lambda g: g.all_reduce(torch.ones(8), name="b")),
    "algorithms": (
        lambda g: g.all_reduce(torch.ones(8), algorithm="ring"),
        lambda g: g.all_reduce(torch.ones(8), algorithm="tree"),
    ),
    "collectives": (lambda g: g.all_reduce(torch.ones(8)), lambda g: g.all_gather(torch.ones(8))),
    "roots": (lambda g: g.broadcast(torch.ones(8), root=0), lambda g: g.broadcast(torch.ones(8), root=1)),
    "both wait": (lambda g: g.broadcast(torch.ones(8), root=1), lambda g: g.reduce(torch.ones(8), root=1)),
    "a call skipped": (
        lambda g: (g.all_reduce(torch.ones(8)), g.barrier()),
        lambda g: (g.barrier(), g.all_reduce(torch.ones(8))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mismatch_is_refused_on_every_rank_and_names_both_sides(case: str, transport: str) -> None:
    ours, theirs = CASES[case]
    took = [0.0] * 3

    def work(group: Group) -> None:
        group.barrier()
        begin = time.monotonic()
        try:
            (theirs if group.rank == 1 else ours)(group)
        finally:
            took[group.rank] = time.monotonic() - begin

    errors = failures(3, work, transport)
    assert all(isinstance(error, Mismatch) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "rank 1 (host test" in str(errors[0])
    assert "rank 0 (host test" in str(errors[0]) or "rank 2 (host test" in str(errors[0])
    assert max(took) < 1.5  # a second is promised; the rest is two cores for twelve threads


def test_a_message_of_another_shape_is_refused_and_both_sides_are_named(transport: str) -> None:
    def work(group: Group) -> None:
        if group.rank == 0:
            group.send(torch.ones(8), to=1, wait=False)
        else:
            group.recv(torch.ones(9), source=0)
        group.barrier()

    errors = failures(2, work, transport)
    assert all(isinstance(error, Mismatch) for error in errors), errors
    assert "float32 [8]" in str(errors[1]) and "float32 [9]" in str(errors[1])


def test_after_a_mismatch_every_call_raises_it_again() -> None:
    def work(group: Group) -> None:
        with pytest.raises(Mismatch):
            group.all_reduce(torch.ones(3 + group.rank))
        with pytest.raises(Mismatch):
            group.barrier()

    assert failures(2, work) == [None, None]


def test_a_dead_peer_ends_the_call_on_all_survivors(transport: str) -> None:
    def work(group: Group) -> float:
        group.barrier()
        if group.rank == 1:
            time.sleep(0.2)
            started.hub.died(1, "killed by SIGKILL")
            return 0.0
        begin = time.monotonic()
        with pytest.raises(PeerLost, match="killed by SIGKILL") as caught:
            group.all_reduce(torch.ones(100_000))
        assert "rank 1 (host test" in str(caught.value) and caught.value.ranks == (1,) and caught.value.secondary
        return time.monotonic() - begin

    started = Run(3, transport)
    started.start(work).finish()
    assert started.errors == [None] * 3
    assert max(started.results) < 1.5


def test_a_slow_peer_is_waited_for_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    monkeypatch.setattr("hora.transport.base.SLOW_S", 0.5)

    def work(group: Group) -> None:
        if group.rank == 1:
            time.sleep(1.2)
        assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4

    assert failures(2, work, transport) == [None, None]
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert said and "rank 0 (host test" in said[0] and "for rank 1 (host test" in said[0] and "all_reduce" in said[0]


def test_a_handle_that_nobody_waits_for_does_not_fail_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    def work(group: Group) -> None:
        group.all_reduce(torch.ones(3 + group.rank), wait=False)

    assert failures(2, work) == [None, None]
    said = [record.getMessage() for record in caplog.records if "never waited for" in record.getMessage()]
    assert len(said) == 2 and "rank 0 (host test" in said[0] and "rank 1 (host test" in said[0]


def test_a_buffer_that_only_one_rank_opens_is_a_mismatch_and_no_hang() -> None:
    def work(group: Group) -> None:
        group.buffer("alone", 10, torch.float32) if group.rank else group.all_reduce(torch.ones(3))

    assert all(isinstance(error, Mismatch) for error in failures(2, work, "shm"))


def test_an_error_in_the_middle_of_a_call_is_told_to_the_others() -> None:
    def work(group: Group) -> None:
        if group.rank:
            group.recv_chunk = None  # type: ignore[method-assign, assignment]
        group.all_reduce(torch.ones(3), algorithm="ring")

    errors = failures(2, work)
    assert isinstance(errors[1], TypeError)
    assert (
        isinstance(errors[0], HoraError)
        and "rank 1 (host test" in str(errors[0])
        and "failed in all_reduce" in str(errors[0])
    )
