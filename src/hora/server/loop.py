"""Loop: feeds one server's state machine from its lines, until all workers have left.

A worker on this host shows its gradients' memory and maps the parameters'; between hosts both travel behind the
messages, over several connections. The loop runs on one thread: in a process of its own, or beside a worker's training.
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
from ..errors import HoraError, OutOfMemory
from ..monitor import spans
from ..net import handshake
from ..net.fd_passing import FdPassing
from ..net.handshake import connect
from ..net.message_socket import ConnectionClosed, MessageSocket
from ..rendezvous.context import RunContext
from ..transport.tcp import tune
from . import messages
from .block_memory import BlockMemory
from .layout import BlockLayout
from .messages import (
    Ack,
    BeginStep,
    BlobReply,
    ChosenWorkers,
    ChunkReady,
    DropStep,
    EnterLoop,
    ExtraConnection,
    FillParameters,
    GetBlob,
    GradientNorm,
    LeaveLoop,
    LoadState,
    Lookup,
    Pull,
    Push,
    PutBlob,
    Refused,
    RowsReply,
    ServerError,
    ServerHello,
    ServerMessage,
    SynchronizeAt,
    SynchronizedAck,
    Welcome,
    WorkerBye,
    WorkerEntered,
    WorkerHello,
)
from .push_codec import PushCodec
from .rows import checked
from .shelf import Shelf
from .state import Out, Rules, ServerState
from .stats import StatsReporter
from .worker_session import WorkerSession

log = logging.getLogger(__name__)

PURPOSE = "parameters"
TURN_S = 0.5  # how long the loop sleeps at most before it looks around
MAX_KEPT = 16
BLOB_BYTES = 64 << 20  # what a worker may leave here, beside
ELEMENT_BYTES = 64  # for each element of the model: several states of an optimizer, or a buffer


def near_address(passing: str) -> str:
    """Where a server listens for workers on its own host: beside the window through which it passes descriptors."""
    return f"\0{passing}-lines"


class ServerLoop:
    """One server at work. Making one opens its port and tells the coordinator where it is."""

    def __init__(
        self,
        context: RunContext,
        layout: BlockLayout,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        entries: list[list[Any]],
        optimizers: Sequence[torch.optim.Optimizer],
        rules: Rules,
    ) -> None:
        self.context = context
        self._layout = layout
        self._part = layout.parts[context.rank]
        self._entries = entries
        self._most_blob_bytes = BLOB_BYTES + ELEMENT_BYTES * self._num_elements()
        self._dtypes = [p.dtype for p in parameters]
        self._names = names
        self._wire = PushCodec(rules.wire, rules.codec, self._part, self._dtypes)
        memory = self._memory()
        history = os.path.join(context.history, f"server-{context.rank}.jsonl") if context.history else ""
        self._history = open(history, "a", buffering=1) if history else None  # noqa: SIM115
        self.server = ServerState(
            Shelf(self._part, memory, parameters, names, optimizers),
            rules,
            number=context.rank,
            num_servers=context.num_servers,
            record=self._note if self._history else None,
        )
        for worker in range(context.size):
            self.server.join(worker)
        self._alive = set(range(context.size))
        self._members = set(range(context.size))  # those that the coordinator knows
        self._guests: dict[int, WorkerSession] = {}
        self._servers: dict[int, MessageSocket] = {}
        self._for_servers: list[tuple[int, ServerMessage]] = []  # for those that have not called yet
        self._kept: dict[str, bytes] = {}
        self._under_way: dict[int, tuple[int, int]] = {}  # by step in sync: who began it first, with which optimizer
        self._news: queue.SimpleQueue[socket.socket | CoordinatorEvent | int] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._writing: set[MessageSocket] = set()
        self._broken: str | None = None
        self.busy_s = 0.0
        self.started = time.monotonic()
        self._herald = StatsReporter(context.rank, self._part.load, context.control.report) if context.watched else None
        context.control.subscribe(self._hear)
        there = {member.rank for member in context.control.members() if member.role == "worker"}
        for worker in self._members - there:  # it ended before we listened
            self.excuse(worker)
        self._passing: FdPassing | None = None
        with contextlib.suppress(OSError):
            self._passing = FdPassing(context.token, context.timeout_s) if memory.descriptor is not None else None
        if self._passing is not None and memory.descriptor is not None:
            self._passing.offer("parameters", memory.descriptor)
        family = socket.AF_INET6 if ":" in context.bind else socket.AF_INET
        sock = socket.create_server((context.bind, 0), family=family, backlog=128)
        address = f"{context.bind} {sock.getsockname()[1]} {self._passing.address if self._passing else '-'}"
        self._listeners = [handshake.AuthenticatedListener(sock, context.token, PURPOSE, self._welcome)]
        if self._passing is not None:
            near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # a word over TCP costs ten times as much
            near.bind(near_address(self._passing.address))
            near.listen(128)
            self._listeners.append(handshake.AuthenticatedListener(near, context.token, PURPOSE, self._welcome))
        context.control.put(f"ps/{context.rank}", address.encode())
        agreeing = rules.backup or rules.clip_norm is not None or rules.mode == "ssp" or rules.sync_every is not None
        if context.rank and agreeing:
            self._call_first()

    def _num_elements(self) -> int:
        """All that a worker may tell of: the model, and the rows that this server may have of tables."""
        tables = [parcel.table for parcel in self._part.parcels if parcel.table is not None]
        rows = sum(table.rows_on(self.context.rank) * table.width for table in tables)
        return rows + sum(math.prod(entry[1]) for entry in self._entries)

    def _memory(self) -> BlockMemory:
        try:
            return BlockMemory.shared(len(self._part.blocks), self._part.num_bytes)
        except OutOfMemory as problem:
            log.warning("server %d: no shared memory, so its parameters travel over TCP: %s",
                        self.context.rank, problem)  # fmt: skip
            return BlockMemory(len(self._part.blocks), self._part.num_bytes)

    def _call_first(self) -> None:
        """Server 0 is where servers agree."""
        host, port, _ = self.context.control.get("ps/0", self.context.timeout_s).decode().split()
        sock = connect((host, int(port)), self.context.token, PURPOSE)
        tune(sock)
        line = MessageSocket(sock, self._place, messages.encode, messages.decode)
        line.peer = ("server", 0)
        line.send(ServerHello(self.context.rank))
        self._servers[0] = line
        self._selector.register(line, selectors.EVENT_READ, line)

    # -- other threads -------------------------------------------------------------------------------------------------

    def _welcome(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            tune(sock)
        self._news.put(sock)
        self._wake()

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.member is not None and event.member.role == "worker" and event.kind in ("joined", "left", "died"):
            self._news.put(event)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def excuse(self, worker: int) -> None:
        """This worker has left: said by itself, since the coordinator tells it to the others only."""
        self._news.put(worker)
        self._wake()

    def abandon(self, reason: str) -> None:
        """Ends the loop from outside."""
        self._broken = reason
        self._wake()

    # -- the loop ------------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Returns when all workers have left. HoraError if the server cannot go on."""
        try:
            while self._alive and self._broken is None:
                ready = self._selector.select(TURN_S)
                begin = time.perf_counter()
                for key, events in ready:
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._bell.recv(4096)
                        self._read_news()
                    else:
                        self._attend(key.data, events)
                self.busy_s += time.perf_counter() - begin
                if spans.on and ready:
                    spans.add(spans.SERVER, "serving", spans.since(begin), queue=self.server.queue)
                if self._herald is not None:
                    self._herald.tell(self.server, self.busy_s)
        except Exception as problem:
            reason = f"server {self.context.rank} cannot go on: {type(problem).__name__}: {problem}"
            for guest in self._guests.values():
                with contextlib.suppress(ConnectionClosed):
                    guest.lines[0].send(ServerError(reason))
            raise
        finally:
            if self._herald is not None:
                self._herald.tell(self.server, self.busy_s, last=True)
            self.close()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for guest in self._guests.values():
            for line in guest.lines:
                line.close()
        for line in self._servers.values():
            line.close()
        if self._passing is not None:
            self._passing.close()
        self.server.shelf.memory.close()
        self._selector.close()
        self._bell.close()
        self._ring.close()
        if self._history is not None:
            self._history.close()

    def _read_news(self) -> None:
        while not self._news.empty():
            news = self._news.get_nowait()
            if isinstance(news, socket.socket):
                line = MessageSocket(news, self._place, messages.encode, messages.decode)
                self._selector.register(line, selectors.EVENT_READ, line)
                self._attend(line, selectors.EVENT_READ)
            elif isinstance(news, int):
                self._alive.discard(news)
                self._part_with(news)
            elif news.member is not None:
                if news.kind == "joined":
                    self._alive.add(news.member.rank)
                    self._members.add(news.member.rank)
                else:
                    self._alive.discard(news.member.rank)
                    self._part_with(news.member.rank)

    def _attend(self, line: MessageSocket, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                line.flush()
            if events & selectors.EVENT_READ:
                for message in line.receive():
                    self._handle(line, message)
        except ConnectionClosed:
            self._lose(line)
        except (HoraError, msgspec.MsgspecError) as problem:  # its fault, and not a reason to fail the others
            log.warning("server %d: a connection was closed: %s", self.context.rank, problem)
            with contextlib.suppress(ConnectionClosed):
                line.send(ServerError(f"server {self.context.rank} refused this worker: {problem}"))
            self._lose(line)
        else:
            self._watch(line)

    def _watch(self, line: MessageSocket) -> None:
        if line.pending != (line in self._writing):
            (self._writing.add if line.pending else self._writing.discard)(line)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.pending else 0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(line, events, line)

    def _lose(self, line: MessageSocket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line)
        self._writing.discard(line)
        line.close()
        if line.peer is not None and line.peer[0] == "worker":
            self._part_with(line.peer[1])

    def _part_with(self, worker: int) -> None:
        """This worker sends no more, well or not, and is not waited for. But in sync a step needs every worker that the
        run began with: one that comes after its end is never answered, and the other workers know why."""
        guest = self._guests.pop(worker, None)
        if worker not in self._members:
            self._alive.discard(worker)
        if guest is not None:
            for line in guest.lines:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(line)
            if self._passing is not None:
                self._passing.withdraw(f"copies-{worker}")
            guest.close()
        if self.server.rules.mode != "sync" or worker not in range(self.context.size):
            self._post(self.server.leave(worker))

    # -- messages ------------------------------------------------------------------------------------------------------

    def _handle(self, line: MessageSocket, message: ServerMessage) -> None:
        if line.peer is None:
            self._introduce(line, message)
            return
        role, number = line.peer
        if role == "server":
            if not isinstance(message, ChosenWorkers | GradientNorm | WorkerEntered | SynchronizeAt):
                raise HoraError(f"server {number} sent a {type(message).__name__}, which is not a server's to send")
            self._post(self.server.hear(number, message))
            return
        guest = self._guests.get(number)
        if guest is None:
            return  # it is gone, and this came before that was known
        if isinstance(message, Push):
            gradients = guest.gradients_of(message)
            versions = self.server.shelf.versions(self._part.parcels[message.parcel])
            if any(base > version for base, version in zip(message.base, versions, strict=True)):
                raise HoraError(f"rank {number} pushes a gradient for versions {message.base} that were never written")
            began = spans.clock() if spans.on else 0
            self._post(self.server.handle(number, message, gradients))
            if spans.on:
                blocks = self._part.parcels[message.parcel].numbers
                spans.add(spans.SERVER, "gradient", began, blocks=blocks, worker=number, step=message.step)
        elif isinstance(message, Lookup):
            line.send(*self._look_up(message))
        elif isinstance(message, BeginStep | SynchronizedAck | DropStep | EnterLoop | LeaveLoop):
            if isinstance(message, BeginStep):
                self._check_begin(number, message)
            self._post(self.server.handle(number, message))
        elif isinstance(message, Pull):
            self._post(self.server.refresh(number, message.number))
        elif isinstance(message, FillParameters | LoadState) and number:
            raise HoraError(f"rank {number} sent a {type(message).__name__}, which is rank 0's to send")
        elif isinstance(message, FillParameters):
            values = guest.parameters_of(message)
            self.server.shelf.fill(self._part.parcels[message.parcel], values, max(0, message.step))
            line.send(Ack())
        elif isinstance(message, LoadState):
            self._load(number, bytes(guest.blob))
            line.send(Ack())
        elif isinstance(message, PutBlob):
            if message.what not in self._kept and len(self._kept) >= MAX_KEPT:
                raise HoraError(f"rank {number} leaves more than {MAX_KEPT} things here")
            self._kept[message.what] = bytes(guest.blob)
            line.send(Ack())
        elif isinstance(message, GetBlob):
            line.send(BlobReply(message.what), self._answer(number, message.what))
        elif isinstance(message, WorkerBye):
            self._part_with(number)
        else:
            raise HoraError(f"rank {number} sent a {type(message).__name__}, which is not a worker's to send")

    def _check_begin(self, worker: int, begin: BeginStep) -> None:
        """HoraError for what would end the server, or spoil the parameters."""
        numbers = (begin.weight, begin.total, begin.scale, 1.0 if begin.factor is None else begin.factor)
        optimizers = self.server.shelf.optimizers
        if not all(map(math.isfinite, numbers)) or not 0 <= begin.optimizer < len(optimizers):
            raise HoraError(f"rank {worker} begins a step of optimizer {begin.optimizer} with {numbers}")
        if begin.hyper is not None and [len(groups) for groups in begin.hyper] != [
            len(optimizer.param_groups) for optimizer in optimizers
        ]:
            raise HoraError(f"rank {worker} tells hyper-parameters of other groups than the optimizers have")
        if self.server.rules.mode != "sync" or self.server.rules.backup:
            if begin.carrier >= 0:
                raise HoraError(f"rank {worker} leaves its gradients to another, where each sends its own")
            return
        if begin.carrier == worker or (begin.carrier >= 0 and begin.carrier not in self.server.workers):
            raise HoraError(f"rank {worker} leaves its gradients to rank {begin.carrier}, which cannot send them")
        self._under_way = {step: first for step, first in self._under_way.items() if step >= self.server.now}
        first, optimizer = self._under_way.setdefault(begin.step, (worker, begin.optimizer))
        if optimizer != begin.optimizer:
            reason = (
                f"rank {worker} steps optimizer {begin.optimizer} where rank {first} steps optimizer {optimizer}: "
                "every worker must step the same optimizers in the same order"
            )
            for guest in self._guests.values():
                guest.lines[0].send(ServerError(reason))
            raise HoraError(reason)

    def _load(self, worker: int, blob: bytes) -> None:
        try:
            self.server.shelf.load(blob)
        except Exception as problem:
            raise HoraError(f"rank {worker} sent optimizer state that cannot be read: {problem}") from None

    def _introduce(self, line: MessageSocket, message: ServerMessage) -> None:
        if isinstance(message, WorkerHello):
            problem = self._objection(message)
            if problem:
                line.send(Refused(problem))
                return
            guest = WorkerSession(line, self._part, self._dtypes, self.context.rank, self._most_blob_bytes, self._wire)
            self._guests[message.worker] = guest
            line.peer = ("worker", message.worker)
            if message.worker not in self.server.workers:
                self.server.join(message.worker)
            self._alive.add(message.worker)
            line.send(self._furnish(guest, message))
        elif isinstance(message, ExtraConnection) and message.worker in self._guests:
            line.peer = ("worker", message.worker)
            self._guests[message.worker].lines.append(line)
        elif (
            isinstance(message, ServerHello)
            and self.context.rank == 0
            and 0 < message.server < self.context.num_servers
        ):
            line.peer = ("server", message.server)
            self._servers[message.server] = line
            early, self._for_servers = self._for_servers, []
            self._post([(("server", server), each) for server, each in early])
        else:
            raise HoraError(f"a {type(message).__name__} as the first word")

    def _objection(self, hello: WorkerHello) -> str:
        if hello.worker in self._guests:
            return f"{hello.name} says that it is rank {hello.worker}, which is here already"
        for mine, theirs in zip(self._entries, hello.entries, strict=False):
            if mine != theirs:
                theirs = [*theirs, "", "", ""]
                return (
                    f"the models differ: {hello.name} has {theirs[0]} {theirs[1]} of {theirs[2]} where server "
                    f"{self.context.rank} has {mine[0]} {mine[1]} of {mine[2]}. Every process must build the same "
                    "model"
                )
        if len(self._entries) != len(hello.entries) or hello.fingerprint != self._layout.fingerprint:
            return (
                f"the models differ: {hello.name} has {len(hello.entries)} parameters and buffers, server "
                f"{self.context.rank} has {len(self._entries)}, or the optimizers' groups are others. Every process "
                "must build the same"
            )
        return ""

    def _furnish(self, guest: WorkerSession, hello: WorkerHello) -> Welcome:
        """Where what this worker reads must be copied, it reads from memory of its own."""
        guest.furnish(hello, self._passing)
        rules = self.server.rules
        mine = ""
        if rules.backup or rules.correct == "dc" or not guest.shared:
            flat, descriptor = guest.copies()
            self.server.lend(hello.worker, flat)
            if descriptor is not None:
                assert self._passing is not None
                mine = f"copies-{hello.worker}"
                self._passing.offer(mine, descriptor)
        if not guest.shared:
            return Welcome()
        assert self._passing is not None
        return Welcome(self._passing.address, "parameters", mine)

    def _look_up(self, asked: Lookup) -> tuple[RowsReply, torch.Tensor]:
        if not 0 <= asked.parcel < len(self._part.parcels) or self._part.parcels[asked.parcel].table is None:
            raise HoraError(f"a look-up in parcel {asked.parcel}, which is no table")
        parcel = self._part.parcels[asked.parcel]
        assert parcel.table is not None
        version, found = self.server.look_up(parcel, checked(asked.rows, parcel.table.rows_on(self.context.rank)))
        return RowsReply(asked.number, version), found

    def _answer(self, worker: int, what: str) -> bytes:
        if what == "state":
            return self.server.shelf.save()
        if what == "stats":
            return json.dumps(self.stats()).encode()
        if what == "awaited":
            return self.server.awaited(worker).encode()
        return self._kept.get(what, b"")

    def stats(self) -> dict[str, Any]:
        counts = self.server.counts
        return {
            "server": self.context.rank,
            "updates": counts.updates,
            "bytes_in": counts.bytes_in,
            "bytes_out": counts.bytes_out,
            "dropped": counts.dropped,
            "skipped": counts.skipped,
            "lags": {str(lag): count for lag, count in sorted(counts.lags.items())},
            "busy_s": round(self.busy_s, 4),
            "seconds": round(time.monotonic() - self.started, 4),
            "load_bytes": self._part.load,
            "cpu_s": round(time.thread_time(), 4),
        }

    def _place(self, line: MessageSocket, message: ServerMessage, num_bytes: int) -> memoryview:
        """Where the tensors behind a message go."""
        if line.peer is None or line.peer[0] != "worker" or line.peer[1] not in self._guests:
            raise HoraError(f"{num_bytes} bytes behind a {type(message).__name__} of one that is no worker")
        return self._guests[line.peer[1]].room(message, num_bytes)

    def _post(self, out: Out) -> None:
        for (role, number), message in out:
            if role == "server":
                line = self._servers.get(number)
                if line is None:
                    self._for_servers.append((number, message))
                else:
                    with contextlib.suppress(ConnectionClosed):  # its end is met where it is read
                        line.send(message)
                    self._watch(line)
                continue
            guest = self._guests.get(number)
            if guest is None:
                continue
            line, payload = guest.lines[0], None
            if isinstance(message, ChunkReady):
                line, payload = guest.envelope(message, self.server.readable(number))
            try:
                line.send(message, payload)
            except ConnectionClosed:
                self._lose(line)
                continue
            self._watch(line)

    def _note(self, kind: str, **facts: Any) -> None:
        assert self._history is not None
        self._history.write(json.dumps({"server": self.context.rank, "kind": kind, **facts}) + "\n")
