"""EarlyExit, one worker's side, with the other workers played by the test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from hora.coordinator import CoordinatorEvent, Member
from hora.strategies.common.hooks import TrainingHooks
from hora.training.early_exit import TOPIC, EarlyExit
from hora.training.join import LOOP, TRAINING, LeaveNotice, Place


class Control:
    def __init__(self) -> None:
        self.sent: list[LeaveNotice] = []
        self.stops: list[str] = []

    def send(self, topic: str, body: bytes) -> None:
        assert topic == TOPIC
        self.sent.append(msgspec.msgpack.decode(body, type=LeaveNotice))

    def stop(self, reason: str) -> None:
        self.stops.append(reason)


def worker(rank: int, num_exchanges: int) -> tuple[EarlyExit, Control, TrainingHooks]:
    """One of three workers, which has gone through so many exchanges, with their steps, in loop 2."""
    transport: Any = SimpleNamespace(cause=None, gone={}, spec=SimpleNamespace(timeout_s=5.0))
    group: Any = SimpleNamespace(rank=rank, others=[r for r in range(3) if r != rank], transport=transport)
    hooks = TrainingHooks()
    hooks.num_exchanges = hooks.step = num_exchanges
    hooks.loop = 2
    control = Control()
    exits = EarlyExit(group, control, hooks, SimpleNamespace(together=True, abort=None))  # type: ignore[arg-type]
    exits.state.enter(2)
    with exits.opening():
        pass
    return exits, control, hooks


def notice(rank: int, place: Place, num_exchanges: int) -> CoordinatorEvent:
    body = msgspec.msgpack.encode(LeaveNotice(place, num_exchanges, num_exchanges))
    return CoordinatorEvent(kind="message", generation=0, member=Member("worker", rank, "h", 1), topic=TOPIC, body=body)


def test_a_worker_that_left_does_not_cancel_an_exchange_that_took_place() -> None:
    """Rank 1 has left after exchange 6; rank 0, in exchange 7, halts. Rank 2 may still be in exchange 6."""
    exits, control, hooks = worker(rank=1, num_exchanges=6)
    assert not exits.leave(2, finished=False, alone=False)
    exits.hear(notice(0, (TRAINING, 0), 6))
    assert not exits.await_others(2)
    exits.announce_halt()
    assert hooks.halted
    assert [each.num_exchanges for each in control.sent if each.place in ((LOOP, 2), (TRAINING, 0))] == [6]
