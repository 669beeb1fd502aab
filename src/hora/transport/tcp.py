"""TCP between ranks: authenticated, one connection per direction, peer and channel, a fixed header per message.

A connection is opened by the sender at its first message, so ranks that never talk never connect. After the handshake
the sender says once who it is (generation, group, rank, channel); a connection of another generation is refused. Then
messages follow each other:

    magic  generation  group  channel  | stamp | number of bytes | data …
    4      4           4      4          8       8

The receiver compares the header with what it expects before any data is read, and data goes straight into the expected
tensor: nothing is ever allocated because a peer said so. Where a rank has an allowance, all its messages share it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch

from ..errors import HoraError, PeerLost, Timeout, Unauthorized
from ..net import handshake
from ..net.framing import recv_exactly
from ..net.handshake import connect
from ..net.tensor_bytes import tensor_bytes
from .base import NUM_CHANNELS, SLICE_S, BoundedWait, GroupSpec, Land, Transfer, Transport
from .rate_limit import RateLimiter

log = logging.getLogger(__name__)

PURPOSE = "link"
MAGIC = b"HoRa"
HEADER = struct.Struct("<4sIIIQQ")
INTRODUCTION = struct.Struct("<III I")  # generation, group, rank, channel
PIECE_BYTES = 256 << 10  # what a reduction takes in one go: stays in the cache


def tune(sock: socket.socket) -> None:
    """No delay for small messages; on loopback a congestion control that does not pace itself."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not ipaddress.ip_address(sock.getpeername()[0]).is_loopback:
        return
    for name in (b"cubic", b"reno"):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


class TcpListener:
    """A rank's listening end, shared by its groups: hands each incoming connection to the group it is for."""

    def __init__(self, token: bytes, bind: str, allowance: RateLimiter | None = None) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        sock = socket.create_server((bind, 0), family=family, backlog=128)
        self.address: tuple[str, int] = (bind, sock.getsockname()[1])
        self.token = token
        self.allowance = allowance  # what this rank may send
        self._groups: dict[tuple[int, int], TcpTransport] = {}
        self._parked: dict[tuple[int, int], list[tuple[socket.socket, int, int]]] = {}
        self._oldest = 0
        self._closed = False
        self._order = threading.Lock()
        self._listener = handshake.AuthenticatedListener(sock, token, PURPOSE, self._welcome)

    def attach(self, transport: TcpTransport) -> None:
        """From now on connections for this group reach it; those that came early are handed over."""
        key = (transport.spec.generation, transport.spec.group)
        with self._order:
            self._groups[key] = transport
            self._oldest = max(self._oldest, transport.spec.generation)
            early = self._parked.pop(key, [])
        for sock, rank, channel in early:
            try:
                transport.adopt(sock, rank, channel)
            except (HoraError, OSError) as problem:
                log.info("connection dropped: %s", problem)
                sock.close()

    def detach(self, transport: TcpTransport) -> None:
        with self._order:
            self._groups.pop((transport.spec.generation, transport.spec.group), None)

    def _welcome(self, sock: socket.socket) -> None:
        data = recv_exactly(sock, INTRODUCTION.size, time.monotonic() + handshake.HANDSHAKE_S)
        generation, group, rank, channel = INTRODUCTION.unpack(data)
        with self._order:
            if self._closed:
                raise HoraError(f"rank {rank} came after this port was closed")
            if generation < self._oldest:
                raise HoraError(f"rank {rank} speaks for generation {generation}; this is {self._oldest}")
            transport = self._groups.get((generation, group))
            if transport is None:
                self._parked.setdefault((generation, group), []).append((sock, rank, channel))
                return
        transport.adopt(sock, rank, channel)

    def forget(self) -> None:
        self._listener.forget()
        for transport in self._groups.values():
            transport.forget()

    def close(self) -> None:
        self._listener.close()
        with self._order:
            self._closed = True
            for early in self._parked.values():
                for sock, _, _ in early:
                    sock.close()
            self._parked.clear()


