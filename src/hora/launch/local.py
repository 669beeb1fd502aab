"""Local: a run on this machine, from its configuration to its record and its exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..net.machine import num_cores
from ..runs.run_directory import RunDirectory
from ..terminal.screen import Screen, make_log_dir, open_standard_descriptors
from . import servers
from .config import RunConfig
from .display import RunDisplay
from .forkserver.client import ForkServer, preloaded
from .process_set import TRACE, ProcessSet, common_environment, threads
from .reaper import Reaper
from .signal_pipe import STOPPING, SignalPipe
from .supervisor import LaunchContext, Supervisor, spelled

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorService

    from .hosts.host_set import HostSet


def run(config: RunConfig) -> int:
    """Runs `config` on this machine and returns the exit code, one of hora.runs.exit_codes. Main thread only; blocks.

    ValueError for what cannot be had here (an address, a directory for logs, a name in use), before any rank starts.
    """
    open_standard_descriptors()
    config, why = settle_servers(config)
    run_id, token = secrets.token_hex(8), secrets.token_bytes(32)
    if config.serve is not None:
        config.serve.check_port()
    crew = ProcessSet(size=config.size, servers=config.servers, workers=config.size, serves=config.serve is not None)
    with SignalPipe() as wake, contextlib.ExitStack() as undo:
        forks = ForkServer(common_environment(config, crew, run_id), preloaded(config))  # it imports torch meanwhile
        undo.callback(forks.close)
        screen = Screen(size=config.size, color=config.color)
        if config.progress == "auto":
            config = dataclasses.replace(config, progress="panel" if screen.can_panel else "plain")
        desk = open_desk(config, crew, run_id, token)
        undo.callback(desk.close)
        notes = [why] if why else []
        return conduct(open_stage(config, crew, run_id, token, desk, screen, wake, undo, notes, forks=forks), undo)


def open_stage(
    config: RunConfig,
    crew: ProcessSet,
    run_id: str,
    token: bytes,
    desk: CoordinatorService,
    screen: Screen,
    wake: SignalPipe,
    undo: contextlib.ExitStack,
    notes: Sequence[str],
    *,
    forks: ForkServer | None = None,
    sites: HostSet | None = None,
) -> LaunchContext:
    """What a run of our own coordinator needs to be seen and found; `notes` are said first."""
    reaper = open_reaper(run_id, undo)
    make_log_dir(config.log_dir)
    record = RunDirectory(directory=config.run_dir, name=config.name, warn=screen.say)
    undo.callback(record.close)
    for note in notes:
        screen.say(note)
    about = facts(config, run_id)
    if sites is not None:
        about["on"] = {site.name: site.address for site in sites.all}
    show = RunDisplay.of_run(config, record, screen, wake, about, reaper.folder)
    undo.callback(show.close)
    show.watch(desk)
    record.begin(about)
    if record.control_path is not None:
        reaper.file(record.control_path)  # before it exists: a launcher killed right after writing it leaves no token
    record.open_control(run=run_id, address=desk.address, token=token)
    return LaunchContext(
        config=config,
        crew=crew,
        run_id=run_id,
        token=token,
        desk=desk,
        record=record,
        screen=screen,
        wake=wake,
        show=show,
        reaper=reaper,
        forks=forks,
        sites=sites,
    )


def open_reaper(run_id: str, undo: contextlib.ExitStack) -> Reaper:
    """The reaper of a run. It is told of every file and folder before that exists, and it is the last to end."""
    reaper = Reaper(run_id)
    undo.callback(reaper.done)
    return reaper


def conduct(stage: LaunchContext, undo: contextlib.ExitStack) -> int:
    """Starts the crew, sees it to its end, undoes what was set up, writes the record and says the last word."""
    started_at = time.monotonic()
    scratch = stage.reaper.folder("hora-")
    undo.callback(shutil.rmtree, scratch, ignore_errors=True)
    launch = Supervisor(stage, scratch)
    outcome = launch.supervise()
    if stage.sites is not None:
        missing = stage.sites.finish(os.path.join(scratch, TRACE) if stage.config.trace else None)
        if missing and stage.config.trace:
            stage.screen.say(f"the trace lacks what host {', '.join(site.name for site in missing)} had of it")
    end: dict[str, object] = {
        "code": outcome.code,
        "cause": outcome.cause,
        "lost": outcome.lost,
        "seconds": round(time.monotonic() - started_at, 3),
        "peak_bytes": launch.peak_bytes(),
        "strategy": spelled(stage.config, stage.desk),
        "auto": {key: value.decode(errors="replace") for key, value in stage.desk.values("auto/").items()},
        "data": stage.desk.views(),
    }
    end["summary"] = stage.show.end(end)
    stage.record.end(end)
    for text in stage.wake.posted():
        stage.screen.say(text)
    stage.show.merge(scratch, lambda: bool(set(stage.wake.read()) & set(STOPPING)))
    undo.close()
    for sentence in stage.show.last_words(facts(stage.config, stage.run_id)):
        stage.screen.say(sentence)
    if outcome.text:
        stage.screen.say(outcome.text)
    launch.flush()
    return outcome.code


def settle_servers(config: RunConfig) -> tuple[RunConfig, str]:
    """The number of servers settled, and a line that explains it where the command line left it open."""
    if config.servers is not None or config.strategy is None or not config.strategy.uses_servers:
        return config, ""
    count, why = servers.default(config.size, num_cores(), servers.measure())
    return dataclasses.replace(config, servers=count), why


def open_desk(config: RunConfig, crew: ProcessSet, run_id: str, token: bytes) -> CoordinatorService:
    """The run's coordinator, listening. ValueError if it cannot."""
    from hora.coordinator import CoordinatorService

    try:
        service = CoordinatorService(token, size=crew.size, servers=crew.num_servers, bind=config.bind)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise ValueError(f"cannot listen on --bind {config.bind}: {why}; without it: 127.0.0.1") from None
    service.start()
    return service


def facts(config: RunConfig, run_id: str) -> dict[str, object]:
    """What run.json says of a run: the resolved configuration, and where it runs."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    found = {name: value for name, value in fields.items() if name not in ("name", "join", "progress", "ssh")}
    found["env"] = [name for name, _ in config.env]  # a value may be a secret
    found["hosts"] = [f"{host.target}:{host.slots}" for host in config.hosts]
    found["strategy"] = config.strategy.spell() if config.strategy else None
    found["serve"] = dataclasses.asdict(config.serve) if config.serve else None
    servers = config.servers if isinstance(config.servers, int) else 0
    found["threads"] = threads(config, config.size + servers)
    return {"run": run_id, **found, "cwd": os.getcwd(), "host": socket.gethostname(), "pid": os.getpid()}
