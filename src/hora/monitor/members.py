"""The workers and servers of a run, and what each has reported: totals over the run, and rates of the last seconds."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from .messages import MAX_LAGS, ServerReport, WorkerReport
from .status import ServerStatus, WorkerStatus

MAX_MEMBERS = 256  # of workers, and of servers
NOTABLE = 1.05  # the slowest worker is named if its compute is this many times the others'
WINDOW_S = 3.0
MAX_REPORTS = 64
NUM_ROUNDS = 4  # over which waiting is averaged
SILENCE_S = 1.0  # a process that is silent for longer than this, and than usual, slows the rates down

ReportT = TypeVar("ReportT", WorkerReport, ServerReport)
_NO_REPORT = WorkerReport(
    sent_at=0, step=0, steps=0, seconds=0, exposed_s=0, comm_s=0, sent_bytes=0, samples=0, computes=[]
)


@dataclasses.dataclass
class Totals:
    """Sums over steps of one worker, or of all."""

    steps: int = 0
    seconds: float = 0.0
    exposed_s: float = 0.0
    comm_s: float = 0.0
    sent_bytes: int = 0

    def add(self, other: Totals | WorkerReport) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.exposed_s += other.exposed_s
        self.comm_s += other.comm_s
        self.sent_bytes += other.sent_bytes

    @property
    def compute_per_step(self) -> float:
        return max(0.0, self.seconds - self.exposed_s) / self.steps if self.steps else 0.0

    @property
    def bytes_per_step(self) -> float:
        return self.sent_bytes / self.steps if self.steps else 0.0

    @property
    def hidden(self) -> float | None:
        """The share of communication that computation hid; None if there was none."""
        return max(0.0, 1.0 - self.exposed_s / self.comm_s) if self.comm_s > 0 else None


class _Window(Generic[ReportT]):
    """The reports of one process in the last WINDOW_S, each with its arrival and the time since the one before."""

    def __init__(self) -> None:
        self.last_at: float | None = None
        self._items: collections.deque[tuple[float, float, ReportT]] = collections.deque(maxlen=MAX_REPORTS)

    @property
    def reports(self) -> list[ReportT]:
        return [report for _, _, report in self._items]

    def add(self, report: ReportT, now: float) -> None:
        """One report with steps is always kept, however old: steps may be long."""
        span_s = max(0.0, now - self.last_at) if self.last_at is not None else report.seconds
        self.last_at = now
        self._items.append((now, span_s, report))
        steps = self.total("steps") if isinstance(report, WorkerReport) else 0
        while len(self._items) > 1 and self._items[0][0] <= now - WINDOW_S:
            oldest = self._items[0][2]
            if isinstance(oldest, WorkerReport) and oldest.steps:
                if oldest.steps == steps:
                    break
                steps -= oldest.steps
            self._items.popleft()

    def total(self, field: str) -> float:
        return sum(getattr(report, field) for _, _, report in self._items)

    def seconds(self, now: float) -> float:
        """The time that the reports cover, plus the silence since, as far as it is longer than usual."""
        if not self._items:
            return 0.0
        covered = sum(span_s for _, span_s, _ in self._items)
        silence = now - self._items[-1][0]
        return covered + max(0.0, silence - max(SILENCE_S, 2 * covered / len(self._items)))


class WorkerStats:
    """What one worker has reported. Its steps are those of the run, by `offset`."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.state = "alive"
        self.step = 0
        self.offset = 0  # from its own steps to those of the run
        self.row_step = 0  # of the newest row
        self.row_samples = 0  # samples of the run at that row
        self.run_samples = 0  # samples of the run at the last report
        self.samples_per_step = 0.0  # its own
        self.newest: dict[str, float] = {}  # logged values
        self.last = _NO_REPORT  # without rows, histograms and notices
        self.totals = Totals()
        self._window: _Window[WorkerReport] = _Window()
        self._rounds: collections.deque[Totals] = collections.deque(maxlen=NUM_ROUNDS)
        self._this_round = Totals()
        self._fresh = Totals()

    @property
    def alive(self) -> bool:
        return self.state == "alive"

    @property
    def reported_at(self) -> float | None:
        return self._window.last_at

    def on_report(self, report: WorkerReport, now: float) -> None:
        """`now` is seconds since the run began."""
        exposed_s = min(report.exposed_s, report.seconds)
        progress = report.progress if report.progress is not None and 0 <= report.progress <= 1 else None
        report = msgspec.structs.replace(
            report, exposed_s=exposed_s, progress=progress, rows=[], histograms=[], notices=[]
        )
        before, self.last = self.last, report
        self.step = report.step
        if report.steps:
            self.samples_per_step = report.samples / report.steps
        self.totals.add(report)
        self._fresh.add(report)
        self._window.add(report, now)
        if report.rounds is not None:
            self._this_round.add(report)
            if report.rounds != before.rounds:
                if before.rounds is not None:
                    self._rounds.append(self._this_round)
                self._this_round = Totals()

    def take_fresh(self) -> tuple[float, float] | None:
        """Seconds of compute and of exposed communication per step since the last call; None without a step."""
        fresh = self._fresh
        if not fresh.steps:
            return None
        self._fresh = Totals()
        exposed_s = fresh.exposed_s / fresh.steps if self.last.rounds is None else self.exposed_per_step()
        return (fresh.seconds - fresh.exposed_s) / fresh.steps, exposed_s

    def exposed_per_step(self) -> float:
        """Of the last seconds; with rounds, of the newest whole ones: the communication is at their ends."""
        parts: Iterable[Totals | WorkerReport] = self._rounds or self._window.reports
        steps = sum(part.steps for part in parts)
        return sum(part.exposed_s for part in parts) / steps if steps else 0.0

    def rate(self, now: float) -> tuple[float, float]:
        """Samples and steps per second."""
        seconds = self._window.seconds(now)
        return (
            (self._window.total("samples") / seconds, self._window.total("steps") / seconds) if seconds else (0.0, 0.0)
        )

    def status(self, now: float, *, comm_s: float, slow: float) -> WorkerStatus:
        """`comm_s` of the exposed communication per step is communication proper; the rest is waiting."""
        status = WorkerStatus(rank=self.rank, name=self.name, state=self.state, step=self.step, slow=slow)
        status.rounds, status.local_steps = self.last.rounds, self.last.local_steps
        lag = self.last.notes.get("lag", math.nan)
        status.lag = lag if math.isfinite(lag) else None
        window, seconds = self._window, self._window.seconds(now)
        if not self.alive or not seconds:
            return status
        exposed_s = self.exposed_per_step()
        status.comm_s = min(comm_s, exposed_s)
        status.wait_s = exposed_s - status.comm_s
        if steps := window.total("steps"):
            status.compute_s = sum(report.seconds - report.exposed_s for report in window.reports) / steps
        status.samples_per_s = window.total("samples") / seconds
        status.sent_bytes_per_s = window.total("sent_bytes") / seconds
        peers: collections.Counter[int] = collections.Counter()
        for report in window.reports:
            peers.update(report.peers)
        status.peers = {rank: sent / seconds for rank, sent in sorted(peers.items())}
        return status


