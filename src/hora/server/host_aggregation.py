"""Fold: the workers of one host give the servers elsewhere one gradient, and get the parameters once.

        host a                       a server elsewhere
    ┌─ 0 ◀── 1 ◀── 2 ─┐
    │  │ sum          │   push ──▶   one gradient for three workers
    └─ ▼ ── 1 ── 2 ───┘   ◀── pull   the parameters, once

    agree     every mate says what its gradients count, and of which blocks it has one
    gather    parcel by parcel the mates' gradients, each by what it counts, are added up in the host's memory
    push      the leader, the first of the mates, sends each sum as soon as it is there
    spread    each parcel that comes back goes through the host's memory to the mates, while others still travel

So a host's link carries a step's gradients once out and the parameters once in, whatever the workers of the host. Every
mate says Begin to every server all the same: whose samples count, who wants to stop and whose gradient is not finite is
known there by worker. What travels as rows (sparse gradients, hora.ServerEmbedding) each worker sends by itself, and a
server on the host is reached through memory as ever. Only where all workers step together: synchronous, no backups.
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


def gather_local_ranks(group: Group, links: Sequence[ServerConnection]) -> HostAggregation | None:
    """Collective over `group`, once all are connected: this worker's fold, if its host has several workers and they
    reach some server over a network."""
    hosts = [[rank for rank in range(group.size) if group.hosts[rank] == host] for host in sorted(set(group.hosts))]
    mates = next(host for host in hosts if group.rank in host)
    away = torch.tensor([float(len(mates) > 1 and not link.shared) for link in links])
    if group.size == 1 or not float(group.all_reduce(away.clone(), "max", name="servers elsewhere").max()):
        return None
    found: HostAggregation | None = None
    for host in hosts:
        if len(host) == 1:
            continue
        inner = group.new_group(host)
        if group.rank in host:
            inner.all_reduce(away, "min", name="servers that no mate shares memory with")
            folded = [link for link, is_away in zip(links, away.tolist(), strict=True) if is_away]
            group.consistency.transports.append(inner.transport)
            found = HostAggregation(inner, host, folded)
    return found


class HostAggregation:
    """`mates` are the ranks of the host, the leader first; `links` are those to the servers that are elsewhere."""

    def __init__(self, inner: Group, mates: Sequence[int], links: Sequence[ServerConnection]) -> None:
        self.leader = mates[0]
        self.leads = inner.rank == 0
        self.size = inner.size
        self.total = 0.0  # what the gradients of all mates count, in the step under way
        self._inner = inner
        self._links = {link.number for link in links}
        self._have: dict[tuple[int, int], bool] = {}

    def carries(self, link: ServerConnection, parcel: Chunk) -> bool:
        """Whether this parcel's gradients leave the host as one."""
        return link.number in self._links and parcel.whole

    def agree(
        self, worth: float, order: Sequence[tuple[ServerConnection, Chunk]], mine: Sequence[Sequence[bool]]
    ) -> None:
        """A step begins: what this worker's gradients count, and for each parcel of `order` which blocks have one."""
        flags = [float(has) for (link, parcel), have in zip(order, mine, strict=True) for has in have
                 if self.carries(link, parcel)]  # fmt: skip
        facts = torch.tensor([worth, *flags], dtype=torch.float64)
        self._inner.all_reduce(facts, "sum", name="gradients to come")
        self.total = float(facts[0])
        blocks = [(link.number, block.number) for link, parcel in order if self.carries(link, parcel)
                  for block in parcel.blocks]  # fmt: skip
        self._have = dict(zip(blocks, (facts[1:] > 0).tolist(), strict=True))

    def has(self, link: ServerConnection, block: ParameterBlock) -> bool:
        """Whether some mate has a gradient of this block."""
        return self._have[link.number, block.number]

    def gather(self, parcel: Chunk, place: torch.Tensor, dtype: torch.dtype) -> None:
        """`place`, a parcel's memory, becomes the sum of all mates'."""
        self._inner.all_reduce(place.view(_REALS.get(dtype, dtype)), "sum", name=f"gradients of parcel {parcel.number}")

    def spread(self, parcel: Chunk, place: torch.Tensor) -> None:
        """`place`, a parcel's memory, becomes the leader's."""
        self._inner.broadcast(place, name=f"parameters of parcel {parcel.number}")

    def tell(self, readies: Sequence[tuple[int, ChunkReady]]) -> list[tuple[int, ChunkReady]]:
        """What the servers said to the leader, by number of the server; the mates give nothing."""
        words = _encode(list(readies)) if self.leads else b""
        length = torch.tensor([len(words)])
        self._inner.broadcast(length, name="length of the servers' words")
        data = torch.frombuffer(bytearray(words or bytes(int(length))), dtype=torch.uint8)
        self._inner.broadcast(data, name="the servers' words")
        return list(readies) if self.leads else _decode(bytes(tensor_bytes(data)))

    def abort(self, cause: HoraError) -> None:
        """Ends every wait for mates. Thread-safe."""
        self._inner.transport.abort(cause)

    def break_off(self, cause: HoraError) -> None:
        """This worker cannot go on, and its mates learn why."""
        self._inner.consistency.abort(cause)

    def close(self) -> None:
        self._inner.close()
