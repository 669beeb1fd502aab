"""Supervisor: the loop that starts the processes of a launch, forwards their output, and carries out the shutdown
policy until none is left.

One poll waits for the ends of processes, their output, space on our own output, signals, and the next deadline. When
`supervise` returns, no process with this run's HORA_RUN is left. If the launcher is killed, the reaper ends them.
"""

from __future__ import annotations

import dataclasses
import select
import signal
import time
from collections.abc import Sequence

from hora.strategies import parse

from ..terminal.screen import RankStream, process_name
from ..terminal.tracebacks import TracebackAction, exception_of
from . import outcome
from .context import CoordinatorHandle, LaunchContext, OpenedBackend, strategy_spelling
from .display import RunDisplay
from .outcome import Outcome
from .process import RunProcess, Slot
from .reaper import sweep
from .shutdown import (
    Action,
    Grace,
    Log,
    ReportExit,
    ReportFailure,
    ReportLoss,
    ReportPredictorFailure,
    SendSignal,
    ShutdownPolicy,
)
from .signal_pipe import Watched, poll

JOINED_S = 0.1
"""How often to look for the end of workers of other launchers, once the launcher's own have ended."""


class CoordinatorFacts:
    """shutdown.RunFacts of a launch: what members told the coordinator, and the configured strategy."""

    def __init__(self, context: LaunchContext, coordinator: CoordinatorHandle) -> None:
        self._context = context
        self._coordinator = coordinator

    def value(self, key: str) -> str:
        """What a member has put under that key; empty if none has."""
        return self._coordinator.values(key).get(key, b"").decode(errors="replace")

    @property
    def can_lose_workers(self) -> bool:
        """Until rank 0 has put `bound`, in `prepare`, all workers are needed, except those that join a run."""
        bound = self._context.processes.joins or self.value("bound") != ""
        spelling = strategy_spelling(self._context.config, self._coordinator)
        try:
            return self._coordinator.formed and bound and spelling is not None and parse(spelling).elastic
        except ValueError:
            return False

    @property
    def training_ended(self) -> bool:
        return self._coordinator.has_ended()

    @property
    def has_joined_workers(self) -> bool:
        return "alive" in self._coordinator.joined().values()

    def announced_failures(self) -> Sequence[Slot]:
        return [slot for slot, _ in self._coordinator.failures()]

    def holds_parameters(self, slot: Slot) -> bool:
        """Whether it is a server, or a worker with a colocated server, which has put `parameters/<rank>`."""
        role, rank = slot
        return role == "server" or self.value(f"parameters/{rank}") != ""


