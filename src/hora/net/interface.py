"""Interface: which of this machine's addresses others reach it by. The kernel's routes are asked, nothing is sent.

A machine has several (a docking network, a container bridge, a fast fabric), and the wrong one costs a hundredfold or a
hang. The right one is the one by which this machine itself reaches those who want to reach it: `route_to`. Users who
know better name it: `named`.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import pathlib
import socket
import struct
import sys

SIOCGIFADDR = 0x8915
NOWHERE = "192.0.2.1"  # reserved for documentation: by the default route, if there is one


def route_to(host: str) -> str:
    """The address of ours from which packets to `host` leave. OSError if there is no route, or no such host."""
    family, kind, proto, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as sock:
        sock.connect(address)  # a datagram socket: only the route is looked up
        found: str = sock.getsockname()[0]
        return found


def addresses() -> dict[str, str]:
    """IPv4: the address of each interface that has one, by its name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def named(words: str) -> str:
    """Our address on the interface `words`: its name (eth1), a network (10.0.0.0/24) or the address itself."""
    there = addresses()
    if words in there:
        return there[words]
    with contextlib.suppress(ValueError):
        if is_ours(str(ipaddress.ip_address(words))):  # an interface may have several
            return words
    with contextlib.suppress(ValueError):
        network = ipaddress.ip_network(words, strict=False)
        for address in there.values():
            if ipaddress.ip_address(address) in network:
                return address
    known = ", ".join(f"{name} ({address})" for name, address in there.items())
    raise ValueError(f"no interface here is {words!r}; there are: {known or 'none'}")


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


def outward(name: str) -> str:
    """The address by which other hosts reach this one, whom they call `name`. OSError if it has none.

    A host's own name may be mapped to loopback by its /etc/hosts, as Debian does (127.0.1.1), or belong to a proxy
    before it. Then it is the address on the default route, or else of the first interface that is not loopback.
    """
    with contextlib.suppress(OSError):
        for *_, (address, *_) in socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM):
            if not is_loopback(str(address)) and is_ours(str(address)):
                return str(address)
    with contextlib.suppress(OSError):
        found = route_to(NOWHERE)
        if not is_loopback(found):
            return found
    for found in addresses().values():
        if not is_loopback(found):
            return found
    raise OSError("this host has no address but loopback")


def kernel(namespace: str) -> str:
    """This boot of this machine, and which of its namespaces of that kind this process lives in."""
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError):
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    return ""
