"""Link: all that joins a worker with one server, and how a block is read whole while that server may write it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..net.message_socket import MessageSocket
from .block_memory import BlockMemory
from .layout import Chunk, ParameterBlock, ServerPart
from .messages import ChunkReady, ServerMessage
from .push_codec import PushCodec
from .rows import from_bytes
from .shelf import views

PATIENT_TRIES = 1000  # so many readings that met a write, and the worker looks up whether the server still lives


class ServerConnection:
    """All that joins this worker with one server."""

    def __init__(self, number: int, part: ServerPart, dtypes: Sequence[torch.dtype]) -> None:
        self.number = number
        self.part = part
        self.lines: list[MessageSocket] = []
        self.shared = False
        self.gradients: BlockMemory
        self.parameters: BlockMemory
        self.private = False  # what it reads is a copy that is its alone, so never half written
        self.base = [0] * len(part.blocks)  # the versions that were read last
        self.held: list[int] | None = None  # those that the gradients to be pushed next are based on, if others
        self.outstanding: set[int] = set()  # parcels that are still to be read
        self.readies: list[ChunkReady] = []
        self.answers: list[ServerMessage] = []
        self.blob: bytearray | None = None
        self.rooms: dict[int, torch.Tensor] = {}  # for rows that were asked for, by the number of the Lookup
        self.staged: list[list[torch.Tensor]] = []
        self.shown: list[list[torch.Tensor]] = []  # the servers' blocks, as they are to be read
        self.num_retries = 0  # readings that met a write
        self.wire: PushCodec
        self.errors: dict[int, torch.Tensor] = {}  # by parcel: what encoding has taken from gradients so far
        self._before: dict[int, torch.Tensor | None] = {}  # the same, without those that are still to be answered
        self._dtypes = dtypes

    def settle(self) -> None:
        """Its memories are there: the views into them are made once."""
        self.staged = list(views(self.gradients, self.part, self._dtypes))
        self.shown = list(views(self.parameters, self.part, self._dtypes))

    @property
    def encodes(self) -> bool:
        """Whether gradients are encoded on their way: not where the server reads them in place."""
        return not self.shared and self.wire.name != "fp32"

    def encode(self, parcel: Chunk, place: torch.Tensor, blocks: Sequence[ParameterBlock]) -> torch.Tensor:
        """The gradients of these blocks in bytes, with what is still owed of those before."""
        self._before[parcel.number] = self.errors.get(parcel.number)
        return self.wire.encode(parcel, place, [self.span(parcel, block) for block in blocks], self.errors)

    def answered(self, number: int, counts: bool) -> None:
        """A parcel's gradients have been applied, or do not count: then what was owed before them is owed still."""
        if number not in self._before:
            return
        before = self._before.pop(number)
        if not counts and before is None:
            del self.errors[number]
        elif not counts and before is not None:
            self.errors[number] = before

    def take_back(self) -> None:
        """Nothing that is not answered yet counts."""
        for number in list(self._before):
            self.answered(number, counts=False)

    def forget(self) -> None:
        """Nothing is owed any more."""
        self.errors.clear()
        self._before.clear()

    def dtype(self, parcel: Chunk) -> torch.dtype:
        return self._dtypes[parcel.blocks[0].index]

    def span(self, parcel: Chunk, block: ParameterBlock) -> slice:
        """A block's place among the elements of its parcel's memory."""
        first = (block.at - parcel.at) // self.dtype(parcel).itemsize
        return slice(first, first + block.numel)

    def read(
        self,
        parcel: Chunk,
        ready: ChunkReady,
        targets: Callable[[ParameterBlock], torch.Tensor],
        check: Callable[[ServerConnection], None],
    ) -> None:
        """Copies a parcel's blocks to where they are wanted. `check` may raise, if the server is gone."""
        if parcel.table is not None:  # its rows are read when they are needed
            self.base[parcel.blocks[0].number] = ready.versions[0]
            return
        rows = from_bytes(ready.rows[0]) if parcel.row and ready.rows is not None else None
        for position, (block, source) in enumerate(zip(parcel.blocks, self.shown[parcel.number], strict=True)):
            target = targets(block)
            if self.private:
                _copy(target, source, rows, parcel.row, packed=not self.shared)
                self.base[block.number] = ready.versions[position]
            else:
                self._read_whole(block, target, source, rows, parcel.row, check)
                if rows is not None:
                    self.base[block.number] = ready.versions[position]  # its other rows may have changed since

    def _read_whole(
        self,
        block: ParameterBlock,
        target: torch.Tensor,
        source: torch.Tensor,
        rows: torch.Tensor | None,
        row: int,
        check: Callable[[ServerConnection], None],
    ) -> None:
        """Copies until nothing was written meanwhile: the block's word is the same even number before and after."""
        words, number = self.parameters.words, block.number
        while True:
            before = words[number]
            if not before & 1:
                _copy(target, source, rows, row)
                if words[number] == before:
                    self.base[number] = before // 2
                    return
            self.num_retries += 1
            if self.num_retries % PATIENT_TRIES == 0:
                check(self)
            time.sleep(0)  # the server needs the core to finish


def _copy(
    target: torch.Tensor, source: torch.Tensor, rows: torch.Tensor | None, row: int, packed: bool = False
) -> None:
    """All of a block, or these rows; `packed`: behind the message came the rows alone."""
    if rows is None:
        target.copy_(source)
    elif len(rows):
        values = source[: len(rows) * row].view(-1, row) if packed else source.view(-1, row)[rows]
        target.view(-1, row).index_copy_(0, rows.to(target.device), values.to(target.device))