class TcpTransport(Transport):
    """`address_of(peer)` blocks until that peer's address is known; it is asked at the first message to it."""

    kind = "tcp"

    def __init__(self, spec: GroupSpec, port: TcpListener, address_of: Callable[[int], tuple[str, int]]) -> None:
        super().__init__(spec)
        self._port = port
        self.allowance = port.allowance
        self._address_of = address_of
        self._out: dict[tuple[int, int], socket.socket] = {}
        self._in: dict[tuple[int, int], socket.socket] = {}
        self._news = threading.Condition()
        port.attach(self)

    def outgoing(self, peer: int, channel: int) -> socket.socket:
        key = (peer, channel)
        sock = self._out.get(key)
        if sock is None:
            sock = self._dial(peer)
            tune(sock)
            sock.sendall(INTRODUCTION.pack(self.spec.generation, self.spec.group, self.rank, channel))
            sock.setblocking(False)
            self._out[key] = sock
        return sock

    def _dial(self, peer: int) -> socket.socket:
        """HoraError that names the peer, its host and the address that was tried, if nobody answers there."""
        address = self._address_of(peer)
        try:
            return connect(address, self._port.token, PURPOSE, check=BoundedWait(self, (peer,)).check)
        except HoraError as problem:
            if problem is self.cause or isinstance(problem, (PeerLost, Timeout)):
                raise
            me, whom, where = self.name_of(self.rank), self.name_of(peer), f"{address[0]} port {address[1]}"
            kind = Unauthorized if isinstance(problem, Unauthorized) else HoraError
            raise kind(
                f"{me} cannot reach {whom} at {where}: {problem}. Is this the right interface, and open to the others?"
            ) from None

    def incoming(self, peer: int, channel: int) -> socket.socket | None:
        return self._in.get((peer, channel))

    def adopt(self, sock: socket.socket, rank: int, channel: int) -> None:
        """Takes a connection that `rank` opened; called on the port's threads."""
        with self._news:
            if not (0 <= rank < self.size and rank != self.rank and 0 <= channel < NUM_CHANNELS):
                raise HoraError(f"a connection claims to come from rank {rank}, channel {channel}: there is none")
            if (rank, channel) in self._in:
                raise HoraError(f"a second connection claims to come from rank {rank}, channel {channel}")
            tune(sock)
            sock.setblocking(False)
            self._in[rank, channel] = sock
            self._news.notify_all()

    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Transfer:
        return _Send(self, peer, channel, stamp, tensor)

    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Transfer:
        return _Recv(self, peer, channel, stamp, tensor, None if land is torch.Tensor.copy_ else land)

    def _idle(self, handle: Transfer, rounds: int) -> None:
        poller = select.poll()
        watched = 0
        limit_s = SLICE_S
        for pending in self._pending(handle.channel):
            if isinstance(pending, _Send):
                if self.allowance is not None and (due_s := self.allowance.due_s(pending.num_bytes)):
                    limit_s = min(limit_s, due_s)  # its socket would take it, and the poll would not sleep
                    continue
                poller.register(pending.sock, select.POLLOUT)
                watched += 1
            elif (sock := self.incoming(pending.peer, pending.channel)) is not None:
                poller.register(sock, select.POLLIN)
                watched += 1
        if watched or limit_s < SLICE_S:
            poller.poll(limit_s * 1000)
        else:
            with self._news:
                if self.incoming(handle.peer, handle.channel) is None:
                    self._news.wait(SLICE_S)

    def forget(self) -> None:
        for sock in (*self._out.values(), *self._in.values()):
            sock.close()

    def close(self) -> None:
        self._port.detach(self)
        for sock in self._out.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)  # what is on its way still arrives
        self.forget()


