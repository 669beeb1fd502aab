"""The coordinator's state machine, driven directly: no socket, no thread, no clock."""

from __future__ import annotations

import pytest

from hora.coordinator import Coordinator, CoordinatorEvent, Member, state
from hora.coordinator.messages import (
    MAX_NAME_CHARS,
    MAX_VALUE_BYTES,
    PROTOCOL,
    AnyRequest,
    CoordinatorReply,
    Fail,
    Get,
    Join,
    Leave,
    Put,
    Send,
    Stop,
)
from hora.coordinator.state import DISCONNECT_GRACE_S, Out
from hora.net.framing import frame


def member(rank: int, role: str = "worker") -> Member:
    return Member(role, rank, "test", 1000 + rank)


def joining(rank: int, role: str = "worker", request: int = 1) -> Join:
    return Join(id=request, member=member(rank, role))


def formed(size: int) -> Coordinator:
    """A run that has formed; rank r speaks on connection r."""
    coordinator = Coordinator(size)
    for rank in range(size):
        coordinator.handle(rank, joining(rank))
    assert coordinator.generation == 1
    return coordinator


def events(out: Out) -> list[tuple[int, str, int, str]]:
    """(connection, kind, the member's rank, text) of every event, by connection."""
    found = [
        (to, said.kind, said.member.rank if said.member else -1, said.text)
        for to, said in out
        if isinstance(said, CoordinatorEvent)
    ]
    return sorted(found)


def reply(out: Out, connection: int) -> CoordinatorReply:
    (found,) = [said for to, said in out if to == connection and isinstance(said, CoordinatorReply)]
    return found


# -- forming -----------------------------------------------------------------------------------------------------------


def test_the_run_forms_when_the_last_rank_has_joined_and_not_before() -> None:
    coordinator = Coordinator(3)
    assert coordinator.handle(7, joining(2, request=5)) == []
    assert coordinator.handle(8, joining(0, request=6)) == []
    assert coordinator.generation == 0
    out = coordinator.handle(9, joining(1, request=7))
    assert coordinator.generation == 1
    assert [kind for _, kind, _, _ in events(out)] == ["formed"] * 3
    for connection, number in ((7, 5), (8, 6), (9, 7)):
        answer = reply(out, connection)
        assert (answer.id, answer.generation, answer.error) == (number, 1, "")
        assert [m.rank for m in answer.members] == [0, 1, 2]


def test_other_roles_take_part_without_being_waited_for() -> None:
    coordinator = Coordinator(1)
    assert coordinator.handle(5, joining(0, "server")) == []
    answer = reply(coordinator.handle(6, joining(0)), 6)
    assert [(m.role, m.rank) for m in answer.members] == [("worker", 0), ("server", 0)]


def test_a_taken_rank_is_refused_and_its_holder_named() -> None:
    coordinator = Coordinator(2)
    coordinator.handle(0, joining(0))
    answer = reply(coordinator.handle(1, Join(id=3, member=Member("worker", 0, "b", 9))), 1)
    assert str(member(0)) in answer.error and "host b, pid 9" in answer.error


@pytest.mark.parametrize("rank", [-1, 2, 1 << 62])
def test_a_rank_that_the_run_does_not_have_is_refused(rank: int) -> None:
    answer = reply(Coordinator(2).handle(0, joining(rank)), 0)
    assert "0 to 1" in answer.error


def test_another_protocol_is_refused_with_both_versions() -> None:
    request = Join(id=1, member=member(0), protocol=PROTOCOL + 1)
    error = reply(Coordinator(1).handle(0, request), 0).error
    assert f"protocol {PROTOCOL + 1}" in error and f"run {PROTOCOL}" in error


def test_a_connection_joins_once() -> None:
    coordinator = Coordinator(2)
    coordinator.handle(0, joining(0))
    assert "already" in reply(coordinator.handle(0, joining(1)), 0).error


def test_a_member_whose_name_does_not_fit_is_refused() -> None:
    request = Join(id=1, member=Member("worker", 0, "h" * MAX_NAME_CHARS, 1))
    assert "characters" in reply(Coordinator(1).handle(0, request), 0).error


@pytest.mark.parametrize(
    "request_",
    [Put(id=1, key="k", value=b""), Get(id=1, key="k"), Stop(id=1, reason="x"), Leave(id=1), Fail(id=1, reason="x")],
)
def test_nothing_but_join_is_answered_before_joining(request_: AnyRequest) -> None:
    coordinator = formed(2)
    out = coordinator.handle(99, request_)
    assert out == [(99, CoordinatorReply(id=1, error="join first"))]
    assert coordinator.stop_reason is None and len(coordinator.alive) == 2


def test_every_change_of_membership_is_a_new_generation() -> None:
    coordinator = formed(4)
    seen = [coordinator.generation]
    for change in (
        lambda: coordinator.handle(0, Leave(id=1)),
        lambda: coordinator.died("worker", 1, "killed"),
        lambda: coordinator.handle(2, Fail(id=1, reason="ValueError")),
        lambda: coordinator.handle(11, joining(1)),
        lambda: coordinator.ended("worker", 3),
    ):
        change()
        seen.append(coordinator.generation)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [m.rank for m in coordinator.alive] == [1]


