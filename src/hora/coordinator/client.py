"""CoordinatorClient: a CoordinatorConnection over TCP."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from ..net import keepalive
from ..net.framing import FrameReader, frame
from ..net.handshake import connect
from .connection import CoordinatorConnection
from .messages import AnyRequest, decode_answer

PURPOSE = "control"


class CoordinatorClient(CoordinatorConnection):
    """Has one reading thread. `on_lost(reason)` is called once if the connection breaks before `close`."""

    def __init__(self, address: tuple[str, int], token: bytes, timeout_s: float = 30.0) -> None:
        super().__init__()
        self.on_lost: Callable[[str], None] | None = None
        self._sock = connect(address, token, PURPOSE, timeout_s)
        keepalive.attach(self._sock)
        self._writing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="hora-control", daemon=True)
        self._thread.start()

    def _transmit(self, request: AnyRequest) -> None:
        data = frame(request)
        try:
            with self._writing:
                self._sock.sendall(data)
        except OSError as problem:
            raise self._lost(keepalive.silence(problem) or str(problem)) from None

    def _read(self) -> None:
        frames = FrameReader()
        reason = "closed by the other end"
        try:
            while data := self._sock.recv(1 << 16):
                for body in frames.feed(data):
                    self._receive(decode_answer(body))
        except (OSError, ValueError) as problem:
            reason = keepalive.silence(problem) or str(problem)
        self._break(reason)
        if not self._closed and self.on_lost:
            self.on_lost(reason)

    def forget(self) -> None:
        """In a forked child: closes the inherited descriptor."""
        self._closed = True
        self._sock.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)
