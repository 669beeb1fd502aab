"""Joining: more workers for a running run, started and supervised by a launcher of their own.

The run is found by its name. Its coordinator hands out the ranks, so two launchers never get the same. The processes
belong to the joining launcher alone: they carry its own HORA_RUN and end with it. They learn of the run's end from
their own connections to its coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hora.errors import HoraError
from hora.strategies import Strategy, parse

from ..runs import run_directory
from ..runs.run_directory import RunRecord
from .config import RunConfig
from .process import Slot
from .process_set import ProcessSet

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorClient

CONNECT_S = 3.0
STRATEGY_S = 30.0  # until the script has chosen its strategy
FORM_S = 300.0


@contextlib.contextmanager
def visit(found: RunRecord) -> Iterator[CoordinatorClient]:
    """A connection to a live run's coordinator, in the role `visitor`. ValueError if it does not answer."""
    from hora.coordinator import CoordinatorClient, Member

    address, token = found.control()
    try:
        client = CoordinatorClient(address, token, CONNECT_S)
        client.join(Member("visitor", os.getpid(), socket.gethostname(), os.getpid()), timeout_s=CONNECT_S)
    except HoraError as problem:
        raise ValueError(f"run {found.name!r} does not answer: {problem}") from None
    try:
        yield client
    finally:
        client.close()


class JoinedCoordinator:
    """Stands for the coordinator of another launcher's run, which learns of the workers from their own connections."""

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

    def missing(self) -> list[Slot]:
        return []

    def failures(self) -> list[tuple[Slot, str]]:
        return []

    def values(self, prefix: str) -> dict[str, bytes]:
        return {}

    def views(self) -> str:
        return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joining:
    """A run with ranks reserved in it: `config` with the run's own settings, the processes to start, and `name` and
    `directory` of the record that the joining launcher writes."""

    run: RunRecord
    config: RunConfig
    processes: ProcessSet
    coordinator: JoinedCoordinator
    token: bytes
    name: str
    directory: str | None


def reserve(config: RunConfig) -> Joining:
    """Reserves `config.size` ranks in the run `config.join`.

    ValueError if there is no such run, if its strategy is not elastic, or if it has ended.
    """
    assert config.join is not None
    found = run_directory.find(config.join, config.run_dir)
    if not found.live:
        raise ValueError(f"run {found.name!r} has ended; {run_directory.live_runs()}")
    address, token = found.control()
    with visit(found) as client:
        strategy = _elastic_strategy(found, client)
        try:
            first = client.reserve(config.size, FORM_S)
        except HoraError as problem:
            raise ValueError(f"run {found.name!r} cannot be joined: {problem}") from None
    begun, suffix = found.config, f"-join-{first}"
    return Joining(
        run=found,
        name=found.name + suffix,
        directory=found.path + suffix if config.run_dir else None,
        config=dataclasses.replace(
            config,
            join=None,
            strategy=strategy,
            timeout_s=begun.get("timeout_s"),
            max_steps=begun.get("max_steps"),
            bind=begun.get("bind", config.bind),
        ),
        processes=ProcessSet(size=int(begun["size"]), servers=begun.get("servers"), first=first, workers=config.size),
        coordinator=JoinedCoordinator(address),
        token=token,
    )


def _elastic_strategy(found: RunRecord, client: CoordinatorClient) -> Strategy:
    """The run's strategy: the command line's, else the script's, which rank 0 has put into the coordinator."""
    spelling = found.config.get("strategy")
    try:
        if spelling is None:
            spelling = client.get("strategy", STRATEGY_S).decode()
        strategy = parse(spelling)
    except (HoraError, ValueError) as problem:
        raise ValueError(f"the strategy of run {found.name!r} is unknown: {problem}") from None
    if not strategy.elastic:
        raise ValueError(
            f"run {found.name!r} cannot be joined: its strategy is {spelling}, and workers may join under "
            "ps:mode=async, ps:mode=ssp and local:via=ps,barrier=false"
        )
    return strategy
