"""Board: the run as it is now, its curves and its events, made of what was heard; a pure state machine.

What it keeps is bounded, however long the run and however many come and go. Times are seconds since the run began.
Where workers step together or in rounds, the least exposed communication that any of them has per step is what
communication takes; what another has beyond it, it waited for slower ones. Elsewhere all of it is communication.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from ..coordinator.messages import Member
from .curve import LIMIT, STRIP_LIMIT, Curve
from .event_log import KINDS, MAX_TEXT_CHARS, EventLog
from .forecast import Forecast
from .members import Members
from .messages import HistogramReport, MetricsRow, Report, ServerReport, WorkerReport
from .metrics_log import LoggedRow, MetricsLog
from .restores import RestoreTracker, steps_back
from .status import RunEvent, RunStatus
from .stragglers import Stragglers
from .validation import MOST_RANKS, is_sound, is_sound_histogram, is_sound_notice, is_sound_row, plain
from .worker_stats import WorkerStats

MAX_STRIPS = 64  # workers whose compute, waiting and communication are kept as curves
_SEAT = re.compile(r"(rank|server) (\d{1,7})\b")
_PARTS = ("compute", "wait", "comm")
_Number = TypeVar("_Number", int, float)


class RunState:
    """For one thread. `lost` counts reports that could not be used; whoever drops one adds to it."""

    def __init__(self, *, run: str = "", size: int = 0, strategy: str = "", synchronous: bool = True) -> None:
        self.curves: dict[str, Curve] = {}
        self.lost_reports = 0
        self.updated_at = 0.0
        self._run = plain(run, MAX_TEXT_CHARS)
        self._size = size
        self._strategy = self._algorithm = self._serving = self._topology = ""
        self._synchronous = synchronous
        self._state = "starting"
        self._waiting = ""
        self._step = self._samples = 0
        self._members = Members()
        self._logbook = MetricsLog(self.curves)
        self._stragglers = Stragglers()
        self._forecast = Forecast()
        self._journal = EventLog()
        self._restores = RestoreTracker()
        self._strips: set[int] = set()
        self._began_at: float | None = None  # the first step
        self._first_step = 0  # after which it came: a run may go on from a checkpoint
        self._worked_at = 0.0
        self.update(strategy=strategy)

    # -- what is heard -----------------------------------------------------------------------------------------------

    def update(
        self,
        *,
        strategy: str | None = None,
        synchronous: bool | None = None,
        topology: str | None = None,
        algorithm: str | None = None,
        serving: str | None = None,
        waiting: str | None = None,
    ) -> None:
        """What becomes known of the run while it goes on. None changes nothing; `serving` and `waiting` may become
        empty."""
        if strategy:
            self._strategy = plain(strategy, MAX_TEXT_CHARS)
        if synchronous is not None:
            self._synchronous = synchronous
        if topology:
            self._topology = plain(topology, MAX_TEXT_CHARS)
        if algorithm:
            self._algorithm = plain(algorithm, MAX_TEXT_CHARS)
        if serving is not None:
            self._serving = plain(serving, MAX_TEXT_CHARS)
        if waiting is not None:
            self._waiting = plain(waiting, MAX_TEXT_CHARS)

    def on_report(self, member: Member, report: Report, now: float) -> None:
        """A report that says what cannot be counts as lost."""
        self.updated_at = now
        roles = ("worker",) if isinstance(report, WorkerReport) else ("worker", "server")
        if member.role not in roles or not 0 <= member.rank < MOST_RANKS or not is_sound(report):
            self.lost_reports += 1
        elif isinstance(report, WorkerReport):
            self._hear_worker(plain(str(member), MAX_TEXT_CHARS), member.rank, report, now)
        else:
            self._hear_server(plain(str(member), MAX_TEXT_CHARS), report, now)

    def on_event(self, kind: str, who: str, text: str, now: float, step: int | None = None) -> None:
        """Something that happened. `who` is a member as str(member) has it, "rank 3 (host a, pid 7)" or "server 0 (…)",
        whose state then follows from `joined`, `left` and `died`; or anything else. What is none of KINDS is passed
        over. After `end` the run has ended."""
        if kind not in KINDS:
            return
        self.updated_at = now
        who = plain(who, MAX_TEXT_CHARS)
        seat = _SEAT.match(who)
        if seat is not None and kind in ("joined", "left", "died"):
            self._members.change("server" if seat[1] == "server" else "worker", int(seat[2]), who, kind)
            if seat[1] == "rank":
                self._stragglers.forget(int(seat[2]))
        if kind == "end":
            self._state = "ended"
            for rank in self._members.live_ranks:
                self._stragglers.forget(rank)
            self._members.end()
        self._journal.add(kind, who, text, now, self._step if step is None else step)

    def tick(self, now: float) -> None:
        """Adds to the curves of speed and of the workers; to be called a few times a second."""
        self.updated_at = now
        live = self._members.live()
        least_s = self._members.least_exposed_s()
        for track in live:
            fresh = track.take_fresh()
            if fresh is not None and (track.rank in self._strips or len(self._strips) < MAX_STRIPS):
                self._strips.add(track.rank)
                compute_s, exposed_s = fresh
                comm_s = min(exposed_s, least_s) if self._synchronous else exposed_s
                for part, seconds in zip(_PARTS, (compute_s, exposed_s - comm_s, comm_s), strict=True):
                    self._add(f"rank/{track.rank}/{part}", now, seconds, STRIP_LIMIT)
        if live and self._state == "running":
            self._add("speed", now, sum(track.rate(now)[0] for track in live), LIMIT)
        progress = _most(track.progress for track in self._members.standing())
        if progress is not None:
            self._forecast.add(now, progress)

    # -- what is shown -----------------------------------------------------------------------------------------------

    def status(self, at: float) -> RunStatus:
        """The run at this moment; nothing here changes it afterwards."""
        everyone = [self._members.workers[rank] for rank in sorted(self._members.workers)]
        live, standing = self._members.live(), self._members.standing()
        comm_s = self._members.least_exposed_s() if self._synchronous else math.inf
        rates = [track.rate(at) for track in live]
        servers = [self._members.servers[number].show(at) for number in sorted(self._members.servers)]
        lags: collections.Counter[int] = collections.Counter()
        for server in servers:
            lags.update(server.lags)
        totals = self._members.totals()
        return RunStatus(
            run=self._run,
            strategy=self._strategy,
            topology=self._topology,
            algorithm=self._algorithm,
            size=self._size,
            state=self._state,
            waiting=self._waiting if self._state == "starting" else "",
            seconds=at,
            step=self._step,
            epoch=_most(track.epoch for track in standing),
            epochs=_most(track.epochs for track in standing),
            progress=self._forecast.progress,
            eta_s=self._forecast.eta_s(at) if self._state == "running" else None,
            samples=self._samples,
            samples_per_s=sum(rate for rate, _ in rates),
            steps_per_s=max((rate for _, rate in rates), default=0.0),
            bytes_per_step=totals.sent_bytes / totals.steps if totals.steps else 0.0,
            hidden=totals.hidden,
            values=self._logbook.newest(standing, everyone),
            workers=[track.show(at, comm_s=comm_s, slow=self._stragglers.factor(track.rank)) for track in everyone],
            servers=servers,
            lags=dict(sorted(lags.items())),
            rounds=_most(track.rounds for track in everyone),
            checkpoints=self._journal.checkpoints,
            skipped=self._journal.skipped,
            slowest=self._members.slowest(),
            serving=self._serving,
            lost_reports=self.lost_reports,
        )

    def summary(self, at: float | None = None) -> dict[str, object]:
        """The run in a few numbers, now or at the last moment known; the rate is from the first step to the last."""
        totals, everyone = self._members.totals(), list(self._members.workers.values())
        worked_s = self._worked_at - self._began_at if self._began_at is not None else 0.0
        return {
            "samples": self._samples,
            "seconds": self.updated_at if at is None else at,
            "samples_per_s": self._samples / worked_s if worked_s > 0 else 0.0,
            "steps": self._step,
            "from_step": self._first_step,
            "bytes_per_step": totals.sent_bytes / totals.steps if totals.steps else 0.0,
            "hidden": totals.hidden,
            "slowest": self._members.slowest(),
            "checkpoints": self._journal.checkpoints,
            "skipped": self._journal.skipped,
            "rounds": _most(track.rounds for track in everyone),
            "values": self._logbook.newest(self._members.standing(), everyone),
            "workers": self._members.seen,
        }

    def is_leader(self, name: str, rank: int) -> bool:
        """Whether this is the lowest live rank of those that log `name`: where one worker's values stand for all."""
        return self._logbook.leads(name, rank)

    @property
    def events(self) -> Sequence[RunEvent]:
        """The newest MAX_EVENTS."""
        return self._journal.events

    def take_events(self) -> list[RunEvent]:
        """Those since this was last asked, MAX_EVENTS at most."""
        return self._journal.take()

    @property
    def rows_half_full(self) -> bool:
        """Whether it is time to take rows, lest some be lost."""
        return self._logbook.crowded

    def take_rows(self) -> list[LoggedRow]:
        """What was logged since this was last asked; the oldest are missing if that was long ago."""
        return self._logbook.take_rows()

    def histograms(self, after: int = 0) -> tuple[int, list[HistogramReport]]:
        """How many ever came, and those after the first `after`, the newest of each name; on the run's clock."""
        return self._logbook.histograms(after)

    # -- workers and servers -----------------------------------------------------------------------------------------

    def _hear_worker(self, name: str, rank: int, report: WorkerReport, now: float) -> None:
        track = self._members.worker(rank, name)
        if track is None:
            self.lost_reports += 1
            return
        for gone in self._members.take_forgotten():
            self._forget(gone)
        self._begin(track, report, now)
        report = _shifted(report, track.offset)
        rows = [row for row in report.rows if is_sound_row(row)]
        self.lost_reports += len(report.rows) - len(rows)
        back = steps_back(track.row_step, rows)
        stale_after = None
        if back is not None:
            rows = rows[back:]
            self._go_back(track, rows[0].step - 1, now)
        elif report.step < track.step:
            self._go_back(track, max(0, report.step - report.steps), now)
        else:
            stale_after = self._restores.stale_after(rank, report, now)
        first, before = track.heard_at is None, track.run_samples
        track.hear(report, now)
        track.run_samples = self._samples = self._samples + report.samples
        if stale_after is None:
            self._log_rows(track, rows, report, now, first, before)
            self._log_rest(track, report, now)
        else:
            track.step = stale_after
        self._step = max(self._step, track.step)
        if track.alive:
            self._compare(track, report, now)

    def _compare(self, track: WorkerStats, report: WorkerReport, now: float) -> None:
        step = report.step if self._synchronous else None
        for change in self._stragglers.hear(track.rank, report.computes, self._members.live_ranks, now, step):
            name = self._members.workers[change.rank].name
            self.on_event("slow" if change.slow else "even", name, change.words(name), now)

    def _begin(self, track: WorkerStats, report: WorkerReport, now: float) -> None:
        """The times of work; and where in the run a worker stands that is heard for the first time."""
        if self._state == "starting":
            self._state = "running"
        if report.steps:
            first_at = max(0.0, now - report.seconds)
            if self._began_at is None:
                self._first_step = max(0, report.step - report.steps)
            self._began_at = first_at if self._began_at is None else min(self._began_at, first_at)
            self._worked_at = now
        if track.heard_at is None:
            track.run_samples = self._samples
            if track.rank >= self._size > 0 and not self._synchronous:  # one who joined counts its own steps, from 0
                track.offset = max(0, self._step - max(0, report.step - report.steps))

    def _log_rows(
        self, track: WorkerStats, rows: list[MetricsRow], report: WorkerReport, now: float, first: bool, before: int
    ) -> None:
        """The run's samples at a row are told by its step: never more than were heard of, nor fewer than at the row
        before. `before` are the run's when this worker was heard last, if this is not the `first` time."""
        if not rows:
            return
        together = self._synchronous or (first and not track.offset and self._members.seen <= self._size)
        begin = report.step - report.steps
        if together:  # each worker's samples grow with its steps, and all are taken to be at this row's
            live = self._members.live()
            missing = max(0, self._size - self._members.seen) if first else 0  # not heard yet, but at work
            slope = sum(other.pace for other in live) + missing * track.pace
            base = self._samples - sum(other.pace * other.step for other in live) - missing * track.pace * begin
        else:
            slope = (self._samples - before) / max(1, report.steps)
            base = before - slope * begin
        for row in rows:
            at = _on_our_clock(row.at, report, now)
            track.row_samples = min(self._samples, max(track.row_samples, round(base + slope * row.step)))
            self._logbook.add(track, row, at, track.row_samples, self._members.live_ranks)
            track.row_step = row.step

    def _log_rest(self, track: WorkerStats, report: WorkerReport, now: float) -> None:
        for histogram in report.histograms:
            if is_sound_histogram(histogram):
                at = _on_our_clock(histogram.at, report, now)
                self._logbook.add_histogram(track.rank, histogram, at, self._members.live_ranks)
            else:
                self.lost_reports += 1
        for notice in report.notices:
            if is_sound_notice(notice):
                alone = notice.kind == "skipped" and not self._synchronous
                at = _on_our_clock(notice.at, report, now)
                self._journal.note(notice, track.name, at, track.rank if alone else None)
            else:
                self.lost_reports += 1

    def _hear_server(self, name: str, report: ServerReport, now: float) -> None:
        server = self._members.server(report.server, name)
        if server is None:
            self.lost_reports += 1
            return
        server.hear(report, now)
        if report.seconds > 0:
            self._add(f"server/{report.server}/busy", now, min(1.0, report.busy_s / report.seconds), STRIP_LIMIT)
        self._add(f"server/{report.server}/queue", now, report.queue, STRIP_LIMIT)

    def _forget(self, rank: int) -> None:
        self._stragglers.forget(rank)
        self._strips.discard(rank)
        for part in _PARTS:
            self.curves.pop(f"rank/{rank}/{part}", None)

    def _go_back(self, track: WorkerStats, step: int, now: float) -> None:
        """This worker is at an earlier step again."""
        track.row_step = 0
        if not self._restores.begins(track.rank, step, now):
            return
        for curve in self.curves.values():
            curve.rewind(step)
        for other in self._members.workers.values():
            other.step = min(other.step, step)
        self._step = min(self._step, step)
        self._forecast.clear()
        self._journal.go_back()

    def _add(self, name: str, at: float, value: float, limit: int) -> None:
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve(limit)
        curve.add(self._step, at, self._samples, value)


def _shifted(report: WorkerReport, offset: int) -> WorkerReport:
    """The same with the run's steps, for one who has joined it."""
    if not offset:
        return report
    return msgspec.structs.replace(
        report,
        step=report.step + offset,
        rows=[msgspec.structs.replace(row, step=row.step + offset) for row in report.rows],
        histograms=[msgspec.structs.replace(each, step=each.step + offset) for each in report.histograms],
        notices=[msgspec.structs.replace(notice, step=notice.step + offset) for notice in report.notices],
    )


def _on_our_clock(theirs: float, report: WorkerReport, now: float) -> float:
    return min(now, max(0.0, now - (report.sent_at - theirs)))


def _most(numbers: Iterable[_Number | None]) -> _Number | None:
    return max((number for number in numbers if number is not None), default=None)
