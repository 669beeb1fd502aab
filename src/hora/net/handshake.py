"""The handshake that opens every connection of a run: both ends prove that they hold the run's token.

    client                                server
      magic, nonce c            ──▶
                                ◀──        nonce s, HMAC(token, "server", purpose, c, s)
      HMAC(token, "client", purpose, c, s) ──▶

The token itself never travels. The server reads 69 bytes at most from a stranger and gives it `PATIENCE_S` in all; the
purpose keeps a proof made for one kind of connection from opening another.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from ..errors import Unauthorized

log = logging.getLogger(__name__)

MAGIC = b"HORA\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
PATIENCE_S = 2.0
MAX_STRANGERS = 64


def new_token() -> bytes:
    """A fresh 256-bit token for one run."""
    return secrets.token_bytes(32)


def recv_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes before `deadline` (monotonic), or ConnectionError / TimeoutError. Blocks."""
    received = bytearray()
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{len(received)} of {count} bytes came in time")
        sock.settimeout(left)
        piece = sock.recv(count - len(received))
        if not piece:
            raise ConnectionError(f"closed after {len(received)} of {count} bytes")
        received += piece
    return bytes(received)


def accept(sock: socket.socket, token: bytes, purpose: str, patience_s: float = PATIENCE_S) -> None:
    """The server's side. Returns once the client has proved the token, else raises Unauthorized."""
    deadline = time.monotonic() + patience_s
    try:
        hello = recv_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline)
        if hello[: len(MAGIC)] != MAGIC:
            raise Unauthorized("a stranger did not speak Hora's protocol")
        theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.sendall(ours + _proof(token, "server", purpose, theirs, ours))
        proof = recv_exactly(sock, PROOF_BYTES, deadline)
    except OSError as problem:
        raise Unauthorized(f"a stranger did not finish the handshake: {problem}") from None
    if not hmac.compare_digest(proof, _proof(token, "client", purpose, theirs, ours)):
        raise Unauthorized("a stranger offered a wrong token")
    sock.settimeout(None)


def greet(sock: socket.socket, token: bytes, purpose: str, patience_s: float = PATIENCE_S) -> None:
    """The client's side. Returns once the server has proved the token, else raises Unauthorized or ConnectionError."""
    deadline = time.monotonic() + patience_s
    ours = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(patience_s)
    sock.sendall(MAGIC + ours)
    reply = recv_exactly(sock, NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, "server", purpose, ours, theirs)):
        raise Unauthorized("the other end holds another token: is this address of another run?")
    sock.sendall(_proof(token, "client", purpose, ours, theirs))
    sock.settimeout(None)


def _proof(token: bytes, side: str, purpose: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    message = b"|".join((b"hora", side.encode(), purpose.encode(), client_nonce, server_nonce))
    return hmac.new(token, message, hashlib.sha256).digest()


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class AuthenticatedListener:
    """Accepts connections on a listening socket and hands on those that proved the token.

    `welcome(sock)` is called on a short-lived thread of its own, so it may block for a moment; it owns the socket. A
    Unix socket's peer must also run under our uid. At most `MAX_STRANGERS` handshakes are under way at once: what comes
    on top is dropped, and a client of ours tries again.
    """

    def __init__(
        self, sock: socket.socket, token: bytes, purpose: str, welcome: Callable[[socket.socket], None]
    ) -> None:
        self._sock = sock
        self._token = token
        self._purpose = purpose
        self._welcome = welcome
        self._places = threading.Semaphore(MAX_STRANGERS)
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, name=f"hora-listen-{purpose}", daemon=True)
        self._thread.start()

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors, say: the run goes on
                continue
            if not self._places.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._examine, args=(sock,), name="hora-handshake", daemon=True).start()

    def _examine(self, sock: socket.socket) -> None:
        try:
            if sock.family == socket.AF_UNIX and peer_credentials(sock)[1] != os.getuid():
                raise Unauthorized("a process of another user knocked")
            accept(sock, self._token, self._purpose)
        except (Unauthorized, OSError) as problem:
            log.info("connection refused: %s", problem)
            sock.close()
            return
        finally:
            self._places.release()
        try:
            self._welcome(sock)
        except Exception as problem:
            log.info("connection dropped after the handshake: %s", problem)
            sock.close()

    def forget(self) -> None:
        """In a forked child: closes the copy of the descriptor without touching the parent's socket."""
        self._sock.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
        self._sock.close()
