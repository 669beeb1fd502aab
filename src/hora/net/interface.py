"""Network interfaces: by which of its addresses other hosts reach this machine. Asks the kernel, sends nothing.

A machine has several addresses (a docking network, a container bridge, a fast fabric), and the wrong one costs a
hundredfold or a hang. The right one is the one from which this machine reaches the others: `route_to`. Users who know
better name it: `address_on`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

SIOCGIFADDR = 0x8915
DEFAULT_ROUTE = "192.0.2.1"  # reserved for documentation: packets to it take the default route, if there is one


def route_to(host: str) -> str:
    """This machine's address from which packets to `host` leave. OSError if there is no route, or no such host."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(address)  # of a datagram socket: only looks up the route
        found: str = sock.getsockname()[0]
        return found


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_on(interface: str) -> str:
    """This machine's address on `interface`: its name (eth1), a network (10.0.0.0/24) or the address itself."""
    known = addresses()
    if interface in known:
        return known[interface]
    with contextlib.suppress(ValueError):
        if is_ours(str(ipaddress.ip_address(interface))):  # an interface may have several
            return interface
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(interface, strict=False)
        for address in known.values():
            if ipaddress.ip_address(address) in network:
                return address
    names = ", ".join(f"{name} ({address})" for name, address in known.items())
    raise ValueError(f"no interface here is {interface!r}; there are: {names or 'none'}")


def name_of(address: str) -> str:
    """The interface that has this address; empty if none has."""
    return next((name for name, mine in addresses().items() if mine == address), "")


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def is_ours(address: str) -> bool:
    """Whether this machine has that address, so that a socket can listen on it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 0))
        return True
    return False


def reachable_address(name: str) -> str:
    """The address by which other hosts, which call this one `name`, reach it. OSError if it has only loopback.

    /etc/hosts may map a host's own name to loopback, as Debian does (127.0.1.1), or the name may belong to a proxy
    before it. Then it is the address on the default route, or else of the first interface that is not loopback.
    """
    with contextlib.suppress(OSError):
        for *_, (address, *_) in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM):
            if not is_loopback(str(address)) and is_ours(str(address)):
                return str(address)
    with contextlib.suppress(OSError):
        found = route_to(DEFAULT_ROUTE)
        if not is_loopback(found):
            return found
    for found in addresses().values():
        if not is_loopback(found):
            return found
    raise OSError("this host has no address but loopback")
