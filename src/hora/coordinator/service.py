"""CoordinatorService: the coordinator's state machine behind TCP sockets, on a thread of its own.

The listeners pass on only connections that have proved the run's token. A member that does not read is dropped once
`MAX_BACKLOG_BYTES` wait for it, so that it cannot delay the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import socket
import threading
import time

import msgspec

from ..net import keepalive
from ..net.framing import FrameReader, frame
from ..net.handshake import AuthenticatedListener
from .client import PURPOSE
from .lease_manager import describe
from .messages import decode_request
from .state import Coordinator, Out

log = logging.getLogger(__name__)

TICK_S = 0.1
MAX_BACKLOG_BYTES = 8 << 20


@dataclasses.dataclass
class _Connection:
    number: int
    sock: socket.socket
    frames: FrameReader = dataclasses.field(default_factory=FrameReader)
    backlog: bytearray = dataclasses.field(default_factory=bytearray)


class CoordinatorService:
    """Runs in the launcher's process, or in rank 0's under another launcher. All methods are thread-safe."""

    def __init__(self, token: bytes, size: int, *, servers: int = 0, bind: str = "127.0.0.1", port: int = 0) -> None:
        self.coordinator = Coordinator(size, servers)
        self.bytes_in = 0
        self.bytes_out = 0
        self._listening = _listen(bind, port)
        self.address: tuple[str, int] = (bind, self._listening.getsockname()[1])
        self._token = token
        self._lock = threading.RLock()
        self._connections: dict[int, _Connection] = {}
        self._next = 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._listeners: list[AuthenticatedListener] = []
        self._thread = threading.Thread(target=self._loop, name="hora-coordinator", daemon=True)
        self._closed = False

    def start(self) -> None:
        self._accept(self._listening)
        self._thread.start()

    def listen(self, bind: str) -> int:
        """Listens at another address too; returns the port there."""
        sock = _listen(bind, 0)
        self._accept(sock)
        port: int = sock.getsockname()[1]
        return port

    def _accept(self, sock: socket.socket) -> None:
        self._listeners.append(AuthenticatedListener(sock, self._token, PURPOSE, self._add))

    def report_death(self, rank: int, reason: str, role: str = "worker") -> None:
        """The launcher saw this process fail."""
        with self._lock:
            self._deliver(self.coordinator.died(role, rank, reason))
        self._wake()

    def report_exit(self, rank: int, role: str = "worker") -> None:
        """The launcher saw this process end well."""
        with self._lock:
            self._deliver(self.coordinator.ended(role, rank))
        self._wake()

    def others_alive(self, rank: int) -> bool:
        """Whether other workers are still in the run."""
        with self._lock:
            return any(member.rank != rank for member in self.coordinator.alive if member.role == "worker")

    def has_ended(self) -> bool:
        """Whether the run had formed, and no worker is in it any more."""
        return self.formed and not self.others_alive(-1)

    @property
    def formed(self) -> bool:
        """Whether all workers and servers have joined."""
        return self.coordinator.generation > 0

    def joined(self) -> dict[int, str]:
        """The state of the workers that joined later, by rank: alive, left or died."""
        with self._lock:
            return self.coordinator.joined

    def missing(self) -> list[tuple[str, int]]:
        """The members that have not joined yet, as role and rank."""
        with self._lock:
            return self.coordinator.missing

    def failures(self) -> list[tuple[tuple[str, int], str]]:
        """The members that announced a failure, as role and rank, and the reasons, in order."""
        with self._lock:
            return list(self.coordinator.failures)

    def values(self, prefix: str) -> dict[str, bytes]:
        """The values whose keys have this prefix."""
        with self._lock:
            return self.coordinator.values(prefix)

    def views(self) -> str:
        """The state of the loaders' epochs, as a text."""
        with self._lock:
            return describe(self.coordinator.leases.views())

    def forget(self) -> None:
        """In a forked child: closes the inherited descriptors."""
        self._closed = True
        for listener in self._listeners:
            listener.forget()
        for connection in self._connections.values():
            connection.sock.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            listener.close()
        self._listening.close()  # if it was not started
        self._wake()
        if self._thread.is_alive():
            self._thread.join(2.0)
        with self._lock:
            for connection in self._connections.values():
                connection.sock.close()
            self._connections.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _add(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keepalive.attach(sock)
        with self._lock:
            if self._closed:
                sock.close()
                return
            connection = _Connection(self._next, sock)
            self._next += 1
            self._connections[connection.number] = connection
            self._selector.register(sock, selectors.EVENT_READ, connection)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _loop(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while not self._closed:
            ready = self._selector.select(max(0.0, next_tick - time.monotonic()))
            with self._lock:
                for key, mask in ready:
                    if key.data is None:
                        with contextlib.suppress(OSError):
                            self._wake_read.recv(4096)
                        continue
                    if mask & selectors.EVENT_READ and key.data.number in self._connections:
                        self._read(key.data)
                    if mask & selectors.EVENT_WRITE and key.data.number in self._connections:
                        self._flush(key.data)
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    self._deliver(self.coordinator.tick(time.monotonic()))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError as problem:
            self._drop(connection, str(problem), keepalive.silence(problem))
            return
        if not data:
            self._drop(connection, "closed")
            return
        self.bytes_in += len(data)
        try:
            for body in connection.frames.feed(data):
                request = decode_request(body)
                self._deliver(self.coordinator.handle(connection.number, request))
        except (ValueError, RecursionError, msgspec.MsgspecError) as problem:  # recursion: arrays nested without end
            self._drop(connection, f"sent an invalid message: {problem}")

    def _deliver(self, out: Out) -> None:
        for number, answer in out:
            connection = self._connections.get(number)
            if connection is None:
                continue
            connection.backlog += frame(answer)
            if len(connection.backlog) > MAX_BACKLOG_BYTES:
                self._drop(connection, "does not read what it is sent")
            else:
                self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.backlog)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # `_read` finds the same error and drops the connection
        self.bytes_out += sent
        del connection.backlog[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlog else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection, why: str, public_reason: str = "") -> None:
        """`public_reason`: the part of `why` that the other members are told."""
        if self._connections.pop(connection.number, None) is None:
            return  # another thread, or a failed send, has dropped it already
        log.debug("control connection %d: %s", connection.number, why)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        self._deliver(self.coordinator.disconnected(connection.number, time.monotonic(), public_reason))


def _listen(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    return socket.create_server((bind, port), family=family, backlog=256)
