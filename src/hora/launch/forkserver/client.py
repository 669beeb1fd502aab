"""The launcher's end of a fork server: `ForkServer` starts processes, `Process` is one of them, seen to its end.

Nothing here blocks but `start`, for the moment that a fork takes, and `close`; both are bounded. Main thread only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..config import RunConfig
from ..process_set import OF_INTERPRETER, token_descriptor
from .interpreter import ROOM
from .messages import (
    ForkReply,
    ForkRequest,
    FrameReader,
    FromServer,
    ProcessExit,
    ServerReady,
    SignalRequest,
    decode_server,
    frame,
)

START_S = 30.0
CLOSE_S = 2.0
LOST = "the process that ranks are forked from"

_CODE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "from hora.launch.forkserver.server import main; main({fd}, {modules}, {listens})"
)
_TITLE_BYTES = 4096  # room for the command lines of children
_READ_BYTES = 1 << 16
_PIPE_BYTES_MAX = 1 << 20


PRELOADED = ("torch", "hora.job", "hora.strategies.allreduce.replicated", "hora.serve.publisher")
"""What every rank imports anyway, with all that these import."""

OPTIMIZERS = "torch._dynamo"
"""What torch imports when the first optimizer is made, which takes about as long as importing torch."""


def preloaded(config: RunConfig) -> tuple[str, ...]:
    """What a fork server imports for this run. A guess that is wrong costs time, and no more."""
    if not config.fork:
        return ()
    try:
        with open("" if config.module else config.command[0], "rb") as file:
            trains = b"optim" in file.read(1 << 20)
    except OSError:
        trains = True  # a module, whose file is not worth the search
    return (*PRELOADED, OPTIMIZERS) if trains else PRELOADED


class OutputSink(Protocol):
    """Where what a process writes goes."""

    def feed(self, data: bytes, now: float) -> None: ...

    def close(self) -> None: ...


class ForkServer:
    """`env` is what the processes will have in common, and what `modules` are imported with; HORA_RUN in it marks them.

    Without any modules, or where something stands in the way of forking (`problem`), processes are started as new
    interpreters. Where HORA_FORKSERVER names the socket of a fork server, that one is used.
    """

    def __init__(self, env: Mapping[str, str], modules: tuple[str, ...] = ()) -> None:
        self.ready = False
        self.problem = ""
        self.pid = 0
        self.lost = ""  # why there is none any more
        self.complaints_fd = -1  # what it has to say itself, as torch's warnings when it is imported
        self._fork = bool(modules)
        self._processes: dict[int, ForkedProcess] = {}
        self._started: ForkReply | None = None
        self._exits: dict[int, ProcessExit] = {}  # that came together with the reply to their start
        self._frames = FrameReader()
        self._server: subprocess.Popen[bytes] | None = None
        self._cwd = os.getcwd()
        shared = env.get("HORA_FORKSERVER")
        self._sock = self._connect(shared) if shared and modules else self._open(env, modules)
        self._sock.setblocking(False)

    def _open(self, env: Mapping[str, str], modules: tuple[str, ...]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = popen(env, theirs.fileno(), modules, stderr=subprocess.PIPE)
        self.pid = self._server.pid
        assert self._server.stderr is not None
        self.complaints_fd = self._server.stderr.fileno()
        os.set_blocking(self.complaints_fd, False)
        return ours

    @staticmethod
    def _connect(path: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError as problem:
            sock.close()
            raise ValueError(f"no fork server answers at HORA_FORKSERVER={path}: {problem.strerror}") from None
        return sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def descriptors(self) -> list[int]:
        """To be waited for: when one is readable, `read` it, or ask for `complaints` if it is that one."""
        return [self.fileno()] + ([self.complaints_fd] if self.complaints_fd >= 0 else [])

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], token: bytes, out: OutputSink, err: OutputSink
    ) -> ForkedProcess:
        """A process with `env` as its environment, /dev/null as stdin, and a descriptor that holds `token`, whose
        number HORA_TOKEN_FD tells it. OSError if it could not be started."""
        message = frame(
            ForkRequest(list(argv), dict(env), self._cwd, ["HORA_TOKEN_FD"], self._fork), "arguments and environment"
        )
        with contextlib.ExitStack() as passed:
            pipes = []
            descriptors = [os.open(os.devnull, os.O_RDONLY)]
            for _ in range(2):
                read, write = os.pipe()
                pipes.append(read)
                descriptors.append(write)
            descriptors.append(token_descriptor(token))
            for descriptor in descriptors:
                passed.callback(os.close, descriptor)
            try:
                self._sock.setblocking(True)
                sent = socket.send_fds(self._sock, [message], descriptors)
                self._sock.sendall(message[sent:])
                started = self._await_start()
            except OSError:
                for pipe in pipes:
                    os.close(pipe)
                raise
            finally:
                self._sock.setblocking(False)
        process = self._processes[started.pid] = ForkedProcess(self, started.pid, pipes, out, err)
        if exit := self._exits.pop(started.pid, None):
            self._take(exit)
        return process

    def _await_start(self) -> ForkReply:
        deadline = time.monotonic() + START_S
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while self._started is None and not self.lost:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(0, f"{LOST} (pid {self.pid}) does not answer")
            self.read()
        started, self._started = self._started, None
        if started is None:
            raise ConnectionError(0, self.lost)
        if started.problem:
            raise OSError(0, started.problem)
        return started

    def read(self) -> None:
        """Takes what has come. Processes whose end was told have ended, and all have if the fork server has."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and not self.lost:
            self.lost = f"{LOST} (pid {self.pid}) {self._how()}"
            also = f"lost with {self.lost}"
            for process in self._processes.values():
                process.end(-signal.SIGKILL, 0, also)
            self._processes.clear()
        for body in self._frames.feed(data):
            self._take(decode_server(body))

    def _take(self, message: FromServer) -> None:
        if isinstance(message, ServerReady):
            self.ready, self.pid, self.problem = True, message.pid, message.problem
        elif isinstance(message, ForkReply):
            self._started = message
        elif message.pid in self._processes:
            self._processes.pop(message.pid).end(message.code, message.peak_bytes)
        else:
            self._exits[message.pid] = message

    def _how(self) -> str:
        if self._server is None:
            return "has ended"
        try:
            code = self._server.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "has closed its line"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def complaints(self) -> list[str]:
        """Whole lines of what it has to say itself."""
        try:
            data = os.read(self.complaints_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self.complaints_fd = -1
        return [line.rstrip() for line in data.decode(errors="replace").splitlines() if line.strip()]

    def signal(self, pid: int, number: int, *, group: bool) -> None:
        if not self.lost:
            with contextlib.suppress(OSError):  # its end is noticed where it is read
                self._sock.setblocking(True)
                try:
                    self._sock.sendall(frame(SignalRequest(pid, int(number), group)))
                finally:
                    self._sock.setblocking(False)

    def close(self) -> None:
        """Ends it, and with it what is left of its processes."""
        self._sock.close()
        if self._server is None:
            return
        try:
            self._server.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        assert self._server.stderr is not None
        self._server.stderr.close()


class ForkedProcess:
    """A process, leader of a session and a process group of its own. Its signals go by way of the fork server, which
    has not let go of its number while it has not told its end."""

    def __init__(self, server: ForkServer, pid: int, pipes: Sequence[int], out: OutputSink, err: OutputSink) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.peak_bytes = 0  # of memory; known when it has ended
        self.lost = ""  # why nothing is known of its end
        self.pipes: dict[int, OutputSink] = dict(zip(pipes, (out, err), strict=True))
        self._server = server
        self._code: int | None = None
        for fd in self.pipes:
            os.set_blocking(fd, False)

    @property
    def running(self) -> bool:
        return self.returncode is None

    def end(self, code: int, peak_bytes: int, lost: str = "") -> None:
        """It has ended, and nothing of its group is left."""
        self._code, self.peak_bytes, self.lost = code, peak_bytes, lost

    def has_ended(self) -> bool:
        """Whether it has ended, and `reap` was not called yet."""
        return self.returncode is None and self._code is not None

    def reap(self) -> None:
        """After `has_ended`: takes its exit code."""
        self.returncode = self._code

    def signal(self, number: int, *, group: bool) -> None:
        """To the process alone, or to its group."""
        if self._code is None:
            self._server.signal(self.pid, number, group=group)

    def read(self, fd: int, now: float) -> bool | None:
        """Feeds what one read finds in the pipe to its outlet: True for something, None for nothing, False at its end.

        One read and no more: a process that writes without end must not keep us from our other duties.
        """
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self.pipes[fd].feed(data, now)
        return bool(data)

    def read_rest(self, now: float) -> None:
        """Feeds everything that an ended process left in its pipes, at most what pipes can hold."""
        for fd in self.pipes:
            for _ in range(_PIPE_BYTES_MAX // _READ_BYTES):
                if not self.read(fd, now):
                    break

    def close_pipe(self, fd: int) -> None:
        self.pipes.pop(fd).close()
        os.close(fd)


def popen(
    env: Mapping[str, str],
    descriptor: int,
    modules: tuple[str, ...],
    *,
    listens: bool = False,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a fork server: `descriptor` is the line of its only launcher, or `listens` for them."""
    code = _CODE.format(fd=descriptor, modules=modules, listens=listens)
    return subprocess.Popen(
        [sys.executable, "-c", code, " " * _TITLE_BYTES],
        env={**env, **ROOM},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(descriptor,),
        bufsize=0,
        start_new_session=True,
    )


@contextlib.contextmanager
def shared(env: Mapping[str, str]) -> Iterator[str]:
    """A fork server for many launches, one after the other or at once: those that find the path which this gives in
    their HORA_FORKSERVER."""
    with tempfile.TemporaryDirectory(prefix="hora-forkserver-") as folder:  # for this user only
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(path)
            listening.listen(64)
            server = popen({**env, **OF_INTERPRETER}, listening.fileno(), (*PRELOADED, OPTIMIZERS), listens=True)
        try:
            yield path
        finally:
            server.kill()
            server.wait()
