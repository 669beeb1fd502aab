"""Recorder: a worker's reports of its own training (steps, logged values, histograms) to the launcher.

The training thread only appends to queues. A thread of the recorder's own reads values off their devices, puts the
report together and sends it, so that neither a slow device nor a slow coordinator is ever waited for.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import HoraError
from ..monitor import messages
from ..monitor.messages import EVERY_S, MAX_COMPUTES, MAX_NAMES, MAX_ROWS, MetricsRow, Notice, WorkerReport
from ..monitor.values import Histogram, Scalar, read_values

if TYPE_CHECKING:
    from .training import Training

log = logging.getLogger(__name__)

MAX_WAITING = 10_000  # rows and steps that are kept for a report; older ones are forgotten
HISTOGRAM_S = 1.0  # between two histograms of one name
CLOSE_S = 1.0


class _Step(NamedTuple):
    seconds: float
    exposed_s: float


class _Totals(NamedTuple):
    """Of everything so far."""

    comm_s: float = 0.0
    sent_bytes: int = 0
    samples: int = 0


class Recorder:
    """One worker's. `send` puts the bytes of a report on their way and may raise HoraError, which ends the reports."""

    def __init__(self, training: Training, send: Callable[[bytes], None]) -> None:
        self._training = training
        self._send = send
        self._steps: collections.deque[_Step] = collections.deque(maxlen=MAX_WAITING)
        self._rows: collections.deque[tuple[int, float, dict[str, Scalar]]] = collections.deque(maxlen=MAX_WAITING)
        self._histograms: collections.deque[tuple[str, int, float, torch.Tensor]] = collections.deque(maxlen=MAX_NAMES)
        self._counted_at: dict[str, float] = {}
        self._notices: collections.deque[Notice] = collections.deque(maxlen=100)
        self._names: set[str] = set()
        self._stepped_at: float | None = None
        self._exposed_s = 0.0
        self._reported = _Totals()
        self._peers: dict[int, int] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hora-recorder", daemon=True)
        self._thread.start()

    # -- the training thread -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A loop begins: what came between it and the last step was no step."""
        self._stepped_at = time.perf_counter()
        self._exposed_s = self._exposed()

    def stepped(self) -> None:
        """The first optimizer has taken a step."""
        now, exposed = time.perf_counter(), self._exposed()
        if self._stepped_at is not None:
            seconds = now - self._stepped_at
            since = exposed - self._exposed_s
            self._steps.append(_Step(seconds, min(seconds, since if since >= 0 else exposed)))  # it may be reset
        self._stepped_at, self._exposed_s = now, exposed

    def log(self, scalars: dict[str, Scalar], histograms: dict[str, Histogram]) -> None:
        now, step = time.monotonic(), self._training.step
        if len(self._names) < MAX_NAMES:
            self._names.update(list(scalars)[: MAX_NAMES - len(self._names)])
        if kept := {name: value for name, value in scalars.items() if name in self._names}:
            self._rows.append((step, now, kept))
        for name, histogram in histograms.items():
            known = name in self._counted_at or len(self._counted_at) < MAX_NAMES
            if known and now - self._counted_at.get(name, -HISTOGRAM_S) >= HISTOGRAM_S:
                self._counted_at[name] = now
                self._histograms.append((name, step, now, histogram.count()))

    def notice(self, kind: str, text: str) -> None:
        self._notices.append(Notice(self._training.step, time.monotonic(), kind, text[:500]))

    def close(self) -> None:
        """Sends what is left, if the coordinator still takes it."""
        self._ending.set()
        self._thread.join(CLOSE_S)

    def _exposed(self) -> float:
        sync = self._training.sync
        return sync.traffic.exposed_s if sync is not None else 0.0

    # -- the recorder's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ending.wait(EVERY_S):
                if self._steps or self._rows or self._notices or self._histograms:
                    self._report()
            self._report()  # in any case: what the end has changed
        except HoraError:
            pass  # the connection is broken, which is reported elsewhere
        except Exception as problem:
            log.warning("this worker's reports end here: %s: %s", type(problem).__name__, problem)

    def _report(self) -> None:
        if self._training.sync is not None:
            self._send(messages.encode(self._work(self._training.sync)))

    def _work(self, sync: Any) -> WorkerReport:
        training, progress, traffic = self._training, self._training.progress, sync.traffic
        steps = _drained(self._steps)
        now = _Totals(traffic.comm_s, traffic.sent_bytes, training.own_samples)
        before, self._reported = self._reported, now
        report = sync.describe()
        peers = report.sent_to
        since = {rank: max(0, count - self._peers.get(rank, 0)) for rank, count in peers.items()}
        self._peers = peers
        seconds, exposed_s = sum(step.seconds for step in steps), sum(step.exposed_s for step in steps)
        return WorkerReport(
            sent_at=time.monotonic(),
            step=training.step,
            steps=len(steps),
            seconds=seconds,
            exposed_s=exposed_s,
            comm_s=_since(now.comm_s, before.comm_s),
            sent_bytes=_since(now.sent_bytes, before.sent_bytes),
            samples=_since(now.samples, before.samples),
            computes=[step.seconds - step.exposed_s for step in steps[-MAX_COMPUTES:]],
            epoch=progress.epoch,
            epochs=progress.num_epochs or None,
            progress=progress.progress(training.step, training.max_steps),
            rounds=sync.rounds,
            local_steps=sync.local_steps,
            peers=since,
            notes=report.figures,
            rows=_merged(self._take_rows()),
            histograms=[_histogram(*each) for each in _drained(self._histograms)],
            notices=_drained(self._notices),
        )

    def _take_rows(self) -> list[MetricsRow]:
        taken = _drained(self._rows)
        values = read_values([row for _, _, row in taken])
        return [MetricsRow(step, at, 1, row) for (step, at, _), row in zip(taken, values, strict=True)]


def _drained(waiting: collections.deque[Any]) -> list[Any]:
    found = []
    with contextlib.suppress(IndexError):
        while True:
            found.append(waiting.popleft())
    return found


def _since(now: Any, before: Any) -> Any:
    """Growth; a counter that was reset counts from there."""
    return now - before if now >= before else now


def _merged(rows: Sequence[MetricsRow]) -> list[MetricsRow]:
    """At most MAX_ROWS: neighbours become their mean."""
    while len(rows) > MAX_ROWS:
        pairs = [rows[at : at + 2] for at in range(0, len(rows), 2)]
        rows = [_mean(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return list(rows)


def _mean(one: MetricsRow, other: MetricsRow) -> MetricsRow:
    both = {**one.values, **other.values}
    for name in one.values.keys() & other.values.keys():
        both[name] = (one.values[name] * one.count + other.values[name] * other.count) / (one.count + other.count)
    return MetricsRow(other.step, other.at, one.count + other.count, both)


def _histogram(name: str, step: int, at: float, counted: torch.Tensor) -> messages.HistogramReport:
    low, high, *counts = counted.tolist()
    return messages.HistogramReport(name, step, at, low, high, [int(count) for count in counts])
