"""ServerConnection: a worker's end of its connection to one server. PartConnection: what both ends have in common."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from ..errors import HoraError
from ..net.message_socket import MessageSocket
from ..net.tensor_bytes import tensor_bytes
from .block_memory import BlockMemory
from .layout import Chunk, ParameterBlock, ServerPart
from .messages import BlobReply, ChunkReady, RowsReply, ServerMessage
from .push_codec import PushCodec
from .rows import from_bytes

CHECK_EVERY = 1000  # reads of a block that met a write, until the worker checks that the server is alive

PARAMETERS_KEY = "parameters"  # under which a server offers the memory of its parameters

Targets = Callable[[ParameterBlock], torch.Tensor]
Check = Callable[[], None]


def gradients_key(server: int) -> str:
    """Under which a worker offers the memory of its gradients."""
    return f"gradients-{server}"


def copy_key(worker: int) -> str:
    """Under which a server offers a worker's private copy of the parameters."""
    return f"copies-{worker}"


class PartConnection:
    """One worker and one server, which holds `part` of the model: their sockets, and memory for gradients.

    The first socket carries messages; further ones, over a network, carry chunks. `shared`: both processes map the
    gradients' and the parameters' memory, so that neither is sent."""

    def __init__(self, part: ServerPart, dtypes: Sequence[torch.dtype], codec: PushCodec) -> None:
        self.part = part
        self.codec = codec
        self.sockets: list[MessageSocket] = []
        self.shared = False
        self.gradients: BlockMemory
        self.gradient_views: list[list[torch.Tensor]] = []  # by chunk and block
        self._dtypes = dtypes

    def allocate(self, shared: bool = False, descriptor: int | None = None) -> BlockMemory:
        """Memory for all blocks of the part. OutOfMemory if there is too little shared memory."""
        num_blocks, num_bytes = len(self.part.blocks), self.part.num_bytes
        return BlockMemory.shared(num_blocks, num_bytes) if shared else BlockMemory(num_blocks, num_bytes, descriptor)

    def use_gradients(self, memory: BlockMemory) -> None:
        self.gradients = memory
        self.gradient_views = memory.block_views(self.part, self._dtypes)

    def socket_for(self, chunk: Chunk) -> MessageSocket:
        return self.sockets[chunk.number % len(self.sockets)]

    def close(self) -> None:
        for socket in self.sockets:
            socket.close()


class ServerConnection(PartConnection):
    """`targets(block)` is the vector into which a block is read. `check` is called while a block is being written, and
    may raise. `private`: the worker reads a copy that is its alone, so it never meets a write."""

    def __init__(
        self,
        number: int,
        part: ServerPart,
        dtypes: Sequence[torch.dtype],
        codec: PushCodec,
        targets: Targets,
        check: Check,
    ) -> None:
        super().__init__(part, dtypes, codec)
        self.number = number
        self.parameters: BlockMemory
        self.private = False
        self.base = [0] * len(part.blocks)  # the block versions that were read last
        self.pushed_base: list[int] | None = None  # those that the next push is based on, if older
        self.outstanding: set[int] = set()  # chunks that have not been read
        self.readies: list[ChunkReady] = []  # of chunks that have been read
        self.replies: list[ServerMessage] = []
        self.blob: bytearray | None = None
        self.row_buffers: dict[int, torch.Tensor] = {}  # by the number of their Lookup
        self._parameter_views: list[list[torch.Tensor]] = []
        self._targets = targets
        self._check = check

    def use_parameters(self, memory: BlockMemory) -> None:
        self.parameters = memory
        self._parameter_views = memory.block_views(self.part, self._dtypes)

    def payload_buffer(self, message: ServerMessage, num_bytes: int) -> memoryview:
        """Where the bytes that follow a message go. HoraError if it does not announce that many."""
        if isinstance(message, ChunkReady) and not self.shared and 0 <= message.chunk < len(self.part.chunks):
            chunk = self.part.chunks[message.chunk]
            if num_bytes <= chunk.num_bytes:
                return tensor_bytes(self.parameters.chunk_bytes(chunk, num_bytes))
        if isinstance(message, RowsReply) and message.number in self.row_buffers:
            buffer = self.row_buffers[message.number]
            if num_bytes == buffer.nbytes:
                return tensor_bytes(buffer)
        if isinstance(message, BlobReply):
            self.blob = bytearray(num_bytes)
            return memoryview(self.blob)
        raise HoraError(f"server {self.number} sent {num_bytes} unexpected bytes after a {type(message).__name__}")

    @property
    def encodes(self) -> bool:
        """Whether gradients are encoded: not where the server reads them in place."""
        return not self.shared and self.codec.name != "fp32"

    def read(self, ready: ChunkReady) -> None:
        """Copies a chunk's blocks to their targets."""
        chunk = self.part.chunks[ready.chunk]
        if chunk.table is not None:  # its rows are read by look-ups
            self.base[chunk.blocks[0].number] = ready.versions[0]
            return
        rows = from_bytes(ready.rows[0]) if chunk.row_numel and ready.rows is not None else None
        views = self._parameter_views[chunk.number]
        for block, source, version in zip(chunk.blocks, views, ready.versions, strict=True):
            target = self._targets(block)
            copy = functools.partial(_copy, target, source, rows, chunk.row_numel, packed=not self.shared)
            if self.private:
                copy()
            else:
                read = self._read_unchanged(block.number, copy)
                version = read if rows is None else version  # other rows may have changed since the answer
            self.base[block.number] = version

    def _read_unchanged(self, number: int, copy: Callable[[], None]) -> int:
        """Copies until the block was not written meanwhile: its seqlock counter is even, and the same before and after.
        Returns the block's version."""
        counters, attempts = self.parameters.counters, 0
        while True:
            before = counters[number]
            if not before & 1:
                copy()
                if counters[number] == before:
                    return before // 2
            attempts += 1
            if attempts % CHECK_EVERY == 0:
                self._check()
            time.sleep(0)  # the server needs the core to finish


def _copy(target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor | None, row_numel: int, packed: bool) -> None:
    """A whole block, or these rows of it; `packed`: `source` holds only the rows, one after the other."""
    if rows is None:
        target.copy_(source)
    elif len(rows):
        values = source[: len(rows) * row_numel].view(-1, row_numel) if packed else source.view(-1, row_numel)[rows]
        target.view(-1, row_numel).index_copy_(0, rows.to(target.device), values.to(target.device))
