"""Local: starts the ranks of a run on this machine and sees them to their end.

One loop waits for everything at once: the ends of processes, their output, room on our own output, signals, and the
next deadline. What it promises:

    a rank fails       the others are told why at once, have 1 s to end by themselves, get SIGTERM, at 2 s SIGKILL
    Ctrl-C, SIGTERM    each rank's main process gets the same; 1.5 s later the groups get SIGTERM, at 2.3 s SIGKILL
    again              SIGKILL at once
    our reader leaves  as SIGTERM
    we are killed      the guardian ends the run

In each case, and after a good end too, no process that carries this run's HORA_RUN is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from typing import TYPE_CHECKING

from . import codes, report
from .child import Child, signal_name
from .config import RunConfig
from .guardian import Guardian, sweep
from .identity import environment, token_descriptor
from .output import Screen, make_log_dir, open_standard_descriptors
from .report import Outcome
from .runfile import RunFile
from .tracebacks import Verdict, exception_of
from .wake import STOPPING, Wake

if TYPE_CHECKING:
    from hora.coordinator import Service

REACT_S = 1.0
"""After the first failure: how long the others may react by themselves before SIGTERM."""

FAILED_KILL_S = 2.0
"""After the first failure: when SIGKILL goes to whoever is left."""

ASKED_TERM_S = 1.5
ASKED_KILL_S = 2.3
"""After Ctrl-C or SIGTERM: when the groups get SIGTERM, and when SIGKILL."""

GIVE_UP_S = 5.0
"""After SIGKILL: how long the launcher waits for a process that the kernel does not let go."""

DRAIN_S = 0.4
"""How long a pipe may stay open after the last rank's end: someone outside the run may hold it."""


def run(config: RunConfig) -> int:
    """Runs `config` on this machine and returns the exit code, one of hora.launch.codes. Main thread only; blocks.

    ValueError for what cannot be had here (an address, a directory for logs, a name in use), before any rank starts.
    """
    open_standard_descriptors()
    started_at = time.monotonic()
    run_id, token = secrets.token_hex(8), secrets.token_bytes(32)
    screen = Screen(size=config.size, color=config.color)
    with Wake() as wake, contextlib.ExitStack() as undo:
        service = _serve(config, run_id, token)
        undo.callback(service.close)
        make_log_dir(config.log_dir)
        record = RunFile(directory=config.run_dir, name=config.name, warn=screen.say)
        undo.callback(record.close)
        guardian = Guardian(run_id)
        undo.callback(guardian.done)
        scratch = tempfile.mkdtemp(prefix="hora-")
        undo.callback(shutil.rmtree, scratch, ignore_errors=True)
        guardian.file(scratch)
        if record.control_path is not None:
            guardian.file(record.control_path)
        record.begin(_facts(config, run_id))
        record.open_control(run=run_id, address=service.address, token=token)
        launch = Launch(config, run_id, token, service, scratch, guardian, screen, wake)
        outcome = launch.supervise()
        record.end(
            {
                "code": outcome.code,
                "cause": outcome.cause,
                "seconds": round(time.monotonic() - started_at, 3),
                "auto": {key: value.decode(errors="replace") for key, value in service.values("auto/").items()},
            }
        )
        undo.close()
        if outcome.text:
            screen.say(outcome.text)
        launch.flush()
    return outcome.code


