"""Track: what one worker, or one server, has told so far: sums over the whole run, and over the last few seconds."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import NamedTuple

from .messages import ServerReport, WorkerReport
from .status import ServerStatus, WorkerStatus
from .validation import MOST_LAGS, share

WINDOW_S = 3.0
MOST_SPELLS = 64
MEETINGS = 4  # rounds over which waiting is averaged
PATIENCE_S = 1.0  # after that a process that is silent for longer than it used to be slows the rates down


class _Spell(NamedTuple):
    """One report: `span_s` is the time since the one before."""

    at: float
    span_s: float
    steps: int
    seconds: float
    exposed_s: float
    samples: int
    sent_bytes: int
    peers: dict[int, int]


class _Meeting(NamedTuple):
    steps: int
    exposed_s: float


class WorkerStats:
    """One worker's."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank = rank
        self.name = name
        self.state = "alive"
        self.step = 0
        self.offset = 0  # from its own steps to the run's
        self.row_step = 0  # of the newest row
        self.row_samples = 0  # the run's, at that row
        self.pace = 0.0  # its own samples per step
        self.newest: dict[str, float] = {}  # of what was logged
        self.epoch: int | None = None
        self.epochs: int | None = None
        self.progress: float | None = None
        self.rounds: int | None = None
        self.local_steps = 0
        self.lag: float | None = None
        self.steps = 0
        self.seconds = 0.0
        self.exposed_s = 0.0
        self.comm_s = 0.0
        self.sent_bytes = 0
        self.heard_at: float | None = None
        self.run_samples = 0  # the run's, when this worker was heard last
        self._spells: collections.deque[_Spell] = collections.deque(maxlen=MOST_SPELLS)
        self._meetings: collections.deque[_Meeting] = collections.deque(maxlen=MEETINGS)
        self._since_meeting = _Meeting(0, 0.0)
        self._fresh = (0, 0.0, 0.0)

    @property
    def alive(self) -> bool:
        return self.state == "alive"

    @property
    def compute_per_step(self) -> float:
        """Over the whole run."""
        return max(0.0, self.seconds - self.exposed_s) / self.steps if self.steps else 0.0

    def hear(self, report: WorkerReport, now: float) -> None:
        """`now` is seconds since the run began."""
        exposed_s = min(report.exposed_s, report.seconds)
        self.step = report.step
        self.epoch, self.epochs, self.progress = report.epoch, report.epochs, share(report.progress)
        lag = report.notes.get("lag")
        self.lag = lag if lag is not None and math.isfinite(lag) else None
        if report.steps:
            self.pace = report.samples / report.steps
        self.steps += report.steps
        self.seconds += report.seconds
        self.exposed_s += exposed_s
        self.comm_s += report.comm_s
        self.sent_bytes += report.sent_bytes
        span_s = now - self.heard_at if self.heard_at is not None else report.seconds
        self.heard_at = now
        spell = _Spell(
            now,
            max(0.0, span_s),
            report.steps,
            report.seconds,
            exposed_s,
            report.samples,
            report.sent_bytes,
            report.peers,
        )
        self._spells.append(spell)
        self._drop_old(now)
        fresh = self._fresh
        self._fresh = (fresh[0] + report.steps, fresh[1] + report.seconds, fresh[2] + exposed_s)
        self._note_round(report, exposed_s)

    def take_fresh(self) -> tuple[float, float] | None:
        """Seconds of compute and of exposed communication per step since this was last asked; None without a step."""
        steps, seconds, exposed_s = self._fresh
        if not steps:
            return None
        self._fresh = (0, 0.0, 0.0)
        exposed = exposed_s / steps if self.rounds is None else self.exposed_per_step()
        return (seconds - exposed_s) / steps, exposed

    def exposed_per_step(self) -> float:
        """Of the last few seconds; where there are rounds, of the newest whole ones: at their ends all of it lies."""
        parts: Iterable[_Meeting | _Spell] = self._meetings or self._spells
        steps = sum(part.steps for part in parts)
        return sum(part.exposed_s for part in parts) / steps if steps else 0.0

    def rate(self, now: float) -> tuple[float, float]:
        """Samples and steps per second."""
        span_s = self._span_s(now)
        if not span_s:
            return 0.0, 0.0
        return sum(spell.samples for spell in self._spells) / span_s, sum(
            spell.steps for spell in self._spells
        ) / span_s

    def show(self, now: float, *, comm_s: float, slow: float) -> WorkerStatus:
        """As the panel shows it, if `comm_s` of a step is what communication takes without waiting for anybody."""
        worker = WorkerStatus(
            rank=self.rank,
            name=self.name,
            state=self.state,
            step=self.step,
            rounds=self.rounds,
            local_steps=self.local_steps,
            lag=self.lag,
            slow=slow,
        )
        steps, span_s = sum(spell.steps for spell in self._spells), self._span_s(now)
        if not self.alive or not span_s:
            return worker
        exposed_s = self.exposed_per_step()
        worker.comm_s = min(comm_s, exposed_s)
        worker.wait_s = exposed_s - worker.comm_s
        if steps:
            worker.compute_s = sum(spell.seconds - spell.exposed_s for spell in self._spells) / steps
        worker.samples_per_s = sum(spell.samples for spell in self._spells) / span_s
        worker.sent_bytes_per_s = sum(spell.sent_bytes for spell in self._spells) / span_s
        peers: collections.Counter[int] = collections.Counter()
        for spell in self._spells:
            peers.update(spell.peers)
        worker.peers = {rank: sent / span_s for rank, sent in sorted(peers.items())}
        return worker

    def _note_round(self, report: WorkerReport, exposed_s: float) -> None:
        before, self.rounds, self.local_steps = self.rounds, report.rounds, report.local_steps
        if report.rounds is None:
            return
        self._since_meeting = _Meeting(
            self._since_meeting.steps + report.steps, self._since_meeting.exposed_s + exposed_s
        )
        if before is not None and report.rounds != before:
            self._meetings.append(self._since_meeting)
        if report.rounds != before:
            self._since_meeting = _Meeting(0, 0.0)

    def _drop_old(self, now: float) -> None:
        """One report with steps is always kept, however long ago: steps may be long."""
        steps = sum(spell.steps for spell in self._spells)
        while len(self._spells) > 1:
            oldest = self._spells[0]
            if oldest.at > now - WINDOW_S or (oldest.steps and oldest.steps == steps):
                break
            steps -= oldest.steps
            self._spells.popleft()

    def _span_s(self, now: float) -> float:
        return _span_s([(spell.at, spell.span_s) for spell in self._spells], now)


