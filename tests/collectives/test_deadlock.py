"""Deadlocks between calls of different groups: found by the live state of a rank, never by an earlier message."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hora.collectives.deadlock import TOPIC, DeadlockDetector, WaitState
from hora.coordinator import CoordinatorEvent, Member
from hora.errors import HoraError

OTHER = Member("worker", 0, "here", 1)
THEIRS = WaitState("gradients", 4, "while averaging gradients in step 4", {"gradients": 4, "job": 3})


class Connection:
    def __init__(self) -> None:
        self.sent: list[WaitState] = []

    def send(self, topic: str, body: bytes) -> None:
        self.sent.append(msgspec.msgpack.decode(body, type=WaitState))


def event(state: WaitState) -> CoordinatorEvent:
    return CoordinatorEvent(kind="message", generation=0, member=OTHER, topic=TOPIC, body=msgspec.msgpack.encode(state))


@pytest.fixture
def found() -> list[HoraError]:
    return []


def detector(found: list[HoraError]) -> tuple[DeadlockDetector, Any]:
    connection = Connection()
    numbers = {"gradients": 3, "job": 4}
    return DeadlockDetector(connection, "rank 1", lambda: numbers, found.append), connection  # type: ignore[arg-type]


def test_a_rank_that_waits_in_a_call_that_the_other_has_not_begun_raises_and_answers(found: list[HoraError]) -> None:
    mine, connection = detector(found)
    with mine.scope("job", lambda: "in all_reduce", lambda: False):
        mine.on_event(event(THEIRS))
        mine.on_event(event(THEIRS))
    assert len(found) == 1 and "waits in all_reduce and" in str(found[0]) and "step 4" in str(found[0])
    assert [state.scope for state in connection.sent] == ["job"], "the other compares it with its own state"


def test_what_another_rank_said_before_this_one_waited_is_not_held_against_it(found: list[HoraError]) -> None:
    mine, connection = detector(found)
    mine.on_event(event(THEIRS))
    with mine.scope("job", lambda: "in all_reduce", lambda: False):
        mine.on_long_wait()
    assert found == [] and len(connection.sent) == 1


def test_a_wait_that_was_aborted_is_no_wait(found: list[HoraError]) -> None:
    mine, connection = detector(found)
    with mine.scope("job", lambda: "in all_reduce", lambda: True):
        mine.on_event(event(THEIRS))
        mine.on_long_wait()
    assert found == [] and connection.sent == []