class Launch:
    """The ranks of one run and the loop over them."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        token: bytes,
        service: Service,
        scratch: str,
        guardian: Guardian,
        screen: Screen,
        wake: Wake,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._token = token
        self._service = service
        self._scratch = scratch
        self._guardian = guardian
        self._screen = screen
        self._wake = wake
        self._children: list[Child] = []
        self._cause: Child | None = None
        self._echo: Child | None = None
        self._unstarted: tuple[int, OSError] | None = None
        self._others_ran = False
        self._asked: int | None = None
        self._killed: list[int] = []
        self._plan: deque[tuple[float, int | None]] = deque()
        self._gave_up = False
        self._reading = True
        self._ending = False
        self._selector = selectors.PollSelector()  # poll, unlike epoll, takes regular files: our stdout may be one
        self._selector.register(wake.fd, selectors.EVENT_READ, None)
        self._guardian_fd = self._watch_guardian()

    def supervise(self) -> Outcome:
        """Starts the ranks and returns when none of them, and nothing that they started, is left."""
        try:
            for rank in range(self._config.size):
                self._turn(at_once=True)
                if self._stopping:
                    break
                self._start(rank)
            while self._running() and not self._gave_up:
                self._turn()
        finally:
            self._end()
        return self._outcome()

    def flush(self) -> None:
        """Writes what is queued for our own output. A reader may take its time, but a signal ends its patience."""
        deadline = time.monotonic() + DRAIN_S if self._asked is not None else None
        while sinks := [sink for sink in self._screen.sinks if sink.pending]:
            if deadline is not None and time.monotonic() >= deadline:
                break
            with selectors.PollSelector() as selector:
                selector.register(self._wake.fd, selectors.EVENT_READ, None)
                for sink in sinks:
                    selector.register(sink.fd, selectors.EVENT_WRITE, sink)
                for key, _ in selector.select(None if deadline is None else deadline - time.monotonic()):
                    if key.data is not None:
                        key.data.write_some()
                    elif set(self._wake.read()) & set(STOPPING):
                        deadline = time.monotonic()

    # -- one turn of the loop ------------------------------------------------------------------------------------

    def _turn(self, *, at_once: bool = False, until: float | None = None) -> None:
        self._watch_output()
        dues = [due for due in (self._screen.due, until, self._plan[0][0] if self._plan else None) if due is not None]
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready = self._selector.select(0.0 if at_once else timeout)
        now = time.monotonic()
        for key, _ in ready:
            if key.fd == self._wake.fd:
                for number in self._wake.read():
                    if number in STOPPING:
                        self._ask(number, now)
            elif key.fd == self._guardian_fd:
                self._mourn_guardian()
            elif key.events & selectors.EVENT_WRITE:
                key.data.write_some()
            elif isinstance(key.data, Child) and key.fd in key.data.pipes and key.data.read(key.fd, now) is False:
                self._close_pipe(key.data, key.fd)
        if any(sink.gone for sink in self._screen.sinks) and not self._stopping:
            self._ask(signal.SIGPIPE, now)
        if any(key.data is None for key, _ in ready):
            self._judge(now)
        self._escalate(now)
        self._screen.tick(now)

    def _watch_output(self) -> None:
        """Waits for room on our output while something is queued; reads the ranks only while the queue is short."""
        for sink in self._screen.sinks:
            watched = sink.fd in self._selector.get_map()
            if sink.pending and not watched:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink)
            elif watched and not sink.pending:
                self._selector.unregister(sink.fd)
        reading = self._ending or not self._screen.full
        if reading != self._reading:
            self._reading = reading
            for child in self._children:
                for fd in child.pipes:
                    self._watch_pipe(child, fd, reading)

    def _watch_pipe(self, child: Child, fd: int, wanted: bool) -> None:
        watched = fd in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(fd, selectors.EVENT_READ, child)
        elif watched and not wanted:
            self._selector.unregister(fd)

    def _close_pipe(self, child: Child, fd: int) -> None:
        """Its end was seen. Its stream ends with the rank, not before: what is held back may be the first cause."""
        self._watch_pipe(child, fd, False)
        if not child.running:
            child.close_pipe(fd)

    # -- ranks start and end -------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        token_fd = token_descriptor(self._token)
        try:
            out, err = self._screen.streams(rank, log_dir=self._config.log_dir, verdict=self._verdict)
            env = environment(self._config, self._run_id, self._service.address, self._scratch, rank, token_fd)
            child = Child(rank=rank, argv=self._config.argv(), env=env, token_fd=token_fd, out=out, err=err)
        except OSError as error:
            self._unstarted = (rank, error)
            self._plan_stop(time.monotonic(), (0.0, signal.SIGTERM), (FAILED_KILL_S, signal.SIGKILL))
            return
        finally:
            os.close(token_fd)
        self._guardian.group(child.pid)
        self._children.append(child)
        if child.pidfd is not None:
            self._selector.register(child.pidfd, selectors.EVENT_READ, None)
        for fd in child.pipes:
            self._watch_pipe(child, fd, self._reading)

    def _judge(self, now: float) -> None:
        """Reaps the ranks that have ended and looks for the first cause among them."""
        ended = [child for child in self._children if child.has_ended()]
        for child in ended:
            child.read_rest(now)
            if child.pidfd is not None:
                self._selector.unregister(child.pidfd)
            child.reap()
            self._guardian.forget(child.pid)
        # Of ranks that ended together, one that was killed comes before one that failed, as the likelier cause.
        for child in sorted(ended, key=lambda child: (child.echo, (child.returncode or 0) > 0, child.rank)):
            if child.returncode == 0:
                if not self._stopping:
                    self._service.report_exit(child.rank)
            elif self._asked is None and self._unstarted is None:
                self._weigh(child, now)
        for child in ended:
            for fd in [fd for fd in child.pipes if child.read(fd, now) is False]:
                self._close_pipe(child, fd)

    def _weigh(self, child: Child, now: float) -> None:
        """A rank ended badly. The first to do so starts the stop; an echo is the cause only if nobody else is."""
        if not self._stopping:
            self._others_ran = bool(self._running())
            self._plan_stop(now, (REACT_S, signal.SIGTERM), (FAILED_KILL_S, signal.SIGKILL))
        if self._cause is not None:
            return
        if child.echo:
            self._echo = self._echo or child
        else:
            self._blame(child)

    def _blame(self, child: Child) -> None:
        self._cause = child
        exception = child.exception
        self._service.report_death(child.rank, f"{child.how}: {exception}" if exception else child.how)
        fold = child.err.fold
        if fold is not None and len(fold.held) <= report.TRACEBACK_LINES and exception_of(fold.held):
            fold.take()  # the report shows it, last and once

    # -- stopping ------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return bool(self._plan) or self._gave_up

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.running]

    def _plan_stop(self, now: float, *steps: tuple[float, int]) -> None:
        self._plan = deque((now + after, number) for after, number in steps)
        self._plan.append((self._plan[-1][0] + GIVE_UP_S, None))

    def _ask(self, number: int, now: float) -> None:
        """Someone wants the run to stop; whoever asks a second time wants it now."""
        if self._stopping:
            self._plan_stop(now, (0.0, signal.SIGKILL))
            return
        running = self._running()
        if not running and len(self._children) == self._config.size:
            return  # it has ended by itself
        self._asked = number
        ranks = "the rank" if len(running) == 1 else f"{len(running)} ranks"
        why = {signal.SIGINT: "interrupted", signal.SIGPIPE: "nobody reads this output any more"}.get(
            signal.Signals(number), f"got {signal_name(number)}"
        )
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        self._screen.say(f"{why}; stopping {ranks}{again}" if running else f"{why} before any rank was started")
        # Only the main process: what it started is its own to end, and would add its own traceback.
        for child in running:
            child.signal_main(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        self._plan_stop(now, (ASKED_TERM_S, signal.SIGTERM), (ASKED_KILL_S, signal.SIGKILL))

    def _escalate(self, now: float) -> None:
        while self._plan and now >= self._plan[0][0]:
            _, number = self._plan.popleft()
            if self._cause is None and self._echo is not None:
                self._blame(self._echo)
            if number is None:
                self._gave_up = True
                return
            for child in self._running():
                child.signal_group(number)
                if number == signal.SIGKILL:
                    self._killed.append(child.rank)

    def _end(self) -> None:
        """Leaves nobody behind, then reads what is left in the pipes; bounded."""
        for child in self._running():
            child.signal_group(signal.SIGKILL)
        sweep(self._run_id)
        self._ending = True
        deadline = time.monotonic() + DRAIN_S
        while any(child.pipes for child in self._children) and time.monotonic() < deadline:
            self._turn(until=deadline)
        for child in self._children:
            child.read_rest(time.monotonic())
            for fd in list(child.pipes):
                child.close_pipe(fd)
        if self._cause is None and self._echo is not None:
            self._blame(self._echo)
        self._screen.close()
        self._selector.close()
        if self._guardian_fd >= 0:
            os.close(self._guardian_fd)

    # -- what is said --------------------------------------------------------------------------------------------

    def _verdict(self, exception: str) -> Verdict:
        """On the screen a stopped rank's own complaint is noise, and another's failure is told once."""
        interrupted = exception.startswith("KeyboardInterrupt")
        echo = exception.startswith("hora.errors.PeerLost")
        if self._asked is not None and (interrupted or echo):
            return Verdict.DROP
        alike = self._cause is not None and exception == self._cause.exception
        return Verdict.LAST_LINE if echo or alike else Verdict.SHOW

    def _outcome(self) -> Outcome:
        if self._unstarted is not None:
            return report.unstarted(*self._unstarted)
        if self._cause is not None:
            return report.failed(self._cause, self._children, others_ran=self._others_ran, log_dir=self._config.log_dir)
        if self._asked is not None:
            return report.stopped(self._asked, killed=self._killed)
        return Outcome(code=codes.OK, cause="")

    # -- the guardian --------------------------------------------------------------------------------------------

    def _watch_guardian(self) -> int:
        """A pidfd of the guardian in the selector; -1 where there are none."""
        pid = self._guardian.pid
        if pid is None or not hasattr(os, "pidfd_open"):
            return -1
        fd = os.pidfd_open(pid)
        self._selector.register(fd, selectors.EVENT_READ, None)
        return fd

    def _mourn_guardian(self) -> None:
        self._selector.unregister(self._guardian_fd)
        os.close(self._guardian_fd)
        self._guardian_fd = -1
        if self._guardian.replaced:
            self._screen.say("the second guardian is gone too; if this launcher is killed now, ranks may be left")
            return
        self._screen.say("the guardian of this run was killed; a new one takes its place")
        self._guardian.replace()
        self._guardian_fd = self._watch_guardian()


def _serve(config: RunConfig, run_id: str, token: bytes) -> Service:
    from hora.coordinator import Service

    try:
        service = Service(token, size=config.size, run=run_id, bind=config.bind)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise ValueError(f"cannot listen on --bind {config.bind}: {why}; without it: 127.0.0.1") from None
    service.start()
    return service


def _facts(config: RunConfig, run_id: str) -> dict[str, object]:
    facts = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "name"}
    facts["strategy"] = config.strategy.spell() if config.strategy else None
    return {"run": run_id, **facts, "cwd": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid()}
