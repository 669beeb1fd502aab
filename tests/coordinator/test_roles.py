"""Servers, workers that join later, and visitors: in the state machine, and as the connection names them."""

from __future__ import annotations

import random

import pytest

from hora.coordinator import Coordinator, CoordinatorEvent, InProcessCoordinator, Member
from hora.coordinator.messages import (
    AnyRequest,
    CoordinatorReply,
    Fail,
    Get,
    Join,
    Leave,
    ListMembers,
    Put,
    Reserve,
    Send,
    Stop,
)
from hora.coordinator.state import MAX_JOINERS, Out
from hora.errors import HoraError, Timeout


def joining(role: str, rank: int) -> Join:
    return Join(id=1, member=Member(role, rank, "test", 1000 + rank))


def formed(size: int, servers: int = 0) -> Coordinator:
    """A run that has formed; worker r speaks on connection r, server k on 100 + k."""
    coordinator = Coordinator(size, servers)
    for rank in range(size):
        coordinator.handle(rank, joining("worker", rank))
    for rank in range(servers):
        coordinator.handle(100 + rank, joining("server", rank))
    assert coordinator.generation == 1
    return coordinator


def heard(out: Out) -> set[tuple[int, str, str]]:
    return {
        (to, said.kind, f"{said.member.role} {said.member.rank}" if said.member else "")
        for to, said in out
        if isinstance(said, CoordinatorEvent)
    }


def reply(out: Out, connection: int) -> CoordinatorReply:
    (found,) = [said for to, said in out if to == connection and isinstance(said, CoordinatorReply)]
    return found


def reserve(coordinator: Coordinator, connection: int, count: int) -> int:
    return int(reply(coordinator.handle(connection, Reserve(id=1, count=count)), connection).value)


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_run_forms_when_all_workers_and_servers_have_joined_in_any_order(seed: int) -> None:
    coordinator = Coordinator(3, servers=2)
    seats = [("worker", rank) for rank in range(3)] + [("server", rank) for rank in range(2)]
    order = random.Random(seed).sample(seats, len(seats))
    for connection, (role, rank) in enumerate(order[:-1]):
        assert coordinator.handle(connection, joining(role, rank)) == []
    out = coordinator.handle(4, joining(*order[-1]))
    assert heard(out) == {(connection, "formed", "") for connection in range(5)}
    for connection in range(5):
        assert [(m.role, m.rank) for m in reply(out, connection).members] == seats


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_server_that_the_run_does_not_have_is_refused(rank: int) -> None:
    error = reply(Coordinator(1, servers=2).handle(0, joining("server", rank)), 0).error
    assert f"server {rank} (host test" in error and "servers 0 to 1" in error


def test_the_death_of_a_server_is_heard_by_workers_and_the_other_servers() -> None:
    coordinator = formed(2, servers=2)
    out = coordinator.died("server", 1, "killed by SIGKILL")
    assert heard(out) == {(to, "died", "server 1") for to in (0, 1, 100)}
    assert [(m.role, m.rank) for m in coordinator.alive] == [("worker", 0), ("worker", 1), ("server", 0)]


def test_a_server_that_ends_before_the_run_has_formed_ends_the_wait() -> None:
    coordinator = Coordinator(1, servers=1)
    coordinator.handle(0, joining("worker", 0))
    assert "server 0" in reply(coordinator.died("server", 0, "exit code 1"), 0).error


def test_a_word_goes_to_the_same_role_only() -> None:
    coordinator = formed(2, servers=2)
    assert [to for to, _ in coordinator.handle(0, Send(topic="t"))] == [1]
    assert [to for to, _ in coordinator.handle(100, Send(topic="t"))] == [101]


def test_a_join_that_waits_names_the_servers_that_are_missing() -> None:
    hub = InProcessCoordinator(3, servers=1)
    with pytest.raises(Timeout, match="for ranks 1, 2 and server 0 to join"):
        hub.connect().join(Member("worker", 0, "here", 1), timeout_s=0.05, size=3, servers=1)
    hub = InProcessCoordinator(1, servers=3)
    with pytest.raises(Timeout, match="for servers 0, 1, 2 to join"):
        hub.connect().join(Member("worker", 0, "here", 1), timeout_s=0.05, size=1, servers=3)