class _Send(Transfer):
    __slots__ = ("parts", "sock", "tensor")

    def __init__(self, transport: TcpTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor) -> None:
        super().__init__(transport, peer, channel)
        data = tensor_bytes(tensor)
        spec = transport.spec
        header = HEADER.pack(MAGIC, spec.generation, spec.group, channel, stamp, len(data))
        self.sock = transport.outgoing(peer, channel)
        self.tensor = tensor
        self.parts = [memoryview(header), data]

    @property
    def num_bytes(self) -> int:
        """What is still to be sent."""
        return sum(len(part) for part in self.parts)

    def advance(self) -> bool:
        moved = False
        while self.parts:
            try:
                sent = self._push()
            except BlockingIOError:
                return moved
            except OSError as problem:
                assert isinstance(self.transport, TcpTransport)
                raise self.transport.broken((self.peer,), problem) from None
            if not sent:
                return moved
            moved = True
            while self.parts and sent >= len(self.parts[0]):
                sent -= len(self.parts[0])
                del self.parts[0]
            if self.parts:
                self.parts[0] = self.parts[0][sent:]
        self.done = True
        return True

    def _push(self) -> int:
        """As much as the socket takes and the allowance grants, which may be nothing."""
        assert isinstance(self.transport, TcpTransport)
        allowance = self.transport.allowance
        if allowance is None:
            return self.sock.sendmsg(self.parts)
        granted = allowance.take(self.num_bytes)
        if not granted:
            return 0
        sent = 0
        try:
            sent = self.sock.sendmsg(_first(self.parts, granted))
        finally:
            allowance.give_back(granted - sent)
        return sent


def _first(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """The first `num_bytes` of all parts in a row."""
    found = []
    for part in parts:
        found.append(part[:num_bytes])
        num_bytes -= len(found[-1])
    return found


class _Recv(Transfer):
    __slots__ = ("filled", "header", "in_header", "land", "offset", "piece", "stamp", "target", "tensor")

    def __init__(
        self,
        transport: TcpTransport,
        peer: int,
        channel: int,
        stamp: int,
        tensor: torch.Tensor,
        land: Land | None,
    ) -> None:
        super().__init__(transport, peer, channel)
        self.stamp = stamp
        self.tensor = tensor
        self.land = land
        self.header = bytearray(HEADER.size)
        self.in_header = True
        self.target = memoryview(self.header)
        self.filled = 0
        self.offset = 0  # elements that have landed
        self.piece = tensor

    def advance(self) -> bool:
        transport = self.transport
        assert isinstance(transport, TcpTransport)
        sock = transport.incoming(self.peer, self.channel)
        if sock is None:
            return False
        moved = False
        while not self.done:
            try:
                count = sock.recv_into(self.target[self.filled :])
            except BlockingIOError:
                return moved
            except OSError as problem:
                raise transport.broken((self.peer,), problem) from None
            if count == 0:
                raise transport.broken((self.peer,), "the connection was closed")
            moved = True
            self.filled += count
            if self.filled == len(self.target):
                self._complete(transport)
        return moved

    def _complete(self, transport: TcpTransport) -> None:
        """The header, or a piece of the data, is whole."""
        if self.in_header:
            self.in_header = False
            spec = transport.spec
            expected = self.tensor.numel() * self.tensor.element_size()
            if HEADER.unpack(self.header) != (
                MAGIC, spec.generation, spec.group, self.channel, self.stamp, expected
            ):  # fmt: skip
                raise transport.watcher.differ(self.peer, self.channel)
            if self.land:
                self.piece = torch.empty(
                    min(self.tensor.numel(), PIECE_BYTES // self.tensor.element_size()), dtype=self.tensor.dtype
                )
        elif self.land:
            count = len(self.target) // self.tensor.element_size()
            self.land(self.tensor[self.offset : self.offset + count], self.piece[:count])
            self.offset += count
        else:
            self.offset = self.tensor.numel()
        left = self.tensor.numel() - self.offset
        self.done = left == 0
        if not self.done:
            self.target = tensor_bytes(self.piece[: min(left, self.piece.numel())])
            self.filled = 0
