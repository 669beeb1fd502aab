"""RequestHandler: what a server does with the messages of a worker that it knows. Checks each before ServerState
sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..errors import HoraError, Mismatch
from ..monitor import spans
from ..net.message_socket import MessageSocket
from . import messages
from .layout import BlockLayout
from .messages import BeginStep, Push, ServerMessage
from .rows import checked
from .state import ServerState
from .store import Outbox
from .worker_session import WorkerSession

MAX_BLOBS = 16


class RequestHandler:
    """`entries` describes this server's model; `stats` gives the server's statistics."""

    def __init__(
        self, server: ServerState, layout: BlockLayout, entries: list[list[Any]], stats: Callable[[], dict[str, Any]]
    ) -> None:
        self._server = server
        self._store = server.store
        self._part = server.store.part
        self._layout = layout
        self._entries = entries
        self._stats = stats
        self._blobs: dict[str, bytes] = {}
        self._first_begins: dict[int, tuple[int, int]] = {}  # by step in sync: who began it first, with which optimizer

    def mismatch(self, hello: messages.WorkerHello) -> str:
        """How a worker's model differs from this server's; empty if it does not."""
        number = self._server.number
        for mine, theirs in zip(self._entries, hello.entries, strict=False):
            if mine != theirs:
                theirs = [*theirs, "", "", ""]
                return (
                    f"the models differ: {hello.name} has {theirs[0]} {theirs[1]} of {theirs[2]} where server {number} "
                    f"has {mine[0]} {mine[1]} of {mine[2]}. Every process must build the same model"
                )
        if len(self._entries) != len(hello.entries) or hello.fingerprint != self._layout.fingerprint:
            return (
                f"the models differ: {hello.name} has {len(hello.entries)} parameters and buffers, server {number} has "
                f"{len(self._entries)}, or the optimizers' groups differ. Every process must build the same"
            )
        return ""

    def handle(self, session: WorkerSession, socket: MessageSocket, message: ServerMessage) -> Outbox:
        """Replies on `socket`, or returns what to send. HoraError if the worker's message is invalid; Mismatch if the
        workers' steps contradict each other."""
        rank = session.rank
        if isinstance(message, Push):
            return self._push(session, message)
        if isinstance(
            message, BeginStep | messages.SynchronizedAck | messages.DropStep | messages.EnterLoop | messages.LeaveLoop
        ):
            if isinstance(message, BeginStep):
                self._check_begin(rank, message)
            return self._server.handle(rank, message)
        if isinstance(message, messages.Pull):
            return self._server.refresh(rank, message.number)
        if isinstance(message, messages.Lookup):
            socket.send(*self._look_up(message))
        elif isinstance(message, messages.GetBlob):
            socket.send(messages.BlobReply(), self._blob(rank, message.what))
        elif isinstance(message, messages.FillParameters | messages.LoadState | messages.PutBlob):
            self._write(session, message)
            socket.send(messages.Ack())
        else:
            raise HoraError(f"rank {rank} sent a {type(message).__name__}, which workers do not send")
        return []

    def _push(self, session: WorkerSession, push: Push) -> Outbox:
        gradients = session.gradients_of(push)
        chunk = self._part.chunks[push.chunk]
        if any(base > version for base, version in zip(push.base, self._store.versions(chunk), strict=True)):
            raise HoraError(f"rank {session.rank} pushes a gradient for versions {push.base} that were never written")
        began = spans.clock() if spans.on else 0
        out = self._server.handle(session.rank, push, gradients)
        spans.add(spans.SERVER, "gradient", began, blocks=chunk.block_numbers, worker=session.rank, step=push.step)
        return out

    def _check_begin(self, rank: int, begin: BeginStep) -> None:
        """HoraError for what would end the server, or spoil the parameters."""
        numbers = (begin.weight, begin.total, begin.scale, 1.0 if begin.factor is None else begin.factor)
        optimizers = self._store.optimizers
        if not all(map(math.isfinite, numbers)) or not 0 <= begin.optimizer < len(optimizers):
            raise HoraError(f"rank {rank} begins a step of optimizer {begin.optimizer} with {numbers}")
        num_groups = [len(optimizer.param_groups) for optimizer in optimizers]
        if begin.hyper is not None and [len(groups) for groups in begin.hyper] != num_groups:
            raise HoraError(f"rank {rank} sends hyper-parameters for other groups than the optimizers have")
        if self._server.rules.mode != "sync" or self._server.rules.backup:
            if begin.carrier >= 0:
                raise HoraError(f"rank {rank} leaves its push to rank {begin.carrier}, but each worker pushes its own")
            return
        if begin.carrier == rank or (begin.carrier >= 0 and begin.carrier not in self._server.workers):
            raise HoraError(f"rank {rank} leaves its push to rank {begin.carrier}, which cannot push it")
        self._first_begins = {step: first for step, first in self._first_begins.items() if step >= self._server.now}
        first, optimizer = self._first_begins.setdefault(begin.step, (rank, begin.optimizer))
        if optimizer != begin.optimizer:
            raise Mismatch(
                f"rank {rank} steps optimizer {begin.optimizer} where rank {first} steps optimizer {optimizer}: "
                "every worker must step the same optimizers in the same order"
            )

    def _write(
        self, session: WorkerSession, message: messages.FillParameters | messages.LoadState | messages.PutBlob
    ) -> None:
        rank = session.rank
        if isinstance(message, messages.PutBlob):
            if message.what not in self._blobs and len(self._blobs) >= MAX_BLOBS:
                raise HoraError(f"rank {rank} puts more than {MAX_BLOBS} blobs")
            self._blobs[message.what] = bytes(session.blob)
        elif rank:
            raise HoraError(f"rank {rank} sent a {type(message).__name__}, which only rank 0 may send")
        elif isinstance(message, messages.FillParameters):
            values = session.parameters_of(message)
            self._store.fill(self._part.chunks[message.chunk], values, max(0, message.step))
        else:
            try:
                self._store.load(bytes(session.blob))
            except Exception as problem:
                raise HoraError(f"rank {rank} sent optimizer state that cannot be read: {problem}") from None

    def _look_up(self, asked: messages.Lookup) -> tuple[messages.RowsReply, torch.Tensor]:
        if not 0 <= asked.chunk < len(self._part.chunks) or self._part.chunks[asked.chunk].table is None:
            raise HoraError(f"look-up in chunk {asked.chunk}, which is not a ServerEmbedding's")
        chunk = self._part.chunks[asked.chunk]
        assert chunk.table is not None
        version, rows = self._store.look_up(chunk, checked(asked.rows, chunk.table.rows_on(self._server.number)))
        return messages.RowsReply(asked.number, version), rows

    def _blob(self, rank: int, what: str) -> bytes:
        if what == "state":
            return self._store.save()
        if what == "stats":
            return msgspec.json.encode(self._stats())
        if what == "awaited":
            return self._server.awaited(rank).encode()
        return self._blobs.get(what, b"")