class ServerStats:
    """What one parameter server has reported. `name` is that of its process, which may be a worker's."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.state = "alive"
        self.updates = 0
        self.last: ServerReport | None = None
        self._window: _Window[ServerReport] = _Window()

    def on_report(self, report: ServerReport, now: float) -> None:
        self.updates += report.updates
        busy_s = min(report.busy_s, report.seconds)
        self.last = msgspec.structs.replace(report, busy_s=busy_s, lags=_bounded(report.lags))
        self._window.add(self.last, now)

    def status(self, now: float) -> ServerStatus:
        status = ServerStatus(number=self.number, state=self.state, updates=self.updates)
        if self.last is not None:
            status.load_bytes, status.lags = self.last.load_bytes, self.last.lags
        window, seconds = self._window, self._window.seconds(now)
        if self.last is not None and self.state == "alive" and seconds:
            status.queue = self.last.queue
            status.updates_per_s = window.total("updates") / seconds
            status.busy = min(1.0, window.total("busy_s") / seconds)
            status.bytes_in_per_s = window.total("bytes_in") / seconds
            status.bytes_out_per_s = window.total("bytes_out") / seconds
        return status


class Members:
    """At most MAX_MEMBERS workers and as many servers; those that left first are dropped first. Calls `on_drop` with
    the rank of a worker that is dropped."""

    def __init__(self, on_drop: Callable[[int], None]) -> None:
        self._on_drop = on_drop
        self.workers: dict[int, WorkerStats] = {}
        self.servers: dict[int, ServerStats] = {}
        self.live_ranks: set[int] = set()
        self.num_seen = 0  # workers that there ever were
        self._ended = False
        self._totals_of_dropped = Totals()

    def worker(self, rank: int, name: str) -> WorkerStats | None:
        """That worker, a new one if another process has taken the rank; None if too many are alive."""
        worker = self.workers.get(rank)
        if worker is not None and worker.name == name:
            return worker
        if worker is not None:
            self._drop(worker)
        elif len(self.workers) >= MAX_MEMBERS:
            gone = next((each for each in self.workers.values() if not each.alive), None)
            if gone is None:
                return None
            self._drop(gone)
        self.num_seen += 1
        worker = self.workers[rank] = WorkerStats(rank, name)
        if self._ended:
            worker.state = "stopped"
        else:
            self.live_ranks.add(rank)
        return worker

    def server(self, number: int, name: str) -> ServerStats | None:
        """The same for a server, in the process of that name."""
        server = self.servers.get(number)
        if server is None or server.name != name:
            if server is None and len(self.servers) >= MAX_MEMBERS:
                return None
            server = self.servers[number] = ServerStats(number, name)
            if self._ended:
                server.state = "stopped"
        return server

    def on_change(self, role: str, number: int, name: str, kind: str) -> None:
        """A member has joined, left or died, and the servers in its process with it."""
        alive = "stopped" if self._ended else "alive"
        state = alive if kind == "joined" else kind
        for server in self.servers.values():
            if server.name == name or (role == "server" and server.number == number):
                server.state = state
        if role == "server":
            return
        worker = self.workers.get(number)
        if (worker is None or worker.name != name) and "(" in name:
            worker = self.worker(number, name)
        if worker is not None:
            worker.state = state
            (self.live_ranks.add if worker.alive else self.live_ranks.discard)(worker.rank)

    def end(self) -> None:
        """The run is over: all live members have stopped."""
        self._ended = True
        self.live_ranks.clear()
        members: list[WorkerStats | ServerStats] = [*self.workers.values(), *self.servers.values()]
        for member in members:
            if member.state == "alive":
                member.state = "stopped"

    def live(self) -> list[WorkerStats]:
        """The live workers, by rank."""
        return [self.workers[rank] for rank in sorted(self.live_ranks)]

    def current(self) -> list[WorkerStats]:
        """Those that know how far the run is: the live workers, else those that stopped or left. If all have died, the
        one that reported last."""
        workers = self.workers.values()
        last = max(workers, key=lambda worker: worker.reported_at or 0.0, default=None)
        return self.live() or [worker for worker in workers if worker.state != "died"] or ([last] if last else [])

    def totals(self) -> Totals:
        totals = dataclasses.replace(self._totals_of_dropped)
        for worker in self.workers.values():
            totals.add(worker.totals)
        return totals

    def least_exposed_s(self) -> float:
        """The least exposed communication per step of any live worker that has taken one."""
        return min((worker.exposed_per_step() for worker in self.live() if worker.totals.steps), default=math.inf)

    def slowest(self) -> str:
        """The worker with the longest compute per step over the whole run, if notably longer than the others'."""
        computes = {each.name: each.totals.compute_per_step for each in self.workers.values() if each.totals.steps}
        if len(computes) < 2:
            return ""
        name = max(computes, key=lambda name: computes[name])
        others = statistics.median(compute for each, compute in computes.items() if each != name)
        return name if computes[name] >= NOTABLE * max(others, 1e-9) else ""

    def _drop(self, worker: WorkerStats) -> None:
        self._totals_of_dropped.add(worker.totals)
        del self.workers[worker.rank]
        self.live_ranks.discard(worker.rank)
        self._on_drop(worker.rank)


def _bounded(lags: dict[int, int]) -> dict[int, int]:
    """The smallest MAX_LAGS lags; larger ones count as the largest of these."""
    ordered = sorted(lags.items())
    kept = dict(ordered[:MAX_LAGS])
    if beyond := ordered[MAX_LAGS:]:
        kept[ordered[MAX_LAGS - 1][0]] += sum(count for _, count in beyond)
    return kept
