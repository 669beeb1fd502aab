"""What a worker reports of its training: the right numbers, and never at the cost of a wait."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hora
from hora.errors import HoraError
from hora.monitor import messages
from hora.monitor.messages import MAX_NAMES, MAX_ROWS, WorkerReport
from hora.monitor.values import check_values
from hora.strategies.common.sync import CommStats, SyncReport
from hora.training.recorder import Recorder


class Sync:
    rounds = None
    local_steps = 0

    def __init__(self) -> None:
        self.traffic = CommStats()
        self.sent = {1: 0}

    def describe(self) -> SyncReport:
        return SyncReport(figures={"lag": 1.5}, sent_to=dict(self.sent))


def training(**given: Any) -> Any:
    progress = SimpleNamespace(epoch=2, num_epochs=5, progress=lambda step, max_steps: 0.5)
    about = {"sync": Sync(), "step": 0, "max_steps": None, "own_samples": 0, "progress": progress}
    return SimpleNamespace(**{**about, **given})


def ended(recorder: Recorder, sent: list[bytes]) -> list[WorkerReport]:
    recorder.close()
    works = [messages.decode(body) for body in sent]
    assert all(isinstance(work, WorkerReport) for work in works)
    return works  # type: ignore[return-value]


def test_steps_are_cut_into_computing_and_what_communication_showed() -> None:
    sent: list[bytes] = []
    stand = training()
    recorder = Recorder(stand, sent.append)
    recorder.begin()
    for step in range(1, 4):
        time.sleep(0.02)
        stand.step = step
        stand.own_samples += 8
        stand.sync.traffic.exposed_s += 0.015
        stand.sync.traffic.comm_s += 0.5
        stand.sync.traffic.sent_bytes += 100
        stand.sync.sent[1] += 40
        recorder.stepped()
    works = ended(recorder, sent)
    total = lambda name: sum(getattr(work, name) for work in works)  # noqa: E731
    assert total("steps") == 3 and total("samples") == 24 and total("sent_bytes") == 300
    assert total("exposed_s") == pytest.approx(0.045) and total("comm_s") == pytest.approx(1.5)
    assert sum(work.peers.get(1, 0) for work in works) == 120
    assert total("seconds") >= 0.06 and total("seconds") - 0.045 == pytest.approx(sum(sum(w.computes) for w in works))
    last = works[-1]
    assert (last.step, last.epoch, last.epochs, last.progress, last.notes) == (3, 2, 5, 0.5, {"lag": 1.5})


def test_a_pause_between_loops_is_no_step_and_a_reset_counter_counts_on() -> None:
    sent: list[bytes] = []
    stand = training()
    recorder = Recorder(stand, sent.append)
    recorder.begin()
    stand.sync.traffic.exposed_s = 5.0
    recorder.stepped()
    time.sleep(0.05)  # an evaluation
    recorder.begin()
    stand.sync.traffic.reset()
    recorder.stepped()
    works = ended(recorder, sent)
    assert sum(work.steps for work in works) == 2
    assert all(0 <= work.exposed_s <= work.seconds < 0.05 for work in works)


def test_what_is_logged_too_often_is_merged_into_means() -> None:
    sent: list[bytes] = []
    stand = training()
    recorder = Recorder(stand, sent.append)
    for step in range(1000):
        stand.step = step
        recorder.log(*check_values({"loss": float(step), **({"rare": 7.0} if step == 500 else {})}))
    works = ended(recorder, sent)
    rows = [row for work in works for row in work.rows]
    assert all(len(work.rows) <= MAX_ROWS for work in works)
    assert sum(row.count for row in rows) == 1000 and rows[-1].step == 999
    assert sum(row.count * row.values["loss"] for row in rows) / 1000 == pytest.approx(499.5)
    assert [row.values["rare"] for row in rows if "rare" in row.values] == [7.0]


def test_names_are_limited() -> None:
    sent: list[bytes] = []
    recorder = Recorder(training(), sent.append)
    for number in range(200):
        recorder.log(*check_values({f"value{number}": 1.0}))
    names = {name for work in ended(recorder, sent) for row in work.rows for name in row.values}
    assert len(names) == MAX_NAMES


def test_a_histogram_is_counted_once_a_second_and_notices_go_along() -> None:
    sent: list[bytes] = []
    stand = training(step=9)
    recorder = Recorder(stand, sent.append)
    for _ in range(50):
        recorder.log(*check_values({"weights": hora.Histogram(torch.arange(10.0))}))
    recorder.notice("checkpoint", "x" * 5000)
    works = ended(recorder, sent)
    (histogram,) = [each for work in works for each in work.histograms]
    assert (histogram.name, histogram.step, histogram.low, histogram.high) == ("weights", 9, 0.0, 9.0)
    assert sum(histogram.counts) == 10
    (notice,) = [each for work in works for each in work.notices]
    assert (notice.kind, notice.step, len(notice.text)) == ("checkpoint", 9, 500)


def test_a_line_that_hangs_or_breaks_is_nobodys_wait() -> None:
    release = threading.Event()
    recorder = Recorder(training(), lambda body: release.wait(10) and None)
    started = time.monotonic()
    for _ in range(30_000):
        recorder.log(*check_values({"loss": 1.0}))
        recorder.stepped()
    assert len(recorder._rows) <= 10_000
    release.set()
    recorder.close()
    assert time.monotonic() - started < 10

    def broken(body: bytes) -> None:
        raise HoraError("the line to the coordinator is broken")

    recorder = Recorder(training(), broken)
    recorder.stepped()
    recorder.log(*check_values({"loss": 1.0}))
    recorder.close()
    assert not recorder._thread.is_alive()
