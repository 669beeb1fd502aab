"""Runs a RunConfig: on this machine, over several hosts, or as workers that join another run; to its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import time

from ..net.machine import num_cores
from ..runs import exit_codes
from ..runs.run_directory import RunDirectory
from ..terminal.screen import RankStream, Screen, make_log_dir, open_standard_descriptors
from . import joining, servers
from .config import RunConfig
from .context import LaunchContext, OpenedBackend, strategy_spelling
from .display import RunDisplay
from .forkserver.client import ForkServer, preloaded
from .hosts import multi_host
from .hosts.host_set import HostSet, SignalReceived
from .joining import JoinedCoordinator, Joining
from .process import RunProcess, Slot
from .process_set import TRACE, ProcessSet, common_environment, environment, threads
from .reaper import Reaper
from .signal_pipe import SignalPipe
from .supervisor import Supervisor


def run(config: RunConfig) -> int:
    """Runs `config` and returns the exit code, one of hora.runs.exit_codes. Main thread only; blocks.

    ValueError, before any process starts, for what is not available: an address, a directory for logs, a name in use,
    a host, a run to join.
    """
    open_standard_descriptors()
    joined = joining.reserve(config) if config.join is not None else None
    notes: list[str] = []
    if joined is not None:
        config, processes, token = joined.config, joined.processes, joined.token
    else:
        config, notes = _choose_servers(config)
        token = secrets.token_bytes(32)
        serves = config.serve is not None
        processes = ProcessSet(size=config.size, servers=config.servers, workers=config.size, serves=serves)
    screen = Screen(size=processes.first + config.size, color=config.color)
    if config.progress == "auto" and joined is None:
        config = dataclasses.replace(config, progress="panel" if screen.can_panel else "plain")
    with SignalPipe() as signals, contextlib.ExitStack() as cleanup:
        run_id = secrets.token_hex(8)  # of this launcher only: it ends all processes that carry it
        reaper = Reaper(run_id)  # it knows every file and folder before that exists, and is the last to end
        cleanup.callback(reaper.done)
        scratch = reaper.folder("hora-")
        cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
        context = LaunchContext(
            config=config,
            processes=processes,
            run_id=run_id,
            token=token,
            screen=screen,
            signals=signals,
            reaper=reaper,
            scratch=scratch,
            cleanup=cleanup,
        )
        try:
            on_hosts = config.hosts or config.engine is not None
            opened = multi_host.connect(context) if on_hosts else _open_local(context, joined)
        except SignalReceived as received:
            return exit_codes.of_signal(received.number)
        make_log_dir(config.log_dir)
        path, name = (joined.directory, joined.name) if joined else (config.run_dir, config.name)
        directory = RunDirectory(directory=path, name=name, warn=screen.log)
        cleanup.callback(directory.close)
        for note in (*opened.notes, *notes):
            screen.log(note)
        facts = _facts(config, run_id)
        if joined is not None:
            directory.begin({**facts, "joins": joined.run.name, "ranks": [rank for _, rank in processes.slots]})
        display = None if joined else _publish(context, opened, directory, facts)
        return _supervise(context, opened, directory, display, facts)


def _choose_servers(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration with the number of servers, and a line that explains the default."""
    if config.servers is not None or config.strategy is None or not config.strategy.uses_servers:
        return config, []
    count, why = servers.default(config.size, num_cores(), servers.measure())
    return dataclasses.replace(config, servers=count), [why]


def _open_local(context: LaunchContext, joined: Joining | None) -> OpenedBackend:
    """The fork server of this machine, which imports torch from now on, and the coordinator."""
    config, processes, run_id = context.config, context.processes, context.run_id
    if config.serve is not None:
        config.serve.check_port()
    env = common_environment(config, processes, run_id)
    forks = ForkServer(env, preloaded(config), context.reaper, context.screen.log)
    context.cleanup.callback(forks.close)
    coordinator = joined.coordinator if joined else context.open_coordinator(config.bind)

    def start_process(slot: Slot, out: RankStream, err: RankStream) -> RunProcess:
        env = environment(config, processes, run_id, coordinator.address, context.scratch, slot)
        return forks.start(slot, config.argv(), env, context.token, out, err)

    return OpenedBackend(forks, coordinator, start_process, [])


def _publish(
    context: LaunchContext, opened: OpenedBackend, directory: RunDirectory, facts: dict[str, object]
) -> RunDisplay:
    """Opens the run's display and writes the files by which others find the run and its coordinator."""
    if isinstance(opened.backend, HostSet):
        facts["on"] = {host.name: host.address for host in opened.backend.all}
    reaper = context.reaper
    display = RunDisplay(context.config, directory, context.screen, context.signals, facts, reaper.folder)
    context.cleanup.callback(display.close)
    assert not isinstance(opened.coordinator, JoinedCoordinator)
    display.observe(opened.coordinator)
    directory.begin(facts)
    if directory.control_path is not None:
        reaper.file(
            directory.control_path
        )  # before it exists: a launcher killed right after writing it leaves no token
    directory.open_control(run=context.run_id, address=opened.coordinator.address, token=context.token)
    return display


def _supervise(
    context: LaunchContext,
    opened: OpenedBackend,
    directory: RunDirectory,
    display: RunDisplay | None,
    facts: dict[str, object],
) -> int:
    """Starts and supervises the processes, cleans up, writes the run's end, and logs the final message."""
    started_at = time.monotonic()
    config, screen, signals, coordinator = context.config, context.screen, context.signals, opened.coordinator
    supervisor = Supervisor(context, opened, display)
    outcome = supervisor.supervise()
    if isinstance(opened.backend, HostSet):
        missing = opened.backend.finish(os.path.join(context.scratch, TRACE) if config.trace else None)
        if missing and config.trace:
            screen.log(f"the trace lacks the files of host {', '.join(host.name for host in missing)}")
    end: dict[str, object] = {
        "code": outcome.code,
        "cause": outcome.cause,
        "lost": outcome.lost,
        "seconds": round(time.monotonic() - started_at, 3),
        "peak_bytes": supervisor.peak_bytes(),
        "strategy": strategy_spelling(config, coordinator),
        "auto": {key: value.decode(errors="replace") for key, value in coordinator.values("auto/").items()},
        "data": coordinator.views(),
    }
    end["summary"] = summary = display.end(end) if display is not None else {}
    directory.end(end)
    for text in signals.posted():
        screen.log(text)
    if display is not None:
        display.merge_trace(context.scratch, lambda: bool(signals.stop_signals()))
    context.cleanup.close()
    for line in display.summary_lines(facts, summary) if display is not None else ():
        screen.log(line)
    if outcome.text:
        screen.log(outcome.text)
    supervisor.flush()
    return outcome.code


def _facts(config: RunConfig, run_id: str) -> dict[str, object]:
    """What run.json says of a run: the resolved configuration, and where it runs."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    facts = {name: value for name, value in fields.items() if name not in ("name", "join", "progress", "ssh")}
    facts["env"] = [name for name, _ in config.env]  # a value may be a secret
    facts["hosts"] = [f"{host.target}:{host.slots}" for host in config.hosts]
    facts["strategy"] = config.strategy.spell() if config.strategy else None
    facts["serve"] = dataclasses.asdict(config.serve) if config.serve else None
    facts["threads"] = threads(config, config.size + (config.servers if isinstance(config.servers, int) else 0))
    return {"run": run_id, **facts, "cwd": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid()}
