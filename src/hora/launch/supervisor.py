"""Supervision: the loop that starts the processes of a launch, watches over them, and sees them to their end.

One loop waits for everything at once: the ends of processes, their output, room on our own output, signals, and the
next deadline. What it promises:

    a rank fails       the others are told why at once, have 1 s to end by themselves, get SIGTERM, at 2 s SIGKILL;
                       the first that told the coordinator of its failure is the cause, and has 30 s to end;
                       if none did and a rank has lost another, that one has 6 s to end and to be the cause
    a rank is killed   the same; if the strategy is elastic, all have prepared and a worker is left, the run goes on
    a server fails     the run ends as above, since its parameters are lost with it
    the predictor does it is named, and the training goes on; nothing that it does ends a run
    workers are done   servers end by themselves, and the predictor unless it is to stay (--serve-after); 10 s later
                       they get SIGTERM, 2 s after that SIGKILL
    Ctrl-C, SIGTERM    each rank's main process gets the same; 1.5 s later the groups get SIGTERM, at 2.3 s SIGKILL
    again              SIGKILL at once
    our reader leaves  as SIGTERM
    we are killed      the guardian ends the run

In each case, and after a good end too, no process that carries this run's HORA_RUN is left.
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import time
from collections import deque
from typing import Protocol

from hora.strategies import parse

from ..runs.run_directory import RunDirectory
from ..terminal.screen import RankStream, Screen, seat_name
from ..terminal.tracebacks import TracebackAction, exception_of
from . import outcome
from .config import RunConfig
from .display import RunDisplay
from .forkserver.client import ForkedProcess, ForkServer
from .grace import Grace
from .hosts.host_set import HostSet, attend, watched
from .hosts.remote_host import RemoteHost, RemoteProcess
from .outcome import Outcome
from .process import LocalProcess, RunProcess, signal_name
from .process_set import ProcessSet, Seat, environment
from .reaper import Reaper, sweep
from .signal_pipe import STOPPING, SignalPipe

LOOK_S = 0.1
"""How often the launcher looks for the end of workers that joined from elsewhere, once its own have ended."""


class CoordinatorHandle(Protocol):
    """What a launcher asks of the coordinator and tells it: its own Service, or a line to another launcher's."""

    address: tuple[str, int]

    @property
    def formed(self) -> bool: ...

    def report_death(self, rank: int, reason: str, role: str = "worker") -> None: ...

    def report_exit(self, rank: int, role: str = "worker") -> None: ...

    def joined(self) -> dict[int, str]: ...

    def has_ended(self) -> bool:
        """Whether all workers had met, and none is in the run any more."""

    def missing(self) -> list[Seat]:
        """Who has not joined yet."""

    def failures(self) -> list[tuple[Seat, str]]:
        """Who said that it fails, and why, in that order."""

    def values(self, prefix: str) -> dict[str, bytes]: ...

    def views(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """All that a launch works with. `run_id` marks every process that it starts."""

    config: RunConfig
    crew: ProcessSet
    run_id: str
    token: bytes
    desk: CoordinatorHandle
    record: RunDirectory
    screen: Screen
    wake: SignalPipe
    show: RunDisplay
    reaper: Reaper
    forks: ForkServer | None = None  # what starts the processes on this machine
    sites: HostSet | None = None  # other hosts, whose agents start the processes


class Supervisor:
    """The processes that one launcher starts and the loop over them."""

    def __init__(self, stage: LaunchContext, scratch: str) -> None:
        self._stage = stage
        self._config = stage.config
        self._desk = stage.desk
        self._scratch = scratch
        self._guardian = stage.reaper
        self._screen = stage.screen
        self._wake = wake = stage.wake
        self._seats = stage.crew.seats
        self._children: list[RunProcess] = []
        self._cause: RunProcess | None = None
        self._echo: RunProcess | None = None
        self._lost: list[tuple[RunProcess, str]] = []
        self._unstarted: tuple[Seat, OSError] | None = None
        self._others_ran = False
        self._asked: int | None = None
        self._killed: list[Seat] = []
        self._overdue: deque[tuple[float, int]] | None = None
        self._dismissed: set[RunProcess] = set()
        self._plan: deque[tuple[float, int | None]] = deque()
        self._gave_up = False
        self._reading = True
        self._ending = False
        self._selector = selectors.PollSelector()  # poll, unlike epoll, takes regular files: our stdout may be one
        self._selector.register(wake.fd, selectors.EVENT_READ, None)
        self._guardian_fd = self._watch_guardian()
        self._show = stage.show
        self._sites = stage.sites
        self._forks = stage.forks
        self._grace = Grace.from_environment()

    def supervise(self) -> Outcome:
        """Starts the processes and returns when none of them, and nothing that they started, is left."""
        try:
            self._await_forks()
            for seat in self._seats:
                self._turn(at_once=True)
                if self._stopping:
                    break
                self._start(seat)
            while (self._running() or (self._guests() and not self._stopping)) and not self._gave_up:
                self._turn()
        finally:
            self._end()
        return self._outcome()

    def _await_forks(self) -> None:
        """Until the fork server has imported torch."""
        forks = self._forks
        if forks is None:
            return
        self._selector.register(forks, selectors.EVENT_READ, forks)
        if forks.complaints_fd >= 0:
            self._selector.register(forks.complaints_fd, selectors.EVENT_READ, forks)
        while not forks.ready and not forks.lost and not self._stopping:
            self._turn()
        if forks.problem and self._config.fork:
            self._screen.say(f"each rank is started as a new interpreter, since {forks.problem}")

    def _heed_forks(self, forks: ForkServer, fd: int) -> None:
        if fd == forks.fileno():
            forks.read()
            over = bool(forks.lost)
        else:
            for line in forks.complaints():
                self._screen.say(line)
            over = forks.complaints_fd < 0
        if over:
            self._selector.unregister(fd)

    def peak_bytes(self) -> dict[str, int]:
        """The most memory that each process had, by name, as far as that was told."""
        return {child.name: child.peak_bytes for child in self._children if child.peak_bytes}

    def flush(self) -> None:
        """Writes what is queued for our own output. A reader may take its time, but a signal ends its patience."""
        deadline = time.monotonic() + self._grace.drain_s if self._asked is not None else None
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
        plans = [plan[0][0] for plan in (self._plan, self._overdue) if plan]
        self._watch_bell()
        self._watch_sites()
        beats = [site.due() for site in self._sites.all if not site.lost] if self._sites else []
        dues = [due for due in (self._screen.due, self._show.due, until, *plans, *beats) if due is not None]
        if not self._running("worker") and self._guests():
            dues.append(time.monotonic() + LOOK_S)
        timeout = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready = self._selector.select(0.0 if at_once else timeout)
        now = time.monotonic()
        for key, _ in ready:
            if key.fd == self._wake.fd:
                for number in self._wake.read():
                    if number in STOPPING:
                        self._ask(number, now)
                for text in self._wake.posted():
                    self._screen.say(text)
            elif key.fd == self._guardian_fd:
                self._mourn_guardian()
            elif key.data is self._show.bell and self._show.bell is not None:
                self._show.answer()
            elif isinstance(key.data, ForkServer):
                self._heed_forks(key.data, key.fd)
            elif isinstance(key.data, RemoteHost):
                for line in attend(key.data, key.fd, key.events, now):
                    self._screen.say(f"host {key.data.name}: {line}")
            elif key.events & selectors.EVENT_WRITE:
                key.data.write_some()
            elif isinstance(key.data, LocalProcess) and self._read_pipe(key.data.process, key.fd, now) is False:
                self._close_pipe(key.data, key.fd)
        if any(sink.gone for sink in self._screen.sinks) and not self._stopping:
            self._ask(signal.SIGPIPE, now)
        if self._sites is not None:
            self._heed_sites(self._sites, now)
        self._judge(now)
        self._escalate(now)
        self._dismiss(now)
        self._show.tick(now, self._desk, self._awaited)
        self._screen.tick(now)

    @staticmethod
    def _read_pipe(process: ForkedProcess, fd: int, now: float) -> bool | None:
        """As Process.read; None also for a pipe that was closed earlier in this turn."""
        return process.read(fd, now) if fd in process.pipes else None

    def _awaited(self) -> str:
        """What a run that has not taken a step yet waits for, in words."""
        if self._forks is not None and not self._forks.ready:
            return "torch is imported"
        names = [seat_name(*seat) for seat in self._desk.missing()]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            return f"{names[0]}{more} to call hora.init()"
        return "the first step"

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
                for fd in child.process.pipes if isinstance(child, LocalProcess) else ():
                    self._watch_pipe(child, fd, reading)

    def _watch_bell(self) -> None:
        """Waits for somebody at the page's address while no page is there to answer."""
        bell = self._show.bell
        if bell is None:
            return
        watched = bell.fileno() in self._selector.get_map()
        if bell.waiting and not watched:
            self._selector.register(bell, selectors.EVENT_READ, bell)
        elif watched and not bell.waiting:
            self._selector.unregister(bell)

    def _watch_sites(self) -> None:
        """Waits for words of the other hosts, and for room on the way there."""
        wanted: dict[int, tuple[int, RemoteHost]] = {}
        for site in self._sites.all if self._sites is not None else ():
            wanted |= watched(site)
            site.hold(not self._reading)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, RemoteHost) and wanted.get(key.fd) != (key.events, key.data):
                self._selector.unregister(key.fd)
        for fd, (events, site) in wanted.items():
            if fd not in self._selector.get_map():
                self._selector.register(fd, events, site)

    def _heed_sites(self, sites: HostSet, now: float) -> None:
        for site in sites.all:
            site.tick(now)
        for site in sites.newly_lost():
            those = [child.name for child in site.children.values() if child.running]
            what = f"; {', '.join(those)} with it" if those else ""
            self._screen.say(f"host {site.name} ({site.address}) is lost: {site.lost}{what}")

    def _watch_pipe(self, child: RunProcess, fd: int, wanted: bool) -> None:
        watched = fd in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(fd, selectors.EVENT_READ, child)
        elif watched and not wanted:
            self._selector.unregister(fd)

    def _close_pipe(self, child: LocalProcess, fd: int) -> None:
        """Its end was seen. Its stream ends with the rank, not before: what is held back may be the first cause."""
        self._watch_pipe(child, fd, False)
        if not child.running:
            child.process.close_pipe(fd)

    # -- ranks start and end -------------------------------------------------------------------------------------

    def _start(self, seat: Seat) -> None:
        role, rank = seat
        try:
            out, err = self._screen.streams(role, rank, log_dir=self._config.log_dir, verdict=self._verdict)
            child = self._sites.start(seat, out, err) if self._sites is not None else self._start_here(seat, out, err)
        except OSError as error:
            if role == "predictor":
                self._screen.say(f"the predictor could not be started: {error.strerror or error}; training goes on")
                self._seats = [each for each in self._seats if each != seat]
                return
            self._unstarted = (seat, error)
            self._plan_stop(time.monotonic(), (0.0, signal.SIGTERM), (self._grace.failed_kill_s, signal.SIGKILL))
            return
        self._children.append(child)

    def _start_here(self, seat: Seat, out: RankStream, err: RankStream) -> LocalProcess:
        stage, config = self._stage, self._config
        assert self._forks is not None
        env = environment(config, stage.crew, stage.run_id, self._desk.address, self._scratch, seat)
        child = LocalProcess(*seat, self._forks.start(config.argv(), env, stage.token, out, err), err)
        self._guardian.group(child.pid)
        for fd in child.process.pipes:
            self._watch_pipe(child, fd, self._reading)
        return child

    def _judge(self, now: float) -> None:
        """Reaps the ranks that have ended and looks for the first cause among them."""
        ended = [child for child in self._children if child.has_ended()]
        for child in ended:
            if not isinstance(child, LocalProcess):
                child.reap()
                continue
            child.process.read_rest(now)
            child.reap()
            self._guardian.forget(child.pid)
        # Of those that ended together, one that was killed comes before one that failed, as the likelier cause, and a
        # server, which all workers need, before a worker.
        for child in sorted(ended, key=lambda c: (c.echo, (c.returncode or 0) > 0, c.role != "server", c.rank)):
            if child.role == "predictor":
                self._part_with_predictor(child)
            elif child.returncode == 0 or child in self._dismissed:
                if not self._stopping:
                    self._desk.report_exit(child.rank, child.role)
            elif self._asked is None and self._unstarted is None:
                self._weigh(child, now)
        if (echo := self._lone_echo) and not self._running("worker") and not self._running("server"):
            self._blame(echo)  # no process is left that could be the cause
            self._plan_failed(now)
        for child in ended:
            if isinstance(child, RemoteProcess):
                child.out.close()
                child.err.close()
            elif isinstance(child, LocalProcess):
                for fd in [fd for fd in child.process.pipes if child.process.read(fd, now) is False]:
                    self._close_pipe(child, fd)

    def _weigh(self, child: RunProcess, now: float) -> None:
        """One ended badly. The first to do so starts the stop, unless the run can do without it. One that lost another,
        or ended while another that had failed before it has not, is the cause only if no other is found."""
        if not self._stopping and self._dispensable(child):
            self._lose(child)
            return
        first = self._first_failure()
        follows = child.echo or (first is not None and first is not child and (child.returncode or 0) > 0)
        if not self._stopping:
            self._others_ran = bool(self._running("worker") or self._running("server"))
            wait_s = self._grace.lost_s if first is None else self._grace.cause_s
            self._plan_failed(now + wait_s if follows else now)
        if self._cause is not None:
            return
        if follows:
            self._echo = self._echo or child
        else:
            if self._lone_echo is not None:
                self._plan_failed(now)
            self._blame(child)

    def _first_failure(self) -> RunProcess | None:
        """Of those that told the coordinator why they fail, the first, if it has not ended yet."""
        seats = [seat for seat, _ in self._desk.failures()]
        return next((child for child in self._running() if [(child.role, child.rank)] == seats[:1]), None)

    def _part_with_predictor(self, child: RunProcess) -> None:
        """However it ended, the run goes on; whether it ever served, it has told under `serving`."""
        if self._stopping or child in self._dismissed:
            return
        if child.returncode:
            self._report_death(child)
            child.err.settle()
            self._screen.say(outcome.silenced(child, training=bool(self._running("worker") or self._guests())))
            return
        self._desk.report_exit(child.rank, child.role)
        if not self._told("serving"):
            self._screen.say("the predictor has served nothing: its script ended without job.prepare(model, optimizer)")

    def _dispensable(self, child: RunProcess) -> bool:
        """Whether the run goes on without this one. Until rank 0 has said `bound`, in `prepare`, all are needed, except
        those who join: nobody waits for them."""
        bound = self._stage.crew.joins or self._told("bound") != ""
        if self._holds_parameters(child) or not self._desk.formed or not bound:
            return False
        if self._desk.failures() or (child.returncode is not None and child.returncode > 0 and not child.echo):
            return False  # a script that fails is a mistake, not a loss
        others = self._running("worker") or self._guests()
        return bool(others) and _elastic(self._config, self._desk)

    def _holds_parameters(self, child: RunProcess) -> bool:
        """Whether it is a server, or a worker that said so under `parameters/<rank>`, since a server lives in it."""
        return child.role == "server" or self._told(f"parameters/{child.rank}") != ""

    def _told(self, key: str) -> str:
        return self._desk.values(key).get(key, b"").decode(errors="replace")

    def _lose(self, child: RunProcess) -> None:
        self._report_death(child)
        child.err.settle()
        step = self._told(f"step/{child.rank}")
        sentence = outcome.lost(child, step if step.isdecimal() else "")
        self._lost.append((child, sentence))
        self._screen.say(f"{sentence}; the others go on")

    def _report_death(self, child: RunProcess) -> None:
        exception = child.exception
        self._desk.report_death(child.rank, f"{child.how}: {exception}" if exception else child.how, child.role)

    def _blame(self, child: RunProcess) -> None:
        """From now on it is the cause; or the first that has failed, if that one is still ending."""
        self._cause = self._first_failure() or child
        if self._cause is child:
            self._report_death(child)
        fold = child.err.fold
        if fold is not None and len(fold.held) <= outcome.TRACEBACK_LINES and exception_of(fold.held):
            fold.take()  # the report shows it, last and once

    # -- stopping ------------------------------------------------------------------------------------------------

    @property
    def _stopping(self) -> bool:
        return bool(self._plan) or self._gave_up

    def _running(self, role: str | None = None) -> list[RunProcess]:
        return [child for child in self._children if child.running and role in (None, child.role)]

    def _guests(self) -> list[int]:
        """The ranks of workers that joined from elsewhere and are still at work."""
        return [rank for rank, state in self._desk.joined().items() if state == "alive"]

    def _plan_stop(self, now: float, *steps: tuple[float, int]) -> None:
        self._plan = deque((now + after, number) for after, number in steps)
        self._plan.append((self._plan[-1][0] + self._grace.give_up_s, None))

    @property
    def _lone_echo(self) -> RunProcess | None:
        """Who lost another, if the run stops for that and the other has not ended yet."""
        return self._echo if self._cause is None and self._asked is None else None

    def _plan_failed(self, since: float) -> None:
        grace = self._grace
        self._plan_stop(since, (grace.react_s, signal.SIGTERM), (grace.failed_kill_s, signal.SIGKILL))

    def _ask(self, number: int, now: float) -> None:
        """Someone wants the run to stop; whoever asks a second time wants it now."""
        if self._stopping and self._lone_echo is None:
            self._plan_stop(now, (0.0, signal.SIGKILL))
            return
        running = self._running()
        over = len(self._children) == len(self._seats) and not self._training()
        if not running and over:
            return  # it has ended by itself
        if over and self._running("predictor"):
            self._screen.say("the predictor closes; training had ended")
            self._dismissed.update(running)  # others may be on their way out still: they are not needed any more
            self._ask_to_stop([child for child in running if child.role != "worker"], number, now)
            return  # what was asked for is what it stayed for, so this is a good end
        self._asked = number
        words = (("worker", "rank"), ("server", "server"), ("predictor", "predictor"))
        numbers = {word: len(self._running(role)) for role, word in words}
        ranks = " and ".join(
            f"the {word}" if number == 1 else f"{number} {word}s" for word, number in numbers.items() if number
        )
        why = {signal.SIGINT: "interrupted", signal.SIGPIPE: "nobody reads this output any more"}.get(
            signal.Signals(number), f"got {signal_name(number)}"
        )
        again = " (Ctrl-C again: at once)" if number == signal.SIGINT else ""
        if not running and self._guests():
            ranks = "the run, which others have joined"
        self._screen.say(f"{why}; stopping {ranks}{again}" if ranks else f"{why} before any rank was started")
        self._ask_to_stop(running, number, now)

    def _training(self) -> bool:
        """Whether a worker is in the run. One that has left it may still take a moment to end."""
        return bool(self._guests()) or (bool(self._running("worker")) and not self._desk.has_ended())

    def _ask_to_stop(self, running: list[RunProcess], number: int, now: float) -> None:
        """Only the main process: what it started is its own to end, and would add its own traceback."""
        for child in running:
            child.signal_main(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        grace = self._grace
        self._plan_stop(now, (grace.asked_term_s, signal.SIGTERM), (grace.asked_kill_s, signal.SIGKILL))

    def _escalate(self, now: float) -> None:
        while self._plan and now >= self._plan[0][0]:
            _, number = self._plan.popleft()
            if echo := self._lone_echo:
                self._blame(echo)
            if number is None:
                self._gave_up = True
                return
            for child in self._running():
                child.signal_group(number)
                if number == signal.SIGKILL:
                    self._killed.append((child.role, child.rank))

    def _dismiss(self, now: float) -> None:
        """Servers and the predictor end once no worker is left. One that does not is made to, which is no failure but
        is said. A predictor that is to stay, stays."""
        serve = self._config.serve
        late = self._running("server") + ([] if serve and serve.after else self._running("predictor"))
        workers = len(self._children) < len(self._seats) or self._running("worker") or self._guests()
        if self._stopping or not late or workers:
            return
        if self._overdue is None:
            grace = self._grace
            self._overdue = deque(
                [(now + grace.server_term_s, signal.SIGTERM), (now + grace.server_kill_s, signal.SIGKILL)]
            )
        while self._overdue and now >= self._overdue[0][0]:
            _, number = self._overdue.popleft()
            for child in late:
                if child not in self._dismissed:
                    self._screen.say(f"{child.name} did not end with the run and is made to")
                    self._dismissed.add(child)
                child.signal_group(number)

    def _end(self) -> None:
        """Leaves nobody behind, then reads what is left in the pipes; bounded."""
        for child in self._running():
            child.signal_group(signal.SIGKILL)
        sweep(self._stage.run_id, spare=self._forks.pid if self._forks is not None else 0)
        self._ending = True
        deadline = time.monotonic() + self._grace.drain_s
        while any(self._still_open(child) for child in self._children) and time.monotonic() < deadline:
            self._turn(until=deadline)
        for child in self._children:
            if isinstance(child, LocalProcess):
                child.process.read_rest(time.monotonic())
                for fd in list(child.process.pipes):
                    child.process.close_pipe(fd)
        if echo := self._lone_echo:
            self._blame(echo)
        self._show.close_panel()
        self._screen.close()
        self._selector.close()
        if self._guardian_fd >= 0:
            os.close(self._guardian_fd)

    @staticmethod
    def _still_open(child: RunProcess) -> bool:
        """Whether more may come of what it wrote."""
        return bool(child.process.pipes) if isinstance(child, LocalProcess) else child.running

    # -- what is said --------------------------------------------------------------------------------------------

    def _verdict(self, exception: str) -> TracebackAction:
        """On the screen a stopped rank's own complaint is noise, and another's failure is told once."""
        interrupted = exception.startswith("KeyboardInterrupt")
        echo = exception.startswith("hora.errors.PeerLost")
        if self._asked is not None and (interrupted or echo):
            return TracebackAction.DROP
        told = [child for child, _ in self._lost] + ([self._cause] if self._cause is not None else [])
        alike = any(exception == child.exception for child in told)
        return TracebackAction.LAST_LINE if echo or alike else TracebackAction.SHOW

    def _outcome(self) -> Outcome:
        if self._unstarted is not None:
            (role, rank), error = self._unstarted
            return outcome.unstarted(role, rank, error)
        cause = self._cause
        if cause is None and self._asked is None and not self._anyone_ended_well():
            cause, _ = self._lost[-1]
        lost = tuple(sentence for child, sentence in self._lost if child is not cause)
        if cause is not None:
            failed = outcome.failed(
                cause,
                self._children,
                others_ran=self._others_ran,
                parameters_lost=self._holds_parameters(cause),
                told=dict(self._desk.failures()).get((cause.role, cause.rank), ""),
                log_dir=self._config.log_dir,
            )
            return dataclasses.replace(failed, lost=lost)
        if self._asked is not None:
            return dataclasses.replace(outcome.stopped(self._asked, killed=self._killed), lost=lost)
        if not self._desk.formed and self._stage.crew.size > 1:
            return outcome.never_met(self._stage.crew.size, self._config.command[0])
        return outcome.ended(lost)

    def _anyone_ended_well(self) -> bool:
        """Of a run that went on without some: all of its own may be lost, and then those who joined too."""
        own = [child.returncode == 0 for child in self._children if child.role == "worker"]
        return any(own) or "left" in self._desk.joined().values() or not self._lost

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


def spelled(config: RunConfig, desk: CoordinatorHandle) -> str | None:
    """The run's strategy: the command line's, else what the script chose, which rank 0 has told the coordinator."""
    if config.strategy is not None:
        return config.strategy.spell()
    told = desk.values("strategy").get("strategy")
    return told.decode(errors="replace") if told is not None else None


def _elastic(config: RunConfig, desk: CoordinatorHandle) -> bool:
    spelling = spelled(config, desk)
    try:
        return spelling is not None and parse(spelling).elastic
    except ValueError:
        return False
