"""TCP keepalive for control connections: how one notices that the other end's host is gone.

A process that dies closes its connections. A host that loses power or its link closes nothing, and TCP by itself would
wait for a quarter of an hour. So between hosts the kernel probes the other kernel every second. A slow process is not
affected: its kernel answers for it while it has room for what arrives, some hundred kilobytes.
"""

from __future__ import annotations

import contextlib
import errno
import socket

from .interface import is_loopback

SILENCE_S = 4  # without any answer; then the connection ends with an error

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def attach(sock: socket.socket) -> None:
    """From now on a silence of `SILENCE_S` ends this connection. On loopback, which loses nothing, it does nothing."""
    if is_loopback(str(sock.getpeername()[0])):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(OSError, AttributeError):  # Linux has them all
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)  # for data in flight, too


def silence(problem: Exception) -> str:
    """A message, if silence is what ended a connection with `problem`; else empty."""
    if isinstance(problem, OSError) and problem.errno in _SILENT:
        return f"no answer for {SILENCE_S} s: is the host down or the link cut?"
    return ""
