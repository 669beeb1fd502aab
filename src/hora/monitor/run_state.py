"""RunState: the status of a run, its curves and its events, computed from reports; a pure state machine.

Its memory is bounded, however long the run and however many processes come and go. Times are seconds since the run
began. Where workers step together or in rounds, the least exposed communication per step of any worker counts as
communication, and what another worker has beyond it as waiting for slower ones. Elsewhere all of it is communication.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from ..coordinator.messages import Member
from .curve import LIMIT, MEMBER_LIMIT, Curve
from .event_log import KINDS, MAX_TEXT_CHARS, EventLog
from .members import Members, WorkerStats
from .messages import MAX_RANKS, MetricsRow, Report, ServerReport, WorkerReport, storable
from .metrics_log import MetricsLog
from .progress import Forecast, RestoreTracker, restart_index
from .status import RunStatus
from .stragglers import Stragglers

MAX_BREAKDOWNS = 64  # workers whose compute, waiting and communication are kept as curves
_MEMBER = re.compile(r"(rank|server) (\d{1,7})\b")
_PARTS = ("compute", "wait", "comm")
_Number = TypeVar("_Number", int, float)


class RunState:
    """For one thread. `metrics` holds the logged rows and histograms, `event_log` the events. `lost_reports` counts
    invalid reports; a caller that drops a report adds to it."""

    def __init__(self, *, run: str = "", size: int = 0, strategy: str = "", synchronous: bool = True) -> None:
        self.curves: dict[str, Curve] = {}
        self.lost_reports = 0
        self.updated_at = 0.0
        self._known: dict[str, str] = {"run": storable(run, MAX_TEXT_CHARS)}  # fields of RunStatus, see update()
        self._size = size
        self._synchronous = synchronous
        self._state = "starting"
        self._step = self._samples = 0
        self._members = Members(on_drop=self._forget)
        self.metrics = MetricsLog(self.curves)
        self._stragglers = Stragglers()
        self._forecast = Forecast()
        self.event_log = EventLog()
        self._restores = RestoreTracker()
        self._breakdowns: set[int] = set()
        self._trained_from: float | None = None  # time of the first step
        self._trained_until = 0.0
        self._first_step = 0  # the step before it: a run may continue from a checkpoint
        self.update(strategy=strategy)

    # -- input -------------------------------------------------------------------------------------------------------

    def update(
        self,
        *,
        strategy: str | None = None,
        synchronous: bool | None = None,
        topology: str | None = None,
        unit: str | None = None,
        algorithm: str | None = None,
        serving: str | None = None,
        waiting: str | None = None,
    ) -> None:
        """What becomes known while the run goes on. None changes nothing; `serving` and `waiting` may become empty."""
        if synchronous is not None:
            self._synchronous = synchronous
        named = {"strategy": strategy, "topology": topology, "unit": unit, "algorithm": algorithm}
        known = {name: text for name, text in named.items() if text}
        known |= {name: text for name, text in (("serving", serving), ("waiting", waiting)) if text is not None}
        self._known |= {name: storable(text, MAX_TEXT_CHARS) for name, text in known.items()}

    def on_report(self, member: Member, report: Report, now: float) -> None:
        """An invalid report counts as lost."""
        self.updated_at = now
        roles = ("worker",) if isinstance(report, WorkerReport) else ("worker", "server")
        if member.role not in roles or not 0 <= member.rank < MAX_RANKS or not report.is_valid():
            self.lost_reports += 1
        elif isinstance(report, WorkerReport):
            self._on_worker_report(storable(str(member), MAX_TEXT_CHARS), member.rank, report, now)
        else:
            self._on_server_report(storable(str(member), MAX_TEXT_CHARS), report, now)

    def on_event(self, kind: str, who: str, text: str, now: float, step: int | None = None) -> None:
        """An event; one whose kind is not in KINDS is ignored. If `who` is a member as str(member) has it, "rank 3
        (host a, pid 7)" or "server 0 (…)", its state follows from `joined`, `left` and `died`. `end` ends the run."""
        if kind not in KINDS:
            return
        self.updated_at = now
        who = storable(who, MAX_TEXT_CHARS)
        member = _MEMBER.match(who)
        if member is not None and kind in ("joined", "left", "died"):
            self._members.on_change("server" if member[1] == "server" else "worker", int(member[2]), who, kind)
            if member[1] == "rank":
                self._stragglers.forget(int(member[2]))
        if kind == "end":
            self._state = "ended"
            for rank in self._members.live_ranks:
                self._stragglers.forget(rank)
            self._members.end()
        self.event_log.add(kind, who, text, now, self._step if step is None else step)

    def tick(self, now: float) -> None:
        """Extend the curves of the speed and of the workers; to be called a few times a second."""
        self.updated_at = now
        live = self._members.live()
        least_s = self._members.least_exposed_s()
        for worker in live:
            fresh = worker.take_fresh()
            if fresh is not None and (worker.rank in self._breakdowns or len(self._breakdowns) < MAX_BREAKDOWNS):
                self._breakdowns.add(worker.rank)
                compute_s, exposed_s = fresh
                comm_s = min(exposed_s, least_s) if self._synchronous else exposed_s
                for part, seconds in zip(_PARTS, (compute_s, exposed_s - comm_s, comm_s), strict=True):
                    self._extend_curve(f"rank/{worker.rank}/{part}", now, seconds, MEMBER_LIMIT)
        if live and self._state == "running":
            self._extend_curve("speed", now, sum(worker.rate(now)[0] for worker in live), LIMIT)
        progress = _max(worker.last.progress for worker in self._members.current())
        if progress is not None:
            self._forecast.add(now, progress)

    # -- output ------------------------------------------------------------------------------------------------------

    def status(self, at: float) -> RunStatus:
        """The run at time `at`; the result is independent of later changes."""
        members = self._members
        workers = [members.workers[rank] for rank in sorted(members.workers)]
        current, totals = members.current(), members.totals()
        comm_s = members.least_exposed_s() if self._synchronous else math.inf
        rates = [worker.rate(at) for worker in members.live()]
        servers = [members.servers[number].status(at) for number in sorted(members.servers)]
        lags: collections.Counter[int] = collections.Counter()
        for server in servers:
            lags.update(server.lags)
        known = self._known if self._state == "starting" else {**self._known, "waiting": ""}
        return RunStatus(
            **known,
            synchronous=self._synchronous,
            size=self._size,
            state=self._state,
            seconds=at,
            trained_s=self._trained_until - self._trained_from if self._trained_from is not None else 0.0,
            step=self._step,
            first_step=self._first_step,
            epoch=_max(worker.last.epoch for worker in current),
            epochs=_max(worker.last.epochs for worker in current),
            progress=self._forecast.progress,
            eta_s=self._forecast.eta_s(at) if self._state == "running" else None,
            samples=self._samples,
            samples_per_s=sum(rate for rate, _ in rates),
            steps_per_s=max((rate for _, rate in rates), default=0.0),
            bytes_per_step=totals.bytes_per_step,
            hidden=totals.hidden,
            values=self.metrics.newest(current, workers),
            num_workers=members.num_seen,
            workers=[each.status(at, comm_s=comm_s, slow=self._stragglers.factor(each.rank)) for each in workers],
            servers=servers,
            lags=dict(sorted(lags.items())),
            rounds=_max(worker.last.rounds for worker in workers),
            checkpoints=self.event_log.checkpoints,
            skipped=self.event_log.skipped,
            slowest=members.slowest(),
            lost_reports=self.lost_reports,
        )

    # -- reports -----------------------------------------------------------------------------------------------------

    def _on_worker_report(self, name: str, rank: int, report: WorkerReport, now: float) -> None:
        worker = self._members.worker(rank, name)
        if worker is None:
            self.lost_reports += 1
            return
        self._note_training(worker, report, now)
        report = _shifted(report, worker.offset)
        rows = [row for row in report.rows if row.is_valid()]
        self.lost_reports += len(report.rows) - len(rows)
        restart = restart_index(worker.row_step, rows)
        stale_after = None
        if restart is not None:
            rows = rows[restart:]
            self._rewind(worker, rows[0].step - 1, now)
        elif report.step < worker.step:
            self._rewind(worker, max(0, report.step - report.steps), now)
        else:
            stale_after = self._restores.stale_after(rank, report, now)
        is_first, before = worker.reported_at is None, worker.run_samples
        worker.on_report(report, now)
        worker.run_samples = self._samples = self._samples + report.samples
        if stale_after is None:
            self._log_rows(worker, rows, report, now, is_first, before)
            self._log_rest(worker, report, now)
        else:
            worker.step = stale_after
        self._step = max(self._step, worker.step)
        if worker.alive:
            step = report.step if self._synchronous else None
            for change in self._stragglers.on_report(rank, report.computes, self._members.live_ranks, now, step):
                name = self._members.workers[change.rank].name
                self.on_event("slow" if change.slow else "even", name, change.describe(name), now)

    def _note_training(self, worker: WorkerStats, report: WorkerReport, now: float) -> None:
        """When training began and was last seen; and at which step of the run a new worker starts."""
        if self._state == "starting":
            self._state = "running"
        if report.steps:
            began_at = max(0.0, now - report.seconds)
            if self._trained_from is None:
                self._trained_from, self._first_step = began_at, max(0, report.step - report.steps)
            self._trained_from = min(self._trained_from, began_at)
            self._trained_until = now
        if worker.reported_at is None:
            worker.run_samples = self._samples
            if worker.rank >= self._size > 0 and not self._synchronous:  # it joined later and counts its steps from 0
                worker.offset = max(0, self._step - max(0, report.step - report.steps))

    def _log_rows(
        self, worker: WorkerStats, rows: list[MetricsRow], report: WorkerReport, now: float, is_first: bool, before: int
    ) -> None:
        """The samples of the run at a row are estimated from its step: never more than were reported, nor fewer than at
        the row before. `before` are those of the run at this worker's last report."""
        if not rows:
            return
        members = self._members
        first_step = report.step - report.steps
        if self._synchronous or (is_first and not worker.offset and members.num_seen <= self._size):
            # all workers are taken to be at the row's step; their samples grow with their steps
            live = members.live()
            missing = max(0, self._size - members.num_seen) if is_first else 0  # at work, without a report yet
            slope = sum(other.samples_per_step for other in live) + missing * worker.samples_per_step
            base = self._samples - sum(other.samples_per_step * other.step for other in live)
            base -= missing * worker.samples_per_step * first_step
        else:
            slope = (self._samples - before) / max(1, report.steps)
            base = before - slope * first_step
        for row in rows:
            at = _on_run_clock(row.at, report, now)
            worker.row_samples = min(self._samples, max(worker.row_samples, round(base + slope * row.step)))
            self.metrics.add(worker, row, at, worker.row_samples, members.live_ranks)
            worker.row_step = row.step

    def _log_rest(self, worker: WorkerStats, report: WorkerReport, now: float) -> None:
        histograms = [histogram for histogram in report.histograms if histogram.is_valid()]
        notices = [notice for notice in report.notices if notice.is_valid()]
        self.lost_reports += len(report.histograms) - len(histograms) + len(report.notices) - len(notices)
        for histogram in histograms:
            at = _on_run_clock(histogram.at, report, now)
            self.metrics.add_histogram(worker.rank, histogram, at, self._members.live_ranks)
        for notice in notices:
            alone = notice.kind == "skipped" and not self._synchronous
            at = _on_run_clock(notice.at, report, now)
            self.event_log.add_notice(notice, worker.name, at, worker.rank if alone else None)

    def _on_server_report(self, name: str, report: ServerReport, now: float) -> None:
        server = self._members.server(report.server, name)
        if server is None:
            self.lost_reports += 1
            return
        server.on_report(report, now)
        if report.seconds > 0:
            busy = min(1.0, report.busy_s / report.seconds)
            self._extend_curve(f"server/{report.server}/busy", now, busy, MEMBER_LIMIT)
        self._extend_curve(f"server/{report.server}/queue", now, report.queue, MEMBER_LIMIT)

    def _forget(self, rank: int) -> None:
        self._stragglers.forget(rank)
        self._breakdowns.discard(rank)
        for part in _PARTS:
            self.curves.pop(f"rank/{rank}/{part}", None)

    def _rewind(self, worker: WorkerStats, step: int, now: float) -> None:
        """This worker is at an earlier step again."""
        worker.row_step = 0
        if not self._restores.is_first(worker.rank, step, now):
            return
        for curve in self.curves.values():
            curve.rewind(step)
        for other in self._members.workers.values():
            other.step = min(other.step, step)
        self._step = min(self._step, step)
        self._forecast.clear()
        self.event_log.rewind()

    def _extend_curve(self, name: str, at: float, value: float, limit: int) -> None:
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve(limit)
        curve.add(self._step, at, self._samples, value)


def _shifted(report: WorkerReport, offset: int) -> WorkerReport:
    """The same with the steps of the run, for a worker that joined later."""
    if not offset:
        return report
    replace = msgspec.structs.replace
    return replace(
        report,
        step=report.step + offset,
        rows=[replace(row, step=row.step + offset) for row in report.rows],
        histograms=[replace(each, step=each.step + offset) for each in report.histograms],
        notices=[replace(notice, step=notice.step + offset) for notice in report.notices],
    )


def _on_run_clock(theirs: float, report: WorkerReport, now: float) -> float:
    return min(now, max(0.0, now - (report.sent_at - theirs)))


def _max(numbers: Iterable[_Number | None]) -> _Number | None:
    return max((number for number in numbers if number is not None), default=None)
