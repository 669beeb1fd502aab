"""Contestants of `hora bench ps`, their results, and ProcessPool: processes that measure on request.

Each process prints {"ready": true} once it is, then one JSON line for each JSON line on its stdin, and ends when stdin
does. They stay alive from round to round and block in between: starting some of the peers takes long.
`stop` ends all processes that a pool has started, also those outside its process group: they have the pool's mark in
their environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import selectors
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

START_S = 180.0
SLACK_S = 60.0  # over the seconds that were asked for: the last push-pull of a crowded machine may take long
LEAVE_S = 10.0
TERM_S = 3.0
TAIL_LINES = 12
MARK = "HORA_BENCH_CREW"

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One measurement. `updates_per_s` counts the updates of all workers together.

    `latency_s` is the median time of one push-pull as a worker sees it, `server_cpu` the cores that all servers kept
    busy, `wire_gb_per_s` what was seen to cross the loopback device, where that was counted.
    """

    name: str
    workers: int
    servers: int
    params: int
    updates_per_s: float
    gb_per_s: float
    latency_s: float
    server_cpu: float | None = None
    wire_gb_per_s: float | None = None


class Contestant(Protocol):
    """`start` and `stop` may be called again and then do nothing; `measure` blocks for about `seconds`.

    RuntimeError from `start` or `measure` says why there is no result; the others go on.
    """

    @property
    def name(self) -> str: ...

    def start(self) -> None: ...

    def measure(self, seconds: float) -> Result: ...

    def stop(self) -> None: ...


def gb_per_s(params: int, updates_per_s: float) -> float:
    """The gradient in and the parameters out, float32."""
    return updates_per_s * params * 4 * 2 / 1e9


class ProcessPool:
    """Processes that get each request together. For one thread."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], env: dict[str, str] | None = None) -> None:
        self.name = name
        self._commands = commands
        self._mark = uuid.uuid4().hex
        self._env = {**os.environ, **(env or {}), MARK: self._mark}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[Any] = []

    def start(self) -> None:
        """Returns when all are ready. Raises RuntimeError with the end of its stderr if one is not."""
        if self._processes:
            return
        for command in self._commands:
            self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115 (closed by stop)
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=self._env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors[-1],
                    start_new_session=True,
                )
            )
        self._answers(START_S)

    def ask(self, request: Answer, limit_s: float) -> list[Answer]:
        """Sends the request to all at once; returns their answers in order."""
        if not self._processes:
            raise RuntimeError(f"{self.name}: not running")
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure("ended between two measurements") from None
        return self._answers(limit_s)

    def _answers(self, limit_s: float) -> list[Answer]:
        found: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for index, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, index)
            while len(found) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._failure(f"no answer in {limit_s:g} s")
                for key, _ in ready:
                    process = self._processes[key.data]
                    assert process.stdout is not None
                    line = process.stdout.readline()  # a line is written at once: to wait for its end costs nothing
                    if not line.endswith(b"\n"):
                        process.wait()
                        raise self._failure(f"ended with exit code {process.returncode}")
                    found[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [found[index] for index in sorted(found)]

    def _failure(self, what: str) -> RuntimeError:
        """Ends the pool; the error carries the last lines of every stderr."""
        errors, self._errors = self._errors, []
        self.stop(leave_s=0.0)
        said = []
        for file in errors:
            file.seek(0)
            said += [f"  {line}" for line in file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]]
            file.close()
        return RuntimeError("\n".join([f"{self.name}: {what}", *said]))

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Lets them end by themselves for `leave_s`, then ends them, with SIGTERM, then SIGKILL."""
        try:
            for process in self._processes:
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with contextlib.suppress(BrokenPipeError):
                            pipe.close()
            if not self._gone(leave_s):
                self._signal(signal.SIGTERM)
                self._gone(TERM_S)
        finally:
            # Nothing to wait for here, so that a second Ctrl-C finds no moment to leave something running.
            self._signal(signal.SIGKILL)
            if self._processes:
                end_marked(self._mark)
            for process in self._processes:
                process.wait()
            for file in self._errors:
                file.close()
            self._processes, self._errors = [], []

    def _gone(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


def end_marked(mark: str) -> None:
    """Ends every process that was started with this mark: Ray's daemons lead groups of their own. Linux only."""
    wanted = f"{MARK}={mark}".encode()
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


@dataclasses.dataclass(kw_only=True)
class PoolContestant:
    """A contestant that asks a pool, which it may share with another one: `request` says what is wanted of it."""

    name: str
    pool: ProcessPool
    workers: int
    params: int
    servers: int = 1
    request: Answer = dataclasses.field(default_factory=dict)

    def start(self) -> None:
        self.pool.start()

    def measure(self, seconds: float) -> Result:
        answers = self.pool.ask({**self.request, "seconds": seconds}, seconds + SLACK_S)
        updates_per_s = sum(answer["updates_per_s"] for answer in answers)
        return Result(
            name=self.name,
            workers=self.workers,
            servers=self.servers,
            params=self.params,
            updates_per_s=updates_per_s,
            gb_per_s=gb_per_s(self.params, updates_per_s),
            latency_s=statistics.median(answer["latency_s"] for answer in answers),
            server_cpu=answers[0].get("server_cpu"),
            wire_gb_per_s=answers[0].get("wire_gb_per_s"),
        )

    def stop(self) -> None:
        self.pool.stop()
