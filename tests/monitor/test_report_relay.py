"""Reports and events on their way from a member through the coordinator to whoever watches."""

from __future__ import annotations

import logging
import threading

from hora.coordinator import CoordinatorEvent, InProcessCoordinator, Member
from hora.coordinator.messages import MAX_REPORT_BYTES


class Witness:
    def __init__(self) -> None:
        self.heard: list[tuple[Member, bytes]] = []
        self.seen: list[CoordinatorEvent] = []

    def on_report(self, member: Member, body: bytes) -> None:
        self.heard.append((member, body))

    def on_event(self, event: CoordinatorEvent) -> None:
        self.seen.append(event)


def member(rank: int, role: str = "worker") -> Member:
    return Member(role, rank, "a", 10 + rank)


def test_a_report_comes_with_its_sender_and_the_ends_of_members_are_seen() -> None:
    hub, witness = InProcessCoordinator(1, servers=1), Witness()
    hub.coordinator.observer = witness
    first, server = hub.connect(), hub.connect()
    thread = threading.Thread(target=lambda: server.join(member(0, "server")))
    thread.start()
    first.join(member(0))
    thread.join()
    first.report(b"one")
    server.report(b"two")
    first.report(b"x" * (MAX_REPORT_BYTES + 1))
    assert witness.heard == [(member(0), b"one"), (member(0, "server"), b"two")], "the last was too long"
    first.stop("enough")
    first.leave()
    hub.died(0, "killed by SIGKILL", role="server")
    assert [(event.kind, event.text) for event in witness.seen] == [
        ("stop", "enough"),
        ("left", "its script ended"),
        ("died", "killed by SIGKILL"),
    ]


def test_nobody_watches_and_nothing_breaks() -> None:
    hub = InProcessCoordinator(1)
    line = hub.connect()
    line.join(member(0))
    line.report(b"one")
    line.leave()


def test_a_stranger_and_a_visitor_cannot_report() -> None:
    hub, witness = InProcessCoordinator(1), Witness()
    hub.coordinator.observer = witness
    hub.connect().report(b"from one who has not joined")
    visitor = hub.connect()
    visitor.join(Member("visitor", 7, "a", 7))
    visitor.report(b"from one who only looks")
    assert witness.heard == []


def test_records_of_logging_say_whose_they_are() -> None:
    from hora.job.startup import _label_records
    from hora.rendezvous.context import ProcessIdentity

    before = logging.getLogRecordFactory()
    try:
        _label_records(ProcessIdentity(role="worker", rank=1, size=4))
        _label_records(ProcessIdentity(role="server", rank=3))
        record = logging.getLogger("mine").makeRecord("mine", logging.INFO, "f", 1, "hello", (), None)
        text = logging.Formatter("%(hora_role)s %(hora_rank)s: %(message)s").format(record)
        assert text == "server 3: hello"
        first = getattr(before, "unlabelled", before)
        assert getattr(logging.getLogRecordFactory(), "unlabelled") is first, "they do not pile up"  # noqa: B009
    finally:
        logging.setLogRecordFactory(before)
