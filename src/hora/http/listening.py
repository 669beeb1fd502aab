"""Listening TCP sockets with readable errors, and the parser of [HOST:]PORT. Imports the standard library only."""

from __future__ import annotations

import errno
import os
import re
import socket

MAX_CONNECTIONS = 2048
MAX_PORT = 65535
NUM_NEAR_PORTS = 100  # ports that `listen_near` tries after the first

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::")
DASHBOARD_PORT = 8320  # default port of the dashboard


def parse_address(text: str, flag: str = "--serve") -> tuple[str, int]:
    """`8000`, `:8000`, `0.0.0.0:8000` or `[::1]:8000`; the default host is 127.0.0.1. ValueError names `flag`."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > MAX_PORT or not re.fullmatch(r"[A-Za-z0-9._:-]*", host):
        raise ValueError(f"{flag} takes [HOST:]PORT, not {text!r}; e.g. {flag} 8000, {flag} 0.0.0.0:8000")
    return host or LOOPBACK, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free port. ValueError if the address cannot be bound."""
    address = format_address(host, port)
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"cannot listen on {address}: ports go from 0 to {MAX_PORT}")
    try:
        family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(found[:2], family=family, backlog=MAX_CONNECTIONS, dualstack_ipv6=both)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror)
        raise ValueError(
            f"cannot listen on {address}: {why[0].lower() + why[1:]}; choose another port, or port 0 for a free one"
        ) from error


def listen_near(host: str, port: int) -> socket.socket:
    """`listen` on `port`, or on the next free port if it is in use; `getsockname` returns the one that was taken."""
    for near in range(port, min(port + NUM_NEAR_PORTS, MAX_PORT) + 1):
        try:
            return listen(host, near)
        except ValueError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
    raise ValueError(
        f"cannot listen on {format_address(host, port)}: it and the next {NUM_NEAR_PORTS} ports are in use; "
        "port 0 picks a free one"
    )
