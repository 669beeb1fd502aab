"""HostSpec: a machine as the user names it in --hosts or --hostfile, and how ranks are dealt to several."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import socket
from collections.abc import Sequence

from hora.net import interface

MAX_SLOTS = 1024
_ITEM = re.compile(r"(?P<target>\[[^\]]+\]|[^\s:,\[\]]+)(?::(?P<slots>[^\s:,]+))?")
_TARGET = re.compile(r"[A-Za-z0-9_.@%:-]+")  # and no leading dash, which ssh would take for an option


@dataclasses.dataclass(frozen=True)
class HostSpec:
    """`target` is the argument for ssh, `user@name` or a name; `slots` how many ranks it takes, None if not given."""

    target: str
    slots: int | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.target.rpartition("@")[2]

    @property
    def is_here(self) -> bool:
        """Whether it is this machine, so that no ssh is needed. With a user name, ssh is used."""
        if self.target != self.name:
            return False
        if self.name in ("localhost", socket.gethostname(), socket.getfqdn()):
            return True
        with contextlib.suppress(OSError):
            found = {str(address[0]) for *_, address in socket.getaddrinfo(self.name, None)}
            return any(interface.is_loopback(a) or a in interface.addresses().values() for a in found)
        return False


def parse(text: str) -> tuple[HostSpec, ...]:
    """`a:2,b:2`, `a,user@b`, `[fe80::1]:2`. ValueError says what is wrong."""
    return _checked([_item(item.strip(), "--hosts") for item in text.split(",") if item.strip()], "--hosts")


def read_file(path: str) -> tuple[HostSpec, ...]:
    """One host per line: `a`, `a:2` or `a slots=2`; empty lines and comments after # are ignored."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not text"
        raise ValueError(f"--hostfile {path} cannot be read: {why}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        if line:
            name, rest = [*line.split(None, 1), ""][:2]
            where = f"--hostfile {path}, line {number}"
            slots = re.fullmatch(r"(?:slots|max_slots|max-slots)\s*=\s*(\S+)", rest.strip()) if rest.strip() else None
            if rest.strip() and slots is None:
                raise ValueError(f"{where}: {rest.strip()!r} is not understood; e.g. {name} slots=2")
            hosts.append(_item(f"{name}:{slots[1]}" if slots else name, where))
    return _checked(hosts, f"--hostfile {path}")


def _item(text: str, where: str) -> HostSpec:
    match = _ITEM.fullmatch(text)
    target = match["target"].strip("[]") if match else ""
    if match is None or not _TARGET.fullmatch(target) or target.startswith("-"):
        raise ValueError(f"{where}: {text!r} is not a host; e.g. a:2, user@b, [fe80::1]:2")
    if match["slots"] is None:
        return HostSpec(target)
    if not match["slots"].isdecimal() or not 1 <= int(match["slots"]) <= MAX_SLOTS:
        raise ValueError(
            f"{where}: host {target!r} takes a number of ranks from 1 to {MAX_SLOTS}, not {match['slots']!r}"
        )
    return HostSpec(target, int(match["slots"]))


def _checked(hosts: Sequence[HostSpec], where: str) -> tuple[HostSpec, ...]:
    if not hosts:
        raise ValueError(f"{where} names no host; e.g. --hosts a:2,b:2")
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{where}: host {name!r} is listed twice; give the number of its ranks instead, as {name}:2"
            )
    return tuple(hosts)


def deal(hosts: Sequence[HostSpec], size: int | None) -> tuple[tuple[HostSpec, ...], int]:
    """The hosts with their numbers of ranks, and the number of ranks; hosts without any are left out.

    Where slots are given, ranks fill them in order. Else `size` ranks are spread evenly; without a size, one each.
    """
    if all(host.slots is None for host in hosts):
        size = len(hosts) if size is None else size
        counts = [size // len(hosts) + (number < size % len(hosts)) for number in range(len(hosts))]
    else:
        slots = [1 if host.slots is None else host.slots for host in hosts]
        size = sum(slots) if size is None else size
        if size > sum(slots):
            names = ", ".join(f"{host.name}:{count}" for host, count in zip(hosts, slots, strict=True))
            raise ValueError(f"-n {size} is more than the hosts take, which is {sum(slots)} ({names})")
        counts, left = [], size
        for count in slots:
            counts.append(min(count, left))
            left -= counts[-1]
    settled = [dataclasses.replace(host, slots=count) for host, count in zip(hosts, counts, strict=True) if count]
    return tuple(settled), size
