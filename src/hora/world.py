"""World: one rank's place in a run. It joins the others, finds out where they are, and makes groups of them."""

from __future__ import annotations

import collections
import contextlib
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
from .coordinator import CoordinatorConnection, CoordinatorEvent, InProcessCoordinator, Member
from .errors import HoraError, OutOfMemory, PeerLost
from .net.fd_passing import FdPassing
from .net.fork import forget_after_fork
from .net.interface import kernel
from .transport import GroupSpec, InProcessHub, InProcessTransport, Transport, futex
from .transport.engine import open_engine
from .transport.process_group import TorchGroup
from .transport.rate_limit import RateLimiter
from .transport.shm import ShmTransport
from .transport.tcp import TcpListener, TcpTransport

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "tcp", "engine", "memory")
BREAK_S = 0.5  # from the break of torch's link to a rank until its end is known
DEATH_GRACE_S = 0.2  # whoever watches the process may know more than that it ended


class HostPlace(msgspec.Struct):
    """What the others must know to reach a rank on its own host."""

    passing: str  # the abstract socket's name, "" if it has none
    kernel: str  # boot and pid namespace: ranks that share it see each other's pids
    network: str  # boot and network namespace: abstract sockets reach no further


class World:
    """Collective: every rank of the run makes one with the same arguments.

    `control` has joined already; `members` are in order of rank. `hub` is where ranks that are threads of one
    process meet; without it a world of one has its own. With `rate_bytes_per_s` each rank sends no faster than that,
    to all others together: its links are TCP then, also on one host. `hosts` says of each rank on which host it is to
    count as being, for those who try what several hosts do; without it they find out.
    """

    def __init__(
        self,
        control: CoordinatorConnection,
        members: tuple[Member, ...],
        rank: int,
        generation: int,
        token: bytes,
        *,
        bind: str = "127.0.0.1",
        rate_bytes_per_s: float | None = None,
        timeout_s: float = 1800.0,
        transport: str = "auto",
        algorithm: str = "auto",
        backend: str = "auto",
        deterministic: bool = False,
        under_mpirun: bool = False,
        hub: InProcessHub | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        if transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}; there are: {', '.join(TRANSPORTS)}")
        self.control = control
        self.members = members
        self.rank = rank
        self.size = len(members)
        self.generation = generation
        self.token = token
        self.bind = bind
        self.rate_bytes_per_s = rate_bytes_per_s
        self.timeout_s = timeout_s
        self.algorithm = algorithm
        self.backend = backend
        self.deterministic = deterministic
        self.under_mpirun = under_mpirun
        self.stop_reason: str | None = None
        self._hub = hub or (InProcessHub() if self.size == 1 and transport == "auto" else None)
        self._groups: list[Group] = []
        self._port: TcpListener | None = None
        self._passing: FdPassing | None = None
        self._places: list[HostPlace] = []
        self._settled = {rank}  # ranks whose end is known
        self._ends: list[CoordinatorEvent] = []  # for groups that are still to be founded
        self._early: collections.deque[CoordinatorEvent] = collections.deque(
            maxlen=256
        )  # words about groups not founded here yet
        self._torch: TorchGroup | None = None
        self._torch_attempts = 0
        self._founder: Group | None = None  # the group that is about to make another
        self._closed = False
        self._deadlocks = DeadlockDetector(control, str(members[rank]), self._numbers, self._break_off)
        control.subscribe(self._hear)
        control.subscribe(self._deadlocks.hear)
        forget_after_fork(self)
        if self._hub is None:
            self._meet()
        self.hosts = tuple(hosts) if hosts is not None else self._find_hosts()
        spec = GroupSpec(rank=rank, members=members, generation=generation, group=0, timeout_s=timeout_s)
        self.group = self._found(spec, transport)
        if self._places:
            threading.Thread(target=self._watch, name="hora-watch", daemon=True).start()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _found(self, spec: GroupSpec, kind: str, whole: Group | None = None) -> Group:
        if kind == "auto" and self._hub is None and len({self.hosts[m.rank] for m in spec.members}) == 1:
            try:
                return self._gather(spec, "shm", whole)
            except OutOfMemory as problem:
                if spec.rank == 0:
                    log.warning("no shared memory, so the ranks talk over TCP, which is slower: %s", problem)
        return self._gather(spec, kind, whole)

    def _gather(self, spec: GroupSpec, kind: str, whole: Group | None) -> Group:
        """A group; or a part of the `whole`, which then hears for it what becomes of the others."""
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
        for event in [*self._ends, *self._early]:  # what was said while it was being founded
            group.consistency.hear(event)
        return group

    def _subgroup(self, parent: Group, ranks: list[int], kind: str, part: bool) -> Group | None:
        spec = parent.transport.spec
        if parent.rank not in ranks:
            return None
        name = f"{spec.name}|{parent.consistency.number}|{ranks}"
        number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        self._founder = parent
        try:
            return self._found(self._inner(spec, ranks, number, parent.rank), kind, parent if part else None)
        finally:
            self._founder = None

    @staticmethod
    def _inner(spec: GroupSpec, ranks: list[int], number: int, rank: int) -> GroupSpec:
        return GroupSpec(
            rank=ranks.index(rank),
            members=tuple(spec.members[r] for r in ranks),
            generation=spec.generation,
            group=number,
            timeout_s=spec.timeout_s,
        )

    def connect(self, spec: GroupSpec, kind: str) -> Transport:
        """Collective among the spec: a transport of that kind; 'auto' means TCP here."""
        if self._hub is not None and kind in ("auto", "memory"):
            return InProcessTransport(spec, self._hub)
        if self.rate_bytes_per_s is not None and kind not in ("auto", "tcp"):
            raise ValueError(f"a rate limit holds for the tcp transport; {kind} would not heed it")
        if kind == "memory":
            raise ValueError("the memory transport joins threads of one process, not processes")
        if kind.startswith("engine"):
            wanted = kind.partition(":")[2] or "auto"
            backend = self.backend if wanted == "auto" else wanted
            if backend == "mpi" and not self.under_mpirun:  # MPI would abort the process rather than say so
                raise ValueError("the engine 'mpi' needs ranks that mpirun started: mpirun -n N python script.py")
            return open_engine(spec, self.control, backend, self.bind, self._check)
        if kind == "shm":
            if self._passing is None:
                raise ValueError("shared memory between ranks needs Linux on x86-64; use the tcp transport")
            leader = self._places[spec.members[0].rank].passing
            return ShmTransport(spec, self._passing, leader, functools.partial(self._agree, spec))
        if kind not in ("tcp", "auto"):
            raise ValueError(f"unknown transport {kind!r}; there are: {', '.join(TRANSPORTS)}")
        return TcpTransport(spec, self._open_port(), lambda peer: self._address(spec.members[peer].rank))

    def torch_group(self, backend: str | None, device: torch.device) -> TorchGroup:
        """Collective at its first call: torch's default process group over all ranks."""
        if self._torch is None:
            spec = self.group.transport.spec
            agree = functools.partial(self._agree, spec)
            attempt, self._torch_attempts = self._torch_attempts, self._torch_attempts + 1
            self._torch = TorchGroup(spec, self.control, self.bind, backend, device, agree, self._check, attempt)
        elif backend not in (None, self._torch.backend):
            raise ValueError(f"job.process_group({backend!r}): it was opened as {self._torch.backend or 'default'!r}")
        return self._torch

    def _agree(self, spec: GroupSpec, key: str, word: str, check: Callable[[], None] | None = None) -> list[str]:
        """Every rank's word to every rank, over the coordinator."""
        self.control.put(f"{key}/{spec.rank}", word.encode())
        return [self._word(member.rank, f"{key}/{rank}", check).decode() for rank, member in enumerate(spec.members)]

    def _word(self, rank: int, key: str, check: Callable[[], None] | None = None) -> bytes:
        """What `rank` puts under `key`; PeerLost if a rank dies, or that one leaves, before it has."""

        def look() -> None:
            self._check(rank)
            if check:
                check()

        try:
            return self.control.get(key, self.timeout_s, look)
        except PeerLost:
            told = self.control.get_nowait(key)  # it may have come before its rank left
            if told is None:
                raise
            return told

    def _find_hosts(self) -> tuple[int, ...]:
        """For each rank the first of those that can pass it a descriptor: all say what they found. Collective."""
        if self._hub is not None:
            return (0,) * self.size
        if self.rate_bytes_per_s is not None:  # memory is no link, so it has no rate
            return tuple(range(self.size))
        firsts: dict[str, int] = {}
        for rank, place in enumerate(self._places):
            firsts.setdefault(place.network if place.passing else f"rank {rank}", rank)
        mine = self._places[self.rank]
        first = firsts[mine.network if mine.passing else f"rank {self.rank}"]
        if first != self.rank:
            try:
                assert self._passing is not None
                self._passing.reach(self._places[first].passing).close()
            except (OSError, HoraError):
                first = self.rank
        whole = GroupSpec(rank=self.rank, members=self.members, generation=self.generation, group=0)
        hosts = tuple(int(word) for word in self._agree(whole, f"g{self.generation}/host", str(first)))
        if not futex.AVAILABLE and self.rank == 0 and self.size > 1:
            log.warning("shared memory is for Linux on x86-64; here the ranks talk over TCP")
        return hosts

    def _meet(self) -> None:
        if futex.AVAILABLE:
            with contextlib.suppress(OSError):
                self._passing = FdPassing(self.token, self.timeout_s)
        mine = HostPlace(self._passing.address if self._passing else "", kernel("pid"), kernel("net"))
        key = f"g{self.generation}/place"
        self.control.put(f"{key}/{self.rank}", msgspec.msgpack.encode(mine))
        self._places = [
            msgspec.msgpack.decode(self._word(rank, f"{key}/{rank}"), type=HostPlace) for rank in range(self.size)
        ]

    def _open_port(self) -> TcpListener:
        if self._port is None:
            allowance = RateLimiter(self.rate_bytes_per_s) if self.rate_bytes_per_s is not None else None
            self._port = TcpListener(self.token, self.bind, allowance)
            host, port = self._port.address
            self.control.put(f"g{self.generation}/tcp/{self.rank}", f"{host} {port}".encode())
        return self._port

    def _address(self, rank: int) -> tuple[str, int]:
        host, port = self._word(rank, f"g{self.generation}/tcp/{rank}").decode().split()
        return host, int(port)

    def _numbers(self) -> dict[str, int]:
        """How many calls this rank has begun in each group."""
        return {group.transport.spec.name: group.consistency.number for group in list(self._groups)}

    def _break_off(self, cause: HoraError) -> None:
        for group in list(self._groups):
            group.consistency.abort(cause)

    # -- the others' fate ----------------------------------------------------------------------------------------------

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.kind == "stop" and self.stop_reason is None:
            self.stop_reason = event.text
        if event.kind in ("died", "left") and event.member is not None and event.member.role == "worker":
            self._settled.add(event.member.rank)
            self._ends.append(event)
        if event.kind == "message" and all(event.topic != g.transport.spec.name for g in self._groups):
            self._early.append(event)
        for group in list(self._groups):
            group.consistency.hear(event)

    def _check(self, awaited: int | None = None) -> None:
        """Raises if a rank has died, the awaited one has left, or the group that founds another was broken off."""
        if self._founder is not None:
            self._founder.transport.check()
        for event in list(self._ends):
            assert event.member is not None
            if event.kind == "died" or event.member.rank == awaited:
                me, lost = self.members[self.rank], event.member
                raise PeerLost(f"{me}: lost {lost} while the ranks met: {event.text}", (lost.rank,), secondary=True)

    def lost_behind(self, error: BaseException) -> PeerLost | None:
        """Whose end made torch's own links fail with `error`; None if they did not, or nobody has died."""
        if self._torch is None or not self._torch.broken_by(error):
            return None
        deadline = time.monotonic() + BREAK_S
        while not (dead := [event for event in self._ends if event.kind == "died"]) and time.monotonic() < deadline:
            time.sleep(0.01)
        for event in dead:
            me, lost = self.members[self.rank], event.member
            assert lost is not None
            return PeerLost(
                f"{me}: lost {lost} in torch's own communication: {event.text}", (lost.rank,), secondary=True
            )
        return None

    def lose(self, rank: int, reason: str) -> None:
        """This rank is dead, whoever found out."""
        if rank not in self._settled:
            self._settled.add(rank)
            event = CoordinatorEvent(kind="died", generation=self.generation, member=self.members[rank], text=reason)
            self._ends.append(event)
            for group in list(self._groups):
                group.consistency.hear(event)

    def _watch(self) -> None:
        """Notices the death of a rank on this host by its pidfd, in case nobody else does."""
        poller = select.poll()
        ranks: dict[int, int] = {}
        for rank, place in enumerate(self._places):
            pid = self.members[rank].pid
            if pid != os.getpid() and place.kernel == self._places[self.rank].kernel:
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
                    self.lose(rank, "its process ended")
        for descriptor in ranks:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # -- the end -------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """In a forked child: the run's sockets are the parent's alone, else its end would go unnoticed."""
        self._closed = True
        child = HoraError(f"this is a forked child of rank {self.rank}: only the process that called init() is it")
        for group in self._groups:
            for transport in group.consistency.transports:
                transport.cause = child
        for part in (self._port, self._passing, self.control):
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
        if self._port:
            self._port.close()
        if self._passing:
            self._passing.close()


def single_process_world(member: Member, timeout_s: float) -> World:
    """A world of this process alone, with a coordinator of its own."""
    control = InProcessCoordinator(1).connect()
    me = Member("worker", 0, member.host, member.pid)
    control.join(me)
    return World(control, (me,), 0, 1, b"", timeout_s=timeout_s)
