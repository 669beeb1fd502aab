"""Guest: one worker as a server sees it: its lines, the memory of its gradients, what is behind its messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import HoraError
from ..net.fd_passing import FdPassing
from ..net.message_socket import MessageSocket
from ..net.tensor_bytes import tensor_bytes
from .block_memory import BlockMemory
from .embedding_table import TableSpec
from .layout import ServerPart
from .messages import ChunkReady, FillParameters, LoadState, Push, PutBlob, ServerMessage, WorkerHello
from .push_codec import PushCodec
from .rows import ROW_BYTES, checked, from_bytes
from .shelf import Gradient, views

FETCH_S = 10.0  # a worker offers its memory before its hello, but its host may be busy; the server waits meanwhile


class WorkerSession:
    """`server` is the number of the server whose `part` of the model this is about.

    What a worker says of sizes, parcels and rows is compared with what the server knows before anything is allocated or
    read: HoraError names what does not fit."""

    def __init__(
        self, line: MessageSocket, part: ServerPart, dtypes: Sequence[torch.dtype], server: int, most_blob_bytes: int,
        wire: PushCodec | None = None,
    ) -> None:  # fmt: skip
        self.lines = [line]
        self.shared = False
        self.blob = bytearray()  # what came with the last Load or Keep
        self.gradients: list[list[torch.Tensor]] = []  # by parcel and block
        self._part = part
        self._dtypes = dtypes
        self._server = server
        self._most_blob_bytes = most_blob_bytes
        self._wire = wire or PushCodec("fp32", None, part, dtypes)
        self._memory: BlockMemory
        self._copies: BlockMemory | None = None
        self._came: dict[int, int] = {}  # bytes that lie encoded in the place of a parcel
        self._loose: dict[int, bytearray] = {}  # rows for tables, by the id of the Push that they came behind

    def furnish(self, hello: WorkerHello, passing: FdPassing | None) -> None:
        """The memory for this worker's gradients: what it shows, or room for what it sends."""
        num_blocks, num_bytes = len(self._part.blocks), self._part.num_bytes
        self.shared = bool(hello.passing)
        if self.shared:
            if passing is None:
                raise HoraError(f"{hello.name} shows memory to a server that cannot map any")
            try:
                self._memory = BlockMemory(num_blocks, num_bytes, passing.fetch(hello.passing, hello.key, FETCH_S))
                self._memory.close()
            except (OSError, ValueError) as problem:
                raise HoraError(f"{hello.name} shows memory that cannot be mapped: {problem}") from None
        else:
            self._memory = BlockMemory(num_blocks, num_bytes)
        self.gradients = list(views(self._memory, self._part, self._dtypes))

    def close(self) -> None:
        """Gives back what was made for it."""
        for line in self.lines:
            line.close()
        if self._copies is not None:
            self._copies.close()

    def copies(self) -> tuple[list[torch.Tensor], int | None]:
        """Memory, block by block, for what this worker reads; and its descriptor, if the worker can map it."""
        num_blocks, num_bytes = len(self._part.blocks), self._part.num_bytes
        self._copies = BlockMemory.shared(num_blocks, num_bytes) if self.shared else BlockMemory(num_blocks, num_bytes)
        flat = [view for parcel in views(self._copies, self._part, self._dtypes) for view in parcel]
        return flat, self._copies.descriptor

    def gradients_of(self, push: Push) -> list[Gradient]:
        if not 0 <= push.parcel < len(self._part.parcels):
            raise HoraError(f"a gradient for parcel {push.parcel} of {len(self._part.parcels)}")
        parcel = self._part.parcels[push.parcel]
        if parcel.table is not None:
            return [self._table_gradient(push, parcel.table)]
        if len(push.base) != len(parcel.blocks) or (push.have is not None and len(push.have) != len(parcel.blocks)):
            raise HoraError(f"a gradient for parcel {push.parcel} that has {len(push.base)} blocks")
        if push.wire:
            self._decode(push)
        found: list[Gradient] = list(self.gradients[push.parcel])
        if push.have is not None:
            found = [view if has else None for view, has in zip(found, push.have, strict=True)]
        if push.rows is not None and (len(push.rows) != 1 or not parcel.row):
            raise HoraError(f"a gradient of rows for parcel {push.parcel}, which has none")
        if found[0] is not None and push.rows is not None:
            num_rows = parcel.blocks[0].numel // parcel.row
            rows = checked(push.rows[0], num_rows)
            values = found[0][: len(rows) * parcel.row].view(len(rows), parcel.row)
            found = [torch.sparse_coo_tensor(rows[None], values, (num_rows, parcel.row), is_coalesced=True,
                                             check_invariants=False)]  # fmt: skip
        return found

    def _decode(self, push: Push) -> None:
        """What came encoded, into its place; what came lies at the beginning of it."""
        parcel = self._part.parcels[push.parcel]
        num_bytes = self._wire.num_bytes(parcel, push.wire)
        if num_bytes is None or self.shared or self._came.pop(push.parcel, None) != num_bytes:
            raise HoraError(f"a gradient of parcel {push.parcel} that is not {num_bytes} bytes of wire={push.wire}")
        place = self._memory.data[parcel.at : parcel.at + parcel.num_bytes]
        self._wire.decode(parcel, place[:num_bytes].clone(), place)

    def _table_gradient(self, push: Push, table: TableSpec) -> Gradient:
        data = self._loose.pop(id(push), b"")
        if push.have == [False] and len(push.base) == 1:
            return None
        if push.have is not None or push.rows is None or len(push.rows) != 1 or len(push.base) != 1:
            raise HoraError(f"a gradient for the table of parcel {push.parcel} that is not one of rows")
        num_rows = table.rows_on(self._server)
        rows = checked(push.rows[0], num_rows)
        if len(data) != len(rows) * table.row_bytes:
            raise HoraError(f"{len(data)} bytes as the gradient of {len(rows)} rows of {table.row_bytes}")
        values = torch.frombuffer(data, dtype=table.dtype) if data else torch.empty(0, dtype=table.dtype)
        return torch.sparse_coo_tensor(
            rows[None], values.view(-1, table.width), (num_rows, table.width), is_coalesced=True, check_invariants=False
        )

    def parameters_of(self, fill: FillParameters) -> list[torch.Tensor]:
        if not 0 <= fill.parcel < len(self._part.parcels):
            raise HoraError(f"parameters for parcel {fill.parcel} of {len(self._part.parcels)}")
        return self.gradients[fill.parcel]

    def room(self, message: ServerMessage, num_bytes: int) -> memoryview:
        """Where the tensors behind a message go."""
        if isinstance(message, Push | FillParameters) and 0 <= message.parcel < len(self._part.parcels):
            parcel = self._part.parcels[message.parcel]
            if isinstance(message, Push) and parcel.table is not None and message.rows:
                if num_bytes == len(message.rows[0]) // ROW_BYTES * parcel.table.row_bytes:
                    self._loose[id(message)] = bytearray(num_bytes)
                    return memoryview(self._loose[id(message)])
            elif isinstance(message, Push) and message.wire:
                if num_bytes == self._wire.num_bytes(parcel, message.wire):
                    self._came[message.parcel] = num_bytes
                    return tensor_bytes(self._memory.data[parcel.at : parcel.at + num_bytes])
            elif num_bytes <= parcel.num_bytes:
                return tensor_bytes(self._memory.data[parcel.at : parcel.at + num_bytes])
        if isinstance(message, LoadState | PutBlob) and num_bytes <= self._most_blob_bytes:
            self.blob = bytearray(num_bytes)
            return memoryview(self.blob)
        raise HoraError(f"{num_bytes} bytes behind a {type(message).__name__} that has no place for them")

    def envelope(self, ready: ChunkReady, readable: list[torch.Tensor]) -> tuple[MessageSocket, torch.Tensor | None]:
        """On which line an answer goes, and with what behind it: nothing where the worker maps the memory."""
        if self.shared:
            return self.lines[0], None
        assert self._copies is not None
        parcel = self._part.parcels[ready.parcel]
        line = self.lines[parcel.number % len(self.lines)]
        if ready.rows is not None:
            return line, readable[parcel.blocks[0].number].view(-1, parcel.row)[from_bytes(ready.rows[0])]
        return line, self._copies.data[parcel.at : parcel.at + parcel.num_bytes]
