"""BlockLayout: how a model is cut into blocks, and which server owns which. Every worker and server computes the same.

A block is a parameter or a slice of one, never of two: torch's optimizers skip a parameter without a gradient, count
steps per parameter and have hyper-parameters per group. Only optimizers that treat each element independently get
slices. The blocks of one server and one optimizer travel in chunks of about `block_bytes`, in model order, so that what
the next forward needs first arrives first.

    parameters      |---- w1 ----|b|-------- w2 --------|       model order
    blocks          |  0  |  1   |2|   3   |   4   |  5 |       balanced over the servers by bytes
    server 0        [ 0 ] [ 2  3 ] [ 5 ]                        chunks
    server 1        [ 1 ] [ 4 ]

A table that only servers hold (hora.ServerEmbedding) is a chunk of its own on every server, after the others.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch

from ..net.interface import is_loopback
from ..parameters.registry import ParameterRegistry
from ..parameters.shards import ALIGN, CUT_BYTES, ELEMENTWISE, is_dense
from ..rendezvous.context import RunContext
from ..transport.arena import round_up
from .embedding import server_embeddings
from .embedding_table import OPTIMIZERS, TableSpec

ALIGN_BYTES = 128  # blocks begin on cache lines of their own
PIECES = 4  # a model is cut into at least this many blocks per server, where possible
REMOTE_PIECES = 16  # over a network: the first blocks come back while the last are still being sent

Slice = tuple[int, int, int]  # parameter index, start, stop


@dataclasses.dataclass(frozen=True)
class ParameterBlock:
    """Elements [start, stop) of parameter `index`, in memory order; at byte `offset` of its server's memory."""

    number: int  # on its server
    index: int
    start: int
    stop: int
    offset: int
    whole: bool  # the entire parameter

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Blocks that travel together: bytes [offset, offset + num_bytes) of their server's memory.

    `row_numel` is nonzero where only touched rows travel; such a block is alone in its chunk. A `table` has no bytes in
    that memory: its one block is empty, and the block's `start` is the number of its server."""

    number: int  # on its server
    optimizer: int
    blocks: tuple[ParameterBlock, ...]
    offset: int
    num_bytes: int
    row_numel: int = 0
    table: TableSpec | None = None

    @functools.cached_property
    def dense(self) -> bool:
        """Whether all of it travels at every step, and not only touched rows."""
        return not self.row_numel and self.table is None

    @functools.cached_property
    def block_numbers(self) -> list[int]:
        return [block.number for block in self.blocks]


@dataclasses.dataclass(frozen=True)
class ServerPart:
    """What one server owns."""

    chunks: tuple[Chunk, ...]
    num_bytes: int

    @functools.cached_property
    def blocks(self) -> tuple[ParameterBlock, ...]:
        return tuple(block for chunk in self.chunks for block in chunk.blocks)

    @functools.cached_property
    def parameter_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """All servers' parts. `served` are the parameters that some optimizer holds; the rest stay local to each worker."""

    parts: tuple[ServerPart, ...]
    served: frozenset[int]

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(repr(self.parts).encode(), digest_size=8).hexdigest()


# -- cutting -----------------------------------------------------------------------------------------------------------


