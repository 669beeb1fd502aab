"""The fork server process: imports torch and Hora once, then forks a child for every ForkProcess message.

It has one thread, runs no parallel operation and initialises no device, so that its children can do all of that. Its
children end with it. When a launcher closes its connection, the processes started for that launcher are killed.
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
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from hora.net.framing import FrameReader, frame

from .. import messages
from ..reaper import sweep
from . import interpreter

if TYPE_CHECKING:
    from ..process import Slot

REAP_EVERY_S = 0.05
"""Where there are no pidfds: how often to look for ended children."""


class ClientConnection:
    """A launcher's connection and the processes started for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.pids: dict[Slot, int] = {}
        self.run_id = ""  # HORA_RUN of its processes
        self.descriptors: list[int] = []  # received, for messages that are still to be handled
        self._frames = FrameReader()

    def receive(self) -> list[messages.ToForkServer] | None:
        """The messages that have arrived; None when the connection is closed."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, messages.MAX_DESCRIPTORS)
        except OSError:
            return None
        self.descriptors += descriptors
        return [messages.decode_to_fork_server(body) for body in self._frames.feed(data)] if data else None

    def send(self, message: messages.FromForkServer) -> None:
        with contextlib.suppress(OSError):  # `receive` sees the end of the connection
            self.sock.sendall(frame(message))

    def take_descriptors(self, count: int) -> list[int]:
        taken, self.descriptors = self.descriptors[:count], self.descriptors[count:]
        return taken


class ForkedChild(NamedTuple):
    """In a forked child: what it must become. `warm`: it may run in the interpreter that it was forked with."""

    request: messages.ForkProcess
    descriptors: list[int]
    warm: bool


class ForkLoop:
    """The loop that waits for launchers and for the ends of children."""

    def __init__(self, first: socket.socket | None, listening: socket.socket | None, problem: str) -> None:
        self._connections: dict[int, ClientConnection] = {}
        self._listening = listening
        self._children: dict[int, tuple[ClientConnection, Slot, int]] = {}  # by pid; last its pidfd, or -1
        self._problem = problem
        self._poller = select.poll()
        self._pid = os.getpid()
        if listening is not None:
            self._poller.register(listening, select.POLLIN)
        if first is not None:
            self._add(first)

    def serve(self) -> ForkedChild:
        """Returns in children only. Ends the process when the last connection is closed and no other can come."""
        while True:
            ready = self._poller.poll(None if hasattr(os, "pidfd_open") else REAP_EVERY_S * 1000)
            for descriptor, _ in ready:
                if self._listening is not None and descriptor == self._listening.fileno():
                    with contextlib.suppress(OSError):
                        self._add(self._listening.accept()[0])
                elif (connection := self._connections.get(descriptor)) is not None:
                    child = self._read(connection)
                    if child is not None:
                        return child
            self._reap()
            if not self._connections and self._listening is None:
                os._exit(0)

    def _add(self, sock: socket.socket) -> None:
        connection = ClientConnection(sock)
        self._connections[sock.fileno()] = connection
        self._poller.register(sock, select.POLLIN)
        connection.send(messages.ServerReady(self._pid, self._problem))

    def _read(self, connection: ClientConnection) -> ForkedChild | None:
        received = connection.receive()
        if received is None:
            self._end(connection)
            return None
        for message in received:
            if isinstance(message, messages.ForkProcess):
                child = self._start(connection, message)
                if child is not None:
                    return child
            elif pid := connection.pids.get((message.role, message.rank)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.killpg if message.group else os.kill)(pid, message.number)
        return None

    def _start(self, connection: ClientConnection, request: messages.ForkProcess) -> ForkedChild | None:
        slot = request.role, request.rank
        descriptors = connection.take_descriptors(3 + len(request.passed))
        connection.run_id = request.env.get("HORA_RUN", connection.run_id)
        warm = not self._problem and num_threads() == 1  # another thread may hold locks, which no child would release
        try:
            pid = os.fork()
        except OSError as problem:
            connection.send(messages.ProcessStarted(*slot, 0, problem.strerror or str(problem)))
            return None
        finally:
            if os.getpid() == self._pid:
                for descriptor in descriptors:
                    os.close(descriptor)
        if pid == 0:
            self._detach_sockets()
            return ForkedChild(request, interpreter.detach(self._pid, descriptors), warm)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        if pidfd >= 0:
            self._poller.register(pidfd, select.POLLIN)
        connection.pids[slot] = pid
        self._children[pid] = connection, slot, pidfd
        connection.send(messages.ProcessStarted(*slot, pid))
        return None

    def _detach_sockets(self) -> None:
        """In a child: the numbers of our descriptors will be reused, so none of our objects may close them."""
        for connection in self._connections.values():
            connection.sock.detach()
        if self._listening is not None:
            self._listening.detach()

    def _reap(self) -> None:
        """An ended child is reaped after the rest of its group was killed: until then its pid cannot be given to
        another process, so no signal can hit a stranger."""
        for pid in list(self._children):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):  # when only the leader is left
                os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            connection, slot, pidfd = self._children.pop(pid)
            if pidfd >= 0:
                self._poller.unregister(pidfd)
                os.close(pidfd)
            connection.pids.pop(slot, None)
            peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            connection.send(messages.ProcessEnded(*slot, os.waitstatus_to_exitcode(status), peak_bytes))

    def _end(self, connection: ClientConnection) -> None:
        """The launcher has closed its connection: nothing that was started for it stays."""
        self._poller.unregister(connection.sock)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()
        for descriptor in connection.descriptors:
            os.close(descriptor)
        for pid in connection.pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if connection.pids and connection.run_id:
            sweep(connection.run_id)


def _preload(modules: Sequence[str]) -> str:
    """Imports the modules. Returns why processes cannot be forked afterwards; empty if they can."""
    if not modules:
        return "interpreters were asked for"
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception as problem:  # each process will meet and show it by itself
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
    """What `client.popen` runs. `descriptor` is a launcher's connection; with `listens`, a listening socket."""
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
    become(ForkLoop(None if listens else sock, sock if listens else None, problem).serve(), imported_with)


def become(child: ForkedChild, imported_with: dict[str, str]) -> NoReturn:
    """In a forked child: runs the requested script, in this interpreter or in a new one."""
    request = child.request
    env = request.env | dict(zip(request.passed, map(str, child.descriptors), strict=True))
    wanted = interpreter.import_time(env)
    if child.warm and request.fork and _without_threads(wanted) == _without_threads(imported_with):
        interpreter.load_environment(env, request.cwd)
        if not interpreter.shadowed(request.argv):
            threads = wanted.get(interpreter.THREADS, "")
            if threads != imported_with.get(interpreter.THREADS, "") and threads.isdecimal():
                interpreter.set_threads(threads)
            interpreter.set_blas_threads(wanted.get(interpreter.BLAS_THREADS, threads))
            interpreter.reseed()
            interpreter.started_with = wanted
            interpreter.end_quickly()
            interpreter.run(request.argv)
    try:
        os.chdir(request.cwd)
        os.execve(request.argv[0], request.argv, env)
    except OSError as problem:
        print(f"{request.argv[0]} cannot be run: {problem.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _without_threads(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name != interpreter.THREADS}
