"""ShutdownPolicy: which process is the cause of a failure, which are secondary, and who is signalled when.

A pure state machine: events come in with their time (`started`, `exited`, `stop_requested`, `tick` …), actions come
out. It owns no clock, process or socket. Its guarantees, with the default grace periods:

    a rank fails           the others are told why at once, get SIGTERM after 1 s and SIGKILL after 2 s. The first rank
                           that announced a failure to the coordinator is the cause, and has 30 s to end. If none did
                           and a rank ended because it lost another, that other one has 6 s to end and be the cause
    a rank is killed       the same; if the strategy is elastic, all have prepared and a worker is left, the run goes on
    a server fails         the run ends as above, since its parameters are lost with it
    the predictor fails    it is reported, and training goes on; it never ends a run
    all workers ended      servers end by themselves, and the predictor unless it is to stay (--serve-after); after 10 s
                           they get SIGTERM, 2 s later SIGKILL
    Ctrl-C, SIGTERM        each main process gets the same signal; after 1.5 s the groups get SIGTERM, at 2.3 s SIGKILL
    a second signal        SIGKILL at once
    our output is closed   as SIGTERM
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..runs.exit_codes import SECONDARY_FAILURE
from ..terminal.screen import process_name
from .process import Slot, signal_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds that processes may take to end. HORA_GRACE=0.2 multiplies all of them by that factor, for tests."""

    react_s: float = 1.0
    failed_kill_s: float = 2.0
    """After the first failure: until the other processes, which were told, get SIGTERM, and SIGKILL."""

    lost_s: float = 6.0
    """After a rank failed because it lost another: until it is blamed itself, if no rank announces a failure."""

    cause_s: float = 30.0
    """The same where a rank has announced a failure: it is the cause, and may take this long to end."""

    asked_term_s: float = 1.5
    asked_kill_s: float = 2.3
    """After Ctrl-C or SIGTERM: until the process groups get SIGTERM, and SIGKILL."""

    server_term_s: float = 10.0
    server_kill_s: float = 12.0
    """After the last worker's end: until a server or predictor that still runs gets SIGTERM, and SIGKILL."""

    give_up_s: float = 5.0
    """After SIGKILL: until a process that the kernel does not end is left behind."""

    drain_s: float = 0.4
    """After the last process's end: until pipes that another process holds open are closed."""

    @classmethod
    def from_environment(cls) -> Grace:
        try:
            factor = float(os.environ.get("HORA_GRACE", "1"))
        except ValueError:
            factor = 1.0
        return cls(**{field.name: getattr(cls, field.name) * factor for field in dataclasses.fields(cls)})


class RunFacts(Protocol):
    """What the coordinator and the configuration say of the run at the time of a decision."""

    @property
    def can_lose_workers(self) -> bool:
        """Whether all have joined and prepared, and the strategy is elastic."""

    @property
    def training_ended(self) -> bool:
        """Whether all workers had joined, and none is in the run any more."""

    @property
    def has_joined_workers(self) -> bool:
        """Whether workers that another launcher started are in the run."""

    def announced_failures(self) -> Sequence[Slot]:
        """The processes that announced a failure, in that order."""

    def holds_parameters(self, slot: Slot) -> bool: ...


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SendSignal:
    slot: Slot
    number: int
    group: bool


@dataclasses.dataclass(frozen=True)
class ReportExit:
    """The process ended well: tell the coordinator."""

    slot: Slot


@dataclasses.dataclass(frozen=True)
class ReportLoss:
    """The run goes on without this worker."""

    slot: Slot


@dataclasses.dataclass(frozen=True)
class ReportPredictorFailure:
    slot: Slot
    training: bool  # whether training goes on


@dataclasses.dataclass(frozen=True)
class ReportFailure:
    """The process's failure ends the run. `is_cause` is false if another, still ending, had announced one before."""

    slot: Slot
    is_cause: bool


@dataclasses.dataclass(frozen=True)
class Log:
    text: str


Action = SendSignal | ReportExit | ReportLoss | ReportPredictorFailure | ReportFailure | Log


