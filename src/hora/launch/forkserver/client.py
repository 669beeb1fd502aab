"""ForkServer: the launcher's connection to a fork server, and the processes that it has started through it."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence

from hora.net.framing import frame

from .. import messages
from ..channel import MessageChannel
from ..config import RunConfig
from ..process import OutputSink, RunProcess, Slot
from ..process_set import INTERPRETER_ENV, token_descriptor
from ..reaper import Reaper
from ..signal_pipe import Watched
from .interpreter import ENV_PLACEHOLDER

START_S = 30.0
CLOSE_S = 2.0
NAME = "the process that ranks are forked from"

_CODE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "from hora.launch.forkserver.server import main; main({fd}, {modules}, {listens})"
)
_TITLE_BYTES = 4096  # space for the command lines of children


PRELOADED = ("torch", "hora.job", "hora.strategies.allreduce.replicated", "hora.serve.publisher")
"""What every rank imports."""

OPTIMIZERS = "torch._dynamo"
"""What torch imports when the first optimizer is made, which takes about as long as importing torch."""


def preloaded(config: RunConfig) -> tuple[str, ...]:
    """What a fork server imports for this run. A wrong guess costs time only."""
    if not config.fork:
        return ()
    try:
        with open("" if config.module else config.command[0], "rb") as file:
            trains = b"optim" in file.read(1 << 20)
    except OSError:
        trains = True  # a module: its file is not searched for
    return (*PRELOADED, OPTIMIZERS) if trains else PRELOADED


class ForkServer:
    """Starts processes on this machine. Only `start`, for the time of a fork, and `close` block, both bounded. Not
    thread-safe.

    `env` is common to all processes and is what `modules` are imported with; HORA_RUN in it marks the run. Processes
    are started as new interpreters if `modules` is empty, or if the fork server cannot fork, which is logged. Where
    HORA_FORKSERVER names the socket of a running fork server, that one is used.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        modules: tuple[str, ...] = (),
        reaper: Reaper | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.ready = False  # processes can be started; or starting one fails at once, with the reason in `lost`
        self.pid = 0
        self.lost = ""  # how the fork server ended
        self._fork = bool(modules)
        self._reaper = reaper
        self._log = log
        self._processes: dict[Slot, RunProcess] = {}
        self._start_problem = ""
        self._paused = False
        self._stderr_fd = -1
        self._server: subprocess.Popen[bytes] | None = None
        self._cwd = os.getcwd()
        shared = env.get("HORA_FORKSERVER")
        self._sock = self._connect(shared) if shared and modules else self._spawn(env, modules)
        self._channel = MessageChannel(self._sock.fileno(), self._sock.fileno(), messages.decode_from_fork_server)

    def _spawn(self, env: Mapping[str, str], modules: tuple[str, ...]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = popen(env, theirs.fileno(), modules, stderr=subprocess.PIPE)
        self.pid = self._server.pid
        assert self._server.stderr is not None
        self._stderr_fd = self._server.stderr.fileno()
        os.set_blocking(self._stderr_fd, False)
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

    def descriptors(self) -> Watched:
        """What to wait for: messages and warnings of the fork server, and output of the processes unless paused."""
        watched: Watched = {}
        if not self.lost:
            events = select.POLLIN | (select.POLLOUT if self._channel.pending_bytes else 0)
            watched[self._sock.fileno()] = (events, self._receive)
        if self._stderr_fd >= 0:
            watched[self._stderr_fd] = (select.POLLIN, self._on_stderr)
        if not self._paused:
            for process in self._processes.values():
                watched |= process.descriptors()
        return watched

    def pause_output(self, paused: bool) -> None:
        self._paused = paused

    def start(
        self,
        slot: Slot,
        argv: Sequence[str],
        env: Mapping[str, str],
        token: bytes,
        out: OutputSink,
        err: OutputSink,
    ) -> RunProcess:
        """A process that leads its own session and group, with `env` as its environment, /dev/null as stdin, and a
        descriptor with `token` whose number is in HORA_TOKEN_FD. OSError if it could not be started."""
        request = messages.ForkProcess(*slot, list(argv), dict(env), self._cwd, ["HORA_TOKEN_FD"], self._fork)
        message = frame(request, "arguments and environment")
        pipes = [os.pipe(), os.pipe()]

        def send_signal(number: int, group: bool) -> None:
            if not self.lost:
                self._channel.send(messages.SignalProcess(*slot, number, group))

        process = RunProcess(slot, socket.gethostname(), out, err, send_signal, [read for read, _ in pipes])
        self._processes[slot] = process
        with contextlib.ExitStack() as passed:
            descriptors = [os.open(os.devnull, os.O_RDONLY), *(write for _, write in pipes), token_descriptor(token)]
            for descriptor in descriptors:
                passed.callback(os.close, descriptor)
            try:
                self._sock.setblocking(True)
                self._channel.flush()
                sent = socket.send_fds(self._sock, [message], descriptors)
                self._sock.sendall(message[sent:])
                self._await_start(process)
            except OSError:
                process.close_pipes()
                del self._processes[slot]
                raise
            finally:
                self._sock.setblocking(False)
        if self._reaper is not None:
            self._reaper.group(process.pid)
        return process

    def _await_start(self, process: RunProcess) -> None:
        deadline = time.monotonic() + START_S
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        self._start_problem = ""
        while not process.pid:
            if self.lost:
                raise ConnectionError(0, self.lost)
            if self._start_problem:
                raise OSError(0, self._start_problem)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError(0, f"{NAME} (pid {self.pid}) does not answer")
            self._receive()

    def take_ended(self) -> list[RunProcess]:
        """The processes that have ended since the last call, reaped."""
        ended = [process for process in self._processes.values() if process.has_ended()]
        for process in ended:
            process.reap()
            if self._reaper is not None:
                self._reaper.forget(process.pid)
        return ended

    def next_deadline(self) -> float | None:
        return None

    def tick(self, now: float) -> None:
        """Nothing to do here at a given time; HostSet has heartbeats."""

    def _on_stderr(self) -> None:
        """Warnings of the fork server itself, as torch's when it is imported."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._stderr_fd, 1 << 16)
            if not data:
                self._stderr_fd = -1
            for line in data.decode(errors="replace").splitlines():
                if line.strip():
                    self._log(line.rstrip())

    def _receive(self) -> None:
        """Handles what has arrived. All processes have ended if the fork server has."""
        self._channel.flush()
        received = self._channel.receive()
        if received is None and not self.lost:
            self.ready = True
            self.lost = f"{NAME} (pid {self.pid}) {self._how_it_ended()}"
            for process in self._processes.values():
                process.exited(-signal.SIGKILL, lost=f"lost with {self.lost}")
        for message in received or ():
            self._handle(message)

    def _handle(self, message: messages.FromForkServer) -> None:
        if isinstance(message, messages.ServerReady):
            self.ready, self.pid = True, message.pid
            if message.problem and self._fork:
                self._log(f"each rank is started as a new interpreter, since {message.problem}")
            return
        process = self._processes.get((message.role, message.rank))
        if process is None:
            return  # its start was given up
        if isinstance(message, messages.ProcessStarted):
            process.pid, self._start_problem = message.pid, message.problem
        else:
            process.exited(message.code, message.peak_bytes)

    def _how_it_ended(self) -> str:
        if self._server is None:
            return "has ended"
        try:
            code = self._server.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"

    def close(self) -> None:
        """Ends the fork server and what is left of its processes."""
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


def popen(
    env: Mapping[str, str],
    descriptor: int,
    modules: tuple[str, ...],
    *,
    listens: bool = False,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Starts a fork server. `descriptor` is its connection to the one launcher; with `listens`, a listening socket."""
    code = _CODE.format(fd=descriptor, modules=modules, listens=listens)
    return subprocess.Popen(
        [sys.executable, "-c", code, " " * _TITLE_BYTES],
        env={**env, **ENV_PLACEHOLDER},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(descriptor,),
        bufsize=0,
        start_new_session=True,
    )


@contextlib.contextmanager
def shared(env: Mapping[str, str]) -> Iterator[str]:
    """A fork server for any number of launches: those with the returned path in HORA_FORKSERVER."""
    with tempfile.TemporaryDirectory(prefix="hora-forkserver-") as folder:  # for this user only
        path = os.path.join(folder, "socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(path)
            listening.listen(64)
            server = popen({**env, **INTERPRETER_ENV}, listening.fileno(), (*PRELOADED, OPTIMIZERS), listens=True)
        try:
            yield path
        finally:
            server.kill()
            server.wait()
