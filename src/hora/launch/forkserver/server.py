"""The fork server's own process: imports torch and Hora, then forks a child for every ForkRequest.

It has one thread, runs no parallel operation and initialises no device, so that its children can do all of that. Its
children end with it, and it ends what it has started for a launcher when that launcher closes its line.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from ..reaper import sweep
from . import interpreter
from .messages import (
    MAX_DESCRIPTORS,
    ForkReply,
    ForkRequest,
    FrameReader,
    FromServer,
    ProcessExit,
    ServerReady,
    SignalRequest,
    decode_client,
    frame,
)

LOOK_S = 0.05
"""Where there are no pidfds: how often ended children are looked for."""


class ClientConnection:
    """A launcher's connection, and what was started for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pids: set[int] = set()
        self.mark = ""  # of the run that its processes belong to
        self.descriptors: list[int] = []  # that have come and belong to messages that are still to be read
        self._frames = FrameReader()

    def receive(self) -> list[ForkRequest | SignalRequest] | None:
        """What has come; None at the end of the line."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, MAX_DESCRIPTORS)
        except OSError:
            return None
        self.descriptors += descriptors
        return [decode_client(body) for body in self._frames.feed(data)] if data else None

    def send(self, message: FromServer) -> None:
        with contextlib.suppress(OSError):  # its end is noticed where it is read
            self.sock.sendall(frame(message))

    def take(self, count: int) -> list[int]:
        taken, self.descriptors = self.descriptors[:count], self.descriptors[count:]
        return taken


class ForkedChild(NamedTuple):
    """In a forked child: what it is to become. `warm`: it may run in the interpreter that it was forked with."""

    start: ForkRequest
    descriptors: list[int]
    warm: bool


class ForkLoop:
    """One loop waits for everything: launchers, and the ends of children."""

    def __init__(self, first: socket.socket | None, listening: socket.socket | None, problem: str) -> None:
        self._lines: dict[int, ClientConnection] = {}
        self._listening = listening
        self._children: dict[
            int, tuple[ClientConnection, int]
        ] = {}  # by pid: for whom, and its pidfd, -1 where there are none
        self._problem = problem
        self._poller = select.poll()
        self._pid = os.getpid()
        if listening is not None:
            self._poller.register(listening, select.POLLIN)
        if first is not None:
            self._add(first)

    def serve(self) -> ForkedChild:
        """Returns in children only; ends the process when the last launcher's line ends and no other can come."""
        while True:
            ready = self._poller.poll(None if hasattr(os, "pidfd_open") else LOOK_S * 1000)
            for descriptor, _ in ready:
                if self._listening is not None and descriptor == self._listening.fileno():
                    with contextlib.suppress(OSError):
                        self._add(self._listening.accept()[0])
                elif (line := self._lines.get(descriptor)) is not None:
                    child = self._read(line)
                    if child is not None:
                        return child
            self._reap()
            if not self._lines and self._listening is None:
                os._exit(0)

    def _add(self, sock: socket.socket) -> None:
        line = ClientConnection(sock)
        self._lines[sock.fileno()] = line
        self._poller.register(sock, select.POLLIN)
        line.send(ServerReady(self._pid, self._problem))

    def _read(self, line: ClientConnection) -> ForkedChild | None:
        messages = line.receive()
        if messages is None:
            self._end(line)
            return None
        for message in messages:
            if isinstance(message, ForkRequest):
                child = self._start(line, message)
                if child is not None:
                    return child
            elif message.pid in line.pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.killpg if message.group else os.kill)(message.pid, message.number)
        return None

    def _start(self, line: ClientConnection, start: ForkRequest) -> ForkedChild | None:
        descriptors = line.take(3 + len(start.passed))
        line.mark = start.env.get("HORA_RUN", line.mark)
        warm = (
            not self._problem and num_threads() == 1
        )  # else locks may be held that no thread of the child will release
        try:
            pid = os.fork()
        except OSError as problem:
            line.send(ForkReply(0, problem.strerror or str(problem)))
            return None
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self._forget()
            return ForkedChild(start, interpreter.detach(self._pid, descriptors), warm)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        if pidfd >= 0:
            self._poller.register(pidfd, select.POLLIN)
        line.pids.add(pid)
        self._children[pid] = line, pidfd
        line.send(ForkReply(pid))
        return None

    def _forget(self) -> None:
        """In a child: the numbers of our descriptors will be others' soon, and no object of ours may close them."""
        for line in self._lines.values():
            line.sock.detach()
        if self._listening is not None:
            self._listening.detach()

    def _reap(self) -> None:
        """An ended child is not reaped before what is left of its group has been killed: until then its number cannot
        be given to another process, so no signal can hit a stranger."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # when only the leader is left
                os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            line, pidfd = self._children.pop(pid)
            if pidfd >= 0:
                self._poller.unregister(pidfd)
                os.close(pidfd)
            line.pids.discard(pid)
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            line.send(ProcessExit(pid, os.waitstatus_to_exitcode(status), peak))

    def _end(self, line: ClientConnection) -> None:
        """The launcher is gone, or done: nothing that was started for it stays."""
        self._poller.unregister(line.sock)
        del self._lines[line.sock.fileno()]
        line.sock.close()
        for descriptor in line.descriptors:
            os.close(descriptor)
        for pid in line.pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if line.pids and line.mark:
            sweep(line.mark)


def _preload(modules: Sequence[str]) -> str:
    """Imports; what stands in the way of forking afterwards, in words, or nothing."""
    if not modules:
        return "interpreters were asked for"
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception as problem:  # whatever it is, each process will meet it by itself and show it
        return f"{name} cannot be imported ({type(problem).__name__}: {problem})"
    threads = num_threads()
    if threads != 1:
        return f"importing torch has left {threads} threads running"
    gc.collect()
    gc.freeze()
    return ""


def num_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def main(descriptor: int, modules: Sequence[str], listens: bool) -> NoReturn:
    """The life of the process that `client.py` starts; `descriptor` is a launcher's line, or `listens` for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interpreter.show_command([f"{sys.executable} -m hora: fork server"])
    if listens:
        interpreter.end_with_parent()
    own_blas = os.environ.get(interpreter.BLAS_THREADS)
    os.environ.setdefault(interpreter.BLAS_THREADS, "1")
    problem = _preload(modules)
    if own_blas is None:
        del os.environ[interpreter.BLAS_THREADS]
    imported_with = interpreter.import_time(os.environ)
    sock = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    server = ForkLoop(None if listens else sock, sock if listens else None, problem)
    child = server.serve()
    become(child, imported_with)


def become(child: ForkedChild, imported_with: dict[str, str]) -> NoReturn:
    """In a forked child: the process that was asked for, in this interpreter or in a new one."""
    start = child.start
    env = start.env | dict(zip(start.passed, map(str, child.descriptors), strict=True))
    wanted = interpreter.import_time(env)
    if child.warm and start.fork and _without_threads(wanted) == _without_threads(imported_with):
        interpreter.adopt_environment(env, start.cwd)
        if not interpreter.shadowed(start.argv):
            threads = wanted.get(interpreter.THREADS, "")
            if threads != imported_with.get(interpreter.THREADS, "") and threads.isdecimal():
                interpreter.set_threads(threads)
            interpreter.set_blas_threads(wanted.get(interpreter.BLAS_THREADS, threads))
            interpreter.reseed()
            interpreter.started_with = wanted
            interpreter.end_quickly()
            interpreter.run(start.argv)
    try:
        os.chdir(start.cwd)
        os.execve(start.argv[0], start.argv, env)
    except OSError as problem:
        print(f"{start.argv[0]} cannot be run: {problem.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _without_threads(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name != interpreter.THREADS}