class _Turn(NamedTuple):
    at: float
    span_s: float
    updates: int
    busy_s: float
    bytes_in: int
    bytes_out: int


class ServerStats:
    """One server's. `name` is that of its process, which may be a worker's."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.state = "alive"
        self.updates = 0
        self.queue = 0
        self.load_bytes = 0
        self.lags: dict[int, int] = {}
        self._heard_at: float | None = None
        self._turns: collections.deque[_Turn] = collections.deque(maxlen=MOST_SPELLS)

    def hear(self, report: ServerReport, now: float) -> None:
        self.updates += report.updates
        self.queue, self.load_bytes = report.queue, report.load_bytes
        self.lags = _bounded(report.lags)
        span_s = max(0.0, now - self._heard_at) if self._heard_at is not None else report.seconds
        self._heard_at = now
        busy_s = min(report.busy_s, report.seconds)
        self._turns.append(_Turn(now, span_s, report.updates, busy_s, report.bytes_in, report.bytes_out))
        while len(self._turns) > 1 and self._turns[0].at <= now - WINDOW_S:
            self._turns.popleft()

    def show(self, now: float) -> ServerStatus:
        server = ServerStatus(
            number=self.number, state=self.state, load_bytes=self.load_bytes, updates=self.updates, lags=self.lags
        )
        span_s = _span_s([(turn.at, turn.span_s) for turn in self._turns], now)
        if self.state != "alive" or not span_s:
            return server
        server.queue = self.queue
        server.updates_per_s = sum(turn.updates for turn in self._turns) / span_s
        server.busy = min(1.0, sum(turn.busy_s for turn in self._turns) / span_s)
        server.bytes_in_per_s = sum(turn.bytes_in for turn in self._turns) / span_s
        server.bytes_out_per_s = sum(turn.bytes_out for turn in self._turns) / span_s
        return server


def _span_s(spans: list[tuple[float, float]], now: float) -> float:
    """The time that these reports cover, and the silence since, as far as it is longer than usual."""
    if not spans:
        return 0.0
    covered = sum(span_s for _, span_s in spans)
    silence = now - spans[-1][0]
    return covered + max(0.0, silence - max(PATIENCE_S, 2 * covered / len(spans)))


def _bounded(lags: dict[int, int]) -> dict[int, int]:
    """The smallest MOST_LAGS lags; what is beyond them counts as the last of these."""
    ordered = sorted(lags.items())
    kept = dict(ordered[:MOST_LAGS])
    if beyond := ordered[MOST_LAGS:]:
        kept[ordered[MOST_LAGS - 1][0]] += sum(count for _, count in beyond)
    return kept
