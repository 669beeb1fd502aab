"""Parameter servers report of themselves, if somebody watches: often while they work, seldom else."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

import pytest
import torch

import ranks
import trainings
from hora.coordinator import CoordinatorConnection
from hora.errors import HoraError
from hora.monitor.messages import EVERY_S, ServerReport, decode
from hora.server import stats
from hora.server.block_memory import BlockMemory
from hora.server.layout import cut
from hora.server.messages import BeginStep, EnterLoop, Push, SynchronizedAck
from hora.server.state import Rules, ServerState
from hora.server.stats import StatsReporter
from hora.server.store import ParameterStore, ServerCounts

NUM_CHUNKS = 2


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(stats, "time", types.SimpleNamespace(monotonic=lambda: self.now))


def test_a_report_tells_what_was_done_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Clock(monkeypatch), []
    counts = ServerCounts()
    server: Any = types.SimpleNamespace(counts=counts, queue=0)
    reporter = StatsReporter(3, 4096, lambda body: sent.append(decode(body)))
    counts.updates, counts.bytes_in, counts.bytes_out, server.queue = 5, 500, 700, 2
    counts.lags[0] = 4
    reporter.report(server, 0.1)
    assert sent == [], "it is not yet time"
    clock.now += EVERY_S
    reporter.report(server, 0.1)
    counts.updates, counts.bytes_in, counts.bytes_out, server.queue = 8, 600, 710, 0
    counts.lags[2] = 1
    clock.now += EVERY_S
    reporter.report(server, 0.15)
    common = {"server": 3, "seconds": EVERY_S, "load_bytes": 4096}
    assert sent == [
        ServerReport(
            sent_at=100.25, updates=5, busy_s=0.1, bytes_in=500, bytes_out=700, queue=2, lags={0: 4}, **common
        ),
        ServerReport(sent_at=100.5, updates=3, busy_s=pytest.approx(0.05), bytes_in=100, bytes_out=10, queue=0,
                lags={0: 4, 2: 1}, **common),
    ]  # fmt: skip


def test_one_that_has_nothing_to_do_says_so_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Clock(monkeypatch), []
    server: Any = types.SimpleNamespace(counts=ServerCounts(), queue=0)
    reporter = StatsReporter(0, 1, lambda body: sent.append(decode(body)))
    for _ in range(13):  # 6.5 s
        clock.now += 0.5
        reporter.report(server, 0.0)
    assert [report.sent_at for report in sent] == [102.0, 104.0, 106.0]
    reporter.report(server, 0.0, last=True)
    assert sent[-1].seconds == 0.5


def test_a_broken_line_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    server: Any = types.SimpleNamespace(counts=ServerCounts(), queue=0)

    def send(body: bytes) -> None:
        raise HoraError("the line is broken")

    clock.now += 9.0
    StatsReporter(0, 1, send).report(server, 0.0)
    StatsReporter(0, 1, send).report(server, 0.0, last=True)


def made(rules: Rules, workers: int) -> ServerState:
    """One server that has two chunks of a parameter each."""
    parameters = [torch.nn.Parameter(torch.zeros(64)) for _ in range(NUM_CHUNKS)]
    optimizers = [torch.optim.SGD(parameters, lr=1.0)]
    layout = cut(parameters, optimizers, 1, 256)
    assert len(layout.parts[0].chunks) == NUM_CHUNKS
    part = layout.parts[0]
    server = ServerState(
        ParameterStore(part, BlockMemory(len(part.blocks), part.num_bytes), parameters, optimizers), rules
    )
    for worker in range(workers):
        server.join(worker)
        server.handle(worker, EnterLoop())
    return server


def push(server: ServerState, worker: int, step: int, chunks: int = NUM_CHUNKS) -> int:
    """A worker's gradients of one step, or some of them; the queue after that."""
    server.handle(worker, BeginStep(step, 0, NUM_CHUNKS, present=len(server.workers)))
    for chunk in range(chunks):
        versions = server.store.versions(server.store.part.chunks[chunk])
        server.handle(worker, Push(step, chunk, versions), [torch.ones(64)])
    return server.queue


def test_in_sync_gradients_queue_for_those_of_the_others() -> None:
    server = made(Rules(mode="sync"), 3)
    assert [push(server, 0, 0), push(server, 1, 0), push(server, 2, 0)] == [2, 4, 0]
    assert push(server, 1, 1, chunks=1) == 1
    server.leave(1)
    assert server.queue == 0


def test_with_backups_nobody_queues_for_the_slowest() -> None:
    server = made(Rules(mode="sync", backup=1), 3)
    assert [push(server, 0, 0), push(server, 1, 0)] == [2, 0]
    assert push(server, 2, 0) == 0, "it came late, and is dropped"


def test_in_async_nothing_queues() -> None:
    server = made(Rules(mode="async"), 2)
    assert [push(server, 0, step) for step in range(3)] == [0, 0, 0]
    assert server.counts.updates == 3


def test_in_ssp_what_queues_are_the_answers_to_who_is_ahead() -> None:
    server = made(Rules(mode="ssp", staleness=1), 2)
    assert [push(server, 0, 0), push(server, 0, 1)] == [0, 2]
    assert server.counts.updates == 2, "they were applied all the same"
    assert push(server, 1, 0) == 0


def test_before_a_full_synchronisation_what_comes_meanwhile_queues() -> None:
    server = made(Rules(mode="async", sync_every=1), 2)
    push(server, 0, 0)
    assert server.queue == 2
    push(server, 1, 0)
    assert server.queue == 0
    server.handle(0, SynchronizedAck(1))
    assert push(server, 0, 1) == 2, "worker 1 has still to read"


def test_servers_in_the_workers_processes_report_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    everything, lock = threading.Event(), threading.Lock()

    def report(self: CoordinatorConnection, body: bytes) -> None:
        with lock:
            sent.append(decode(body))
            if all(sum(each.updates for each in sent if each.server == server) >= 10 for server in (0, 1)):
                everything.set()

    monkeypatch.setattr(CoordinatorConnection, "report", report)

    def work(group: Any) -> None:
        one = trainings.training(group, "ps/2")
        assert one.context is not None
        one.context = dataclasses.replace(one.context, watched=True)
        trainings.fit(one, steps=10)
        assert everything.wait(20)

    ranks.run(2, work)
    for server in (0, 1):
        mine = [each for each in sent if each.server == server]
        assert sum(each.updates for each in mine) == 10
        assert sum(each.bytes_in for each in mine) > 0 and sum(each.bytes_out for each in mine) > 0
        assert mine[-1].load_bytes > 0 and mine[-1].lags[0] > 0
        assert all(0 <= each.busy_s <= each.seconds + 0.1 for each in mine)


def test_without_a_watcher_no_server_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(self: CoordinatorConnection, body: bytes) -> None:
        raise AssertionError

    monkeypatch.setattr(CoordinatorConnection, "report", report)
    ranks.run(2, lambda group: trainings.fit(trainings.training(group, "ps/1"), steps=3))
