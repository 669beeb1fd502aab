"""MessageChannel: typed messages over two descriptors, between a launcher and a fork server or a host's agent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from hora.net.framing import FrameReader, frame

READ_BYTES = 1 << 18
WRITE_BYTES = 1 << 16

Received = TypeVar("Received")


class MessageChannel(Generic[Received]):
    """`read_fd` and `write_fd` become non-blocking and may be one socket. Nothing here blocks. Not thread-safe."""

    def __init__(self, read_fd: int, write_fd: int, decode: Callable[[bytes], Received]) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.broken = False  # a write failed: the other end is gone
        self.received_bytes = 0
        self._decode = decode
        self._frames = FrameReader()
        self._out = bytearray()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued and not written yet."""
        return len(self._out)

    def send(self, message: msgspec.Struct) -> None:
        """Queues the message and writes as much as fits. Call `flush` when the descriptor is writable again."""
        if not self.broken:
            self._out += frame(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: os.write(self.write_fd, memoryview(self._out)[:WRITE_BYTES])]
        except BlockingIOError:
            pass
        except OSError:
            self.break_off()

    def break_off(self) -> None:
        """Drops what is queued and sends nothing more."""
        self.broken = True
        self._out.clear()

    def receive(self) -> list[Received] | None:
        """The messages that have arrived; None at the end of the stream. ValueError or MsgspecError for other bytes."""
        try:
            data = os.read(self.read_fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self.received_bytes += len(data)
        return [self._decode(body) for body in self._frames.feed(data)] if data else None