# -- joining -----------------------------------------------------------------------------------------------------------


def test_a_reserved_rank_is_taken_at_once_and_all_hear_of_it() -> None:
    coordinator = formed(2, servers=1)
    coordinator.handle(50, joining("visitor", 77))
    assert reserve(coordinator, 50, 1) == 2
    out = coordinator.handle(5, joining("worker", 2))
    answer = reply(out, 5)
    assert (answer.error, answer.generation) == ("", 2)
    assert [(m.role, m.rank) for m in answer.members] == [
        ("worker", 0),
        ("worker", 1),
        ("worker", 2),
        ("server", 0),
    ]
    assert {(to, "joined", "worker 2") for to in (0, 1, 100)} <= heard(out)
    assert coordinator.joined == {2: "alive"}


def test_no_rank_is_reserved_twice() -> None:
    coordinator = formed(3)
    chance = random.Random(0)
    given: list[int] = []
    for connection in range(50, 80):
        coordinator.handle(connection, joining("visitor", 7))
        count = chance.randint(1, 5)
        first = reserve(coordinator, connection, count)
        given += range(first, first + count)
    assert given == list(range(3, 3 + len(given)))


def test_a_rank_beyond_the_size_that_was_not_reserved_is_refused() -> None:
    coordinator = formed(2)
    assert "ranks 0 to 1" in reply(coordinator.handle(5, joining("worker", 2)), 5).error


def test_the_place_of_one_that_joined_and_died_is_not_filled_again() -> None:
    coordinator = formed(1)
    assert reserve(coordinator, 0, 1) == 1
    coordinator.handle(5, joining("worker", 1))
    coordinator.disconnected(5, 0.0)
    assert (0, "died", "worker 1") in heard(coordinator.tick(9.0))
    assert coordinator.joined == {1: "died"}
    assert "takes a new number" in reply(coordinator.handle(6, joining("worker", 1)), 6).error
    assert reserve(coordinator, 0, 1) == 2


def test_a_reservation_waits_until_the_run_has_formed() -> None:
    coordinator = Coordinator(1)
    coordinator.handle(50, joining("visitor", 7))
    assert coordinator.handle(50, Reserve(id=9, count=2)) == []
    out = coordinator.handle(0, joining("worker", 0))
    assert (reply(out, 50).id, reply(out, 50).value) == (9, b"1")


def test_a_reservation_in_a_run_that_cannot_form_or_is_over_is_refused() -> None:
    coordinator = Coordinator(2)
    coordinator.handle(50, joining("visitor", 7))
    coordinator.handle(50, Reserve(id=9, count=1))
    assert "rank 1" in reply(coordinator.died("worker", 1, "exit code 1"), 50).error
    over = formed(1, servers=1)
    over.handle(50, joining("visitor", 7))
    over.handle(0, Leave(id=1))
    assert "no worker is left" in reply(over.handle(50, Reserve(id=1, count=1)), 50).error
    stopping = formed(1)
    stopping.handle(0, Stop(reason="enough"))
    assert "is stopping: enough" in reply(stopping.handle(0, Reserve(id=1, count=1)), 0).error


@pytest.mark.parametrize("count", [0, -1, MAX_JOINERS + 1])
def test_a_senseless_reservation_is_refused(count: int) -> None:
    assert "may join at once" in reply(formed(1).handle(0, Reserve(id=1, count=count)), 0).error


def test_the_line_gives_the_first_of_the_ranks_that_it_reserved() -> None:
    hub = InProcessCoordinator(1)
    connection = hub.connect()
    connection.join(Member("worker", 0, "here", 1))
    visitor = hub.connect()
    visitor.join(Member("visitor", 5, "here", 5))
    assert (visitor.reserve(2), visitor.reserve(1)) == (1, 3)
    assert [str(member) for member in visitor.members()] == ["rank 0 (host here, pid 1)"]
    with pytest.raises(HoraError, match="may look and change nothing"):
        visitor.put("k", b"v")


