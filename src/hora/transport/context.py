"""What a rank's transports are opened with: the run's settings, where the ranks are, values that they exchange."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..coordinator import Member
from ..errors import HoraError, PeerLost
from ..net.fd_passing import FdPassing
from ..net.machine import namespace_id
from ..rendezvous.context import RunContext
from . import futex
from .base import GroupSpec
from .in_process import InProcessHub

log = logging.getLogger(__name__)

T = TypeVar("T")


class RankPlace(msgspec.Struct):
    """Where a rank is, for those on its host."""

    fd_passing: str  # the address of its FdPassing; empty if it has none
    pid_namespace: str  # ranks that share it see each other's pids
    net_namespace: str  # abstract Unix sockets reach no further


@dataclasses.dataclass(kw_only=True)
class TransportContext:
    """One per rank. `hub` is set where the ranks are threads of one process. `check(rank)` raises if a rank has died,
    or `rank` has left: every wait here calls it.

    `locate` (collective) must come first; then `hosts[r]` is the first rank on the host of rank r.
    """

    run: RunContext
    members: tuple[Member, ...]
    generation: int
    check: Callable[[int | None], None]
    backend: str = "auto"
    hub: InProcessHub | None = None
    hosts: tuple[int, ...] = ()
    places: list[RankPlace] = dataclasses.field(default_factory=list)
    fd_passing: FdPassing | None = None
    resources: dict[str, Any] = dataclasses.field(default_factory=dict)

    def resource(self, name: str, make: Callable[[TransportContext], T]) -> T:
        """What all groups of this rank share under `name`, made at first use and closed with the context."""
        if name not in self.resources:
            self.resources[name] = make(self)
        found: T = self.resources[name]
        return found

    def publish(self, name: str, value: bytes) -> None:
        """Makes `value` known to all ranks. Does not wait for them."""
        self.run.control.put(f"g{self.generation}/{name}/{self.run.rank}", value)

    def published(self, rank: int, name: str) -> bytes:
        """What `rank` has published under `name`. Blocks until it has; PeerLost if it leaves or a rank dies before."""
        return self._get(rank, f"g{self.generation}/{name}/{rank}")

    def gather(self, spec: GroupSpec, key: str, value: str, check: Callable[[], None] | None = None) -> list[str]:
        """Collective: every rank's value, in order of rank, by way of the coordinator. `check` may raise meanwhile."""
        self.run.control.put(f"{key}/{spec.rank}", value.encode())
        return [self._get(member.rank, f"{key}/{rank}", check).decode() for rank, member in enumerate(spec.members)]

    def _get(self, rank: int, key: str, check: Callable[[], None] | None = None) -> bytes:
        def look() -> None:
            self.check(rank)
            if check:
                check()

        try:
            return self.run.control.get(key, self.run.timeout_s, look)
        except PeerLost:
            value = self.run.control.get_nowait(key)  # it may have come before its rank left
            if value is None:
                raise
            return value

    def locate(self) -> None:
        """Collective: finds out which ranks share a host, which means that one can pass the other a descriptor."""
        if self.hub is not None:
            self.hosts = self.hosts or (0,) * len(self.members)
            return
        if futex.AVAILABLE:
            with contextlib.suppress(OSError):
                self.fd_passing = FdPassing(self.run.token, self.run.timeout_s)
        mine = RankPlace(self.fd_passing.address if self.fd_passing else "", namespace_id("pid"), namespace_id("net"))
        self.publish("place", msgspec.msgpack.encode(mine))
        self.places = [
            msgspec.msgpack.decode(self.published(rank, "place"), type=RankPlace) for rank in range(len(self.members))
        ]
        self.hosts = self.hosts or self._find_hosts()

    def _find_hosts(self) -> tuple[int, ...]:
        if self.run.rate_bytes_per_s is not None:  # a rate limit holds for links between hosts, not for memory
            return tuple(range(len(self.members)))
        keys = [place.net_namespace if place.fd_passing else f"rank {rank}" for rank, place in enumerate(self.places)]
        first = keys.index(keys[self.run.rank])
        if first != self.run.rank:
            try:
                assert self.fd_passing is not None
                self.fd_passing.connect(self.places[first].fd_passing).close()
            except (OSError, HoraError):
                first = self.run.rank
        world = GroupSpec(rank=self.run.rank, members=self.members, generation=self.generation, group=0)
        hosts = tuple(int(host) for host in self.gather(world, f"g{self.generation}/host", str(first)))
        if not futex.AVAILABLE and self.run.rank == 0 and len(self.members) > 1:
            log.warning("shared memory needs Linux on x86-64; here the ranks communicate over TCP")
        return hosts

    def _open_resources(self) -> list[Any]:
        return [resource for resource in (*self.resources.values(), self.fd_passing) if resource is not None]

    def forget(self) -> None:
        """In a forked child: closes inherited descriptors without sending anything."""
        for resource in self._open_resources():
            resource.forget()

    def close(self) -> None:
        for resource in self._open_resources():
            resource.close()
