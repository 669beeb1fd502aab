"""ConnectionPool: one worker's connections to all servers. Connects, sends, receives, waits, and detects lost
servers."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..coordinator import CoordinatorEvent
from ..errors import HoraError, Mismatch, OutOfMemory, PeerLost, Timeout
from ..monitor import spans
from ..net.fd_passing import FdPassing
from ..net.handshake import connect
from ..net.message_socket import ConnectionClosed, MessageSocket
from ..rendezvous.context import RunContext
from ..transport.base import LONG_WAIT_S, POLL_S, SLOW_S
from ..transport.tcp import tune
from . import messages
from .connection import PARAMETERS_KEY, Check, ServerConnection, Targets, copy_key, gradients_key
from .layout import BlockLayout
from .loop import PURPOSE, local_address
from .messages import ChunkReady, ServerMessage
from .push_codec import PushCodec
from .state import Rules

log = logging.getLogger(__name__)

NUM_EXTRA = 1  # further connections to a remote server, for tensors
MIN_SPAN_NS = 20_000  # shorter waits are not traced
CAUSE_S = 0.5  # how long a lost connection waits for the coordinator's report of the cause

Payload = torch.Tensor | bytes | None  # what follows a message


class ConnectionPool(abc.ABC):
    """Used on one thread. `check` is called while it waits, and may raise."""

    def __init__(
        self,
        context: RunContext,
        layout: BlockLayout,
        dtypes: Sequence[torch.dtype],
        rules: Rules,
        check: Check,
        targets: Targets,
    ) -> None:
        self.connections: list[ServerConnection] = []
        for number, part in enumerate(layout.parts):
            codec = PushCodec(rules.wire, rules.codec, part, dtypes)
            check_server = functools.partial(self.check_alive, number)
            self.connections.append(ServerConnection(number, part, dtypes, codec, targets, check_server))
        self.on_slow_wait: Callable[[], None] = lambda: None  # a wait has lasted for LONG_WAIT_S
        self._context = context
        self.layout = layout
        self._check = check
        self._ended: dict[int, str] = {}  # lost servers, and why
        self._poller = select.poll()
        self._by_descriptor: dict[int, tuple[ServerConnection, MessageSocket]] = {}
        self._passing: FdPassing | None = None
        if context.shared:
            with contextlib.suppress(OSError):
                self._passing = FdPassing(context.token, context.timeout_s)
        context.control.subscribe(self._on_event)
        if not context.colocated:  # a server may have ended before we listened
            alive = {member.rank for member in context.control.members() if member.role == "server"}
            for connection in self.connections:
                if connection.number not in alive:
                    self._ended.setdefault(connection.number, f"server {connection.number}: it ended before it served")

    @abc.abstractmethod
    def _on_ready(self, connection: ServerConnection, ready: ChunkReady) -> None:
        """A chunk may be read."""

    @abc.abstractmethod
    def _on_lost(self, cause: PeerLost) -> None:
        """A server is lost. Called on another thread."""

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.member is None or event.kind not in ("died", "left"):
            return
        if event.member.role == "server" or (
            # A colocated server continues after its worker has left, until all workers have.
            self._context.colocated and event.kind == "died" and event.member.rank < len(self.connections)
        ):
            self._ended[event.member.rank] = f"{event.member}: {event.text}"
            self._on_lost(self._peer_lost(event.member.rank))

    # -- connecting ----------------------------------------------------------------------------------------------------

    def connect(self, entries: list[list[Any]]) -> None:
        """Connects to all servers. Mismatch if one has built another model; `entries` is this worker's."""
        for connection in self.connections:
            check = functools.partial(self.check_alive, connection.number)
            address = self._context.control.get(f"ps/{connection.number}", self._context.timeout_s, check).decode()
            host, port, passing = address.split()
            self._connect(connection, (host, int(port)), "" if passing == "-" else passing, entries)

    def _connect(
        self, connection: ServerConnection, address: tuple[str, int], passing: str, entries: list[list[Any]]
    ) -> None:
        if passing and self._is_local(passing):
            self._offer_gradients(connection)
        if not connection.shared:
            connection.use_gradients(connection.allocate())
        own = self._passing.address if connection.shared and self._passing else ""
        hello = messages.WorkerHello(self._context.rank, self._context.name, self.layout.fingerprint, entries, own)
        self._open(connection, address, passing).send(hello)
        reply = self.receive(connection, messages.Welcome, messages.Refused)
        if isinstance(reply, messages.Refused):
            raise Mismatch(reply.reason)
        assert isinstance(reply, messages.Welcome)
        if connection.shared:
            assert self._passing is not None
            key = copy_key(self._context.rank) if reply.private else PARAMETERS_KEY
            descriptor = self._passing.fetch(reply.passing, key)
            connection.use_parameters(connection.allocate(descriptor=descriptor))
            connection.parameters.close()
            self._passing.withdraw(gradients_key(connection.number))
            connection.gradients.close()
            connection.private = reply.private
        else:
            connection.use_parameters(connection.allocate())
            connection.private = True
            for _ in range(NUM_EXTRA):
                self._open(connection, address).send(messages.ExtraConnection(self._context.rank))

    def _is_local(self, passing: str) -> bool:
        if self._passing is None:
            return False
        try:
            self._passing.connect(passing).close()
        except (OSError, HoraError):
            return False
        return True

    def _offer_gradients(self, connection: ServerConnection) -> None:
        """Allocates gradients that the server can map, if there is memory."""
        assert self._passing is not None
        try:
            connection.use_gradients(connection.allocate(shared=True))
        except OutOfMemory as problem:
            log.warning("rank %d: no shared memory for gradients, so they go over TCP: %s", self._context.rank, problem)
            return
        assert connection.gradients.descriptor is not None
        self._passing.offer(gradients_key(connection.number), connection.gradients.descriptor)
        connection.shared = True

    def _open(self, connection: ServerConnection, address: tuple[str, int], passing: str = "") -> MessageSocket:
        if connection.shared:
            assert self._passing is not None
            sock = self._passing.connect(local_address(passing)[1:], self._context.timeout_s, PURPOSE)
        else:
            sock = connect(address, self._context.token, PURPOSE, check=self._check)
            tune(sock)
        socket = MessageSocket(
            sock, lambda _, message, size: connection.payload_buffer(message, size), messages.encode, messages.decode
        )
        connection.sockets.append(socket)
        self._by_descriptor[socket.fileno()] = (connection, socket)
        self._poller.register(socket.fileno(), select.POLLIN)
        return socket

    def close(self) -> None:
        for connection in self.connections:
            if connection.sockets:
                with contextlib.suppress(HoraError):
                    connection.sockets[0].send(messages.WorkerBye())
            connection.close()
        if self._passing is not None:
            self._passing.close()

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(
        self,
        connection: ServerConnection,
        message: ServerMessage,
        payload: Payload = None,
        socket: MessageSocket | None = None,
    ) -> None:
        """Queues a message; does not block. PeerLost if the server is gone."""
        try:
            (socket or connection.sockets[0]).send(message, payload)
        except ConnectionClosed as problem:
            raise self._lost(connection, problem) from None

    def request(
        self, connection: ServerConnection, message: ServerMessage, reply: type[ServerMessage], payload: Payload = None
    ) -> None:
        """Sends a message and waits for the reply."""
        self.send(connection, message, payload)
        self.receive(connection, reply)

    def receive(self, connection: ServerConnection, *kinds: type[ServerMessage]) -> ServerMessage:
        """Waits for a message of one of these kinds. Timeout after `timeout_s`."""
        deadline = time.monotonic() + self._context.timeout_s
        while True:
            for position, reply in enumerate(connection.replies):
                if isinstance(reply, kinds):
                    return connection.replies.pop(position)
            if not self.poll(POLL_S * 1000):
                self.check_alive(connection.number)
                if time.monotonic() > deadline:
                    raise Timeout(f"{self._context.name} has waited {self._context.timeout_s:.0f} s for "
                                  f"server {connection.number}")  # fmt: skip

    def get_blob(self, server: int, what: str) -> bytes:
        connection = self.connections[server]
        connection.blob = None
        self.request(connection, messages.GetBlob(what), messages.BlobReply)
        return bytes(connection.blob or b"")

    @property
    def pending(self) -> bool:
        """Whether something is queued that the sockets have not taken yet."""
        return any(socket.pending for connection in self.connections for socket in connection.sockets)

    def poll(self, timeout_ms: float) -> bool:
        """Sends and receives what is possible; whether anything was."""
        writing = [socket for connection in self.connections for socket in connection.sockets if socket.pending]
        for socket in writing:
            self._poller.modify(socket.fileno(), select.POLLIN | select.POLLOUT)
        begin = spans.clock() if spans.on and timeout_ms else 0
        events = self._poller.poll(timeout_ms)
        if begin and (end := spans.clock()) - begin > MIN_SPAN_NS:
            spans.add(spans.TRAINING, "waiting", begin, end, what="servers")
        for socket in writing:
            self._poller.modify(socket.fileno(), select.POLLIN)
        moved = False
        for descriptor, mask in events:
            connection, socket = self._by_descriptor[descriptor]
            try:
                if mask & select.POLLOUT:
                    socket.flush()
                    moved = True
                if mask & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    for message in socket.receive():
                        moved = True
                        if isinstance(message, ChunkReady):
                            self._on_ready(connection, message)
                        elif isinstance(message, messages.ServerError):
                            raise HoraError(message.reason)
                        else:
                            connection.replies.append(message)
            except ConnectionClosed as problem:
                raise self._lost(connection, problem) from None
        return moved

    def wait(self, done: Callable[[], bool]) -> None:
        """Sends and receives until `done()`. Warns while that takes long; Timeout after `timeout_s`, with the ranks
        that the servers wait for."""
        started = time.monotonic()
        next_warning, noticed = SLOW_S, False
        while not done():
            if self.poll(POLL_S * 1000):
                continue
            self._check()
            waited = time.monotonic() - started
            if not noticed and waited >= LONG_WAIT_S:
                noticed = True
                self.on_slow_wait()
            for connection in self.connections:
                if connection.outstanding and connection.number in self._ended:  # a lost host closes no connection
                    raise self._lost(connection, "it was reported dead")
            if waited >= next_warning:
                next_warning *= 2
                log.warning("%s has waited %.0f s for %s", self._context.name, waited, self._awaited())
            if waited >= self._context.timeout_s:
                raise Timeout(f"{self._context.name} has waited {waited:.0f} s for {self._awaited()}; gave up after "
                              f"timeout_s={self._context.timeout_s:g}")  # fmt: skip

    def _awaited(self) -> str:
        found = []
        for connection in self.connections:
            if connection.outstanding:
                with contextlib.suppress(HoraError):
                    ranks = self.get_blob(connection.number, "awaited").decode()
                    found.append(f"server {connection.number}, which waits for {ranks}")
        return "; ".join(found) or "the servers"

    # -- lost servers --------------------------------------------------------------------------------------------------

    def check_alive(self, server: int) -> None:
        """Raises if this server is lost, or if `check` does."""
        self._check()
        if server in self._ended:
            raise self._lost(self.connections[server], "it was reported dead")

    def _lost(self, connection: ServerConnection, problem: object) -> HoraError:
        """A server is gone: the cause, if it is reported within CAUSE_S, else what was seen here."""
        for socket in connection.sockets:
            with contextlib.suppress(ConnectionClosed):
                for message in socket.receive():  # the server may have told why
                    if isinstance(message, messages.ServerError):
                        return HoraError(message.reason)
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            self._check()
            self._context.control.check()
            if connection.number in self._ended:
                return self._peer_lost(connection.number)
            time.sleep(0.005)
        return self._peer_lost(connection.number, f"server {connection.number}: {problem}")

    def _peer_lost(self, server: int, what: str = "") -> PeerLost:
        lost = what or self._ended[server]
        return PeerLost(f"{self._context.name}: lost {lost}; its parameters are lost with it", (), secondary=True)
