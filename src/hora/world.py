"""World: one rank's view of the run. It finds out where the other ranks are and makes groups of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Sequence

import torch

from .collectives.deadlock import DeadlockDetector
from .collectives.group import Group
from .coordinator import CoordinatorEvent, InProcessCoordinator, Member
from .errors import HoraError, OutOfMemory, PeerLost
from .net.fork import forget_after_fork
from .rendezvous.context import RunContext
from .transport import GroupSpec, InProcessHub, registry
from .transport.context import TransportContext
from .transport.process_group import TorchGroup

log = logging.getLogger(__name__)

BREAK_S = 0.5  # from the break of torch's connection to a rank until the coordinator reports its end
DEATH_GRACE_S = 0.2  # the launcher, which knows the exit code, gets this long to report it first


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
        if transport != "auto":
            registry.find(transport)
        self.context = context
        self.control = control = context.control
        self.members = members
        self.rank = rank = context.rank
        self.size = len(members)
        self.generation = generation
        self.algorithm = algorithm
        self.deterministic = deterministic
        self.stop_reason: str | None = None
        self._groups: list[Group] = []
        self._ended_ranks = {rank}
        self._ends: list[CoordinatorEvent] = []  # of other ranks, also for later groups
        self._early: collections.deque[CoordinatorEvent] = collections.deque(maxlen=256)  # messages for later groups
        self._torch: TorchGroup | None = None
        self._torch_attempts = 0
        self._parent: Group | None = None  # the group that is making another
        self._closed = False
        self._deadlocks = DeadlockDetector(control, str(members[rank]), self._call_counts, self._abort_all)
        control.subscribe(self._on_event)
        control.subscribe(self._deadlocks.on_event)
        forget_after_fork(self)
        self._transports = TransportContext(
            run=context,
            members=members,
            generation=generation,
            check=self._check,
            backend=backend,
            hub=hub or (InProcessHub() if self.size == 1 and transport == "auto" else None),
            hosts=tuple(hosts or ()),
        )
        self._transports.locate()
        spec = GroupSpec(rank=rank, members=members, generation=generation, group=0, timeout_s=context.timeout_s)
        self.group = self._make_group(spec, transport)
        if self._transports.places:
            threading.Thread(target=self._watch_processes, name="hora-watch", daemon=True).start()

    # -- groups --------------------------------------------------------------------------------------------------------

    def _make_group(self, spec: GroupSpec, kind: str, parent: Group | None = None) -> Group:
        kinds = registry.candidates(self._transports, spec, kind)
        for chosen, fallback in itertools.pairwise(kinds):
            try:
                return self._new_group(spec, chosen, parent)
            except OutOfMemory as problem:
                if spec.rank == 0:
                    log.warning("no %s transport, so the ranks use %s, which is slower: %s", chosen, fallback, problem)
        return self._new_group(spec, kinds[-1], parent)

    def _new_group(self, spec: GroupSpec, kind: str, parent: Group | None) -> Group:
        """A group; or a part of `parent`, which then gets the events for it."""
        group = Group(
            registry.open_transport(self._transports, spec, kind),
            self.control,
            algorithm=self.algorithm,
            deterministic=self.deterministic,
            hosts=[self._transports.hosts[member.rank] for member in spec.members],
            open_transport=lambda kind: registry.open_transport(self._transports, spec, kind),
            make_subgroup=lambda ranks, kind, part: self._subgroup(group, ranks, kind, part),
            on_close=lambda: self._groups.remove(group) if group in self._groups else None,
            parent=parent,
            deadlocks=self._deadlocks,
        )
        if parent is None:
            self._groups.append(group)
            for event in [*self._ends, *self._early]:  # from before it was made
                group.consistency.on_event(event)
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

    def torch_group(self, backend: str | None, device: torch.device) -> TorchGroup:
        """Collective at its first call: torch's default process group over all ranks."""
        if self._torch is None:
            attempt, self._torch_attempts = self._torch_attempts, self._torch_attempts + 1
            self._torch = TorchGroup(self._transports, self.group.transport.spec, backend, device, attempt)
        elif backend not in (None, self._torch.backend):
            raise ValueError(f"job.process_group({backend!r}): it was opened as {self._torch.backend or 'default'!r}")
        return self._torch

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
            group.consistency.on_event(event)

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
                group.consistency.on_event(event)

    def _watch_processes(self) -> None:
        """Notices the death of a rank on this host by its pidfd, also without a launcher."""
        poller = select.poll()
        ranks: dict[int, int] = {}
        places = self._transports.places
        for rank, place in enumerate(places):
            pid = self.members[rank].pid
            if pid != os.getpid() and place.pid_namespace == places[self.rank].pid_namespace:
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
        self._transports.forget()
        if hasattr(self.control, "forget"):
            self.control.forget()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._torch:
            self._torch.close()
        for group in list(self._groups):
            group.close()
        self._transports.close()


def single_process_world(member: Member, timeout_s: float) -> World:
    """A world of this process alone, with a coordinator of its own."""
    control = InProcessCoordinator(1).connect()
    me = Member("worker", 0, member.host, member.pid)
    control.join(me)
    return World(RunContext(control=control, token=b"", timeout_s=timeout_s), (me,), 1)