# -- visitors ----------------------------------------------------------------------------------------------------------


def test_a_visitor_is_answered_at_once_and_counted_nowhere() -> None:
    coordinator = Coordinator(2)
    coordinator.handle(0, joining("worker", 0))
    out = coordinator.handle(50, joining("visitor", 0))
    assert [to for to, _ in out] == [50]
    assert [m.rank for m in reply(out, 50).members] == [0]
    assert [m.role for m in coordinator.alive] == ["worker"]
    coordinator.handle(1, joining("worker", 1))
    assert coordinator.generation == 1


def test_nobody_hears_of_a_visitor_and_it_hears_of_nothing() -> None:
    coordinator = formed(2)
    assert heard(coordinator.handle(50, joining("visitor", 9))) == set()
    assert coordinator.handle(51, joining("visitor", 9)), "two may have the same number"
    out = coordinator.handle(1, Leave(id=1)) + coordinator.handle(0, Stop(reason="x"))
    assert {to for to, _, _ in heard(out)} <= {0, 1}
    coordinator.disconnected(50, 0.0)
    assert coordinator.tick(9.0) == [] and coordinator.generation == 2
    coordinator.handle(51, Leave(id=1))
    assert reply(coordinator.handle(51, ListMembers(id=1)), 51).error == "join first"


@pytest.mark.parametrize(
    "request_",
    [
        Put(id=1, key="k", value=b""),
        Send(id=1, topic="k"),
        Stop(id=1, reason="x"),
        Fail(id=1, reason="x"),
    ],
)
def test_a_visitor_changes_nothing(request_: AnyRequest) -> None:
    coordinator = formed(2)
    coordinator.handle(50, joining("visitor", 0))
    out = coordinator.handle(50, request_)
    assert [to for to, _ in out] == [50] and "may look" in reply(out, 50).error
    assert coordinator.stop_reason is None and coordinator.values("") == {} and len(coordinator.alive) == 2


def test_a_visitor_may_read_what_members_have_put() -> None:
    coordinator = formed(1)
    coordinator.handle(50, joining("visitor", 0))
    assert coordinator.handle(50, Get(id=4, key="k")) == []
    out = coordinator.handle(0, Put(id=1, key="k", value=b"v"))
    assert reply(out, 50).value == b"v"
    assert [(m.role, m.rank) for m in reply(coordinator.handle(50, ListMembers(id=5)), 50).members] == [("worker", 0)]
    assert "joined already" in reply(coordinator.handle(50, joining("worker", 0)), 50).error


# -- the predictor -----------------------------------------------------------------------------------------------------


def test_a_predictor_is_answered_when_the_run_has_formed_and_is_not_waited_for() -> None:
    coordinator = Coordinator(2)
    assert coordinator.handle(70, joining("predictor", 0)) == []
    coordinator.handle(0, joining("worker", 0))
    out = coordinator.handle(1, joining("worker", 1))
    assert coordinator.generation == 1 and reply(out, 70).error == ""
    late = formed(2)
    out = late.handle(70, joining("predictor", 0))
    assert [to for to, _ in out] == [70] and late.generation == 1, "nobody hears of it, and nothing counts it"


def test_a_predictor_hears_of_workers_and_nobody_hears_of_its_end() -> None:
    coordinator = formed(2)
    coordinator.handle(70, joining("predictor", 0))
    assert heard(coordinator.died("predictor", 0, "killed by SIGKILL")) == set()
    assert coordinator.generation == 1
    coordinator.handle(71, joining("predictor", 0))
    assert (71, "left", "worker 1") in heard(coordinator.handle(1, Leave(id=1)))
    assert coordinator.handle(71, Leave(id=3)) == [(71, CoordinatorReply(id=3))]


def test_a_predictor_that_dies_before_the_run_has_formed_holds_nobody_up() -> None:
    coordinator = Coordinator(2)
    coordinator.handle(0, joining("worker", 0))
    assert coordinator.died("predictor", 0, "exit code 1") == []
    coordinator.handle(1, joining("worker", 1))
    assert coordinator.generation == 1
