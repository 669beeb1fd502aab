"""The "tcp" transport: authenticated connections, one per direction, peer and channel, a fixed header per message.

The sender opens a connection with its first message, so ranks that never exchange anything never connect. After the
handshake it introduces itself (generation, group, rank, channel); a connection of another generation is refused. Then
messages follow each other:

    magic  generation  group  channel  | fingerprint | number of bytes | data …
    4      4           4      4          8             8

The receiver compares the header with what it expects before it reads any data, and data goes straight into the expected
tensor: nothing is allocated because a peer said so. With a rate limit, all messages of a rank share it.
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
from typing import TYPE_CHECKING, Any

import torch

from ..errors import HoraError, PeerLost, Timeout, Unauthorized
from ..net import handshake
from ..net.framing import recv_exactly
from ..net.handshake import connect
from ..net.tensor_bytes import tensor_bytes
from .base import NUM_CHANNELS, POLL_S, BoundedWait, GroupSpec, Transfer, Transport
from .rate_limit import RateLimiter

if TYPE_CHECKING:
    from .context import TransportContext

log = logging.getLogger(__name__)

PURPOSE = "link"
MAGIC = b"HoRa"
HEADER = struct.Struct("<4sIIIQQ")
INTRODUCTION = struct.Struct("<III I")  # generation, group, rank, channel
PIECE_BYTES = 256 << 10  # what is reduced in one go: stays in the cache


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
    """A rank's listening socket, shared by its groups: hands each incoming connection to the group it is for."""

    def __init__(self, token: bytes, bind: str, rate_limiter: RateLimiter | None = None) -> None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        sock = socket.create_server((bind, 0), family=family, backlog=128)
        self.address: tuple[str, int] = (bind, sock.getsockname()[1])
        self.token = token
        self.rate_limiter = rate_limiter  # of what this rank sends
        self._groups: dict[tuple[int, int], TcpTransport] = {}
        self._early: dict[tuple[int, int], list[tuple[socket.socket, int, int]]] = {}
        self._generation = 0
        self._closed = False
        self._lock = threading.Lock()
        self._listener = handshake.AuthenticatedListener(sock, token, PURPOSE, self._on_connection)

    @classmethod
    def open(cls, context: TransportContext) -> TcpListener:
        rate = context.run.rate_bytes_per_s
        listener = cls(context.run.token, context.run.bind, RateLimiter(rate) if rate is not None else None)
        host, port = listener.address
        context.publish("tcp", f"{host} {port}".encode())
        return listener

    def attach(self, transport: TcpTransport) -> None:
        """From now on connections for this group reach it; those that came early are handed over."""
        key = (transport.spec.generation, transport.spec.group)
        with self._lock:
            self._groups[key] = transport
            self._generation = max(self._generation, transport.spec.generation)
            early = self._early.pop(key, [])
        for sock, rank, channel in early:
            try:
                transport.add_incoming(sock, rank, channel)
            except (HoraError, OSError) as problem:
                log.info("connection dropped: %s", problem)
                sock.close()

    def detach(self, transport: TcpTransport) -> None:
        with self._lock:
            self._groups.pop((transport.spec.generation, transport.spec.group), None)

    def _on_connection(self, sock: socket.socket) -> None:
        data = recv_exactly(sock, INTRODUCTION.size, time.monotonic() + handshake.HANDSHAKE_S)
        generation, group, rank, channel = INTRODUCTION.unpack(data)
        with self._lock:
            if self._closed:
                raise HoraError(f"rank {rank} connected after this port was closed")
            if generation < self._generation:
                raise HoraError(f"rank {rank} belongs to generation {generation}; this is {self._generation}")
            transport = self._groups.get((generation, group))
            if transport is None:
                self._early.setdefault((generation, group), []).append((sock, rank, channel))
                return
        transport.add_incoming(sock, rank, channel)

    def forget(self) -> None:
        self._listener.forget()
        for transport in self._groups.values():
            transport.forget()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            self._closed = True
            for early in self._early.values():
                for sock, _, _ in early:
                    sock.close()
            self._early.clear()


class _Send(Transfer):
    __slots__ = ("parts", "sock")
    transport: TcpTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        data, spec = tensor_bytes(self.tensor), self.transport.spec
        header = HEADER.pack(MAGIC, spec.generation, spec.group, self.channel, self.fingerprint, len(data))
        self.sock = self.transport.outgoing(self.peer, self.channel)
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
                raise self.transport.lost_error((self.peer,), problem) from None
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
        """As much as the socket takes and the rate limit grants, which may be nothing."""
        limiter = self.transport.rate_limiter
        if limiter is None:
            return self.sock.sendmsg(self.parts)
        left = granted = limiter.take(self.num_bytes)
        if not granted:
            return 0
        first = []
        for part in self.parts:
            first.append(part[:left])
            left -= len(first[-1])
        sent = 0
        try:
            sent = self.sock.sendmsg(first)
        finally:
            limiter.give_back(granted - sent)
        return sent


