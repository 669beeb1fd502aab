"""Conductor: starts every contestant of `hora bench train` as its user would, and lets one at a time take its steps.

All contestants are started at once and build their models; then each blocks on a Unix socket until the conductor sends
it a request. One that ends early, or does not answer in time, is named with the last lines of its stderr; the others
go on. `close` leaves no process behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import pty
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

START_S = 300.0  # for all of them together: many processes import torch at the same time
TURN_S = 60.0
STEP_S = 10.0
POLL_S = 0.1
SETTLE_S = 3.0  # how long the rest of a failed contestant may take to write its error
LEAVE_S = 10.0
TERM_S = 4.0
TAIL_LINES = 15

Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """`how` is plain, kept, ddp, hora or logged; `strategy`, `servers` and further `flags` are for `hora run`, in which
    {folder} stands for the contestant's own. `terminal`: its stderr is one, and what it writes is read from there."""

    name: str
    ranks: int
    how: str = "plain"
    strategy: str | None = None
    servers: str | None = None
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    terminal: bool = False


class Running:
    """A contestant's processes, each leading a process group, and the connection to each of its ranks."""

    def __init__(self, contestant: Contestant, model: str, device: str, path: str, folder: pathlib.Path) -> None:
        self.contestant = contestant
        self.lines: dict[int, tuple[socket.socket, IO[bytes]]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.batch_size = 0
        self.failure = ""
        self.folder = folder
        folder.mkdir()
        rank_of = ["-m", "hora_benchmarks.bench.train_rank", path, contestant.name, contestant.how, model, device]
        env = dict(os.environ, OMP_NUM_THREADS="1", **dict(contestant.env))
        if contestant.how in ("hora", "logged", "path"):
            strategy = ["--strategy", contestant.strategy] if contestant.strategy else []
            strategy += ["--servers", contestant.servers] if contestant.servers else []
            flags = [flag.replace("{folder}", str(folder)) for flag in contestant.flags]
            run = ["-m", "hora.cli.main", "run", "-n", str(contestant.ranks), *strategy, *flags]
            self._start([*run, "--run-dir", str(folder / "run"), *rank_of], env)
            return
        # They meet in a file: a port that was free may be taken, with so many starting, before DDP listens on it.
        env |= {"WORLD_SIZE": str(contestant.ranks), "MEET_AT": (folder / "store").as_uri()}
        for rank in range(contestant.ranks):
            self._start(rank_of, env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})

    def _start(self, arguments: list[str], env: dict[str, str]) -> None:
        with open(self.folder / f"{len(self.processes)}.err", "wb") as err:
            screen = _terminal(err.fileno()) if self.contestant.terminal else None
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=err if screen is None else screen,
                    start_new_session=True,
                )
            )
        if screen is not None:
            os.close(screen)

    @property
    def ready(self) -> bool:
        return len(self.lines) == self.contestant.ranks

    @property
    def alive(self) -> bool:
        return not self.failure

    def ended(self) -> bool:
        """Whether one of its processes has ended."""
        return any(process.poll() is not None for process in self.processes)

    def hang_up(self) -> None:
        for line, file in self.lines.values():
            file.close()
            line.close()
        self.lines = {}

    def wait(self, limit_s: float) -> bool:
        """Whether all of its processes have ended within `limit_s`."""
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def signal(self, number: int) -> None:
        """To every group that is left. A launcher passes SIGTERM on; after SIGKILL its reaper ends its ranks."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)

    def fail(self, what: str, settle_s: float = SETTLE_S) -> None:
        """Ends what is left of it after `settle_s` and keeps the end of its stderr as the reason."""
        self.wait(settle_s)
        codes = [process.poll() for process in self.processes]
        end([self])
        said: list[str] = []
        for index, code in enumerate(codes):
            lines = (self.folder / f"{index}.err").read_text(errors="replace").splitlines()
            whose = "" if len(codes) == 1 else f"rank {index}, "
            said.append(f"  {whose}{_how_it_ended(code)}{', stderr:' if lines else ', nothing on stderr'}")
            said += [f"    {line}" for line in lines[-TAIL_LINES:]]
        self.failure = "\n".join([f"{self.contestant.name}: {what}", *said])


class Conductor:
    """Call `start`, then `turn` as often as wanted; `close` in any case. One caller, one thread."""

    def __init__(self, contestants: Sequence[Contestant], model: str, folder: str, device: str = "cpu") -> None:
        """`folder` is private (0700): a process that can reach the socket in it can drive the benchmark."""
        self._path = os.path.join(folder, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(sum(contestant.ranks for contestant in contestants))
        self._listener.setblocking(False)
        self._contestants = contestants
        self._model = model
        self._device = device
        self._folder = pathlib.Path(folder)
        self.running: dict[str, Running] = {}

    def start(self, limit_s: float = START_S) -> None:
        """Starts all and returns when each of them is ready or has failed."""
        for index, contestant in enumerate(self._contestants):
            folder = self._folder / str(index)
            self.running[contestant.name] = Running(contestant, self._model, self._device, self._path, folder)
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while waiting := [one for one in self.running.values() if one.alive and not one.ready]:
                if selector.select(POLL_S):
                    self._accept()
                    continue
                for one in waiting:
                    if one.ended():
                        one.fail("ended before it was ready")
                    elif time.monotonic() > deadline:
                        one.fail(
                            f"{one.contestant.ranks - len(one.lines)} of its ranks were not ready in {limit_s:g} s"
                        )

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        line.settimeout(TURN_S)
        file = line.makefile("rb")
        text = file.readline()
        if not text:
            return  # it died between two lines; its process has the reason
        hello = json.loads(text)
        one = self.running[hello["name"]]
        one.lines[hello["rank"]] = (line, file)
        one.batch_size = hello["batch_size"]

    def turn(self, name: str, steps: int, limit_s: float | None = None) -> list[Answer] | None:
        """Lets a contestant take `steps`; its ranks' answers in order, or None if it failed, then or earlier."""
        one = self.running[name]
        if not one.alive:
            return None
        limit_s = limit_s if limit_s is not None else TURN_S + steps * STEP_S
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        try:
            with selectors.DefaultSelector() as selector:
                for rank, (line, _) in one.lines.items():
                    selector.register(line, selectors.EVENT_READ, rank)
                for line, _ in one.lines.values():
                    line.sendall(json.dumps({"steps": steps}).encode() + b"\n")
                while len(answers) < len(one.lines):
                    ready = selector.select(max(0.0, deadline - time.monotonic()))
                    if not ready:
                        missing = ", ".join(str(rank) for rank in sorted(set(one.lines) - set(answers)))
                        one.fail(f"no answer from rank {missing} in {limit_s:g} s", settle_s=0.0)
                        return None
                    for key, _ in ready:
                        text = one.lines[key.data][1].readline()
                        if not text.endswith(b"\n"):
                            one.fail(f"rank {key.data} ended in the middle of its steps")
                            return None
                        answers[key.data] = json.loads(text)
        except OSError as error:
            one.fail(f"the line to one of its ranks broke: {error}")
            return None
        return [answers[rank] for rank in sorted(answers)]

    @property
    def failures(self) -> list[str]:
        return [one.failure for one in self.running.values() if one.failure]

    def close(self, leave_s: float = LEAVE_S) -> None:
        """Hangs up; the ranks then end by themselves, or are ended after `leave_s`. Calling it again does nothing."""
        self._listener.close()
        end(list(self.running.values()), leave_s)


def end(those: Sequence[Running], leave_s: float = 0.0) -> None:
    """Ends contestants, with SIGTERM, then SIGKILL; an interruption here ends them at once."""
    for one in those:
        one.hang_up()
    try:
        for number, limit_s in ((None, leave_s), (signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)):
            deadline = time.monotonic() + limit_s
            for one in those:
                if number is not None:
                    one.signal(number)
            if all(one.wait(max(0.0, deadline - time.monotonic())) for one in those):
                return
    except BaseException:
        for one in those:
            one.signal(signal.SIGKILL)
        raise


def _terminal(copy_fd: int) -> int:
    """A terminal's descriptor to write to; a thread reads what it shows into the file behind `copy_fd`."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    kept = os.dup(copy_fd)

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(reading, 1 << 16):
                os.write(kept, data)
        os.close(reading)
        os.close(kept)

    threading.Thread(target=read, name="hora-bench-terminal", daemon=True).start()
    return writing


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "had to be ended"
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
