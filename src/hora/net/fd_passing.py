"""Passing file descriptors between processes of one host, over abstract Unix sockets.

This also defines "one host": a rank that can be handed a descriptor shares the host, whatever hostnames and /dev/shm
look like. Both ends run under one uid and prove the run's token. There is no name in the file system, so nothing is
left behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time

from ..errors import HoraError
from . import handshake
from .framing import recv_exactly

PURPOSE = "descriptors"
GRANTED, REFUSED = b"G", b"R"
CONNECT_S = 30.0


class FdPassing:
    """Offers descriptors under keys and fetches those that other ranks offer. Thread-safe.

    `timeout_s` is how long to wait for a rank that is slow to offer.
    """

    def __init__(self, token: bytes, timeout_s: float = 60.0) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self.address = f"hora-{secrets.token_hex(8)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind("\0" + self.address)
        sock.listen(64)
        self._offers: dict[str, int | str] = {}  # a descriptor, or why there is none
        self._changed = threading.Condition()
        self._closed = False
        self._listener = handshake.AuthenticatedListener(sock, token, PURPOSE, self._serve)

    def offer(self, key: str, descriptor: int) -> None:
        """Peers that fetch `key` get a copy. The descriptor stays ours to close, after `withdraw`."""
        self._set(key, descriptor)

    def refuse(self, key: str, reason: str) -> None:
        """Peers that fetch `key` get an error with this reason instead of waiting."""
        self._set(key, reason)

    def _set(self, key: str, offer: int | str) -> None:
        with self._changed:
            self._offers[key] = offer
            self._changed.notify_all()

    def withdraw(self, key: str) -> None:
        with self._changed:
            self._offers.pop(key, None)

    def fetch(self, address: str, key: str, timeout_s: float | None = None) -> int:
        """The descriptor that the rank at `address` offers under `key`. Blocks until it is offered.

        ConnectionError if that rank is not on this host, HoraError with the reason if it refuses.
        """
        with self.connect(address, timeout_s or CONNECT_S) as sock:
            sock.settimeout(self._timeout_s if timeout_s is None else timeout_s)
            name = key.encode()
            sock.sendall(bytes([len(name)]) + name)
            answer, descriptors, _, _ = socket.recv_fds(sock, 512, 1)
            if answer[:1] == GRANTED and descriptors:
                os.set_inheritable(descriptors[0], False)  # the kernel makes it inheritable
                return descriptors[0]
            raise HoraError(answer[1:].decode(errors="replace") or "the other rank closed before it offered anything")

    def connect(self, address: str, timeout_s: float = CONNECT_S, purpose: str = PURPOSE) -> socket.socket:
        """An authenticated connection to the process at `address`; ConnectionError if it is not on this host."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + address)
            if handshake.peer_credentials(sock)[1] != os.getuid():
                raise ConnectionError("the process at the other end runs under another user")
            handshake.client_handshake(sock, self._token, purpose, timeout_s)
        except BaseException:
            sock.close()
            raise
        return sock

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            deadline = time.monotonic() + 10.0
            length = recv_exactly(sock, 1, deadline)[0]
            key = recv_exactly(sock, length, deadline).decode()
            deadline = time.monotonic() + self._timeout_s
            with self._changed:
                while key not in self._offers:
                    if self._closed or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        return
                offer = self._offers[key]
                sock.settimeout(10.0)
                if isinstance(offer, int):
                    socket.send_fds(sock, [GRANTED], [offer])
                else:
                    sock.sendall(REFUSED + offer.encode()[:500])

    def forget(self) -> None:
        self._listener.forget()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