class _Recv(Transfer):
    __slots__ = ("filled", "header", "in_header", "offset", "piece", "target")
    transport: TcpTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.header = bytearray(HEADER.size)
        self.in_header = True
        self.target = memoryview(self.header)
        self.filled = 0
        self.offset = 0  # elements that are complete
        self.piece = self.tensor

    def advance(self) -> bool:
        transport = self.transport
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
                raise transport.lost_error((self.peer,), problem) from None
            if count == 0:
                raise transport.lost_error((self.peer,), "the connection was closed")
            moved = True
            self.filled += count
            if self.filled == len(self.target):
                self._complete()
        return moved

    def _complete(self) -> None:
        """The header, or a piece of the data, is complete."""
        tensor = self.tensor
        if self.in_header:
            self.in_header = False
            spec, num_bytes = self.transport.spec, tensor.numel() * tensor.element_size()
            expected = (MAGIC, spec.generation, spec.group, self.channel, self.fingerprint, num_bytes)
            if HEADER.unpack(self.header) != expected:
                raise self.transport.observer.mismatch(self.peer, self.channel)
            if self.combine:
                self.piece = torch.empty(min(tensor.numel(), PIECE_BYTES // tensor.element_size()), dtype=tensor.dtype)
        elif self.combine:
            count = len(self.target) // tensor.element_size()
            self.combine(tensor[self.offset : self.offset + count], self.piece[:count])
            self.offset += count
        else:
            self.offset = tensor.numel()
        left = tensor.numel() - self.offset
        self.done = left == 0
        if not self.done:
            self.target = tensor_bytes(self.piece[: min(left, self.piece.numel())])
            self.filled = 0


class TcpTransport(Transport):
    """`address_of(peer)` blocks until that peer's address is known; it is called for the first message to it."""

    kind = "tcp"
    auto_order = 2
    limits_rate = True
    send_transfer, recv_transfer = _Send, _Recv

    @classmethod
    def open(cls, context: TransportContext, spec: GroupSpec, option: str = "") -> Transport:
        def address_of(peer: int) -> tuple[str, int]:
            host, port = context.published(spec.members[peer].rank, "tcp").decode().split()
            return host, int(port)

        return cls(spec, context.resource("tcp", TcpListener.open), address_of)

    def __init__(self, spec: GroupSpec, listener: TcpListener, address_of: Callable[[int], tuple[str, int]]) -> None:
        super().__init__(spec)
        self._listener = listener
        self.rate_limiter = listener.rate_limiter
        self._address_of = address_of
        self._out: dict[tuple[int, int], socket.socket] = {}
        self._in: dict[tuple[int, int], socket.socket] = {}
        self._connected = threading.Condition()
        listener.attach(self)

    def outgoing(self, peer: int, channel: int) -> socket.socket:
        sock = self._out.get((peer, channel))
        if sock is None:
            sock = self._connect(peer)
            tune(sock)
            sock.sendall(INTRODUCTION.pack(self.spec.generation, self.spec.group, self.rank, channel))
            sock.setblocking(False)
            self._out[peer, channel] = sock
        return sock

    def _connect(self, peer: int) -> socket.socket:
        """HoraError names the peer, its host and the address that was tried, if there is no answer."""
        address = self._address_of(peer)
        try:
            return connect(address, self._listener.token, PURPOSE, check=BoundedWait(self, (peer,)).check)
        except HoraError as problem:
            if problem is self.cause or isinstance(problem, (PeerLost, Timeout)):
                raise
            me, other, where = self.name_of(self.rank), self.name_of(peer), f"{address[0]} port {address[1]}"
            kind = Unauthorized if isinstance(problem, Unauthorized) else HoraError
            raise kind(
                f"{me} cannot reach {other} at {where}: {problem}. Is this the right interface, and open to the others?"
            ) from None

    def incoming(self, peer: int, channel: int) -> socket.socket | None:
        return self._in.get((peer, channel))

    def add_incoming(self, sock: socket.socket, rank: int, channel: int) -> None:
        """Takes a connection that `rank` opened; called on the listener's threads."""
        with self._connected:
            if not (0 <= rank < self.size and rank != self.rank and 0 <= channel < NUM_CHANNELS):
                raise HoraError(f"a connection claims to come from rank {rank}, channel {channel}, which do not exist")
            if (rank, channel) in self._in:
                raise HoraError(f"a second connection claims to come from rank {rank}, channel {channel}")
            tune(sock)
            sock.setblocking(False)
            self._in[rank, channel] = sock
            self._connected.notify_all()

    def _idle(self, transfer: Transfer, rounds: int) -> None:
        poller = select.poll()
        watched = 0
        limit_s = POLL_S
        for pending in self._pending(transfer.channel):
            if isinstance(pending, _Send):
                if self.rate_limiter is not None and (due_s := self.rate_limiter.due_s(pending.num_bytes)):
                    limit_s = min(limit_s, due_s)  # its socket would take it, and the poll would not sleep
                    continue
                poller.register(pending.sock, select.POLLOUT)
                watched += 1
            elif (sock := self.incoming(pending.peer, pending.channel)) is not None:
                poller.register(sock, select.POLLIN)
                watched += 1
        if watched or limit_s < POLL_S:
            poller.poll(limit_s * 1000)
        else:
            with self._connected:
                if self.incoming(transfer.peer, transfer.channel) is None:
                    self._connected.wait(POLL_S)

    def forget(self) -> None:
        for sock in (*self._out.values(), *self._in.values()):
            sock.close()

    def close(self) -> None:
        self._listener.detach(self)
        for sock in self._out.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)  # what is in flight still arrives
        self.forget()
