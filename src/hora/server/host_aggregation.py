"""HostAggregation: the workers of one host push one gradient to remote servers, and pull the parameters once.

        host a                       a remote server
    ┌─ 0 ◀── 1 ◀── 2 ─┐
    │  │ sum          │   push ──▶   one gradient for three workers
    └─ ▼ ── 1 ── 2 ───┘   ◀── pull   the parameters, once

    agree       every local rank tells its weight, and which blocks it has a gradient for
    reduce      chunk by chunk, the local ranks' weighted gradients are summed through the host's memory
    push        the leader, the first local rank, sends each sum as soon as it is complete
    broadcast   each chunk that comes back goes through the host's memory to the other ranks, while others still travel

So a host's network link carries a step's gradients once out and the parameters once in, however many workers it has.
Every local rank still sends BeginStep to every server, which needs each worker's weight, stop request and nonfinite
gradient. What travels as rows (sparse gradients, hora.ServerEmbedding) each worker sends itself, and a server on the
same host is reached through shared memory. Only for workers that step together: mode=sync without backups.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from ..collectives.group import Group
from ..errors import HoraError
from ..net.tensor_bytes import tensor_bytes
from .connection import ServerConnection
from .layout import Chunk, ParameterBlock
from .messages import ChunkReady

_REALS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, ChunkReady]]).decode

Pushed = tuple[ServerConnection, Chunk]


def make_host_aggregation(group: Group, connections: Sequence[ServerConnection]) -> HostAggregation | None:
    """Collective over `group`, once all ranks are connected. None where this host has one worker, or where no server is
    remote."""
    hosts = [[rank for rank in range(group.size) if group.hosts[rank] == host] for host in sorted(set(group.hosts))]
    local_ranks = next(host for host in hosts if group.rank in host)
    remote = torch.tensor([float(len(local_ranks) > 1 and not connection.shared) for connection in connections])
    if group.size == 1 or not float(group.all_reduce(remote.clone(), "max", name="remote servers").max()):
        return None
    found: HostAggregation | None = None
    for host in hosts:
        if len(host) == 1:
            continue
        inner = group.new_group(host)
        if group.rank in host:
            inner.all_reduce(remote, "min", name="servers that are remote for all local ranks")
            servers = {
                connection.number for connection, is_remote in zip(connections, remote, strict=True) if is_remote
            }
            found = HostAggregation(group, inner, host[0], servers)
    return found


class HostAggregation:
    """`inner` has the local ranks of `group`, and is aborted with it. `leader` is the rank that pushes; `servers` are
    the numbers of the remote servers. Methods are collective over the local ranks, except `carries`, `has`, `abort`,
    `break_off` and `close`."""

    def __init__(self, group: Group, inner: Group, leader: int, servers: set[int]) -> None:
        self.leader = leader
        self.leads = inner.rank == 0
        self.size = inner.size
        self.total = 0.0  # the weights of all local ranks in the current step
        self._inner = inner
        self._whole = group.consistency
        self._whole.transports.append(inner.transport)
        self._servers = servers
        self._have: dict[tuple[int, int], bool] = {}  # by server and block

    def carries(self, connection: ServerConnection, chunk: Chunk) -> bool:
        """Whether this chunk's gradients leave the host as one."""
        return connection.number in self._servers and chunk.dense

    def agree(self, weight: float, order: Sequence[Pushed], mine: Sequence[Sequence[bool]]) -> None:
        """A step begins: this worker's weight, and for each chunk of `order` which blocks have a gradient."""
        carried = [(connection, chunk, have) for (connection, chunk), have in zip(order, mine, strict=True)
                   if self.carries(connection, chunk)]  # fmt: skip
        facts = torch.tensor([weight, *(float(has) for *_, have in carried for has in have)], dtype=torch.float64)
        self._inner.all_reduce(facts, "sum", name="gradients to come")
        self.total = float(facts[0])
        blocks = [(connection.number, block.number) for connection, chunk, _ in carried for block in chunk.blocks]
        self._have = dict(zip(blocks, (facts[1:] > 0).tolist(), strict=True))

    def has(self, connection: ServerConnection, block: ParameterBlock) -> bool:
        """Whether any local rank has a gradient of this block."""
        return self._have[connection.number, block.number]

    def reduce(self, chunk: Chunk, memory: torch.Tensor, dtype: torch.dtype) -> None:
        """`memory`, a chunk's gradients, becomes the sum over the local ranks."""
        self._inner.all_reduce(memory.view(_REALS.get(dtype, dtype)), "sum", name=f"gradients of chunk {chunk.number}")

    def broadcast(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """`memory`, a chunk's parameters, becomes the leader's."""
        self._inner.broadcast(memory, name=f"parameters of chunk {chunk.number}")

    def broadcast_readies(self, readies: Sequence[tuple[int, ChunkReady]]) -> list[tuple[int, ChunkReady]]:
        """The servers' answers to the leader, by number of the server; the other ranks' argument is ignored."""
        body = _encode(list(readies)) if self.leads else b""
        length = torch.tensor([len(body)])
        self._inner.broadcast(length, name="length of the servers' answers")
        data = torch.frombuffer(bytearray(body or bytes(int(length))), dtype=torch.uint8)
        self._inner.broadcast(data, name="the servers' answers")
        return list(readies) if self.leads else _decode(bytes(tensor_bytes(data)))

    def abort(self, cause: HoraError) -> None:
        """Ends every wait for local ranks. Thread-safe."""
        self._inner.transport.abort(cause)

    def break_off(self, cause: HoraError) -> None:
        """This worker cannot continue: the other local ranks fail with the same error."""
        self._inner.consistency.abort(cause)

    def close(self) -> None:
        self._whole.transports = [each for each in self._whole.transports if each is not self._inner.transport]
        self._inner.close()
