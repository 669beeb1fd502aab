"""Line: messages over one socket, each with tensors behind it or none. Nothing here blocks.

    length of the message | bytes of tensors | message … | tensors …
    4                       8

Where the tensors go is asked (`place`) once the message is there and before any of them is read: nothing is allocated
because a peer said so.
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

Message = Any  # whatever the two ends speak: a typed struct each
Place = Callable[["MessageSocket", Message, int], memoryview]


class ConnectionClosed(HoraError):
    """The other end is gone."""


class MessageSocket:
    """One end of a connection that has been authenticated; one thread uses it. `encode`, `decode` know its messages."""

    def __init__(
        self,
        sock: socket.socket,
        place: Place,
        encode: Callable[[Message], bytes],
        decode: Callable[[bytearray], Message],
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.sent_bytes = 0  # of tensors
        self.peer: tuple[str, int] | None = None  # who is at the other end, once it has said so
        self._place = place
        self._encode = encode
        self._decode = decode
        self._out: collections.deque[memoryview] = collections.deque()
        self._held: collections.deque[object] = collections.deque()  # what the views in _out look into
        self._header = bytearray(HEADER.size)
        self._target = memoryview(self._header)
        self._filled = 0
        self._body: bytearray | None = None
        self._message: Message | None = None
        self._num_payload = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    # -- sending -------------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something is queued that the socket did not take yet."""
        return bool(self._out)

    def send(self, message: Message, payload: torch.Tensor | bytes | None = None) -> None:
        """Queues the message and writes what the socket takes. The payload must not change until it is `pending` no
        more."""
        body = self._encode(message)
        data = memoryview(b"")
        if isinstance(payload, torch.Tensor):
            data = tensor_bytes(payload)
        elif payload is not None:
            data = memoryview(payload)
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

    # -- receiving -----------------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Message]:
        """The messages that are there, each with its tensors in place, which is asked for once the one before it is
        dealt with. Closed if the other end is gone."""
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
        """The header, the message or its tensors are whole; tells the message when all is."""
        if self._message is not None:
            return self._finish()
        if self._body is None:
            length, self._num_payload = HEADER.unpack(self._header)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise HoraError(f"a message announces {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
            self._body = bytearray(length)
            self._aim(memoryview(self._body))
            return None
        self._message = self._decode(self._body)
        if not self._num_payload:
            return self._finish()
        self._aim(self._place(self, self._message, self._num_payload))
        return None

    def _finish(self) -> Message:
        message, self._message, self._body = self._message, None, None
        self._aim(memoryview(self._header))
        assert message is not None
        return message

    def _aim(self, target: memoryview) -> None:
        self._target, self._filled = target, 0

    def close(self) -> None:
        self.sock.close()
