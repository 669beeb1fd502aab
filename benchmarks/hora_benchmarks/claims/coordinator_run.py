"""ObservedRun: a run whose coordinator is observed while it goes on, for claim `coordinator`.

The processes get the environment that `hora run` gives them, and join a coordinator in this process, which counts
what passes through it. They train when they are asked to (bench/process_pool.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import secrets
import sys
import tempfile
from collections.abc import Iterator

from hora.coordinator import CoordinatorService
from hora.coordinator.messages import AnyRequest
from hora.coordinator.state import Coordinator, Out
from hora.launch import process_set
from hora.launch.config import RunConfig
from hora.net.framing import frame
from hora.rendezvous.environment import NAMES
from hora.strategies import parse

from ..bench.process_pool import Answer, ProcessPool

RANK = "hora_benchmarks.claims.coordinator_rank"
TURN_S = 300.0
TOKEN_FD = 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """`metrics`: whether the processes report what they do and log, as they do unless it is turned off."""

    strategy: str
    workers: int
    params: int
    metrics: bool = True
    servers: int = 0


class Counting(Coordinator):
    """Counts requests by their kind, and bytes: of the request, and of all messages that it caused."""

    def __init__(self, size: int, servers: int) -> None:
        super().__init__(size, servers)
        self.messages: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def handle(self, connection: int, request: AnyRequest) -> Out:
        out = super().handle(connection, request)
        kind = str(request.__struct_config__.tag)
        self.messages[kind] += 1
        self.bytes[kind] += len(frame(request)) + sum(len(frame(answer)) for _, answer in out)
        return out


@dataclasses.dataclass(frozen=True)
class Count:
    """What has passed so far; the difference of two is what passed in between. `by_kind`: messages in, and bytes."""

    total_bytes: int
    by_kind: dict[str, tuple[int, int]]

    def since(self, before: Count) -> Answer:
        grown = {}
        for kind, (messages, num_bytes) in self.by_kind.items():
            messages_before, bytes_before = before.by_kind.get(kind, (0, 0))
            if messages > messages_before:
                grown[kind] = [messages - messages_before, num_bytes - bytes_before]
        return {"bytes": self.total_bytes - before.total_bytes, "by_kind": grown}


class ObservedRun:
    """One caller, one thread. `start` blocks until all processes are ready, `stop` until they have left."""

    def __init__(self, setting: Setting, folder: pathlib.Path) -> None:
        self.setting = setting
        token = secrets.token_bytes(32)
        self._service = CoordinatorService(token, setting.workers, servers=setting.servers)
        self._counting = self._service.coordinator = Counting(setting.workers, setting.servers)
        self._pool = ProcessPool(f"{setting.strategy} with {setting.workers}", self._commands(folder, token))

    def start(self) -> Answer:
        """What passed until the first step could begin."""
        self._service.start()
        self._pool.start()
        return self.count().since(Count(0, {}))

    def ask(self, steps: int, lead: int) -> Answer:
        """All workers take so many steps, `lead` others just before. What passed in the steps, from the end of the lead
        until the last one was over; bytes of tensors, and seconds: those of the slowest.

        Idle workers report nothing. After a lead of a report's interval the first report of the turn tells as many
        steps as any other, and so makes up for those that the turn's end leaves to a later one."""
        self._pool.ask({"steps": lead}, TURN_S)
        before = self.count()
        told = [answer for answer in self._pool.ask({"steps": steps}, TURN_S) if answer]
        return self.count().since(before) | {
            "tensor_bytes": sum(answer["sent_bytes"] for answer in told),
            "seconds": max(answer["seconds"] for answer in told),
        }

    def stop(self) -> Answer:
        """What passed while they left."""
        before = self.count()
        self._pool.stop()
        return self.count().since(before)

    def close(self) -> None:
        """Ends all processes that are left."""
        self._pool.stop(0.0)
        self._service.close()

    def count(self) -> Count:
        counted = self._counting
        messages = dict(counted.messages)  # a copy: the service goes on counting in a thread of its own
        by_kind = {kind: (number, counted.bytes[kind]) for kind, number in messages.items()}
        return Count(self._service.bytes_in + self._service.bytes_out, by_kind)

    def _commands(self, folder: pathlib.Path, token: bytes) -> list[list[str]]:
        """The launcher passes the token on in a descriptor; here a shell opens it for each process."""
        setting = self.setting
        path = folder / "token"
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(token)
        strategy = parse(setting.strategy)
        config = RunConfig(command=(RANK,), module=True, size=setting.workers, strategy=strategy, progress="off")
        crew = process_set.ProcessSet(size=setting.workers, workers=setting.workers, servers=setting.servers or None)
        commands = []
        for seat in crew.slots:
            words = process_set.identity(config, crew, self._service.address, seat, seat[1], setting.workers)
            words |= {"HORA_RUN": folder.name, "HORA_TOKEN_FD": str(TOKEN_FD), "HORA_SCRATCH": str(folder)}
            words |= {"HORA_WATCH": "1" if setting.metrics else "off", "OMP_NUM_THREADS": "1"}
            env = [*(f"--unset={name}" for name in NAMES), *(f"{name}={value}" for name, value in words.items())]
            opened = ["sh", "-c", f'exec "$@" {TOKEN_FD}<"$0"', str(path)]
            commands.append(["env", *env, *opened, sys.executable, "-m", RANK, str(setting.params)])
        return commands


@contextlib.contextmanager
def opened(setting: Setting) -> Iterator[ObservedRun]:
    """No process is left running afterwards."""
    with tempfile.TemporaryDirectory(prefix="hora-claim-") as folder:
        run = ObservedRun(setting, pathlib.Path(folder))
        try:
            yield run
        finally:
            run.close()
