"""What members run on is compared when they join; a host that stopped answering is said to have."""

from __future__ import annotations

import errno
import socket

import pytest

from hora.coordinator import Coordinator, CoordinatorEvent, Member
from hora.coordinator.messages import CoordinatorReply, Join
from hora.coordinator.state import DISCONNECT_GRACE_S, Out
from hora.net import keepalive


def joining(rank: int, versions: str, role: str = "worker") -> Join:
    return Join(id=1, member=Member(role, rank, "ab"[rank % 2], 7 + rank), versions=versions)


def errors(out: Out) -> dict[int, str]:
    return {to: said.error for to, said in out if isinstance(said, CoordinatorReply) and said.error}


def test_alike_members_form_a_run_and_one_that_says_nothing_is_not_asked() -> None:
    coordinator = Coordinator(3)
    for rank, versions in enumerate(("torch 2.13.0, python 3.11", "", "python 3.11, torch 2.13.0")):
        assert not errors(coordinator.handle(rank, joining(rank, versions)))
    assert coordinator.generation == 1


def test_another_version_is_named_to_all_who_wait_and_to_all_who_come() -> None:
    coordinator = Coordinator(3)
    coordinator.handle(0, joining(0, "hora 1, python 3.11, torch 2.13.0"))
    found = errors(coordinator.handle(1, joining(1, "hora 1, python 3.12, torch 2.12.0")))
    words = (
        "rank 1 (host b, pid 8) has python 3.12, torch 2.12.0, rank 0 (host a, pid 7) python 3.11, torch 2.13.0: "
        "install the same on every host"
    )
    assert found[1] == words
    assert found[0].endswith(words)
    late = errors(coordinator.handle(2, joining(2, "hora 1, python 3.11, torch 2.13.0")))
    assert words in late[2]
    assert coordinator.generation == 0


def test_another_version_that_joins_later_is_refused_alone() -> None:
    coordinator = Coordinator(1)
    coordinator.handle(0, joining(0, "torch 2.13.0"))
    out = coordinator.handle(1, joining(0, "torch 2.12.0", "predictor"))
    assert list(errors(out)) == [1] and coordinator.generation == 1


def test_a_connection_that_ended_in_silence_is_reported_as_that() -> None:
    coordinator = Coordinator(2)
    for rank in range(2):
        coordinator.handle(rank, joining(rank, ""))
    why = keepalive.silence(OSError(errno.ETIMEDOUT, "Connection timed out"))
    coordinator.disconnected(1, 1.0, why)
    (died,) = [said for _, said in coordinator.tick(1.1 + DISCONNECT_GRACE_S) if isinstance(said, CoordinatorEvent)]
    assert died.text == "its connection broke: no answer for 4 s: is the host down or the link cut?"


@pytest.mark.parametrize("problem", [OSError(errno.ECONNRESET, "reset"), ValueError("nonsense")])
def test_other_ends_are_not_silence(problem: Exception) -> None:
    assert keepalive.silence(problem) == ""


def test_on_loopback_nothing_is_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as sock:
        keepalive.attach(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