def test_one_who_joins_again_gets_the_new_generation_and_the_others_hear_of_it() -> None:
    coordinator = formed(2)
    coordinator.died("worker", 1, "killed")
    out = coordinator.handle(5, joining(1))
    assert (reply(out, 5).generation, [m.rank for m in reply(out, 5).members]) == (3, [0, 1])
    assert (0, "joined", 1, "again") in events(out)


def test_a_process_whose_place_was_taken_again_is_fenced() -> None:
    coordinator = formed(2)
    coordinator.died("worker", 1, "frozen")
    coordinator.handle(5, joining(1))
    assert reply(coordinator.handle(1, Put(id=9, key="late", value=b"x")), 1).error
    assert coordinator.handle(0, Get(id=2, key="late")) == []
    coordinator.disconnected(1, 1.0)
    assert events(coordinator.tick(9.0)) == []
    assert len(coordinator.alive) == 2


# -- ending ------------------------------------------------------------------------------------------------------------


def test_a_member_that_leaves_is_reported_as_left_to_the_others() -> None:
    out = formed(3).handle(1, Leave(id=4))
    assert events(out) == [(0, "left", 1, "its script ended"), (2, "left", 1, "its script ended")]
    assert reply(out, 1).error == ""


def test_a_member_that_fails_tells_the_others_why() -> None:
    out = formed(3).handle(1, Fail(reason="ValueError: no"))
    assert events(out) == [(0, "died", 1, "ValueError: no"), (2, "died", 1, "ValueError: no")]


def test_a_process_seen_to_end_well_has_left_and_badly_has_died() -> None:
    coordinator = formed(3)
    assert events(coordinator.ended("worker", 2))[0] == (0, "left", 2, "its script ended")
    assert events(coordinator.died("worker", 1, "killed by SIGKILL"))[0] == (0, "died", 1, "killed by SIGKILL")


def test_the_first_cause_of_a_death_wins() -> None:
    coordinator = formed(2)
    assert events(coordinator.handle(1, Fail(reason="ValueError: no"))) == [(0, "died", 1, "ValueError: no")]
    assert coordinator.died("worker", 1, "exit code 1") == []
    coordinator.disconnected(1, 0.1)
    assert coordinator.tick(9.0) == []
    assert coordinator.handle(0, Leave(id=1)) and coordinator.generation == 3


def test_a_cause_that_comes_within_the_grace_replaces_the_broken_connection() -> None:
    coordinator = formed(2)
    assert coordinator.disconnected(1, 5.0) == []
    assert coordinator.tick(5.0 + DISCONNECT_GRACE_S / 2) == []
    assert events(coordinator.died("worker", 1, "killed by SIGSEGV")) == [(0, "died", 1, "killed by SIGSEGV")]
    assert coordinator.tick(9.0) == []


def test_a_connection_that_breaks_without_a_word_is_a_death_after_the_grace() -> None:
    coordinator = formed(2)
    coordinator.disconnected(1, 5.0)
    assert events(coordinator.tick(5.1 + DISCONNECT_GRACE_S)) == [(0, "died", 1, "its connection broke")]
    assert coordinator.died("worker", 1, "killed") == []


def test_a_member_that_left_may_close_its_connection() -> None:
    coordinator = formed(2)
    coordinator.handle(1, Leave(id=1))
    coordinator.disconnected(1, 0.0)
    assert coordinator.tick(9.0) == []


def test_one_that_left_and_then_ended_badly_has_died() -> None:
    coordinator = formed(2)
    coordinator.handle(1, Leave(id=1))
    generation = coordinator.generation
    assert events(coordinator.died("worker", 1, "exit code 3")) == [(0, "died", 1, "exit code 3")]
    assert coordinator.generation == generation  # it was out already: the membership is the same
    assert coordinator.ended("worker", 1) == [] and coordinator.died("worker", 1, "again") == []


def test_a_death_before_the_run_is_formed_answers_those_who_wait() -> None:
    coordinator = Coordinator(3)
    coordinator.handle(0, joining(0, request=8))
    out = coordinator.died("worker", 2, "ModuleNotFoundError")
    answer = reply(out, 0)
    assert answer.id == 8 and "rank 2" in answer.error and "ModuleNotFoundError" in answer.error
    assert "rank 2" in reply(coordinator.handle(1, joining(1)), 1).error


def test_a_waiting_rank_whose_connection_breaks_ends_the_wait_of_the_others() -> None:
    coordinator = Coordinator(3)
    coordinator.handle(0, joining(0))
    coordinator.handle(1, joining(1))
    coordinator.disconnected(1, 1.0)
    out = coordinator.tick(2.0)
    assert "rank 1" in reply(out, 0).error
    assert [to for to, _ in out if to == 1] == []


