"""Joining: more workers for a run that is going on, started and watched by a launcher of their own.

The run is found by its name; its coordinator hands out the new workers' ranks, so that two who join never get the same.
The children belong to this launcher alone: they carry its mark, and its end is theirs. When the run itself ends they
notice by their lines to its coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hora.errors import HoraError
from hora.strategies import Strategy, parse

from ..runs import run_directory
from ..runs.run_directory import RunDirectory, RunRecord
from ..terminal.screen import Screen, make_log_dir, open_standard_descriptors
from .config import RunConfig
from .display import RunDisplay
from .forkserver.client import ForkServer, preloaded
from .local import conduct, facts, open_reaper
from .process_set import ProcessSet, Seat, common_environment
from .signal_pipe import SignalPipe
from .supervisor import LaunchContext

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorClient

REACH_S = 3.0
STRATEGY_S = 30.0  # how long a script may take to say which strategy it chose
FORM_S = 300.0


@contextlib.contextmanager
def visit(found: RunRecord) -> Iterator[CoordinatorClient]:
    """A visitor's line to a live run's coordinator; ValueError if it does not answer."""
    from hora.coordinator import CoordinatorClient, Member

    address, token = found.control()
    try:
        line = CoordinatorClient(address, token, REACH_S)
        line.join(Member("visitor", os.getpid(), socket.gethostname(), os.getpid()), timeout_s=REACH_S)
    except HoraError as problem:
        raise ValueError(f"run {found.name!r} does not answer: {problem}") from None
    try:
        yield line
    finally:
        line.close()


class RemoteCoordinator:
    """What takes the coordinator's place for a launcher whose run is another's: it hears of the children from
    themselves, by their own lines, and by the breaking of those."""

    formed = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address

    def report_death(self, rank: int, reason: str, role: str = "worker") -> None:
        pass

    def report_exit(self, rank: int, role: str = "worker") -> None:
        pass

    def joined(self) -> dict[int, str]:
        return {}

    def has_ended(self) -> bool:
        return False

    def missing(self) -> list[Seat]:
        return []

    def failures(self) -> list[tuple[Seat, str]]:
        return []

    def values(self, prefix: str) -> dict[str, bytes]:
        return {}

    def views(self) -> str:
        return ""


def join(config: RunConfig) -> int:
    """Starts `config.size` workers that join the run `config.join`; returns as `local.run` does.

    ValueError if there is no such run, if it is not elastic, or if it is over.
    """
    assert config.join is not None
    open_standard_descriptors()
    found = run_directory.find(config.join, config.run_dir)
    if not found.live:
        raise ValueError(f"run {found.name!r} has ended; {run_directory.live_runs()}")
    address, token = found.control()
    with visit(found) as line:
        strategy = _strategy_of(found, line)
        try:
            first = line.reserve(config.size, FORM_S)
        except HoraError as problem:
            raise ValueError(f"run {found.name!r} cannot be joined: {problem}") from None
    begun = found.config
    config = dataclasses.replace(
        config,
        join=None,
        strategy=strategy,
        timeout_s=begun.get("timeout_s"),
        max_steps=begun.get("max_steps"),
        bind=begun.get("bind", config.bind),
    )
    crew = ProcessSet(size=int(begun["size"]), servers=begun.get("servers"), first=first, workers=config.size)
    run_id = secrets.token_hex(8)  # its own: each launcher ends what carries its mark, and nothing else
    screen = Screen(size=first + config.size, color=config.color)
    beside = f"{found.path}-join-{first}" if config.run_dir else None
    with SignalPipe() as wake, contextlib.ExitStack() as undo:
        forks = ForkServer(common_environment(config, crew, run_id), preloaded(config))
        undo.callback(forks.close)
        reaper = open_reaper(run_id, undo)
        make_log_dir(config.log_dir)
        record = RunDirectory(directory=beside, name=f"{found.name}-join-{first}", warn=screen.say)
        undo.callback(record.close)
        ranks = [rank for _, rank in crew.seats]
        record.begin({**facts(config, run_id), "joins": found.name, "ranks": ranks})
        stage = LaunchContext(
            config=config,
            crew=crew,
            run_id=run_id,
            token=token,
            desk=RemoteCoordinator(address),
            record=record,
            screen=screen,
            wake=wake,
            show=RunDisplay(),
            reaper=reaper,
            forks=forks,
        )
        return conduct(stage, undo)


def _strategy_of(found: RunRecord, line: CoordinatorClient) -> Strategy:
    """The run's strategy, which must be one that workers may join; what its script chose, rank 0 has told."""
    spelling = found.config.get("strategy")
    try:
        if spelling is None:
            spelling = line.get("strategy", STRATEGY_S).decode()
        strategy = parse(spelling)
    except (HoraError, ValueError) as problem:
        raise ValueError(f"run {found.name!r} does not tell its strategy: {problem}") from None
    if not strategy.elastic:
        raise ValueError(
            f"run {found.name!r} cannot be joined: its strategy is {spelling}, and workers may join under "
            "ps:mode=async and ps:mode=ssp"
        )
    return strategy