def cut(
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    num_servers: int,
    block_bytes: int,
    sparse: frozenset[int] = frozenset(),
    tables: Mapping[int, TableSpec] | None = None,
    pieces: int = PIECES,
) -> BlockLayout:
    """Deterministic in its arguments: the parameters' shapes and dtypes, and the optimizers' groups. `sparse`
    parameters are cut between rows; placeholders of `tables` are not cut.

    ValueError if there are more servers than blocks, or if two optimizers hold one parameter."""
    index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
    owner: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in _parameters_of(optimizer):
            if owner.setdefault(index_of[id(parameter)], number) != number:
                raise ValueError(f"two optimizers hold one parameter of shape {list(parameter.shape)}: under ps "
                                 "each parameter needs exactly one optimizer")  # fmt: skip
    tables = tables or {}
    served = sorted(index for index in owner if parameters[index].numel() and index not in tables)
    total = sum(parameters[index].nbytes for index in served)
    limit = min(block_bytes, max(CUT_BYTES, -(-total // (pieces * num_servers))))
    slices: list[Slice] = []
    for index in served:
        parameter = parameters[index]
        kind = type(optimizers[owner[index]])
        may_cut = kind in ELEMENTWISE or (index in sparse and kind is torch.optim.SparseAdam)
        length = parameter.numel()
        if may_cut and is_dense(parameter) and parameter.nbytes > limit:
            unit = length // parameter.shape[0] if index in sparse else ALIGN
            length = max(1, limit // parameter.element_size() // unit) * unit
        slices += [
            (index, start, min(start + length, parameter.numel())) for start in range(0, parameter.numel(), length)
        ]
    if len(slices) < num_servers and not tables:
        raise ValueError(
            f"{num_servers} servers for a model of {len(slices)} block{'s' * (len(slices) != 1)}: each server needs "
            f"at least one block. Use --servers {len(slices)} or fewer"
        )
    server_of = _balance([(stop - start) * parameters[i].element_size() for i, start, stop in slices], num_servers)
    parts = []
    for server in range(num_servers):
        mine = [piece for piece, its in zip(slices, server_of, strict=True) if its == server]
        parts.append(_pack(mine, parameters, owner, limit, sparse, tables, server))
    return BlockLayout(tuple(parts), frozenset(served))


def _balance(sizes: Sequence[int], num_servers: int) -> list[int]:
    """Largest first, each to the least loaded server: no server has more than one block above another."""
    loads = [0] * num_servers
    server_of = [0] * len(sizes)
    for piece in sorted(range(len(sizes)), key=lambda piece: (-sizes[piece], piece)):
        least = loads.index(min(loads))
        server_of[piece] = least
        loads[least] += max(1, sizes[piece])
    return server_of


def _pack(
    slices: Sequence[Slice],
    parameters: Sequence[torch.Tensor],
    owner: Mapping[int, int],
    limit: int,
    sparse: frozenset[int],
    tables: Mapping[int, TableSpec],
    server: int,
) -> ServerPart:
    """One server's blocks in model order, contiguous in chunks of one optimizer and dtype each; then the tables."""
    groups: list[list[ParameterBlock]] = []
    previous: object = None
    offset = 0
    for number, (index, start, stop) in enumerate(slices):
        parameter = parameters[index]
        num_bytes = (stop - start) * parameter.element_size()
        kind = (owner[index], parameter.dtype, number if index in sparse else -1)
        if kind != previous or offset - groups[-1][0].offset + num_bytes > limit:
            groups.append([])
        groups[-1].append(ParameterBlock(number, index, start, stop, offset, stop - start == parameter.numel()))
        previous = kind
        offset = round_up(offset + num_bytes, ALIGN_BYTES)
    chunks = []
    starts = [*(blocks[0].offset for blocks in groups), offset]
    for number, blocks in enumerate(groups):
        index = blocks[0].index
        row_numel = parameters[index].numel() // parameters[index].shape[0] if index in sparse else 0
        num_bytes = starts[number + 1] - starts[number]
        chunks.append(Chunk(number, owner[index], tuple(blocks), starts[number], num_bytes, row_numel))
    for number, (index, table) in enumerate(sorted(tables.items()), len(slices)):
        block = ParameterBlock(number, index, server, server, offset, False)
        chunks.append(Chunk(len(chunks), owner[index], (block,), offset, 0, table.width, table))
    return ServerPart(tuple(chunks), offset)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# -- a script's model --------------------------------------------------------------------------------------------------


def make_layout(registry: ParameterRegistry, context: RunContext, block_bytes: int) -> BlockLayout:
    """How this model is cut. ValueError for a model that parameter servers cannot hold.

    Runs on several hosts never use loopback addresses, so the address tells whether chunks cross a network."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in registry.optimizers):
        raise ValueError(
            "LBFGS needs all parameters at once, but a server holds only some: use --strategy ring or auto"
        )
    _check_overlap(registry)
    _check_embeddings(registry)
    return cut(
        registry.parameters,
        registry.optimizers,
        context.num_servers,
        block_bytes,
        sparse_parameters(registry),
        _table_specs(registry, context.num_servers),
        PIECES if is_loopback(context.bind) else REMOTE_PIECES,
    )


def sparse_parameters(registry: ParameterRegistry) -> frozenset[int]:
    """The weights of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, whose gradients are rows."""
    weights = [
        id(module.weight)
        for model in registry.models
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    ]
    return frozenset(registry.index[weight] for weight in weights if weight in registry.index)


def _check_overlap(registry: ParameterRegistry) -> None:
    """Two parameters must not share memory: two servers would update it."""
    places: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, name in zip(registry.parameters, registry.names, strict=True):
        start = int(parameter.storage_offset())
        stop = start + (parameter.numel() if is_dense(parameter) else 1)  # only the first element of one with gaps
        others = places.setdefault(parameter.untyped_storage().data_ptr(), [])
        for other_start, other_stop, other in others if parameter.numel() else ():
            if start < other_stop and other_start < stop:
                raise ValueError(
                    f"parameters {name} and {other} share memory, and two servers cannot both update it: let both "
                    "modules use one nn.Parameter"
                )
        others.append((start, stop, name))


def _check_embeddings(registry: ParameterRegistry) -> None:
    served = {id(p) for optimizer in registry.optimizers for p in _parameters_of(optimizer)}
    for prefix, model in registry._prefixed():
        for place, module in model.named_modules():
            if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or id(module.weight) not in served:
                continue
            name = f"{prefix}{place}{'.' if place else ''}weight"
            if module.max_norm is not None:
                raise ValueError(
                    f"{name} has max_norm={module.max_norm:g}: every forward writes into it, and the servers, which "
                    "own it, would not see that. Leave max_norm out under ps"
                )
            if module.sparse and not module.weight.is_contiguous():
                raise ValueError(f"{name} is sparse and not contiguous: make it contiguous() before job.prepare()")


def _table_specs(registry: ParameterRegistry, num_servers: int) -> dict[int, TableSpec]:
    """Each ServerEmbedding's table, by the index of its placeholder parameter."""
    optimizer_of = {id(p): type(optimizer) for optimizer in registry.optimizers for p in _parameters_of(optimizer)}
    specs = {}
    for table in server_embeddings(registry.models):
        index = registry.index[id(table.rows)]
        kind = optimizer_of.get(id(table.rows))
        if kind is None:
            raise ValueError(f"{registry.names[index]}, of a ServerEmbedding, is in no optimizer: its rows need one")
        if kind not in OPTIMIZERS:
            supported = ", ".join(each.__name__ for each in OPTIMIZERS)
            raise ValueError(
                f"{registry.names[index]}, of a ServerEmbedding, is in {kind.__name__}, which is not known to "
                f"update rows independently; supported: {supported}"
            )
        specs[index] = table.spec(index, num_servers)
    return specs
