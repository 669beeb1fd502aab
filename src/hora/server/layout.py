"""Layout: how the parameters are cut into blocks, and which server has which. The same on every worker and server.

A block is a parameter or a slice of one, never of two: torch's optimizers skip a parameter without a gradient, count
steps per parameter and have hyper-parameters per group. Slices are only for optimizers that treat every element by
itself. Blocks of one server and one optimizer travel in parcels of about `block_bytes`, in the order of the model:
what the next forward needs first comes first.

    parameters      |---- w1 ----|b|-------- w2 --------|       model order
    blocks          |  0  |  1   |2|   3   |   4   |  5 |       balanced over the servers by bytes
    server 0        [ 0 ] [ 2  3 ] [ 5 ]                        parcels
    server 1        [ 1 ] [ 4 ]

A table that only servers have (hora.ServerEmbedding) is a parcel of its own on every server, after the others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch

from ..parameters.shards import ALIGN, CUT_BYTES, ELEMENTWISE, is_dense
from .embedding_table import TableSpec

ALIGN_BYTES = 128  # blocks begin on cache lines of their own
PIECES = 4  # a model is cut into so many blocks per server at least, where it can be
FAR_PIECES = 16  # over a network: the first come back while the last are still on their way


@dataclasses.dataclass(frozen=True)
class ParameterBlock:
    """Elements [start, stop) of parameter `index`, in the order of its memory. `at` is its place in its server's."""

    number: int  # on its server
    index: int
    start: int
    stop: int
    at: int  # bytes
    whole: bool

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Blocks that travel together: bytes [at, at + num_bytes) of their server's memory.

    `row` is 0, or the length of a row where only those that were touched travel; such a block travels alone. Of a
    `table` nothing lies in that memory: its one block is empty, and its `start` is the number of its server."""

    number: int  # on its server
    optimizer: int
    blocks: tuple[ParameterBlock, ...]
    at: int
    num_bytes: int
    row: int = 0
    table: TableSpec | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it travels at every step, and not the rows that were touched."""
        return not self.row and self.table is None

    @functools.cached_property
    def numbers(self) -> list[int]:
        """Of its blocks."""
        return [block.number for block in self.blocks]


@dataclasses.dataclass(frozen=True)
class ServerPart:
    """What one server has."""

    parcels: tuple[Chunk, ...]
    num_bytes: int

    @functools.cached_property
    def blocks(self) -> tuple[ParameterBlock, ...]:
        return tuple(block for parcel in self.parcels for block in parcel.blocks)

    @functools.cached_property
    def load(self) -> int:
        """Bytes of parameters."""
        return sum(parcel.num_bytes for parcel in self.parcels)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """All servers' parts. `served` are the parameters that some optimizer has; the others are nobody's but each
    worker's own."""

    parts: tuple[ServerPart, ...]
    served: frozenset[int]

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(self.parts).encode(), digest_size=8).hexdigest()


