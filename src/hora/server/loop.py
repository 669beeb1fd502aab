"""ServerLoop: one server's event loop. Feeds ServerState from its connections until all workers have left.

A worker on this host shares its gradients' memory and maps the parameters; a remote one sends and receives both after
the messages, over several connections. The loop runs on one thread: in a process of its own, or beside a worker's
training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ..coordinator import CoordinatorEvent
from ..errors import HoraError, Mismatch, OutOfMemory
from ..monitor import spans
from ..net import handshake
from ..net.fd_passing import FdPassing
from ..net.handshake import connect
from ..net.message_socket import ConnectionClosed, MessageSocket
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from ..transport.tcp import tune
from . import messages, stats
from .block_memory import BlockMemory
from .connection import PARAMETERS_KEY, copy_key
from .layout import BlockLayout, ServerPart
from .messages import ChunkReady, ServerMessage
from .push_codec import PushCodec
from .request_handler import RequestHandler
from .state import Rules, ServerState
from .store import Outbox, ParameterStore
from .worker_session import WorkerSession

log = logging.getLogger(__name__)

PURPOSE = "parameters"
POLL_S = 0.5  # how long the loop sleeps at most
BLOB_BYTES = 64 << 20  # a blob's limit, beside
ELEMENT_BYTES = 64  # for each element of the model: several states of an optimizer, or a buffer


def local_address(passing: str) -> str:
    """The Unix socket where a server listens for workers on its own host, by the address of its FdPassing."""
    return f"\0{passing}-lines"


class ServerLoop:
    """The server with number `context.rank`. The constructor opens its port and publishes it through the coordinator.

    `parameters` and `optimizers` are those of `registry`, or stand-ins for them."""

    def __init__(
        self,
        context: RunContext,
        layout: BlockLayout,
        registry: ParameterRegistry,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        rules: Rules,
    ) -> None:
        self._context = context
        self._number = number = context.rank
        self._part = layout.parts[number]
        self._dtypes = [p.dtype for p in parameters]
        self._codec = PushCodec(rules.wire, rules.codec, self._part, self._dtypes)
        entries = registry.entries()
        self._max_blob_bytes = _max_blob_bytes(self._part, number, entries)
        memory = _allocate(self._part, number)
        history = os.path.join(context.history, f"server-{number}.jsonl") if context.history else ""
        self._history = open(history, "a", buffering=1) if history else None  # noqa: SIM115
        self.server = ServerState(
            ParameterStore(self._part, memory, parameters, optimizers),
            rules,
            number=number,
            num_servers=context.num_servers,
            record=self._write_history if self._history else None,
        )
        self._requests = RequestHandler(self.server, layout, entries, self.stats)
        self._launched = set(range(context.size))  # the workers that the run began with
        for worker in self._launched:
            self.server.join(worker)
        self._alive = set(self._launched)
        self._members = set(self._launched)  # those that the coordinator knows
        self._sessions: dict[int, WorkerSession] = {}
        self._servers: dict[int, MessageSocket] = {}
        self._unsent: Outbox = []  # for servers that have not connected yet
        self._events: queue.SimpleQueue[socket.socket | CoordinatorEvent | int] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._waker = socket.socketpair()
        self._wakeup.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._writing: set[MessageSocket] = set()
        self._stopped = False
        self._busy_s = 0.0
        self._started = time.monotonic()
        self._reporter = (
            stats.StatsReporter(number, self._part.parameter_bytes, context.control.report) if context.watched else None
        )
        context.control.subscribe(self._on_event)
        alive = {member.rank for member in context.control.members() if member.role == "worker"}
        for worker in self._members - alive:  # it ended before we listened
            self.worker_left(worker)
        self._listeners: list[handshake.AuthenticatedListener] = []
        self._passing: FdPassing | None = None
        self._listen(memory)
        if number and (rules.backup or rules.clip_norm is not None or rules.counts_clocks):
            self._connect_first()

    def _listen(self, memory: BlockMemory) -> None:
        """Opens a TCP port, and where memory can be shared a Unix socket: a message over TCP costs ten times as
        much."""
        context = self._context
        with contextlib.suppress(OSError):
            self._passing = FdPassing(context.token, context.timeout_s) if memory.descriptor is not None else None
        if self._passing is not None and memory.descriptor is not None:
            self._passing.offer(PARAMETERS_KEY, memory.descriptor)
        family = socket.AF_INET6 if ":" in context.bind else socket.AF_INET
        sock = socket.create_server((context.bind, 0), family=family, backlog=128)
        address = f"{context.bind} {sock.getsockname()[1]} {self._passing.address if self._passing else '-'}"
        self._listeners.append(handshake.AuthenticatedListener(sock, context.token, PURPOSE, self._accept))
        if self._passing is not None:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(local_address(self._passing.address))
            local.listen(128)
            self._listeners.append(handshake.AuthenticatedListener(local, context.token, PURPOSE, self._accept))
        context.control.put(f"ps/{self._number}", address.encode())

    def _connect_first(self) -> None:
        """Connects to server 0, which decides for all servers."""
        host, port, _ = self._context.control.get("ps/0", self._context.timeout_s).decode().split()
        sock = connect((host, int(port)), self._context.token, PURPOSE)
        tune(sock)
        connection = self._add_socket(sock)
        connection.peer = ("server", 0)
        connection.send(messages.ServerHello(self._number))
        self._servers[0] = connection

    def _add_socket(self, sock: socket.socket) -> MessageSocket:
        connection = MessageSocket(sock, self._payload_buffer, messages.encode, messages.decode)
        self._selector.register(connection, selectors.EVENT_READ, connection)
        return connection

    # -- other threads -------------------------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            tune(sock)
        self._queue(sock)

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.member is not None and event.member.role == "worker" and event.kind in ("joined", "left", "died"):
            self._queue(event)

    def worker_left(self, worker: int) -> None:
        """For the worker in this process, of which the coordinator tells only the other processes."""
        self._queue(worker)

    def stop(self) -> None:
        """Ends `serve`."""
        self._stopped = True
        self._wake()

    def _queue(self, event: socket.socket | CoordinatorEvent | int) -> None:
        self._events.put(event)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    # -- the loop ------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Returns when all workers have left. Raises what the server cannot continue after; the workers are told."""
        try:
            while self._alive and not self._stopped:
                ready = self._selector.select(POLL_S)
                begin = time.perf_counter()
                for key, events in ready:
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._wakeup.recv(4096)
                        self._handle_events()
                    else:
                        self._serve_socket(key.data, events)
                self._busy_s += time.perf_counter() - begin
                if spans.on and ready:
                    spans.add(spans.SERVER, "serving", spans.since(begin), queue=self.server.queue)
                if self._reporter is not None:
                    self._reporter.report(self.server, self._busy_s)
        except Exception as problem:
            self._send_error(f"server {self._number} failed: {type(problem).__name__}: {problem}")
            raise
        finally:
            if self._reporter is not None:
                self._reporter.report(self.server, self._busy_s, last=True)
            self.close()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for session in self._sessions.values():
            session.close()
        for connection in self._servers.values():
            connection.close()
        if self._passing is not None:
            self._passing.close()
        self.server.store.memory.close()
        self._selector.close()
        self._wakeup.close()
        self._waker.close()
        if self._history is not None:
            self._history.close()

    def _handle_events(self) -> None:
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, socket.socket):
                self._serve_socket(self._add_socket(event), selectors.EVENT_READ)
                continue
            if isinstance(event, CoordinatorEvent):
                assert event.member is not None
                worker = event.member.rank
                if event.kind == "joined":
                    self._alive.add(worker)
                    self._members.add(worker)
                    continue
            else:
                worker = event
            self._alive.discard(worker)
            self._remove_worker(worker)

    def _serve_socket(self, connection: MessageSocket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                for message in connection.receive():
                    self._handle(connection, message)
        except ConnectionClosed:
            self._close_socket(connection)
        except (HoraError, msgspec.MsgspecError) as problem:  # this worker's fault: the others go on
            log.warning("server %d: a connection was closed: %s", self._number, problem)
            if isinstance(problem, Mismatch):  # the others wait for a step that cannot happen
                self._send_error(str(problem))
            with contextlib.suppress(ConnectionClosed):
                connection.send(messages.ServerError(f"server {self._number} refused this worker: {problem}"))
            self._close_socket(connection)
        else:
            self._watch(connection)

    def _watch(self, connection: MessageSocket) -> None:
        """Waits for the socket to become writable only while something is queued."""
        if connection.pending != (connection in self._writing):
            (self._writing.add if connection.pending else self._writing.discard)(connection)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(connection, events, connection)

    def _close_socket(self, connection: MessageSocket) -> None:
        self._unregister(connection)
        connection.close()
        if connection.peer is not None and connection.peer[0] == "worker":
            self._remove_worker(connection.peer[1])

    def _unregister(self, connection: MessageSocket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._writing.discard(connection)

    def _remove_worker(self, worker: int) -> None:
        """This worker sends nothing more and is not waited for. But a synchronous step needs every worker that the run
        began with: a step after its end is never answered, and the other workers learn the cause elsewhere."""
        session = self._sessions.pop(worker, None)
        if worker not in self._members:
            self._alive.discard(worker)
        if session is not None:
            for connection in session.sockets:
                self._unregister(connection)
            if self._passing is not None:
                self._passing.withdraw(copy_key(worker))
            session.close()
        if self.server.rules.mode != "sync" or worker not in self._launched:
            self._send(self.server.leave(worker))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _handle(self, connection: MessageSocket, message: ServerMessage) -> None:
        if connection.peer is None:
            self._introduce(connection, message)
            return
        role, number = connection.peer
        if role == "server":
            if not isinstance(message, messages.FromServer):
                raise HoraError(f"server {number} sent a {type(message).__name__}, which servers do not send")
            self._send(self.server.handle_server(number, message))
        elif isinstance(message, messages.WorkerBye):
            self._remove_worker(number)
        elif number in self._sessions:  # else it is gone, and this came before
            self._send(self._requests.handle(self._sessions[number], connection, message))

    def _introduce(self, connection: MessageSocket, message: ServerMessage) -> None:
        """The first message on a connection."""
        if isinstance(message, messages.WorkerHello):
            self._welcome(connection, message)
        elif isinstance(message, messages.ExtraConnection) and message.worker in self._sessions:
            connection.peer = ("worker", message.worker)
            self._sessions[message.worker].sockets.append(connection)
        elif (
            isinstance(message, messages.ServerHello)
            and not self._number
            and 0 < message.server < self._context.num_servers
        ):
            connection.peer = ("server", message.server)
            self._servers[message.server] = connection
            unsent, self._unsent = self._unsent, []
            self._send(unsent)
        else:
            raise HoraError(f"a connection began with a {type(message).__name__}")

    def _welcome(self, connection: MessageSocket, hello: messages.WorkerHello) -> None:
        worker = hello.worker
        problem = self._requests.mismatch(hello)
        if worker in self._sessions:
            problem = f"{hello.name} claims rank {worker}, which is already connected"
        if problem:
            connection.send(messages.Refused(problem))
            return
        session = self._sessions[worker] = WorkerSession(
            worker, connection, self._part, self._dtypes, self._codec, self._number, self._max_blob_bytes
        )
        connection.peer = ("worker", worker)
        if worker not in self.server.workers:
            self.server.join(worker)
        self._alive.add(worker)
        session.open(hello, self._passing)
        private = self.server.rules.private_copies
        if private or not session.shared:
            flats, descriptor = session.make_copies()
            self.server.store.set_copy(worker, flats)
            if descriptor is not None:
                assert self._passing is not None
                self._passing.offer(copy_key(worker), descriptor)
        address = self._passing.address if session.shared and self._passing is not None else ""
        connection.send(messages.Welcome(address, private))

    def _payload_buffer(self, connection: MessageSocket, message: ServerMessage, num_bytes: int) -> memoryview:
        """Where the bytes that follow a message go."""
        if connection.peer is None or connection.peer[0] != "worker" or connection.peer[1] not in self._sessions:
            raise HoraError(f"{num_bytes} bytes after a {type(message).__name__} that is not of a known worker")
        return self._sessions[connection.peer[1]].payload_buffer(message, num_bytes)

    def _send(self, out: Outbox) -> None:
        for (role, number), message in out:
            if role == "server":
                server = self._servers.get(number)
                if server is None:
                    self._unsent.append((("server", number), message))
                else:
                    with contextlib.suppress(ConnectionClosed):  # noticed where it is read
                        server.send(message)
                    self._watch(server)
                continue
            session = self._sessions.get(number)
            if session is None:
                continue
            connection, payload = session.sockets[0], None
            if isinstance(message, ChunkReady):
                connection, payload = session.reply(message, self.server.store.readable(number))
            try:
                connection.send(message, payload)
            except ConnectionClosed:
                self._close_socket(connection)
                continue
            self._watch(connection)

    def _send_error(self, reason: str) -> None:
        for session in self._sessions.values():
            with contextlib.suppress(ConnectionClosed):
                session.sockets[0].send(messages.ServerError(reason))

    # -- statistics ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        return stats.collect(self.server.counts, self._number, self._part.parameter_bytes, self._busy_s, self._started)

    def _write_history(self, kind: str, **facts: Any) -> None:
        assert self._history is not None
        self._history.write(json.dumps({"server": self._number, "kind": kind, **facts}) + "\n")


def _max_blob_bytes(part: ServerPart, server: int, entries: list[list[Any]]) -> int:
    """By the elements of the model, and of the rows that this server may hold of tables."""
    tables = [chunk.table for chunk in part.chunks if chunk.table is not None]
    num_elements = sum(table.rows_on(server) * table.width for table in tables)
    num_elements += sum(math.prod(entry[1]) for entry in entries)
    return BLOB_BYTES + ELEMENT_BYTES * num_elements


def _allocate(part: ServerPart, server: int) -> BlockMemory:
    try:
        return BlockMemory.shared(len(part.blocks), part.num_bytes)
    except OutOfMemory as problem:
        log.warning("server %d: no shared memory, so its parameters go over TCP: %s", server, problem)
        return BlockMemory(len(part.blocks), part.num_bytes)
