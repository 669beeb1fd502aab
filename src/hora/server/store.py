"""ParameterStore: one server's blocks, the optimizers that update them, and what each worker was last sent.

The optimizers are copies of the script's own, whose groups hold blocks instead of parameters. So per-group
hyper-parameters, skipped gradients and per-parameter step counts behave as they do in torch.
"""

from __future__ import annotations

import collections
import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch

from .. import checkpoint
from ..parameters import hyperparameters
from ..parameters.hyperparameters import Hyper
from ..parameters.shards import is_dense
from .block_memory import UINT64_MASK, BlockMemory
from .embedding_table import EmbeddingTable
from .layout import Chunk, ParameterBlock, ServerPart
from .messages import ChunkReady
from .rows import ROW_BYTES, RowLog, stays_in_rows, to_bytes, weighted_sum

LENGTH = struct.Struct("<Q")

Gradient = torch.Tensor | None
Outbox = list[tuple[tuple[str, int], Any]]  # ("worker", rank) or ("server", number), and the message to send there


@dataclasses.dataclass
class ServerCounts:
    """Totals since the server started."""

    updates: int = 0  # whole steps, by one gradient or one mean
    bytes_in: int = 0
    bytes_out: int = 0
    dropped: int = 0
    skipped: int = 0
    lags: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