def test_a_reason_as_long_as_a_frame_still_reaches_the_others() -> None:
    failing = Fail(reason="é" * 524_240)
    frame(failing)  # it fits by itself, not with the member's name beside it
    ((_, event),) = formed(2).handle(1, failing)
    assert isinstance(event, CoordinatorEvent) and event.kind == "died"
    frame(event)  # raises if it does not fit


# -- values ------------------------------------------------------------------------------------------------------------


def test_get_answers_at_once_or_when_somebody_puts() -> None:
    coordinator = formed(3)
    assert coordinator.handle(0, Get(id=4, key="k")) == []
    assert coordinator.handle(1, Get(id=5, key="k")) == []
    out = coordinator.handle(2, Put(id=6, key="k", value=b"v"))
    assert sorted((to, said.id, said.value) for to, said in out if isinstance(said, CoordinatorReply)) == [
        (0, 4, b"v"),
        (1, 5, b"v"),
        (2, 6, b""),
    ]
    assert reply(coordinator.handle(0, Get(id=7, key="k")), 0).value == b"v"


def test_a_put_replaces_and_does_not_answer_a_get_twice() -> None:
    coordinator = formed(2)
    coordinator.handle(0, Get(id=1, key="k"))
    coordinator.handle(1, Put(id=1, key="k", value=b"a"))
    out = coordinator.handle(1, Put(id=2, key="k", value=b"b"))
    assert [to for to, _ in out] == [1]
    assert reply(coordinator.handle(0, Get(id=2, key="k")), 0).value == b"b"


def test_nothing_is_sent_to_a_waiter_that_is_gone() -> None:
    coordinator = formed(2)
    coordinator.handle(0, Get(id=1, key="k"))
    coordinator.disconnected(0, 0.0)
    assert [to for to, _ in coordinator.handle(1, Put(id=1, key="k", value=b""))] == [1]


def test_a_value_has_a_largest_size() -> None:
    coordinator = formed(1)
    assert reply(coordinator.handle(0, Put(id=1, key="k", value=bytes(MAX_VALUE_BYTES))), 0).error == ""
    assert "bytes" in reply(coordinator.handle(0, Put(id=2, key="k", value=bytes(MAX_VALUE_BYTES + 1))), 0).error
    assert len(reply(coordinator.handle(0, Get(id=3, key="k")), 0).value) == MAX_VALUE_BYTES


def test_there_are_so_many_keys_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_KEYS", 3)
    coordinator = formed(1)
    answers = [reply(coordinator.handle(0, Put(id=1, key=str(i), value=b"")), 0).error for i in range(5)]
    assert [bool(error) for error in answers] == [False, False, False, True, True]
    assert reply(coordinator.handle(0, Put(id=1, key="0", value=b"new")), 0).error == ""


@pytest.mark.parametrize(
    "request_",
    [
        Put(id=1, key="n" * 2000, value=b""),
        Get(id=1, key="n" * 2000),
        Send(id=1, topic="n" * 2000),
    ],
)
def test_a_name_has_a_longest_length(request_: AnyRequest) -> None:
    out = formed(2).handle(0, request_)
    assert [to for to, _ in out] == [0] and "characters" in reply(out, 0).error


# -- telling and stopping ----------------------------------------------------------------------------------------------


def test_a_word_reaches_only_those_addressed() -> None:
    coordinator = formed(4)
    out = coordinator.handle(0, Send(topic="t", body=b"b", to=(1, 3)))
    assert [(to, said.topic, said.body, said.member) for to, said in out if isinstance(said, CoordinatorEvent)] == [
        (1, "t", b"b", member(0)),
        (3, "t", b"b", member(0)),
    ]


def test_a_word_without_address_reaches_all_others_of_the_same_role() -> None:
    coordinator = formed(2)
    for rank in range(4):
        coordinator.handle(10 + rank, joining(rank, "server"))
    assert [to for to, _ in coordinator.handle(0, Send(topic="t"))] == [1]
    assert [to for to, _ in coordinator.handle(10, Send(topic="t"))] == [11, 12, 13]


def test_a_word_to_oneself_or_to_nobody_reaches_nobody() -> None:
    coordinator = formed(2)
    assert coordinator.handle(0, Send(topic="t", to=(0, 7))) == []
    coordinator.disconnected(1, 0.0)
    assert coordinator.handle(0, Send(topic="t", to=(1,))) == []


def test_a_word_has_a_largest_size() -> None:
    out = formed(2).handle(0, Send(id=1, topic="t", body=bytes(MAX_VALUE_BYTES + 1)))
    assert [to for to, _ in out] == [0] and "bytes" in reply(out, 0).error


def test_everybody_hears_the_first_reason_to_stop_once() -> None:
    coordinator = formed(3)
    out = coordinator.handle(1, Stop(reason="enough"))
    assert events(out) == [(rank, "stop", 1, "enough") for rank in range(3)]
    assert coordinator.handle(2, Stop(reason="me too")) == []
    assert coordinator.stop_reason == "enough"