def cut(
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    num_servers: int,
    block_bytes: int,
    sparse: frozenset[int] = frozenset(),
    tables: Mapping[int, TableSpec] | None = None,
    pieces: int = PIECES,
) -> BlockLayout:
    """Depends on the arguments alone: the parameters' shapes and types, the optimizers' groups. `sparse` ones are cut
    by rows; those that stand in for `tables` are not cut at all.

    ValueError if there are more servers than blocks, or if two optimizers have one parameter."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                index = index_of[id(parameter)]
                if owner.setdefault(index, number) != number:
                    raise ValueError(f"two optimizers have one parameter of shape {list(parameter.shape)}: under ps "
                                     "each parameter has one optimizer")  # fmt: skip
    tables = tables or {}
    served = sorted(index for index in owner if parameters[index].numel() and index not in tables)
    total = sum(parameters[index].numel() * parameters[index].element_size() for index in served)
    limit = min(block_bytes, max(CUT_BYTES, -(-total // (pieces * num_servers))))
    slices: list[tuple[int, int, int]] = []  # parameter, start, stop
    for index in served:
        parameter = parameters[index]
        kind = type(optimizers[owner[index]])
        may_cut = kind in ELEMENTWISE or (index in sparse and kind is torch.optim.SparseAdam)
        if may_cut and is_dense(parameter) and parameter.numel() * parameter.element_size() > limit:
            slices += [(index, start, stop) for start, stop in _slices(parameter, limit, index in sparse)]
        else:
            slices.append((index, 0, parameter.numel()))
    if len(slices) < num_servers and not tables:
        raise ValueError(
            f"{num_servers} servers for a model of {len(slices)} block{'s' * (len(slices) != 1)}: each server needs "
            f"one at least, so say --servers {len(slices)} or less"
        )
    server_of = _balance(
        [(stop - start) * parameters[index].element_size() for index, start, stop in slices], num_servers
    )
    parts = []
    for server in range(num_servers):
        mine = [piece for piece, its in zip(slices, server_of, strict=True) if its == server]
        parts.append(_shelve(_pack(mine, parameters, owner, limit, sparse), tables, owner, server))
    return BlockLayout(tuple(parts), frozenset(served))


def _slices(parameter: torch.Tensor, limit: int, by_rows: bool) -> list[tuple[int, int]]:
    unit = parameter.numel() // parameter.shape[0] if by_rows else ALIGN
    each = max(1, limit // parameter.element_size() // unit) * unit
    return [(start, min(start + each, parameter.numel())) for start in range(0, parameter.numel(), each)]


def _balance(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Large ones first, each to the server that has least: nobody has more than a block above another."""
    loads = [0] * num_servers
    server_of = [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: (-sizes[piece], piece)):
        least = loads.index(min(loads))
        server_of[piece] = least
        loads[least] += max(1, sizes[piece])
    return server_of


def _shelve(part: ServerPart, tables: Mapping[int, TableSpec], owner: Mapping[int, int], server: int) -> ServerPart:
    """The tables' parcels behind the others."""
    parcels = list(part.parcels)
    for index, table in sorted(tables.items()):
        number = len(part.blocks) + len(parcels) - len(part.parcels)
        block = ParameterBlock(number, index, server, server, part.num_bytes, False)
        parcels.append(Chunk(len(parcels), owner[index], (block,), part.num_bytes, 0, table.width, table))
    return ServerPart(tuple(parcels), part.num_bytes)


def _pack(
    pieces: Sequence[tuple[int, int, int]],
    parameters: Sequence[torch.Tensor],
    owner: dict[int, int],
    limit: int,
    sparse: frozenset[int],
) -> ServerPart:
    """One server's blocks, in the order of the model, side by side in parcels of one optimizer and dtype each."""
    parcels: list[Chunk] = []
    blocks: list[ParameterBlock] = []
    begin = at = 0

    def close() -> None:
        nonlocal begin
        if blocks:
            index = blocks[0].index
            row = parameters[index].numel() // parameters[index].shape[0] if index in sparse else 0
            parcels.append(Chunk(len(parcels), owner[index], tuple(blocks), begin, at - begin, row))
            blocks.clear()
        begin = at

    for number, (index, start, stop) in enumerate(pieces):
        parameter = parameters[index]
        num_bytes = (stop - start) * parameter.element_size()
        if blocks:
            last = parameters[blocks[-1].index]
            alike = owner[blocks[-1].index] == owner[index] and last.dtype == parameter.dtype
            alike = alike and index not in sparse and blocks[-1].index not in sparse
            if not alike or at - begin + num_bytes > limit:
                close()
        blocks.append(ParameterBlock(number, index, start, stop, at, stop - start == parameter.numel()))
        at = -(-(at + num_bytes) // ALIGN_BYTES) * ALIGN_BYTES
    close()
    return ServerPart(tuple(parcels), at)