class ParameterStore:
    """`memory` holds the parameters; `parameters` are the model's, for shapes and strides. Not thread-safe: one thread
    writes. Readers of `memory` in other processes use its seqlock counters."""

    def __init__(
        self,
        part: ServerPart,
        memory: BlockMemory,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.part = part
        self.memory = memory
        self.optimizers = list(optimizers)
        self.counts = ServerCounts()
        self.flats: list[torch.Tensor] = []  # each block as a vector in `memory`
        self.tables: dict[int, EmbeddingTable] = {}  # by chunk
        self.copies: dict[int, list[torch.Tensor]] = {}  # by worker: its private copy of the blocks, as last sent
        self._blocks: list[torch.nn.Parameter] = []
        self._group_of: list[int] = []  # by block
        self._sums: dict[int, torch.Tensor] = {}  # by block; reused, since fresh memory is slow
        self._hyper: Hyper | None = None  # as last applied
        self._row_logs: dict[int, RowLog] = {}  # by chunk
        self._sent: dict[int, dict[int, int]] = {}  # by worker and chunk: versions of sparse blocks when last sent
        initial = [dict(optimizer.state) for optimizer in optimizers]
        groups = [
            {id(p): number for number, group in enumerate(o.param_groups) for p in group["params"]} for o in optimizers
        ]
        for optimizer in self.optimizers:  # from now on the groups hold blocks, and only during a step
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = []
        for chunk in part.chunks:
            for block in chunk.blocks:
                parameter = parameters[block.index]
                self.flats.append(memory.tensor(block.offset, block.numel, parameter.dtype))
                self._blocks.append(torch.nn.Parameter(_shaped(self.flats[-1], parameter, block, chunk)))
                self._group_of.append(groups[chunk.optimizer][id(parameter)])
                state = initial[chunk.optimizer].get(parameter)  # Adagrad has some before its first step
                if chunk.table is not None:
                    self.tables[chunk.number] = EmbeddingTable(chunk.table, block.start, state)
                elif state is not None:
                    self._load_block(chunk.optimizer, block.number, state)

    def version(self, block: ParameterBlock) -> int:
        return self.memory.counters[block.number] // 2

    def versions(self, chunk: Chunk) -> list[int]:
        counters = self.memory.counters
        return [counters[block.number] // 2 for block in chunk.blocks]

    # -- updates -------------------------------------------------------------------------------------------------------

    def apply(self, chunk: Chunk, gradients: Sequence[Gradient], hyper: Hyper | None) -> None:
        """One optimizer step on the blocks that have a gradient; each of them gets a new version."""
        if all(gradient is None for gradient in gradients):
            return
        if hyper is not None and hyper is not self._hyper:
            hyperparameters.apply(self.optimizers, hyper)
            self._hyper = hyper
        if chunk.dense:
            self._step(chunk, gradients)
            return
        gradient = gradients[0]
        assert gradient is not None
        if chunk.table is not None:
            self.tables[chunk.number].apply(self.optimizers[chunk.optimizer], self._group(chunk), gradient)
            self.memory.counters[chunk.blocks[0].number] += 2
        else:
            log = self._row_log(chunk)
            log.touch(self._step_rows(chunk, gradient, log.num_rows), self.version(chunk.blocks[0]))

    def _step(self, chunk: Chunk, gradients: Sequence[Gradient]) -> None:
        optimizer, counters = self.optimizers[chunk.optimizer], self.memory.counters
        touched = []
        groups = optimizer.param_groups
        for block, gradient in zip(chunk.blocks, gradients, strict=True):
            if gradient is not None:
                parameter = self._blocks[block.number]
                if gradient.is_sparse:
                    parameter.grad = gradient
                elif not block.whole or parameter.is_contiguous():
                    parameter.grad = gradient.view_as(parameter)
                else:
                    parameter.grad = gradient.as_strided(parameter.shape, parameter.stride())
                groups[self._group_of[block.number]]["params"].append(parameter)
                touched.append(block.number)
        for number in touched:
            counters[number] += 1  # odd: being written
        try:
            optimizer.step()
        finally:
            for number in touched:
                counters[number] += 1
                self._blocks[number].grad = None
            for group in groups:
                group["params"] = []

    def _step_rows(self, chunk: Chunk, gradient: torch.Tensor, num_rows: int) -> torch.Tensor:
        """A step on a sparse block; returns the rows that it changed."""
        if not gradient.is_sparse:
            self._step(chunk, [gradient])
            return torch.arange(num_rows)
        if stays_in_rows(type(self.optimizers[chunk.optimizer]), self._group(chunk)):
            self._step(chunk, [gradient])
            return gradient.coalesce().indices()[0].clone()
        flat = self.flats[chunk.blocks[0].number]
        before = flat.clone()
        self._step(chunk, [gradient])
        return (before != flat).view(num_rows, -1).any(1).nonzero().view(-1)

    def _group(self, chunk: Chunk) -> dict[str, Any]:
        """The optimizer's group of a chunk of one block."""
        group: dict[str, Any] = self.optimizers[chunk.optimizer].param_groups[self._group_of[chunk.blocks[0].number]]
        return group

    def weighted_sum(self, chunk: Chunk, parts: Sequence[tuple[Sequence[Gradient], float]]) -> list[Gradient]:
        """The sum over workers of gradients times factor; None for a block without any gradient. The result is valid
        until the next call for this chunk. Half precision is summed in float32 and rounded once."""
        result: list[Gradient] = []
        for position, block in enumerate(chunk.blocks):
            terms = [(g, factor) for gradients, factor in parts if (g := gradients[position]) is not None]
            result.append(self._sum_block(block, terms) if terms else None)
        return result

    def _sum_block(self, block: ParameterBlock, terms: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
        if any(gradient.is_sparse for gradient, _ in terms):
            return weighted_sum(terms)
        first, factor = terms[0]
        total = self._sums.get(block.number)
        if total is None:
            wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
            total = self._sums[block.number] = torch.empty(block.numel, dtype=wide)
        torch.mul(first, factor, out=total)
        for gradient, factor in terms[1:]:
            total.add_(gradient, alpha=factor)
        return total if total.dtype == first.dtype else total.to(first.dtype)

    def fill(self, chunk: Chunk, values: Sequence[torch.Tensor], step: int = 0) -> None:
        """Sets a chunk's parameters, which are those of the job's `step`. All chunks are filled, in order."""
        counters, origins = self.memory.counters, self.memory.origins
        self.begin_step()
        for block, value in zip(chunk.blocks, values, strict=True):
            counters[block.number] += 1
            self.flats[block.number].copy_(value)
            origins[block.number] = (counters[block.number] // 2 + 1 - step) & UINT64_MASK  # of the version to come
            counters[block.number] += 1
        if chunk.number == max(each.number for each in self.part.chunks if each.table is None):
            self.end_step(step)

    def begin_step(self) -> None:
        """From now on the blocks may belong to different steps."""
        self.memory.step_seqlock[0] |= 1

    def end_step(self, step: int | None) -> None:
        """All blocks belong to the job's `step` again; None: to the step before."""
        seqlock = self.memory.step_seqlock
        if step is not None:
            self.begin_step()
            seqlock[1] = step
        seqlock[0] = (seqlock[0] | 1) + 1

    # -- what workers read ---------------------------------------------------------------------------------------------

    def join(self, worker: int) -> None:
        self._sent[worker] = {}

    def leave(self, worker: int) -> None:
        self.copies.pop(worker, None)
        self._sent.pop(worker, None)

    def set_copy(self, worker: int, copies: list[torch.Tensor]) -> None:
        """From now on this worker reads these copies of the blocks, into which `answer` copies: updates that come
        later cannot get into what it reads."""
        self.copies[worker] = copies
        for copy, flat in zip(copies, self.flats, strict=True):
            copy.copy_(flat)

    def readable(self, worker: int) -> list[torch.Tensor]:
        """The blocks as this worker reads them."""
        return self.copies.get(worker, self.flats)

    def answer(self, worker: int, readies: list[ChunkReady]) -> Outbox:
        """Completes these messages with versions and changed rows, and updates the worker's copy."""
        for ready in readies:
            chunk = self.part.chunks[ready.chunk]
            ready.versions = self.versions(chunk)
            copies = self.copies.get(worker)
            if chunk.dense:
                self.counts.bytes_out += chunk.num_bytes
                if copies is not None:
                    for block in chunk.blocks:
                        copies[block.number].copy_(self.flats[block.number])
            elif chunk.table is None:  # the rows of a table are read by look-ups
                ready.rows = [to_bytes(self._send_rows(worker, chunk, copies))]
        return [(("worker", worker), ready) for ready in readies]

    def _send_rows(self, worker: int, chunk: Chunk, copies: list[torch.Tensor] | None) -> torch.Tensor:
        """The rows of a sparse block that changed since this worker was last answered; all of them the first time."""
        log, block = self._row_log(chunk), chunk.blocks[0]
        version, sent = self.version(block), self._sent[worker].get(chunk.number)
        self._sent[worker][chunk.number] = version
        rows = torch.arange(log.num_rows) if sent is None else log.since(sent)
        log.forget(min(each.get(chunk.number, version) for each in self._sent.values()))
        values = self.flats[block.number].view(-1, chunk.row_numel)
        self.counts.bytes_out += len(rows) * (chunk.row_numel * values.element_size() + ROW_BYTES)
        if copies is not None and len(rows):
            copies[block.number].view(-1, chunk.row_numel).index_copy_(0, rows, values[rows])
        return rows

    def _row_log(self, chunk: Chunk) -> RowLog:
        if chunk.number not in self._row_logs:
            self._row_logs[chunk.number] = RowLog(chunk.blocks[0].numel // chunk.row_numel)
        log = self._row_logs[chunk.number]
        log.set_version(self.version(chunk.blocks[0]))
        return log

    def look_up(self, chunk: Chunk, rows: torch.Tensor) -> tuple[int, torch.Tensor]:
        """A table's version and these rows of it."""
        found = self.tables[chunk.number].look_up(rows)
        self.counts.bytes_out += found.nbytes
        return self.version(chunk.blocks[0]), found

    # -- state ---------------------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """The parameters, then each optimizer's state by block, all of one moment."""
        values = {str(number): flat for number, flat in enumerate(self.flats)}
        states: list[dict[str, Any]] = [{} for _ in self.optimizers]
        for chunk in self.part.chunks:
            state = self.optimizers[chunk.optimizer].state
            for block in chunk.blocks:
                if chunk.table is not None:
                    states[chunk.optimizer][str(block.number)] = self.tables[chunk.number].save()
                elif (parameter := self._blocks[block.number]) in state:
                    by_key = {key: _to_dense(value) for key, value in state[parameter].items()}
                    states[chunk.optimizer][str(block.number)] = by_key
        return pack([values, *states])

    def load(self, blob: bytes) -> None:
        """Replaces the optimizers' state with that of `blob`, by block."""
        tables = {self.part.chunks[number].blocks[0].number: table for number, table in self.tables.items()}
        for table in tables.values():
            table.clear()
        for number, by_block in enumerate(unpack(blob)):
            self.optimizers[number].state.clear()
            for block, state in by_block.items():
                if int(block) in tables:
                    tables[int(block)].load(state)
                else:
                    self._load_block(number, int(block), state)

    def _load_block(self, optimizer: int, number: int, state: dict[str, Any]) -> None:
        parameter = self._blocks[number]
        self.optimizers[optimizer].state[parameter] = {key: _cut(value, parameter) for key, value in state.items()}


def _shaped(flat: torch.Tensor, parameter: torch.Tensor, block: ParameterBlock, chunk: Chunk) -> torch.Tensor:
    """A block as the optimizer sees it: shaped like its parameter, or like the rows that it holds."""
    if block.whole and is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    if block.whole:
        return flat.view(parameter.shape)
    return flat.view(-1, *parameter.shape[1:]) if chunk.row_numel else flat


def _to_dense(value: Any) -> Any:
    """Optimizers accept dense state, such as momentum, where they made it sparse."""
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


def _cut(value: Any, block: torch.Tensor) -> Any:
    """State that is uniform over a parameter, such as Adagrad's initial sum, cut to a block's size."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() <= 1 or value.shape == block.shape:
        return value.clone()
    return value.reshape(-1)[: block.numel()].reshape(block.shape).clone()


def pack(states: list[dict[str, Any]]) -> bytes:
    """States as bytes: msgpack for plain values, then safetensors, which has no limit on length."""
    plain, tensors = checkpoint.encode(states)
    storages: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():  # blocks of a parameter may share one step count, which is saved for each
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    head = msgspec.msgpack.encode(plain)
    return b"".join((LENGTH.pack(len(head)), head, safetensors.torch.save(separate)))


def unpack(blob: bytes) -> list[dict[str, Any]]:
    """What `pack` was given."""
    (length,) = LENGTH.unpack_from(blob)
    end = LENGTH.size + length
    tensors = checkpoint.parse(blob[end:], "optimizer state")
    states: list[dict[str, Any]] = checkpoint.decode(msgspec.msgpack.decode(blob[LENGTH.size : end]), tensors)
    return states
