"""Shelf: one server's blocks, and the user's own optimizer that updates them.

The optimizer is the server's copy of the one that the script made: its groups hold the blocks instead of parameters,
so hyper-parameters per group, skipped gradients and step counts per parameter are what torch makes of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import safetensors.torch
import torch

from .. import checkpoint
from ..parameters import hyperparameters
from ..parameters.hyperparameters import Hyper
from ..parameters.shards import is_dense
from .block_memory import BlockMemory
from .embedding_table import EmbeddingTable
from .layout import Chunk, ParameterBlock, ServerPart
from .rows import add_up, stays_in_rows

LENGTH = struct.Struct("<Q")
WORD = (1 << 64) - 1

Gradient = torch.Tensor | None


class Shelf:
    """`memory` holds the parameters; `names` and `parameters` are the model's, for shapes and for messages."""

    def __init__(
        self,
        part: ServerPart,
        memory: BlockMemory,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.part = part
        self.memory = memory
        self.names = names
        self.optimizers = list(optimizers)
        self.flats: list[torch.Tensor] = []  # each block as a vector in `memory`
        self.tables: dict[int, EmbeddingTable] = {}  # by parcel
        self._blocks: list[torch.nn.Parameter] = []
        self._means: dict[int, torch.Tensor] = {}  # kept, since fresh memory is slow
        self._group_of: list[int] = []
        self._settings: Hyper | None = None
        groups = [
            {id(p): number for number, group in enumerate(o.param_groups) for p in group["params"]} for o in optimizers
        ]
        for parcel in part.parcels:
            for block in parcel.blocks:
                parameter = parameters[block.index]
                flat = memory.tensor(block.at, block.numel, parameter.dtype)
                self.flats.append(flat)
                shaped = flat
                if block.whole:
                    dense = is_dense(parameter)
                    shaped = (
                        flat.as_strided(parameter.shape, parameter.stride()) if dense else flat.view(parameter.shape)
                    )
                elif parcel.row:
                    shaped = flat.view(-1, *parameter.shape[1:])
                self._blocks.append(torch.nn.Parameter(shaped))
                self._group_of.append(groups[parcel.optimizer][id(parameter)])
        self._adopt(parameters)

    def _adopt(self, parameters: Sequence[torch.Tensor]) -> None:
        """The groups hold blocks from now on, for the length of a step each; what an optimizer has from the start, as
        Adagrad does, is cut to their size."""
        found = [dict(optimizer.state) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = []
        for parcel in self.part.parcels:
            for block in parcel.blocks:
                state = found[parcel.optimizer].get(parameters[block.index])
                if parcel.table is not None:
                    self.tables[parcel.number] = EmbeddingTable(parcel.table, block.start, state)
                elif state is not None:
                    self._keep(parcel.optimizer, block.number, state)

    def _keep(self, optimizer: int, number: int, state: dict[str, Any]) -> None:
        parameter = self._blocks[number]
        kept = {key: _like_block(value, parameter) for key, value in state.items()}
        self.optimizers[optimizer].state[parameter] = kept

    # -- updates -------------------------------------------------------------------------------------------------------

    def version(self, block: ParameterBlock) -> int:
        return self.memory.words[block.number] // 2

    def versions(self, parcel: Chunk) -> list[int]:
        words = self.memory.words
        return [words[block.number] // 2 for block in parcel.blocks]

    def apply(self, parcel: Chunk, gradients: Sequence[Gradient], settings: Hyper | None) -> None:
        """One step of the optimizer on the blocks that have a gradient, all of which get a new version."""
        optimizer, words = self.optimizers[parcel.optimizer], self.memory.words
        self._heed(settings)
        touched = []
        groups = optimizer.param_groups
        for block, gradient in zip(parcel.blocks, gradients, strict=True):
            if gradient is not None:
                parameter = self._blocks[block.number]
                parameter.grad = gradient if gradient.is_sparse else gradient.view_as(parameter) if (
                    not block.whole or parameter.is_contiguous()
                ) else gradient.as_strided(parameter.shape, parameter.stride())  # fmt: skip
                groups[self._group_of[block.number]]["params"].append(parameter)
                touched.append(block.number)
        for number in touched:
            words[number] += 1  # odd: being written
        try:
            optimizer.step()
        finally:
            for number in touched:
                words[number] += 1
                self._blocks[number].grad = None
            for group in groups:
                group["params"] = []

    def _heed(self, settings: Hyper | None) -> None:
        if settings is not None and settings is not self._settings:
            hyperparameters.apply(self.optimizers, settings)
            self._settings = settings

    def apply_to_table(self, parcel: Chunk, gradient: torch.Tensor, settings: Hyper | None) -> None:
        """One step of the optimizer on the rows of a table, which gets a new version."""
        self._heed(settings)
        optimizer, number = self.optimizers[parcel.optimizer], parcel.blocks[0].number
        self.tables[parcel.number].apply(optimizer, optimizer.param_groups[self._group_of[number]], gradient)
        self.memory.words[number] += 2

    def stays_in_rows(self, parcel: Chunk, settings: Hyper | None) -> bool:
        """Whether a sparse gradient of this block will change its own rows alone."""
        optimizer, group = self.optimizers[parcel.optimizer], self._group_of[parcel.blocks[0].number]
        told = {} if settings is None else settings[parcel.optimizer][group]
        return stays_in_rows(type(optimizer), {**optimizer.param_groups[group], **told})

    def mean(self, parcel: Chunk, parts: Sequence[tuple[Sequence[Gradient], float]]) -> list[Gradient]:
        """The sum of everybody's gradients, each times its factor; None for a block that nobody has one for.

        Half precision is added up in float32 and rounded once."""
        result: list[Gradient] = []
        for position, block in enumerate(parcel.blocks):
            given = [(gradients[position], factor) for gradients, factor in parts]
            result.append(self._mean(block, [(g, factor) for g, factor in given if g is not None]))
        return result

    def _mean(self, block: ParameterBlock, given: list[tuple[torch.Tensor, float]]) -> Gradient:
        if not given:
            return None
        first, factor = given[0]
        if any(gradient.is_sparse for gradient, _ in given):
            return add_up(given)
        total = self._room(block, first)
        torch.mul(first, factor, out=total)
        for gradient, factor in given[1:]:
            total.add_(gradient, alpha=factor)
        if total.dtype != first.dtype:
            return total.to(first.dtype)
        return total

    def _room(self, block: ParameterBlock, like: torch.Tensor) -> torch.Tensor:
        wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        room = self._means.get(block.number)
        if room is None:
            room = self._means[block.number] = torch.empty(block.numel, dtype=wide)
        return room

    def fill(self, parcel: Chunk, values: Sequence[torch.Tensor], step: int = 0) -> None:
        """These are the parameters now, of this step of the job; parcels are filled all, in order."""
        words, origins = self.memory.words, self.memory.origins
        self.disturb()
        for block, value in zip(parcel.blocks, values, strict=True):
            words[block.number] += 1
            self.flats[block.number].copy_(value)
            origins[block.number] = (words[block.number] // 2 + 1 - step) & WORD  # of the version that comes now
            words[block.number] += 1
        if parcel.number == max(each.number for each in self.part.parcels if each.table is None):
            self.rest(step)

    def disturb(self) -> None:
        """From now on not all blocks are of one step."""
        self.memory.moment[0] |= 1

    def rest(self, step: int | None) -> None:
        """Now they are again, of this step of the job; None: of the one before."""
        moment = self.memory.moment
        if step is not None:
            self.disturb()
            moment[1] = step
        moment[0] = (moment[0] | 1) + 1

    # -- optimizer state -----------------------------------------------------------------------------------------------

    def save(self) -> bytes:
        """The parameters, then what each optimizer keeps, by block: of one moment."""
        values = {str(number): flat for number, flat in enumerate(self.flats)}
        states: list[dict[str, Any]] = [{} for _ in self.optimizers]
        for number, table in self.tables.items():
            parcel = self.part.parcels[number]
            states[parcel.optimizer][str(parcel.blocks[0].number)] = table.save()
        for parcel in self.part.parcels:
            kept = self.optimizers[parcel.optimizer].state
            for block in parcel.blocks:
                if self._blocks[block.number] in kept:
                    state = kept[self._blocks[block.number]]
                    states[parcel.optimizer][str(block.number)] = {key: _dense(value) for key, value in state.items()}
        return pack([values, *states])

    def load(self, blob: bytes) -> None:
        """The optimizers' state, by block."""
        tables = {self.part.parcels[number].blocks[0].number: table for number, table in self.tables.items()}
        for table in tables.values():
            table.clear()
        for number, theirs in enumerate(unpack(blob)):
            self.optimizers[number].state.clear()
            for block, state in theirs.items():
                if int(block) in tables:
                    tables[int(block)].load(state)
                else:
                    self._keep(number, int(block), state)


def pack(states: list[dict[str, Any]]) -> bytes:
    plain, tensors = checkpoint.encode(states)
    known: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():  # the blocks of a parameter may have one step count, which is saved for each
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if place in known else tensor
        known.add(place)
    words = msgspec.msgpack.encode(plain)
    return b"".join((LENGTH.pack(len(words)), words, safetensors.torch.save(apart)))  # of any length, unlike msgpack's


def unpack(blob: bytes) -> list[dict[str, Any]]:
    (length,) = LENGTH.unpack_from(blob)
    end = LENGTH.size + length
    tensors = checkpoint.parse(blob[end:], "optimizer state")
    states: list[dict[str, Any]] = checkpoint.decode(msgspec.msgpack.decode(blob[LENGTH.size : end]), tensors)
    return states


def _dense(value: Any) -> Any:
    """State that is sparse, as momentum over sparse gradients is, works as well when it is not."""
    return value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value


def _like_block(value: Any, block: torch.Tensor) -> Any:
    """State that is the same everywhere in a parameter, as Adagrad's first sum is, cut to a block's size."""
    if not isinstance(value, torch.Tensor) or value.numel() <= 1 or value.shape == block.shape:
        return value.clone() if isinstance(value, torch.Tensor) else value
    return value.reshape(-1)[: block.numel()].reshape(block.shape).clone()


def views(memory: BlockMemory, part: ServerPart, dtypes: Sequence[torch.dtype]) -> Iterator[list[torch.Tensor]]:
    """Each parcel's blocks in `memory`, as vectors; `dtypes` are the parameters'."""
    for parcel in part.parcels:
        yield [memory.tensor(block.at, block.numel, dtypes[block.index]) for block in parcel.blocks]
