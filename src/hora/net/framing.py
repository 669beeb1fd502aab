"""Length-prefixed msgpack messages over a byte stream: the framing of every control connection. Needs no torch.

    length of the body, 4 bytes, little-endian | body: one msgspec struct in msgpack

`frame(message)` makes the bytes to send, over any socket or pipe. On the receiving side `FrameReader.feed(data)` cuts
what arrived into bodies, and a msgspec decoder of the expected types turns each into a message. Messages with tensors
behind them travel through a MessageSocket (message_socket.py).
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 20
LENGTH = struct.Struct("<I")

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Any, what: str = "message") -> bytes:
    """The message as it is sent. ValueError, which calls it `what`, if it is longer than `MAX_FRAME_BYTES`."""
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{what} of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
    return LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies. A length over the limit raises ValueError before anything is kept."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are complete with `data`; a rest is kept for the next call."""
        self._pending += data
        bodies = []
        while len(self._pending) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._pending)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
            if len(self._pending) < LENGTH.size + length:
                break
            bodies.append(bytes(self._pending[LENGTH.size : LENGTH.size + length]))
            del self._pending[: LENGTH.size + length]
        return bodies


def recv_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """`count` bytes before `deadline` (monotonic; without one, the socket's own timeout holds for each read). Blocks.

    Raises ConnectionError if the other end closes first, TimeoutError if the time is up.
    """
    received = bytearray(count)
    rest = memoryview(received)
    while rest:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"received {count - len(rest)} of {count} bytes in time")
            sock.settimeout(left)
        num_read = sock.recv_into(rest)
        if not num_read:
            raise ConnectionError(f"connection closed after {count - len(rest)} of {count} bytes")
        rest = rest[num_read:]
    return bytes(received)
