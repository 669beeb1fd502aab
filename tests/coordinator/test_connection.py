"""A long wait on the connection to the coordinator is logged and named."""

from __future__ import annotations

import threading
import time

import pytest

from hora.coordinator import InProcessCoordinator, Member
from hora.errors import HoraError, Timeout


def test_a_join_that_takes_long_names_the_ranks_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hora.coordinator.connection.SLOW_S", 0.2)
    hub = InProcessCoordinator(4)
    early = [hub.connect(), hub.connect()]
    errors: list[BaseException] = []

    def join(index: int, rank: int) -> None:
        try:
            early[index].join(Member("worker", rank, "here", 10 + rank), timeout_s=1.0, size=4)
        except HoraError as error:
            errors.append(error)

    threads = [threading.Thread(target=join, args=(i, rank)) for i, rank in enumerate((0, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 2 and all(isinstance(error, Timeout) for error in errors)
    assert any("rank 2 (host here, pid 12) has waited 1 s for ranks 1, 3 to join" in str(error) for error in errors)
    assert any("for ranks 1, 3 to join" in record.getMessage() for record in caplog.records)


def test_a_value_that_nobody_puts_is_named_when_the_wait_ends() -> None:
    connection = InProcessCoordinator(1).connect()
    connection.join(Member("worker", 0, "here", 1))
    with pytest.raises(Timeout, match="key 'the moon' to be put"):
        connection.get("the moon", timeout_s=0.2)


def test_a_value_put_later_ends_the_wait() -> None:
    hub = InProcessCoordinator(2)
    lines = [hub.connect(), hub.connect()]
    threading.Thread(target=lambda: lines[1].join(Member("worker", 1, "here", 2)), daemon=True).start()
    lines[0].join(Member("worker", 0, "here", 1))
    threading.Timer(0.1, lambda: lines[1].put("late", b"yes")).start()
    begin = time.monotonic()
    assert lines[0].get("late") == b"yes"
    assert time.monotonic() - begin < 5
