"""Listening: a socket on an address, or the sentence that says why there is none. Needs nothing but Python."""

from __future__ import annotations

import errno
import os
import socket

MAX_CONNECTIONS = 2048
MAX_PORT = 65535
NEXT = 100  # ports that are tried after one that is taken

DASHBOARD_PORT = 8320  # of a run's dashboard and of `hora dashboard`, unless told otherwise


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes one that is free. ValueError if there can be none."""
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"cannot listen on {_shown(host, port)}: a port is a number from 0 to {MAX_PORT}")
    try:
        return _listen(host, port)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
        raise ValueError(
            f"cannot listen on {_shown(host, port)}: {why[0].lower() + why[1:]}; "
            f"another port may be free, and port 0 takes one that is"
        ) from error


def listen_near(host: str, port: int) -> socket.socket:
    """The same, and if the port is taken the next one that is free. Its `getsockname` tells which it is."""
    for near in range(port, min(port + NEXT, MAX_PORT) + 1):
        try:
            return listen(host, near)
        except ValueError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"cannot listen on {_shown(host, port)}: it and the {NEXT} ports after it are taken; "
        f"port 0 takes one that is free"
    )


def _listen(host: str, port: int) -> socket.socket:
    flags = socket.AI_PASSIVE
    family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