class Supervisor:
    """The processes that one launcher starts. Main thread only."""

    def __init__(self, context: LaunchContext, opened: OpenedBackend, display: RunDisplay | None) -> None:
        self._context = context
        self._config = context.config
        self._screen = context.screen
        self._signals = context.signals
        self._backend = opened.backend
        self._coordinator = opened.coordinator
        self._start_process = opened.start_process
        self._display = display
        self._processes: dict[Slot, RunProcess] = {}
        self._lost: dict[Slot, str] = {}  # sentences about those that the run went on without
        self._start_error: tuple[Slot, OSError] | None = None
        self._ending = False
        self._facts = CoordinatorFacts(context, opened.coordinator)
        self._grace = Grace.from_environment()
        serve = context.config.serve
        self._policy = ShutdownPolicy(
            context.processes.slots, self._facts, self._grace, keep_predictor=serve is not None and serve.after
        )

    def supervise(self) -> Outcome:
        """Starts the processes and returns when none of them, and nothing that they started, is left."""
        policy = self._policy
        try:
            while not self._backend.ready and not policy.stopping:
                self._turn()
            for slot in self._context.processes.slots:
                self._turn(wait=False)
                if policy.stopping:
                    break
                self._start(slot)
            while not policy.gave_up and (policy.running() or (self._facts.has_joined_workers and not policy.stopping)):
                self._turn()
        finally:
            self._end()
        return self._outcome()

    def peak_bytes(self) -> dict[str, int]:
        """Peak memory of each process by name, as far as it is known."""
        return {process.name: process.peak_bytes for process in self._processes.values() if process.peak_bytes}

    def flush(self) -> None:
        """Writes what is queued for our own output. Waits for a slow reader until a stopping signal comes."""
        deadline = time.monotonic() + self._grace.drain_s if self._policy.stop_signal is not None else None
        while (watched := self._output_descriptors()) and (deadline is None or time.monotonic() < deadline):
            watched[self._signals.fd] = (select.POLLIN, lambda: None)
            poll(watched, None if deadline is None else deadline - time.monotonic())
            if self._signals.stop_signals():
                break

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self, *, wait: bool = True, until: float | None = None) -> None:
        policy = self._policy
        self._backend.pause_output(self._screen.full and not self._ending)
        watched: Watched = {
            self._signals.fd: (select.POLLIN, self._on_signal),
            **self._output_descriptors(),
            **self._backend.descriptors(),
            **(self._display.descriptors() if self._display is not None else {}),
        }
        if self._context.reaper.pidfd >= 0:
            watched[self._context.reaper.pidfd] = (select.POLLIN, self._on_reaper_exit)
        display_due = self._display.due if self._display is not None else None
        sources = (self._screen.due, display_due, policy.next_deadline, self._backend.next_deadline(), until)
        deadlines = [deadline for deadline in sources if deadline is not None]
        if not policy.running("worker") and self._facts.has_joined_workers:
            deadlines.append(time.monotonic() + JOINED_S)
        timeout_s = min(deadlines) - time.monotonic() if deadlines else None
        poll(watched, timeout_s if wait else 0.0)
        now = time.monotonic()
        if any(sink.gone for sink in self._screen.sinks) and not policy.stopping:
            self._apply(policy.stop_requested(signal.SIGPIPE, now))
        self._backend.tick(now)
        self._handle_exits(now)
        self._apply(policy.tick(now))
        if self._display is not None:
            self._display.tick(now, self._coordinator, self._waiting_for)
        self._screen.tick(now)

    def _output_descriptors(self) -> Watched:
        return {sink.fd: (select.POLLOUT, sink.write_some) for sink in self._screen.sinks if sink.pending}

    def _on_signal(self) -> None:
        for number in self._signals.stop_signals():
            self._apply(self._policy.stop_requested(number, time.monotonic()))
        for text in self._signals.posted():
            self._screen.log(text)

    def _on_reaper_exit(self) -> None:
        if self._context.reaper.replace():
            self._screen.log("the reaper of this run was killed; a new one was started")
        else:
            self._screen.log("the second reaper was killed too; if this launcher is killed now, ranks may be left")

    def _waiting_for(self) -> str:
        """What a run that has not taken a step yet waits for."""
        if not self._backend.ready:
            return "the import of torch"
        names = [process_name(*slot) for slot in self._coordinator.missing()]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"{names[0]}{more} to call hora.init()"
        return "the first step"

    # -- processes ---------------------------------------------------------------------------------------------------

    def _start(self, slot: Slot) -> None:
        role, rank = slot
        try:
            out, err = self._screen.streams(role, rank, log_dir=self._config.log_dir, decide=self._traceback_action)
            self._processes[slot] = self._start_process(slot, out, err)
        except OSError as error:
            if role == "predictor":
                self._screen.log(f"the predictor could not be started: {error.strerror or error}; training goes on")
            else:
                self._start_error = slot, error
            self._policy.could_not_start(slot, time.monotonic())
            return
        self._policy.started(slot)

    def _handle_exits(self, now: float) -> None:
        ended = self._backend.take_ended()
        if not ended:
            return
        self._apply(self._policy.exited({process.slot: process.returncode or 0 for process in ended}, now))
        for process in ended:
            process.close_finished_streams()  # not earlier: what they hold back may be the cause's traceback

    def _apply(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Log):
                self._screen.log(action.text)
                continue
            process = self._processes[action.slot]
            if isinstance(action, SendSignal):
                process.signal(action.number, group=action.group)
            elif isinstance(action, ReportExit):
                self._report_exit(process)
            elif isinstance(action, ReportLoss):
                self._report_loss(process)
            elif isinstance(action, ReportFailure):
                self._report_failure(process, action.is_cause)
            elif isinstance(action, ReportPredictorFailure):
                self._report_death(process)
                _stream(process).flush_traceback()
                self._screen.log(outcome.predictor_failed(process, action.training))

    def _report_exit(self, process: RunProcess) -> None:
        self._coordinator.report_exit(process.rank, process.role)
        if process.role == "predictor" and not self._facts.value("serving"):
            self._screen.log("the predictor served nothing: its script ended without job.prepare(model, optimizer)")

    def _report_loss(self, process: RunProcess) -> None:
        self._report_death(process)
        _stream(process).flush_traceback()
        step = self._facts.value(f"step/{process.rank}")
        sentence = self._lost[process.slot] = outcome.lost(process, step if step.isdecimal() else "")
        self._screen.log(f"{sentence}; the others go on")

    def _report_failure(self, process: RunProcess, is_cause: bool) -> None:
        if is_cause:
            self._report_death(process)
        fold = _stream(process).fold
        if fold is not None and len(fold.held) <= outcome.TRACEBACK_LINES and exception_of(fold.held):
            fold.take()  # the final report shows it, last and once

    def _report_death(self, process: RunProcess) -> None:
        exception = process.exception
        reason = f"{process.how}: {exception}" if exception else process.how
        self._coordinator.report_death(process.rank, reason, process.role)

    def _end(self) -> None:
        """Kills what is left, then reads what is left in the pipes. Bounded."""
        for slot in self._policy.running():
            self._processes[slot].signal(signal.SIGKILL, group=True)
        sweep(self._context.run_id, spare=self._backend.pid)
        self._ending = True
        deadline = time.monotonic() + self._grace.drain_s
        while time.monotonic() < deadline and any(p.running or p.pipes for p in self._processes.values()):
            self._turn(until=deadline)
        for process in self._processes.values():
            process.read_rest()
            process.close_pipes()
        self._apply(self._policy.settle())
        self._screen.close()

    # -- the outcome -------------------------------------------------------------------------------------------------

    def _traceback_action(self, exception: str) -> TracebackAction:
        """Whether a traceback is shown: of a stopped rank it is noise, and a failure is shown once in full."""
        interrupted = exception.startswith("KeyboardInterrupt")
        peer_lost = exception.startswith("hora.errors.PeerLost")
        policy = self._policy
        if policy.stop_signal is not None and (interrupted or peer_lost):
            return TracebackAction.DROP
        reported = [self._processes[slot] for slot in (*policy.lost, policy.cause) if slot is not None]
        known = any(exception == process.exception for process in reported)
        return TracebackAction.LAST_LINE if peer_lost or known else TracebackAction.SHOW

    def _outcome(self) -> Outcome:
        policy = self._policy
        if self._start_error is not None:
            (role, rank), error = self._start_error
            return outcome.unstarted(role, rank, error)
        cause = policy.cause
        if cause is None and policy.stop_signal is None and policy.lost and not self._any_worker_ended_well():
            cause = policy.lost[-1]
        lost = tuple(sentence for slot, sentence in self._lost.items() if slot != cause)
        if cause is not None:
            failed = outcome.failed(
                self._processes[cause],
                list(self._processes.values()),
                others_ran=policy.others_ran,
                parameters_lost=self._facts.holds_parameters(cause),
                announced=dict(self._coordinator.failures()).get(cause, ""),
                log_dir=self._config.log_dir,
            )
            return dataclasses.replace(failed, lost=lost)
        if policy.stop_signal is not None:
            return dataclasses.replace(outcome.stopped(policy.stop_signal, killed=policy.killed), lost=lost)
        if not self._coordinator.formed and self._context.processes.size > 1:
            return outcome.never_met(self._context.processes.size, self._config.command[0])
        return outcome.ended(lost)

    def _any_worker_ended_well(self) -> bool:
        """The launcher's own workers may all be lost, and then those of other launchers too."""
        own = any(code == 0 for (role, _), code in self._policy.codes.items() if role == "worker")
        return own or "left" in self._coordinator.joined().values()


def _stream(process: RunProcess) -> RankStream:
    assert isinstance(process.err, RankStream)
    return process.err