class ShutdownPolicy:
    """`slots` are the processes to start; with `keep_predictor` the predictor may outlive the training."""

    def __init__(self, slots: Sequence[Slot], facts: RunFacts, grace: Grace, *, keep_predictor: bool = False) -> None:
        self.cause: Slot | None = None
        self.lost: list[Slot] = []  # the run went on without these
        self.killed: list[Slot] = []
        self.stop_signal: int | None = None  # the signal that stopped the run
        self.start_failed = False
        self.others_ran = False  # when the first failure ended the run
        self.gave_up = False
        self.codes: dict[Slot, int] = {}
        self._facts = facts
        self._grace = grace
        self._keep_predictor = keep_predictor
        self._to_start = set(slots)
        self._running: list[Slot] = []
        self._secondary: Slot | None = None  # the first secondary failure
        self._schedule: deque[tuple[float, int | None]] = deque()  # signals to all; None: give up
        self._dismissal: deque[tuple[float, int]] | None = None  # signals to servers and predictor
        self._dismissed: set[Slot] = set()

    @property
    def stopping(self) -> bool:
        return bool(self._schedule) or self.gave_up

    @property
    def next_deadline(self) -> float | None:
        schedule = self._schedule or self._dismissal
        return schedule[0][0] if schedule else None

    def running(self, *roles: str) -> list[Slot]:
        """The running processes, of these roles or of all."""
        return [slot for slot in self._running if not roles or slot[0] in roles]

    # -- events ------------------------------------------------------------------------------------------------------

    def started(self, slot: Slot) -> None:
        self._to_start.discard(slot)
        self._running.append(slot)

    def could_not_start(self, slot: Slot, now: float) -> None:
        """A run does without its predictor, and ends without any other process."""
        if slot[0] == "predictor":
            self._to_start.discard(slot)
        else:
            self.start_failed = True
            self._schedule_stop(now, (0.0, signal.SIGTERM), (self._grace.failed_kill_s, signal.SIGKILL))

    def exited(self, codes: Mapping[Slot, int], now: float) -> list[Action]:
        """These processes have ended, all at the same time as far as is known; exit codes as in subprocess."""
        self.codes |= codes
        self._running = [slot for slot in self._running if slot not in codes]
        actions: list[Action] = []
        for slot in sorted(codes, key=self._likely_cause_first):
            if slot[0] == "predictor":
                actions += self._on_predictor_exit(slot)
            elif codes[slot] == 0 or slot in self._dismissed:
                actions += [ReportExit(slot)] if not self.stopping else []
            elif self.stop_signal is None and not self.start_failed:
                actions += self._on_failure(slot, now)
        if (secondary := self._unexplained) and not self.running("worker", "server"):
            actions += self._blame(secondary)  # no process is left that could be the cause
            self._schedule_failed(now)
        return actions

    def stop_requested(self, number: int, now: float) -> list[Action]:
        """The launcher got this signal; SIGPIPE: the reader of its output is gone. The second one kills."""
        if self.stopping and self._unexplained is None:
            self._schedule_stop(now, (0.0, signal.SIGKILL))
            return []
        facts = self._facts
        training = facts.has_joined_workers or (bool(self.running("worker")) and not facts.training_ended)
        over = not self._to_start and not training
        if over and not self._running:
            return []
        if over and self.running("predictor"):
            # The predictor has stayed until this signal, so this is a good end. Others may still be ending.
            self._dismissed.update(self._running)
            signals = self._signal_main_processes(self.running("server", "predictor"), number, now)
            return [Log("the predictor closes; training had ended"), *signals]
        self.stop_signal = number
        return [Log(self._stop_text(number)), *self._signal_main_processes(self._running, number, now)]

    def tick(self, now: float) -> list[Action]:
        """Call it at `next_deadline` at the latest."""
        actions: list[Action] = []
        while self._schedule and now >= self._schedule[0][0]:
            _, number = self._schedule.popleft()
            actions += self.settle()
            if number is None:
                self.gave_up = True
                break
            actions += [SendSignal(slot, number, group=True) for slot in self._running]
            if number == signal.SIGKILL:
                self.killed += self._running
        return actions + self._dismiss(now)

    def settle(self) -> list[Action]:
        """Nothing more is waited for: a secondary failure without a cause becomes the cause."""
        secondary = self._unexplained
        return self._blame(secondary) if secondary is not None else []

    # -- failures ----------------------------------------------------------------------------------------------------

    def _likely_cause_first(self, slot: Slot) -> tuple[bool, bool, bool, int]:
        """Of processes that ended together: a killed one before one that failed, a server before the workers, which
        all need it, and secondary failures last."""
        role, rank = slot
        code = self.codes[slot]
        return code == SECONDARY_FAILURE, code > 0, role != "server", rank

    def _on_predictor_exit(self, slot: Slot) -> list[Action]:
        if self.stopping or slot in self._dismissed:
            return []
        if self.codes[slot] == 0:
            return [ReportExit(slot)]
        return [ReportPredictorFailure(slot, training=bool(self.running("worker")) or self._facts.has_joined_workers)]

    def _on_failure(self, slot: Slot, now: float) -> list[Action]:
        """The first failure starts the stop, unless the run can go on. A process that lost another, or that ended while
        one that had announced its failure before is still ending, is the cause only if no other is found."""
        code = self.codes[slot]
        if not self.stopping and self._can_go_on_without(slot):
            self.lost.append(slot)
            return [ReportLoss(slot)]
        first = self._first_announced()
        is_secondary = code == SECONDARY_FAILURE or (first is not None and code > 0)
        if not self.stopping:
            stopped = [other for other, code in self.codes.items() if other != slot and code == SECONDARY_FAILURE]
            self.others_ran = bool(self.running("worker", "server") or stopped)  # these may have ended together with it
            wait_s = self._grace.lost_s if first is None else self._grace.cause_s
            self._schedule_failed(now + wait_s if is_secondary else now)
        if self.cause is not None:
            return []
        if is_secondary:
            self._secondary = self._secondary or slot
            return []
        if self._unexplained is not None:
            self._schedule_failed(now)
        return self._blame(slot)

    def _can_go_on_without(self, slot: Slot) -> bool:
        facts, code = self._facts, self.codes[slot]
        if facts.holds_parameters(slot) or facts.announced_failures() or (code > 0 and code != SECONDARY_FAILURE):
            return False  # a script that fails is a mistake, not a loss
        return facts.can_lose_workers and (bool(self.running("worker")) or facts.has_joined_workers)

    def _first_announced(self) -> Slot | None:
        """The first process that announced a failure, if it is still running."""
        return next((slot for slot in self._facts.announced_failures()[:1] if slot in self._running), None)

    @property
    def _unexplained(self) -> Slot | None:
        """The first secondary failure, while the run stops for it and its cause has not ended."""
        return self._secondary if self.cause is None and self.stop_signal is None else None

    def _blame(self, slot: Slot) -> list[Action]:
        self.cause = self._first_announced() or slot
        return [ReportFailure(slot, is_cause=self.cause == slot)]

    # -- stopping ----------------------------------------------------------------------------------------------------

    def _schedule_stop(self, since: float, *steps: tuple[float, int]) -> None:
        self._schedule = deque((since + after_s, number) for after_s, number in steps)
        self._schedule.append((self._schedule[-1][0] + self._grace.give_up_s, None))

    def _schedule_failed(self, since: float) -> None:
        self._schedule_stop(since, (self._grace.react_s, signal.SIGTERM), (self._grace.failed_kill_s, signal.SIGKILL))

    def _signal_main_processes(self, slots: Sequence[Slot], number: int, now: float) -> list[Action]:
        """Only the main processes: they end what they have started, which would print tracebacks of its own."""
        self._schedule_stop(now, (self._grace.asked_term_s, signal.SIGTERM), (self._grace.asked_kill_s, signal.SIGKILL))
        sent = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        return [SendSignal(slot, sent, group=False) for slot in slots]

    def _stop_text(self, number: int) -> str:
        reasons = {signal.SIGINT: "interrupted", signal.SIGPIPE: "the reader of this output is gone"}
        why = reasons.get(signal.Signals(number), f"got {signal_name(number)}")
        counts = [
            f"the {noun}" if count == 1 else f"{count} {noun}s"
            for role, noun in (("worker", "rank"), ("server", "server"), ("predictor", "predictor"))
            if (count := len(self.running(role)))
        ]
        if not counts and not self._facts.has_joined_workers:
            return f"{why} before any rank was started"
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        return f"{why}; stopping {' and '.join(counts) or 'the run, which other workers have joined'}{again}"

    def _dismiss(self, now: float) -> list[Action]:
        """Servers and predictor end by themselves after the last worker. One that does not is ended, which is logged
        and no failure."""
        late = self.running("server") if self._keep_predictor else self.running("server", "predictor")
        workers = self._to_start or self.running("worker") or (late and self._facts.has_joined_workers)
        if self.stopping or not late or workers:
            return []
        if self._dismissal is None:
            self._dismissal = deque(
                [(now + self._grace.server_term_s, signal.SIGTERM), (now + self._grace.server_kill_s, signal.SIGKILL)]
            )
        actions: list[Action] = []
        while self._dismissal and now >= self._dismissal[0][0]:
            _, number = self._dismissal.popleft()
            for slot in late:
                if slot not in self._dismissed:
                    actions.append(Log(f"{process_name(*slot)} did not end with the run and is ended"))
                    self._dismissed.add(slot)
                actions.append(SendSignal(slot, number, group=True))
        return actions
