"""MessageSocket: messages over one non-blocking socket, each with the bytes of tensors behind it or none.

    length of the message | bytes of tensors | message … | tensors …
    4                       8

`payload_buffer` tells where the tensors go, once the message is there and before any of them is read: nothing is
allocated because a peer said so.
"""

from __future__ import annotations

import collections
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import HoraError
from .tensor_bytes import tensor_bytes

HEADER = struct.Struct("<IQ")
MAX_MESSAGE_BYTES = 64 << 20  # the description of a model of 100,000 parameters has a tenth of that

Message = Any  # a typed struct
PayloadBuffer = Callable[["MessageSocket", Message, int], memoryview]


class ConnectionClosed(HoraError):
    """The other end has closed the connection, or it broke."""


class MessageSocket:
    """One end of an authenticated connection, for one thread. Nothing here blocks."""

    def __init__(
        self,
        sock: socket.socket,
        payload_buffer: PayloadBuffer,
        encode: Callable[[Message], bytes],
        decode: Callable[[bytearray], Message],
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.sent_bytes = 0  # of tensors
        self.peer: tuple[str, int] | None = None  # role and rank of the other end, once it has introduced itself
        self._payload_buffer = payload_buffer
        self._encode = encode
        self._decode = decode
        self._out: collections.deque[memoryview] = collections.deque()
        self._held: list[object] = []  # what the views in _out look into
        self._header = bytearray(HEADER.size)
        self._target = memoryview(self._header)  # what is being received
        self._filled = 0
        self._body: bytearray | None = None
        self._message: Message | None = None
        self._payload_bytes = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    def close(self) -> None:
        self.sock.close()

    @property
    def pending(self) -> bool:
        """Whether something is queued that the socket did not take yet."""
        return bool(self._out)

    def send(self, message: Message, payload: torch.Tensor | bytes | None = None) -> None:
        """Queues the message and writes what the socket takes. The payload must not change while it is `pending`."""
        body = self._encode(message)
        data = tensor_bytes(payload) if isinstance(payload, torch.Tensor) else memoryview(payload or b"")
        self._out.append(memoryview(HEADER.pack(len(body), len(data)) + body))
        if len(data):
            self._out.append(data)
            self._held.append(payload)
            self.sent_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        while self._out:
            try:
                sent = self.sock.sendmsg(list(self._out)[:16])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                raise ConnectionClosed(str(problem)) from None
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out[0])
                self._out.popleft()
            if sent:
                self._out[0] = self._out[0][sent:]
        self._held.clear()

    def receive(self) -> Iterator[Message]:
        """The messages that have arrived, each after its payload. The buffer for a payload is asked for after the
        message before it was handled. ConnectionClosed if the other end is gone."""
        while True:
            try:
                count = self.sock.recv_into(self._target[self._filled :])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as problem:
                raise ConnectionClosed(str(problem)) from None
            if count == 0:
                raise ConnectionClosed("the connection was closed")
            self._filled += count
            if self._filled == len(self._target):
                message = self._advance()
                if message is not None:
                    yield message

    def _advance(self) -> Message | None:
        """The header, the message or its payload is complete; returns the message when all of it is."""
        if self._message is None and self._body is None:
            length, self._payload_bytes = HEADER.unpack(self._header)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise HoraError(f"message of {length} bytes exceeds the limit of {MAX_MESSAGE_BYTES} bytes")
            self._body = bytearray(length)
            self._target, self._filled = memoryview(self._body), 0
            return None
        if self._message is None:
            assert self._body is not None
            self._message = self._decode(self._body)
            if self._payload_bytes:
                self._target, self._filled = self._payload_buffer(self, self._message, self._payload_bytes), 0
                return None
        message, self._message, self._body = self._message, None, None
        self._target, self._filled = memoryview(self._header), 0
        return message
