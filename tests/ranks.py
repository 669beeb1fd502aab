"""Ranks as threads: `run(4, check)` calls `check(group)` on four ranks at once and raises what any of them raised."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from hora.collectives import Group
from hora.coordinator import InProcessCoordinator, Member
from hora.errors import HoraError
from hora.rendezvous.context import RunContext
from hora.transport import InProcessHub
from hora.world import World

TOKEN = b"t" * 32
_OF_CONTEXT = {"bind", "rate_bytes_per_s"}


class Run:
    """The ranks of one test: their worlds, their hub (the coordinator), what they returned or raised."""

    def __init__(self, size: int, transport: str = "memory", timeout_s: float = 20.0, **options: Any) -> None:
        self.size = size
        self.hub = InProcessCoordinator(size)
        self.worlds: list[World | None] = [None] * size
        self.results: list[Any] = [None] * size
        self.errors: list[BaseException | None] = [None] * size
        self._hub = InProcessHub() if transport == "memory" else None
        self._identity: dict[str, Any] = {key: options.pop(key) for key in _OF_CONTEXT & options.keys()}
        self._timeout_s = timeout_s
        self._options = dict(options, transport=transport)

    def start(self, work: Callable[[Group], Any]) -> Run:
        self._threads = [
            threading.Thread(target=self._rank, args=(rank, work), daemon=True) for rank in range(self.size)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def finish(self, patience_s: float = 40.0) -> Run:
        for rank, thread in enumerate(self._threads):
            thread.join(patience_s)
            assert not thread.is_alive(), f"rank {rank} hangs"
        for world in self.worlds:
            if world:
                world.close()
        return self

    def _rank(self, rank: int, work: Callable[[Group], Any]) -> None:
        try:
            line = self.hub.connect()
            reply = line.join(Member("worker", rank, "test", os.getpid()))
            context = RunContext(control=line, token=TOKEN, rank=rank, timeout_s=self._timeout_s, **self._identity)
            world = World(context, reply.members, reply.generation, hub=self._hub, **self._options)
            self.worlds[rank] = world
            self.results[rank] = work(world.group)
        except BaseException as error:
            self.errors[rank] = error


def run(size: int, work: Callable[[Group], Any], transport: str = "memory", **options: Any) -> list[Any]:
    """The results in order of rank; raises what a rank raised, rather a failure of its own than a lost peer."""
    done = Run(size, transport, **options).start(work).finish()
    errors = [error for error in done.errors if error is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, HoraError)):
        raise error
    return done.results


def failures(size: int, work: Callable[[Group], Any], transport: str = "memory", **options: Any) -> list[Any]:
    """What each rank raised, None where it did not."""
    return Run(size, transport, **options).start(work).finish().errors
