"""WorkerSession: a server's end of its connection to one worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import HoraError
from ..net.fd_passing import FdPassing
from ..net.message_socket import MessageSocket
from ..net.tensor_bytes import tensor_bytes
from .block_memory import BlockMemory
from .connection import PartConnection, gradients_key
from .embedding_table import TableSpec
from .layout import Chunk, ServerPart
from .messages import ChunkReady, FillParameters, LoadState, Push, PutBlob, ServerMessage, WorkerHello
from .push_codec import PushCodec
from .rows import ROW_BYTES, checked, from_bytes, make_sparse
from .store import Gradient

FETCH_S = 10.0  # a worker offers its memory before its hello, but its host may be busy; the server blocks meanwhile


class WorkerSession(PartConnection):
    """Worker `rank` on server `server`. Sizes, chunks and rows that the worker announces are checked before anything is
    allocated or read: HoraError tells what is wrong."""

    def __init__(
        self,
        rank: int,
        socket: MessageSocket,
        part: ServerPart,
        dtypes: Sequence[torch.dtype],
        codec: PushCodec,
        server: int,
        max_blob_bytes: int,
    ) -> None:
        super().__init__(part, dtypes, codec)
        self.rank = rank
        self.sockets = [socket]
        self.blob = bytearray()  # what followed the last LoadState or PutBlob
        self._server = server
        self._max_blob_bytes = max_blob_bytes
        self._copies: BlockMemory | None = None
        self._encoded_bytes: dict[int, int] = {}  # by chunk: bytes that lie encoded in its memory
        self._table_payloads: dict[int, bytearray] = {}  # by the id of the Push that they followed

    def open(self, hello: WorkerHello, passing: FdPassing | None) -> None:
        """Maps the memory of this worker's gradients, or allocates memory for those that it will send."""
        self.shared = bool(hello.passing)
        if not self.shared:
            self.use_gradients(self.allocate())
            return
        if passing is None:
            raise HoraError(f"{hello.name} offers shared memory, which this server cannot map")
        try:
            self.use_gradients(
                self.allocate(descriptor=passing.fetch(hello.passing, gradients_key(self._server), FETCH_S))
            )
            self.gradients.close()
        except (OSError, ValueError) as problem:
            raise HoraError(f"{hello.name} offers memory that cannot be mapped: {problem}") from None

    def make_copies(self) -> tuple[list[torch.Tensor], int | None]:
        """This worker's private copy of the blocks, and its descriptor if the worker can map it."""
        self._copies = self.allocate(shared=self.shared)
        flats = [view for views in self._copies.block_views(self.part, self._dtypes) for view in views]
        return flats, self._copies.descriptor

    def close(self) -> None:
        super().close()
        if self._copies is not None:
            self._copies.close()

    def payload_buffer(self, message: ServerMessage, num_bytes: int) -> memoryview:
        """Where the bytes that follow a message go. HoraError if it may not be followed by that many."""
        if isinstance(message, Push | FillParameters) and 0 <= message.chunk < len(self.part.chunks):
            chunk = self.part.chunks[message.chunk]
            if isinstance(message, Push) and chunk.table is not None and message.rows:
                if num_bytes == len(message.rows[0]) // ROW_BYTES * chunk.table.row_bytes:
                    payload = self._table_payloads[id(message)] = bytearray(num_bytes)
                    return memoryview(payload)
            elif isinstance(message, Push) and message.wire:
                if num_bytes == self.codec.num_bytes(chunk, message.wire):
                    self._encoded_bytes[message.chunk] = num_bytes
                    return tensor_bytes(self.gradients.chunk_bytes(chunk, num_bytes))
            elif num_bytes <= chunk.num_bytes:
                return tensor_bytes(self.gradients.chunk_bytes(chunk, num_bytes))
        if isinstance(message, LoadState | PutBlob) and num_bytes <= self._max_blob_bytes:
            self.blob = bytearray(num_bytes)
            return memoryview(self.blob)
        raise HoraError(f"{num_bytes} bytes after a {type(message).__name__}, which has no place for them")

    def gradients_of(self, push: Push) -> list[Gradient]:
        """A push's gradients, by block."""
        chunk = self._chunk(push.chunk)
        if chunk.table is not None:
            return [self._table_gradient(push, chunk.table)]
        if len(push.base) != len(chunk.blocks) or (push.have is not None and len(push.have) != len(chunk.blocks)):
            raise HoraError(f"push of chunk {push.chunk} names {len(push.base)} blocks; it has {len(chunk.blocks)}")
        if push.wire:
            self._decode(push, chunk)
        found: list[Gradient] = list(self.gradient_views[push.chunk])
        if push.have is not None:
            found = [view if has else None for view, has in zip(found, push.have, strict=True)]
        if push.rows is not None and (len(push.rows) != 1 or not chunk.row_numel):
            raise HoraError(f"push of rows for chunk {push.chunk}, which is dense")
        if found[0] is not None and push.rows is not None:
            num_rows = chunk.blocks[0].numel // chunk.row_numel
            rows = checked(push.rows[0], num_rows)
            values = found[0][: len(rows) * chunk.row_numel].view(len(rows), chunk.row_numel)
            found = [make_sparse(rows, values, num_rows)]
        return found

    def _decode(self, push: Push, chunk: Chunk) -> None:
        """Decodes a chunk in its memory, at whose beginning the encoded bytes lie."""
        num_bytes = self.codec.num_bytes(chunk, push.wire)
        if num_bytes is None or self.shared or self._encoded_bytes.pop(push.chunk, None) != num_bytes:
            raise HoraError(f"push of chunk {push.chunk} is not {num_bytes} bytes of wire={push.wire}")
        self.codec.decode(
            chunk, self.gradients.chunk_bytes(chunk, num_bytes).clone(), self.gradients.chunk_bytes(chunk)
        )

    def _table_gradient(self, push: Push, table: TableSpec) -> Gradient:
        data = self._table_payloads.pop(id(push), b"")
        if push.have == [False] and len(push.base) == 1:
            return None
        if push.have is not None or push.rows is None or len(push.rows) != 1 or len(push.base) != 1:
            raise HoraError(f"push of chunk {push.chunk}, a ServerEmbedding's, without rows")
        num_rows = table.rows_on(self._server)
        rows = checked(push.rows[0], num_rows)
        if len(data) != len(rows) * table.row_bytes:
            raise HoraError(f"{len(data)} bytes as the gradient of {len(rows)} rows of {table.row_bytes} bytes")
        values = torch.frombuffer(data, dtype=table.dtype) if data else torch.empty(0, dtype=table.dtype)
        return make_sparse(rows, values.view(-1, table.width), num_rows)

    def parameters_of(self, fill: FillParameters) -> list[torch.Tensor]:
        return self.gradient_views[self._chunk(fill.chunk).number]

    def _chunk(self, number: int) -> Chunk:
        if not 0 <= number < len(self.part.chunks):
            raise HoraError(f"chunk {number} does not exist; there are {len(self.part.chunks)}")
        return self.part.chunks[number]

    def reply(self, ready: ChunkReady, readable: list[torch.Tensor]) -> tuple[MessageSocket, torch.Tensor | None]:
        """The socket for an answer, and the parameters to send after it: None where the worker maps the memory."""
        if self.shared:
            return self.sockets[0], None
        assert self._copies is not None
        chunk = self.part.chunks[ready.chunk]
        if ready.rows is not None:
            rows = from_bytes(ready.rows[0])
            return self.socket_for(chunk), readable[chunk.blocks[0].number].view(-1, chunk.row_numel)[rows]
        return self.socket_for(chunk), self._copies.chunk_bytes(chunk)
