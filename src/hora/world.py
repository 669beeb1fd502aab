"""World: one rank's view of the run. It finds out where the other ranks are and makes groups of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from .collectives.deadlock import DeadlockDetector
from .collectives.group import Group
from .coordinator import CoordinatorEvent, InProcessCoordinator, Member
from .errors import HoraError, OutOfMemory, PeerLost
from .net.fd_passing import FdPassing
from .net.fork import forget_after_fork
from .net.interface import kernel
from .rendezvous.context import RunContext
from .transport import GroupSpec, InProcessHub, InProcessTransport, Transport, futex
from .transport.engine import open_engine
from .transport.process_group import TorchGroup
from .transport.rate_limit import RateLimiter
from .transport.shm import ShmTransport
from .transport.tcp import TcpListener, TcpTransport

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "tcp", "engine", "memory")
BREAK_S = 0.5  # from the break of torch's connection to a rank until the coordinator reports its end
DEATH_GRACE_S = 0.2  # the launcher, which knows the exit code, gets this long to report it first


class HostAddress(msgspec.Struct):
    """What the ranks on one host must know to reach each other."""

    fd_socket: str  # the abstract socket that passes descriptors, "" if there is none
    pid_namespace: str  # with the boot id: ranks that share it see each other's pids
    net_namespace: str  # with the boot id: abstract sockets reach no further


class World:
    """Collective: every rank of the run makes one with the same arguments.

    `context.control` has joined already; `members` are the workers in order of rank. `hub` connects ranks that are
    threads of one process; a world of one rank makes its own. With `context.rate_bytes_per_s` each rank sends no faster
    than that, to all others together, over TCP even on one host. `hosts` has a host number for each rank, for tests of
    several hosts; without it the ranks find out.
    """

    def __init__(
        self,
        context: RunContext,
        members: tuple[Member, ...],
        generation: int,
        *,
        transport: str = "auto",
        algorithm: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
        hub: InProcessHub | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; there are: {', '.join(TRANSPORTS)}")
        self.context = context
        self.control = control = context.control
        self.members = members
        self.rank = rank = context.rank
        self.size = len(members)
        self.generation = generation
        self.algorithm = algorithm
        self.backend = backend
        self.deterministic = deterministic
        self.stop_reason: str | None = None
        self._hub = hub or (InProcessHub() if self.size == 1 and transport == "auto" else None)
        self._groups: list[Group] = []
        self._listener: TcpListener | None = None
        self._fd_passing: FdPassing | None = None
        self._addresses: list[HostAddress] = []
        self._ended_ranks = {rank}
        self._ends: list[CoordinatorEvent] = []  # of other ranks, also for later groups
        self._early: collections.deque[CoordinatorEvent] = collections.deque(maxlen=256)  # messages for later groups
        self._torch: TorchGroup | None = None
        self._torch_attempts = 0
        self._parent: Group | None = None  # the group that is making another
        self._closed = False
        self._deadlocks = DeadlockDetector(control, str(members[rank]), self._call_counts, self._abort_all)
        control.subscribe(self._on_event)
        control.subscribe(self._deadlocks.hear)
        forget_after_fork(self)
        if self._hub is None:
            self._exchange_addresses()
        self.hosts = tuple(hosts) if hosts is not None else self._find_hosts()
        spec = GroupSpec(rank=rank, members=members, generation=generation, group=0, timeout_s=context.timeout_s)
        self.group = self._make_group(spec, transport)
        if self._addresses:
            threading.Thread(target=self._watch_processes, name="hora-watch", daemon=True).start()

    # -- groups --------------------------------------------------------------------------------------------------------

    def _make_group(self, spec: GroupSpec, kind: str, whole: Group | None = None) -> Group:
        if kind == "auto" and self._hub is None and len({self.hosts[m.rank] for m in spec.members}) == 1:
            try:
                return self._new_group(spec, "shm", whole)
            except OutOfMemory as problem:
                if spec.rank == 0:
                    log.warning("shared memory is not available, so the ranks use TCP, which is slower: %s", problem)
        return self._new_group(spec, kind, whole)

    def _new_group(self, spec: GroupSpec, kind: str, whole: Group | None) -> Group:
        """A group; or a part of the `whole`, which then gets the events for it."""
        group = Group(
            self.connect(spec, kind),
            self.control,
            algorithm=self.algorithm,
            deterministic=self.deterministic,
            hosts=[self.hosts[member.rank] for member in spec.members],
            companion=lambda wanted: self.connect(spec, wanted),
            found=lambda ranks, wanted, part: self._subgroup(group, ranks, wanted, part),
            closed=lambda: self._groups.remove(group) if group in self._groups else None,
            whole=whole,
            deadlocks=self._deadlocks,
        )
        if whole is not None:
            return group
        self._groups.append(group)
        for event in [*self._ends, *self._early]:  # from before it was made
            group.consistency.hear(event)
        return group

    def _subgroup(self, parent: Group, ranks: list[int], kind: str, part: bool) -> Group | None:
        spec = parent.transport.spec
        if parent.rank not in ranks:
            return None
        name = f"{spec.name}|{parent.consistency.number}|{ranks}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        members = tuple(spec.members[rank] for rank in ranks)
        inner = dataclasses.replace(spec, rank=ranks.index(parent.rank), members=members, group=number)
        self._parent = parent
        try:
            return self._make_group(inner, kind, parent if part else None)
        finally:
            self._parent = None

    def connect(self, spec: GroupSpec, kind: str) -> Transport:
        """Collective among the members of `spec`: a transport of that kind; 'auto' means TCP here."""
        if self._hub is not None and kind in ("auto", "memory"):
            return InProcessTransport(spec, self._hub)
        if self.context.rate_bytes_per_s is not None and kind not in ("auto", "tcp"):
            raise ValueError(f"a rate limit needs the tcp transport; {kind} does not support it")
        if kind == "memory":
            raise ValueError("the memory transport connects threads of one process, not processes")
        if kind.startswith("engine"):
            wanted = kind.partition(":")[2] or "auto"
            backend = self.backend if wanted == "auto" else wanted
            if backend == "mpi" and self.context.launcher != "mpirun":  # MPI would abort the process without a message
                raise ValueError("the engine 'mpi' needs ranks that mpirun started: mpirun -n N python script.py")
            return open_engine(spec, self.control, backend, self.context.bind, self._check)
        if kind == "shm":
            if self._fd_passing is None:
                raise ValueError("shared memory between ranks needs Linux on x86-64; use the tcp transport")
            leader = self._addresses[spec.members[0].rank].fd_socket
            return ShmTransport(spec, self._fd_passing, leader, functools.partial(self._all_gather, spec))
        if kind not in ("tcp", "auto"):
            raise ValueError(f"unknown transport {kind!r}; there are: {', '.join(TRANSPORTS)}")
        return TcpTransport(spec, self._listen(), lambda peer: self._tcp_address(spec.members[peer].rank))

    def torch_group(self, backend: str | None, device: torch.device) -> TorchGroup:
        """Collective at its first call: torch's default process group over all ranks."""
        if self._torch is None:
            spec = self.group.transport.spec
            all_gather = functools.partial(self._all_gather, spec)
            attempt, self._torch_attempts = self._torch_attempts, self._torch_attempts + 1
            self._torch = TorchGroup(
                spec, self.control, self.context.bind, backend, device, all_gather, self._check, attempt
            )
        elif backend not in (None, self._torch.backend):
            raise ValueError(f"job.process_group({backend!r}): it was opened as {self._torch.backend or 'default'!r}")
        return self._torch

    def _all_gather(self, spec: GroupSpec, key: str, text: str, check: Callable[[], None] | None = None) -> list[str]:
        """Collective: the texts of all ranks, over the coordinator."""
        self.control.put(f"{key}/{spec.rank}", text.encode())
        return [self._get(member.rank, f"{key}/{rank}", check).decode() for rank, member in enumerate(spec.members)]

    def _get(self, rank: int, key: str, check: Callable[[], None] | None = None) -> bytes:
        """The value that `rank` puts under `key`; PeerLost if any rank dies, or that one leaves, before it has."""

        def check_ranks() -> None:
            self._check(rank)
            if check:
                check()

        try:
            return self.control.get(key, self.context.timeout_s, check_ranks)
        except PeerLost:
            value = self.control.get_nowait(key)  # it may have been put before its rank left
            if value is None:
                raise
            return value

    def _find_hosts(self) -> tuple[int, ...]:
        """Collective: for each rank the first rank that can pass it a descriptor."""
        if self._hub is not None:
            return (0,) * self.size
        if self.context.rate_bytes_per_s is not None:  # shared memory has no rate limit
            return tuple(range(self.size))
        names = [a.net_namespace if a.fd_socket else f"rank {rank}" for rank, a in enumerate(self._addresses)]
        first = names.index(names[self.rank])
        if first != self.rank:
            try:
                assert self._fd_passing is not None
                self._fd_passing.reach(self._addresses[first].fd_socket).close()
            except (OSError, HoraError):
                first = self.rank
        whole = GroupSpec(rank=self.rank, members=self.members, generation=self.generation, group=0)
        hosts = tuple(int(text) for text in self._all_gather(whole, f"g{self.generation}/host", str(first)))
        if not futex.AVAILABLE and self.rank == 0 and self.size > 1:
            log.warning("shared memory needs Linux on x86-64; the ranks use TCP")
        return hosts

    def _exchange_addresses(self) -> None:
        """Collective: the HostAddress of every rank."""
        if futex.AVAILABLE:
            with contextlib.suppress(OSError):
                self._fd_passing = FdPassing(self.context.token, self.context.timeout_s)
        mine = HostAddress(self._fd_passing.address if self._fd_passing else "", kernel("pid"), kernel("net"))
        key = f"g{self.generation}/place"
        self.control.put(f"{key}/{self.rank}", msgspec.msgpack.encode(mine))
        decode = msgspec.msgpack.Decoder(HostAddress).decode
        self._addresses = [decode(self._get(rank, f"{key}/{rank}")) for rank in range(self.size)]

    def _listen(self) -> TcpListener:
        if self._listener is None:
            limiter = RateLimiter(self.context.rate_bytes_per_s) if self.context.rate_bytes_per_s is not None else None
            self._listener = TcpListener(self.context.token, self.context.bind, limiter)
            host, port = self._listener.address
            self.control.put(f"g{self.generation}/tcp/{self.rank}", f"{host} {port}".encode())
        return self._listener

    def _tcp_address(self, rank: int) -> tuple[str, int]:
        host, port = self._get(rank, f"g{self.generation}/tcp/{rank}").decode().split()
        return host, int(port)

    def _call_counts(self) -> dict[str, int]:
        """The number of calls that this rank has begun in each group."""
        return {group.transport.spec.name: group.consistency.number for group in list(self._groups)}

    def _abort_all(self, cause: HoraError) -> None:
        for group in list(self._groups):
            group.consistency.abort(cause)

    # -- ends of other ranks -------------------------------------------------------------------------------------------

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.kind == "stop" and self.stop_reason is None:
            self.stop_reason = event.text
        if event.kind in ("died", "left") and event.member is not None and event.member.role == "worker":
            self._ended_ranks.add(event.member.rank)
            self._ends.append(event)
        if event.kind == "message" and all(event.topic != g.transport.spec.name for g in self._groups):
            self._early.append(event)
        for group in list(self._groups):
            group.consistency.hear(event)

    def _check(self, awaited: int | None = None) -> None:
        """Raises if a rank has died, the awaited one has left, or the group that makes another was aborted."""
        if self._parent is not None:
            self._parent.transport.check()
        for event in list(self._ends):
            assert event.member is not None
            if event.kind == "died" or event.member.rank == awaited:
                raise self._peer_lost(event, "while the ranks connected")

    def _peer_lost(self, event: CoordinatorEvent, during: str) -> PeerLost:
        assert event.member is not None
        text = f"{self.members[self.rank]}: lost {event.member} {during}: {event.text}"
        return PeerLost(text, (event.member.rank,), secondary=True)

    def peer_lost_by(self, error: BaseException) -> PeerLost | None:
        """The loss behind an `error` of torch's own process group; None if it is not one, or no rank has died."""
        if self._torch is None or not self._torch.broken_by(error):
            return None
        deadline = time.monotonic() + BREAK_S
        while not (dead := [event for event in self._ends if event.kind == "died"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._peer_lost(dead[0], "in torch's own communication") if dead else None

    def peer_died(self, rank: int, reason: str) -> None:
        """Treats this rank as dead, as if the coordinator had reported it."""
        if rank not in self._ended_ranks:
            self._ended_ranks.add(rank)
            event = CoordinatorEvent(kind="died", generation=self.generation, member=self.members[rank], text=reason)
            self._ends.append(event)
            for group in list(self._groups):
                group.consistency.hear(event)

    def _watch_processes(self) -> None:
        """Notices the death of a rank on this host by its pidfd, also without a launcher."""
        poller = select.poll()
        ranks: dict[int, int] = {}
        mine = self._addresses[self.rank].pid_namespace
        for rank, address in enumerate(self._addresses):
            pid = self.members[rank].pid
            if pid != os.getpid() and address.pid_namespace == mine:
                with contextlib.suppress(OSError):
                    descriptor = os.pidfd_open(pid)
                    ranks[descriptor] = rank
                    poller.register(descriptor, select.POLLIN)
        ended: dict[int, float] = {}
        while not self._closed and (ranks or ended):
            for descriptor, _ in poller.poll(50 if ended else 200):
                poller.unregister(descriptor)
                os.close(descriptor)
                ended[ranks.pop(descriptor)] = time.monotonic()
            for rank, since in list(ended.items()):
                if time.monotonic() - since >= DEATH_GRACE_S:
                    del ended[rank]
                    self.peer_died(rank, "its process ended")
        for descriptor in ranks:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: closes the inherited sockets, so that the end of the parent is noticed."""
        self._closed = True
        child = HoraError(
            f"this is a forked child of rank {self.rank}; only the process that called init() can communicate"
        )
        for group in self._groups:
            for transport in group.consistency.transports:
                transport.cause = child
        for part in (self._listener, self._fd_passing, self.control):
            if part is not None and hasattr(part, "forget"):
                part.forget()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._torch:
            self._torch.close()
        for group in list(self._groups):
            group.close()
        if self._listener:
            self._listener.close()
        if self._fd_passing:
            self._fd_passing.close()


def single_process_world(member: Member, timeout_s: float) -> World:
    """A world of this process alone, with a coordinator of its own."""
    control = InProcessCoordinator(1).connect()
    me = Member("worker", 0, member.host, member.pid)
    control.join(me)
    return World(RunContext(control=control, token=b"", timeout_s=timeout_s), (me,), 1)
