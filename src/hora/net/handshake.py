"""Authenticated connections: both ends prove that they hold the run's token before anything else is read.

    client                                server
      magic, nonce c            ──▶
                                ◀──        nonce s, HMAC(token, "server", purpose, c, s)
      HMAC(token, "client", purpose, c, s) ──▶

The token itself is never sent. The server reads at most 69 bytes from an unauthenticated peer, within `HANDSHAKE_S`.
The purpose keeps a proof made for one kind of connection from opening another.
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

from ..errors import HoraError, Unauthorized
from .framing import recv_exactly

log = logging.getLogger(__name__)

MAGIC = b"HORA\x01"
NONCE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_S = 2.0
MAX_HANDSHAKES = 64
ATTEMPT_S = 2.0  # of one connection attempt; `check` is called between two of them


def new_token() -> bytes:
    """A fresh 256-bit token for one run."""
    return secrets.token_bytes(32)


def server_handshake(sock: socket.socket, token: bytes, purpose: str, timeout_s: float = HANDSHAKE_S) -> None:
    """The server's side. Returns once the client has proved the token, else raises Unauthorized."""
    deadline = time.monotonic() + timeout_s
    try:
        hello = recv_exactly(sock, len(MAGIC) + NONCE_BYTES, deadline)
        if hello[: len(MAGIC)] != MAGIC:
            raise Unauthorized("the peer does not speak Hora's protocol")
        theirs, ours = hello[len(MAGIC) :], secrets.token_bytes(NONCE_BYTES)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.sendall(ours + _proof(token, "server", purpose, theirs, ours))
        proof = recv_exactly(sock, PROOF_BYTES, deadline)
    except OSError as problem:
        raise Unauthorized(f"the peer did not finish the handshake: {problem}") from None
    if not hmac.compare_digest(proof, _proof(token, "client", purpose, theirs, ours)):
        raise Unauthorized("the peer has a wrong token")
    sock.settimeout(None)


def client_handshake(sock: socket.socket, token: bytes, purpose: str, timeout_s: float = HANDSHAKE_S) -> None:
    """The client's side. Returns once the server has proved the token, else raises Unauthorized or ConnectionError."""
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(NONCE_BYTES)
    sock.settimeout(timeout_s)
    sock.sendall(MAGIC + ours)
    reply = recv_exactly(sock, NONCE_BYTES + PROOF_BYTES, deadline)
    theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, "server", purpose, ours, theirs)):
        raise Unauthorized("the server has another token: does this address belong to another run?")
    sock.sendall(_proof(token, "client", purpose, ours, theirs))
    sock.settimeout(None)


def _proof(token: bytes, side: str, purpose: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    message = b"|".join((b"hora", side.encode(), purpose.encode(), client_nonce, server_nonce))
    return hmac.new(token, message, hashlib.sha256).digest()


def connect(
    address: tuple[str, int],
    token: bytes,
    purpose: str,
    timeout_s: float = 30.0,
    check: Callable[[], None] | None = None,
) -> socket.socket:
    """An authenticated TCP connection to `address`; HoraError names the address if there is none within `timeout_s`.

    Blocks, and tries again while no process listens there yet. `check` is called before each attempt and may raise.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        sock = None
        if check is not None:
            check()
        try:
            sock = socket.create_connection(address, timeout=max(0.1, min(ATTEMPT_S, deadline - time.monotonic())))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client_handshake(sock, token, purpose, min(10.0, max(0.1, deadline - time.monotonic())))
            return sock
        except (Unauthorized, OSError) as problem:
            if sock is not None:
                sock.close()
            if isinstance(problem, Unauthorized):
                raise
            if time.monotonic() + 0.1 >= deadline:
                raise HoraError(f"no connection to {address[0]}:{address[1]} ({purpose}): {problem}") from None
            time.sleep(0.05)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class AuthenticatedListener:
    """Accepts connections on a listening socket and hands on those that proved the token.

    `on_connection(sock)` is called on a short-lived thread of its own, so it may block briefly; it owns the socket. The
    peer of a Unix socket must also run under our uid. At most `MAX_HANDSHAKES` handshakes run at once; further
    connections are dropped, and `connect` tries again.
    """

    def __init__(
        self, sock: socket.socket, token: bytes, purpose: str, on_connection: Callable[[socket.socket], None]
    ) -> None:
        self._sock = sock
        self._token = token
        self._purpose = purpose
        self._on_connection = on_connection
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._closed = False
        threading.Thread(target=self._accept_all, name=f"hora-listen-{purpose}", daemon=True).start()

    def _accept_all(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of file descriptors, for example: the run goes on
                continue
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._authenticate, args=(sock,), name="hora-handshake", daemon=True).start()

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            if sock.family == socket.AF_UNIX and peer_credentials(sock)[1] != os.getuid():
                raise Unauthorized("the peer runs under another user")
            server_handshake(sock, self._token, self._purpose)
        except (Unauthorized, OSError) as problem:
            log.info("connection refused: %s", problem)
            sock.close()
            return
        finally:
            self._handshakes.release()
        try:
            self._on_connection(sock)
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
