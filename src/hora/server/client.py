"""ServerClient: a worker's push and pull. One step pushes every chunk's gradients and pulls its parameters.

Chunks are pushed in model order, what the next forward needs first, and each is read as soon as its server allows it,
while later ones are still being sent. On one host a gradient is copied once, into memory that the server reads in
place, and a block is copied once, out of memory that the server writes; its seqlock counter proves that the copy is
consistent. Over a network gradients may be encoded (PushCodec), and the workers of a host may push one gradient
(HostAggregation).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from ..errors import HoraError, PeerLost, Timeout
from ..monitor import spans
from ..monitor.spans import COMMUNICATION, TRAINING
from ..rendezvous.context import RunContext
from . import messages
from .connection import Check, ServerConnection, Targets
from .connection_pool import ConnectionPool
from .host_aggregation import HostAggregation, Pushed
from .layout import BlockLayout, Chunk, ParameterBlock
from .messages import BeginStep, ChunkReady, Push, ServerMessage
from .rows import num_bytes, to_bytes
from .state import Rules

MAX_ROWS = 1 << 20  # of a table in one batch: their numbers fit into a message

GradientOf = Callable[[ParameterBlock], torch.Tensor | None]


class ServerClient(ConnectionPool):
    """One worker's client of all servers. Used on its training thread; `check` is called while it waits, and may raise.

    `targets(block)` is the vector into which a block's parameters are read.
    """

    host_aggregation: HostAggregation | None = None

    def __init__(
        self,
        context: RunContext,
        layout: BlockLayout,
        dtypes: Sequence[torch.dtype],
        rules: Rules,
        *,
        check: Check,
        targets: Targets,
    ) -> None:
        super().__init__(context, layout, dtypes, rules, check, targets)
        self.pushed_bytes = 0  # of gradients, sent or placed where a server reads them
        self.plain_bytes = 0  # what these would be without encoding
        self.lags: list[int] = []  # of the current step, by chunk
        self._rules = rules
        self._pushed_at = 0  # when the last push ended, for the trace
        self._num_refreshes = 0
        self._num_lookups = 0
        self._deferring = False
        self._deferred: list[tuple[ServerConnection, ChunkReady]] = []  # answers to be read by `pull`
        self._broadcasts: list[Pushed] = []  # chunks of the current step for the other local ranks
        chunks = [(connection, chunk) for connection in self.connections for chunk in connection.part.chunks]
        chunks.sort(key=lambda pair: (pair[1].blocks[0].index, pair[1].blocks[0].start))
        self._order: dict[int, list[Pushed]] = {}  # by optimizer, in model order
        self._tables: dict[int, list[Pushed]] = {}  # by parameter, in the order of the servers
        for connection, chunk in chunks:
            self._order.setdefault(chunk.optimizer, []).append((connection, chunk))
            if chunk.table is not None:
                self._tables.setdefault(chunk.table.index, []).append((connection, chunk))

    def close(self) -> None:
        self.leave_local_ranks()
        super().close()

    def leave_local_ranks(self) -> None:
        """Between two steps: from now on this worker pushes its own gradients only."""
        if self.host_aggregation is not None:
            self.host_aggregation.close()
            self.host_aggregation = None

    def _on_lost(self, cause: PeerLost) -> None:
        """A worker that waits for a local rank does not look at the servers."""
        if self.host_aggregation is not None:
            self.host_aggregation.abort(cause)

    # -- push ----------------------------------------------------------------------------------------------------------

    def push(self, begin: BeginStep, gradient: GradientOf, defer: bool = False) -> None:
        """Sends a step's gradients to all servers and reads what becomes ready; with `defer` only `pull` reads.

        `gradient(block)` is a vector, None, or a sparse tensor of the block's rows."""
        order = self._order.get(begin.optimizer, [])
        aggregation = self.host_aggregation
        self._broadcasts = [] if aggregation is None else [pair for pair in order if aggregation.carries(*pair)]
        started, pushed_bytes = spans.clock() if spans.on else 0, self.pushed_bytes
        self._deferring = defer
        weight = begin.weight * begin.scale if self._rules.mode == "sync" else begin.scale
        with self._share_errors():
            if aggregation is not None:
                have = [
                    [gradient(block) is not None for block in chunk.blocks] if chunk.dense else () for _, chunk in order
                ]
                aggregation.agree(weight, order, have)
            factors = self._begin(begin, weight)
            self.lags.clear()
            for connection, chunk in order:
                if chunk.table is not None:
                    self._push_rows(connection, chunk, begin.step, gradient(chunk.blocks[0]))
                else:
                    self._push_chunk(connection, chunk, begin.step, gradient, factors[connection.number])
                self.poll(0)
        if spans.on:
            self._pushed_at = spans.clock()
            sent = self.pushed_bytes - pushed_bytes
            for lane in (TRAINING, COMMUNICATION):
                spans.add(lane, "push", started, self._pushed_at, step=begin.step, bytes=sent)

    def _begin(self, begin: BeginStep, weight: float) -> list[float]:
        """Tells all servers that a step begins. Returns, by server, the factor to multiply gradients with before they
        are sent.

        Encoded gradients are weighted before encoding, so that a residual has the same weight whenever it is added.
        Half precision may hold the mean of the local ranks' gradients and not their sum: their mean is sent."""
        factors = []
        for connection in self.connections:
            chunks = [chunk for chunk in connection.part.chunks if chunk.optimizer == begin.optimizer]
            aggregation = self.host_aggregation if any(connection is each for each, _ in self._broadcasts) else None
            connection.outstanding = {
                chunk.number for chunk in chunks if aggregation is None or aggregation.leads or not chunk.dense
            }
            connection.readies.clear()
            begin.num_chunks = len(connection.outstanding)
            begin.carrier, begin.factor, factor = -1, None, 1.0
            if connection.encodes:
                begin.factor = 1.0 if aggregation is None else float(aggregation.size)
                factor = weight / begin.factor
            elif aggregation is not None:
                begin.factor, factor = aggregation.total, weight / aggregation.total if aggregation.total else 0.0
            if aggregation is not None and not aggregation.leads:
                begin.carrier = aggregation.leader
            self.send(connection, begin)
            factors.append(factor)
        return factors

    @contextlib.contextmanager
    def _share_errors(self) -> Iterator[None]:
        """An error that ends this worker's step ends the other local ranks' steps too."""
        try:
            yield
        except HoraError as problem:
            if self.host_aggregation is not None and type(problem) in (HoraError, PeerLost, Timeout):
                self.host_aggregation.break_off(problem)
            raise

    def _push_chunk(
        self, connection: ServerConnection, chunk: Chunk, step: int, gradient: GradientOf, factor: float
    ) -> None:
        """Copies a chunk's gradients into its memory, sums them over the local ranks where these push one, and
        pushes."""
        aggregation = self.host_aggregation
        if aggregation is not None and not aggregation.carries(connection, chunk):
            aggregation = None
        have: list[bool] = []
        rows = None
        length = chunk.num_bytes
        clear = (
            aggregation is not None or connection.encodes
        ) and chunk.dense  # absent gradients are summed or encoded
        for block, target in zip(chunk.blocks, connection.gradient_views[chunk.number], strict=True):
            given = gradient(block)
            have.append(given is not None)
            if given is None:
                if clear:
                    target.zero_()
            elif given.is_sparse:
                values = given.values()
                target[: values.numel()].copy_(values.reshape(-1))
                rows = [to_bytes(given.indices()[0])]
                length = values.numel() * target.element_size()
            elif factor == 1.0 or not chunk.dense:
                target.copy_(given)
            elif given.dtype == target.dtype:
                torch.mul(given, factor, out=target)
            else:
                target.copy_(given).mul_(factor)
        if aggregation is not None:
            have = [aggregation.has(connection, block) for block in chunk.blocks]
            if any(have):
                aggregation.reduce(chunk, connection.gradients.chunk_bytes(chunk), target.dtype)
            if not aggregation.leads:
                return
        self._send_gradients(connection, chunk, step, have, rows, connection.gradients.chunk_bytes(chunk, length))

    def _send_gradients(
        self,
        connection: ServerConnection,
        chunk: Chunk,
        step: int,
        have: list[bool],
        rows: list[bytes] | None,
        data: torch.Tensor,
    ) -> None:
        """Pushes what lies in a chunk's memory: over the connection, or where the server reads it in place."""
        views = connection.gradient_views[chunk.number]
        row_bytes = sum(map(len, rows or ()))
        plain_bytes = len(data) if rows else sum(view.nbytes for view, has in zip(views, have, strict=True) if has)
        known = connection.base if connection.pushed_base is None else connection.pushed_base
        base = [known[block.number] for block in chunk.blocks]
        message = Push(step, chunk.number, base, None if all(have) else have, rows)
        self.plain_bytes += plain_bytes + row_bytes
        if connection.shared or not any(have):
            self.pushed_bytes += plain_bytes + row_bytes
            self.send(connection, message)
            return
        if connection.codec.num_bytes(chunk, connection.codec.name) is not None:
            message.wire = connection.codec.name
            data = connection.codec.encode(chunk, data, [b for b, has in zip(chunk.blocks, have, strict=True) if has])
            plain_bytes = len(data)
        self.pushed_bytes += plain_bytes + row_bytes
        self.send(connection, message, data, connection.socket_for(chunk))

    # -- pull ----------------------------------------------------------------------------------------------------------

    def pull(self) -> list[ChunkReady]:
        """Waits for the rest of the step's chunks and reads them. Returns the servers' answers."""
        self._deferring = False
        begin = spans.clock() if spans.on else 0
        deferred, self._deferred = self._deferred, []
        for connection, ready in deferred:
            self._on_ready(connection, ready)
        broadcasts, self._broadcasts = self._broadcasts, []
        with self._share_errors():
            if self.host_aggregation is not None and broadcasts:
                self._broadcast(self.host_aggregation, broadcasts)
            self.wait(lambda: not any(connection.outstanding for connection in self.connections))
        if spans.on:
            spans.add(TRAINING, "pull", begin)
            spans.add(COMMUNICATION, "pull", self._pushed_at or begin)  # the answer to what was pushed
            self._pushed_at = 0
        return [ready for connection in self.connections for ready in connection.readies]

    def _broadcast(self, aggregation: HostAggregation, chunks: Sequence[Pushed]) -> None:
        """The leader's chunks to the other local ranks, in model order, which is about that of their arrival."""
        if not aggregation.leads:  # what other workers may wait for is sent before this one waits for the leader
            self.wait(lambda: not self.pending)
        for connection, chunk in chunks:
            if aggregation.leads:
                self.wait(functools.partial(_is_read, connection, chunk))
            aggregation.broadcast(chunk, connection.parameters.chunk_bytes(chunk))
        numbers = {(connection.number, chunk.number) for connection, chunk in chunks}
        readies = [(connection.number, ready) for connection in self.connections for ready in connection.readies
                   if (connection.number, ready.chunk) in numbers]  # fmt: skip
        for server, ready in aggregation.broadcast_readies(readies):
            if not aggregation.leads:
                self._on_ready(self.connections[server], ready)

    def _on_ready(self, connection: ServerConnection, ready: ChunkReady) -> None:
        if self._deferring:
            self._deferred.append((connection, ready))
            return
        self.lags.append(ready.lag)
        connection.read(ready)
        connection.codec.settle(ready.chunk, applied=not ready.skipped and not ready.dropped)
        connection.outstanding.discard(ready.chunk)
        connection.readies.append(ready)

    def freeze_base_versions(self) -> None:
        """The next push is based on what was read up to now, not on what is read before it."""
        for connection in self.connections:
            connection.pushed_base = list(connection.base)

    def refresh(self) -> list[ChunkReady]:
        """Reads all parameters as they are now. Returns the servers' answers."""
        self._num_refreshes += 1
        self._broadcasts = []  # of a step that was dropped
        for connection in self.connections:
            connection.outstanding = {chunk.number for chunk in connection.part.chunks}
            connection.readies.clear()
            connection.pushed_base = None
            self.send(connection, messages.Pull(-self._num_refreshes))
        return self.pull()

    # -- rows of a ServerEmbedding -------------------------------------------------------------------------------------

    def look_up(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """The rows with these ids, ascending without duplicates, of the table with placeholder parameter `index`."""
        self._num_lookups += 1
        number, num_servers = self._num_lookups, len(self.connections)
        asked = []
        for connection, chunk in self._tables[index]:
            mine = (ids % num_servers == connection.number).nonzero().view(-1)
            if len(mine):
                connection.row_buffers[number] = _row_buffer(len(mine), chunk)
                self.send(connection, messages.Lookup(number, chunk.number, to_bytes(ids[mine] // num_servers)))
                asked.append((connection, chunk, mine))
        found = _row_buffer(len(ids), self._tables[index][0][1])
        for connection, chunk, mine in asked:
            reply = self.receive(connection, messages.RowsReply)
            while isinstance(reply, messages.RowsReply) and reply.number != number:
                connection.row_buffers.pop(reply.number, None)  # of a look-up that was interrupted
                reply = self.receive(connection, messages.RowsReply)
            assert isinstance(reply, messages.RowsReply)
            found[mine] = connection.row_buffers.pop(number)
            connection.base[chunk.blocks[0].number] = reply.version
        return found

    def _push_rows(self, connection: ServerConnection, chunk: Chunk, step: int, given: torch.Tensor | None) -> None:
        """The gradient of a table, whose rows always go over the connection."""
        base = [connection.base[chunk.blocks[0].number]]
        if given is None:
            self.send(connection, Push(step, chunk.number, base, [False]))
            return
        assert chunk.table is not None
        self.pushed_bytes += num_bytes([given])
        values = given.values().to(chunk.table.dtype).contiguous()
        self.send(connection, Push(step, chunk.number, base, None, [to_bytes(given.indices()[0])]), values)

    # -- outside of steps ----------------------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        self._send_all(messages.EnterLoop())

    def leave_loop(self) -> None:
        self._send_all(messages.LeaveLoop())

    def acknowledge(self, step: int) -> None:
        """This worker has read the result of a full synchronisation (`sync_every`)."""
        self._send_all(messages.SynchronizedAck(step))

    def drop_step(self, step: int) -> None:
        """The current step will not take place: the servers cannot answer it, since one worker never pushed."""
        for connection in self.connections:
            connection.outstanding.clear()
            connection.codec.drop_unanswered()
            self.send(connection, messages.DropStep(step))

    def _send_all(self, message: ServerMessage) -> None:
        for connection in self.connections:
            self.send(connection, message)

    def fill_parameters(self, values: Callable[[ParameterBlock], torch.Tensor], step: int = 0) -> None:
        """Sets the servers' parameters, which are those of the job's `step`."""
        for connection in self.connections:
            for chunk in connection.part.chunks:
                if chunk.table is not None:
                    continue
                for block, target in zip(chunk.blocks, connection.gradient_views[chunk.number], strict=True):
                    target.copy_(values(block))
                payload = None if connection.shared else connection.gradients.chunk_bytes(chunk)
                self.request(connection, messages.FillParameters(chunk.number, step), messages.Ack, payload)

    def reset_error_feedback(self) -> None:
        """Discards what encoding has lost of gradients so far."""
        for connection in self.connections:
            connection.codec.reset()

    def load_state(self, server: int, blob: bytes) -> None:
        """Replaces one server's optimizer state."""
        self.request(self.connections[server], messages.LoadState(), messages.Ack, blob)

    def put_blob(self, server: int, what: str, blob: bytes) -> None:
        self.request(self.connections[server], messages.PutBlob(what), messages.Ack, blob)


def _is_read(connection: ServerConnection, chunk: Chunk) -> bool:
    return chunk.number not in connection.outstanding


def _row_buffer(num_rows: int, chunk: Chunk) -> torch.Tensor:
    assert chunk.table is not None
    if num_rows > MAX_ROWS:
        raise HoraError(f"a batch needs {num_rows} rows of one ServerEmbedding; the limit is {MAX_ROWS}")
    return torch.empty(num_rows, chunk.row_numel, dtype=chunk.table.dtype)
