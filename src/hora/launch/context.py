"""LaunchContext: what all parts of a launch share; and ProcessBackend: what starts its processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, Union

from ..terminal.screen import RankStream, Screen
from .config import RunConfig
from .process import RunProcess, Slot
from .process_set import ProcessSet
from .reaper import Reaper
from .signal_pipe import SignalPipe, Watched

if TYPE_CHECKING:
    from hora.coordinator import CoordinatorService

    from .joining import JoinedCoordinator

CoordinatorHandle = Union["CoordinatorService", "JoinedCoordinator"]


class ProcessBackend(Protocol):
    """What starts processes and holds them: the fork server of this machine, or the agents of a HostSet.

    Nothing blocks. `descriptors` are to be polled with their handlers, `tick` is to be called at `next_deadline` at
    the latest, and `take_ended` after both.
    """

    pid: int  # of the fork server, whose end is not the run's end; 0 without one
    ready: bool  # processes can be started, or starting one fails at once

    def descriptors(self) -> Watched: ...

    def next_deadline(self) -> float | None: ...

    def tick(self, now: float) -> None: ...

    def take_ended(self) -> list[RunProcess]:
        """The processes that have ended since the last call, reaped."""

    def pause_output(self, paused: bool) -> None: ...


StarterFunction = Callable[[Slot, RankStream, RankStream], RunProcess]


class OpenedBackend(NamedTuple):
    """What starts the processes, and the coordinator that they can reach. `start_process` raises OSError if it cannot;
    `notes` are lines for the user."""

    backend: ProcessBackend
    coordinator: CoordinatorHandle
    start_process: StarterFunction
    notes: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """`run_id` is HORA_RUN of every process of this launch; `scratch` a folder that is removed after it. `cleanup`
    undoes in reverse order what was set up."""

    config: RunConfig
    processes: ProcessSet
    run_id: str
    token: bytes
    screen: Screen
    signals: SignalPipe
    reaper: Reaper
    scratch: str
    cleanup: contextlib.ExitStack

    def open_coordinator(self, bind: str) -> CoordinatorService:
        """The run's coordinator, listening. ValueError if it cannot."""
        from hora.coordinator import CoordinatorService

        size, servers = self.processes.size, self.processes.num_servers
        try:
            service = CoordinatorService(self.token, size=size, servers=servers, bind=bind)
        except OSError as error:
            why = str(error.strerror or error).partition(" (")[0]
            raise ValueError(f"cannot listen on --bind {bind}: {why}; the default is 127.0.0.1") from None
        self.cleanup.callback(service.close)
        service.start()
        return service


def strategy_spelling(config: RunConfig, coordinator: CoordinatorHandle) -> str | None:
    """The run's strategy: the command line's, else the script's, which rank 0 has put into the coordinator."""
    if config.strategy is not None:
        return config.strategy.spell()
    chosen = coordinator.values("strategy").get("strategy")
    return chosen.decode(errors="replace") if chosen is not None else None
