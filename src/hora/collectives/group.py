"""Group: the ranks that act together, and the collectives they call.

Every rank of a group makes the same calls in the same order; the group's consistency checker notices when they do not.
Calls block, or with `wait=False` return a handle at once: then a thread of the group does the work while the caller
computes. Calls keep their order. A group is for one thread at a time; use `new_group` for another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..coordinator import CoordinatorConnection
from ..errors import HoraError
from ..transport import RegisteredBuffer, Transport
from ..transport.base import POINT_TO_POINT
from ..transport.engine import EngineTransport
from . import algorithms, auto, primitives, shared
from .consistency import CallPlan
from .deadlock import DeadlockDetector
from .executor import CallExecutor
from .hierarchy import Between, HostHierarchy
from .reduction import check_dtype, check_tensor, operation_for
from .tensors import describe, describe_rows, dtype_name, flatten, in_place, mark_changed, on_device, to_cpu, to_device


class Group(CallExecutor):
    """Ranks 0 to size − 1 over one transport. World and `new_group` make one, on all its ranks together: where they
    share memory the staging slots are allocated here, and OutOfMemory is raised on all of them if that is refused.

    `algorithm` is what "auto" stands for in `all_reduce`; `hosts` has a number per rank, equal for ranks of one host;
    `open_transport(kind)` opens another transport over the same ranks; `make_subgroup(ranks, kind, part)` makes a group
    of some of them, with `part` as a part of this one, whose `parent` is then this one.
    """

    def __init__(
        self,
        transport: Transport,
        control: CoordinatorConnection,
        *,
        algorithm: str = "auto",
        deterministic: bool = False,
        hosts: Sequence[int] | None = None,
        open_transport: Callable[[str], Transport] | None = None,
        make_subgroup: Callable[[list[int], str, bool], Group | None] | None = None,
        on_close: Callable[[], None] | None = None,
        parent: Group | None = None,
        deadlocks: DeadlockDetector | None = None,
    ) -> None:
        super().__init__(transport, control, parent, deadlocks)
        self.generation = transport.spec.generation
        self.algorithm = algorithm
        self.deterministic = deterministic
        self.hosts = tuple(hosts) if hosts is not None else (0,) * self.size
        self.num_hosts = len(set(self.hosts))
        self.auto_table: auto.AlgorithmTable | None = None
        self.own_gpus: bool | None = None  # whether each rank has a GPU of its own, once that was compared
        self._open_transport = open_transport
        self._make_subgroup = make_subgroup
        self.on_close = [on_close] if on_close is not None else []
        self._engines: dict[str, EngineTransport] = {}
        self._hierarchy: HostHierarchy | None = None
        self._staging = shared.StagingSlots.open(transport) if transport.shares_memory else None

    def __repr__(self) -> str:
        return f"<hora.Group rank {self.rank} of {self.size} over {self.transport.kind}, generation {self.generation}>"

    # -- the collectives ---------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        name: str | None = None,
        wait: bool = True,
        between: Between | None = None,
    ) -> Any:
        """Every rank's tensor becomes the reduction of all of them, in place. Returns it, or a handle.

        Where ranks are on several hosts 'ring', 'shared' and 'auto' go by host (hierarchy.py). With `between` every
        algorithm does, and this function is what the hosts' leaders exchange by; on one host it is not called."""
        try:
            key = ("all_reduce", op, algorithm, between, tensor.is_cuda, tensor.dtype, tensor.shape, name)
            plan = self._plans.get(key)
        except (AttributeError, TypeError):
            check_tensor(tensor)
            raise
        if plan is None:
            plan = self._plan_all_reduce(key, tensor, op, algorithm, name, between)
        return self._issue(plan, tensor, wait)

    def _plan_all_reduce(
        self,
        key: tuple[Any, ...],
        tensor: torch.Tensor,
        op: str,
        algorithm: str,
        name: str | None,
        between: Between | None,
    ) -> CallPlan:
        chosen = self.algorithm if algorithm == "auto" else algorithm
        if chosen not in algorithms.ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; there are: {', '.join(algorithms.ALGORITHMS)}")
        check_tensor(tensor)
        operation = operation_for(op, tensor.dtype)
        reduce, stays = algorithms.choose(self, chosen, tensor, between)
        text = f"all_reduce {op} of {describe(tensor)}" + (f" by {chosen}" if chosen != "auto" else "")
        if between is not None and self.num_hosts > 1:
            text += f" and {getattr(between, '__name__', type(between).__name__)} between hosts"
        if stays and tensor.is_cuda and between is None:
            text += " on cuda"  # all ranks or none: some of them do not reach the others' GPUs
        run = on_device if stays else in_place
        return self._plan(key, text, lambda t: run(t, lambda flat: reduce(self, flat, operation)), name)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, name: str | None = None, wait: bool = True) -> Any:
        """Every rank's tensor becomes the root's, in place."""
        self._check_root(root)
        check_tensor(tensor)
        return self._call(
            ("broadcast", tensor.dtype, tensor.shape, root, name),
            f"broadcast from rank {root} of {describe(tensor)}",
            lambda t: in_place(t, lambda flat: primitives.broadcast(self, flat, root)),
            name,
            tensor,
            wait,
        )

    def reduce(
        self, tensor: torch.Tensor, root: int = 0, op: str = "sum", name: str | None = None, wait: bool = True
    ) -> Any:
        """The root's tensor becomes the reduction of all, in place; the others' stay as they are."""
        self._check_root(root)
        check_tensor(tensor)
        operation = operation_for(op, tensor.dtype)
        return self._call(
            ("reduce", op, tensor.dtype, tensor.shape, root, name),
            f"reduce {op} to rank {root} of {describe(tensor)}",
            lambda t: in_place(t, lambda flat: primitives.reduce(self, flat, operation, root), self.rank == root),
            name,
            tensor,
            wait,
        )

    def all_gather(self, tensor: torch.Tensor, name: str | None = None, wait: bool = True) -> Any:
        """The list of all ranks' tensors, in order of rank; their first dimensions may differ."""
        check_tensor(tensor)
        return self._call(
            ("all_gather", tensor.dtype, tensor.dim(), tensor.shape[1:], name),
            f"all_gather of {describe_rows(tensor)}",
            lambda t: to_device(primitives.all_gather(self, to_cpu(t)), t.device),
            name,
            tensor,
            wait,
        )

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        name: str | None = None,
        wait: bool = True,
        *,
        overwrite: bool = False,
    ) -> Any:
        """This rank's share of the reduction: its rows are dealt in order, and shares differ by at most one row.

        With `overwrite` no copy is made: the tensor's rows are lost, and the share may be a part of it.
        """
        check_tensor(tensor)
        if tensor.dim() == 0:
            raise ValueError("reduce_scatter deals out rows; a scalar has none")
        operation = operation_for(op, tensor.dtype)

        def run(t: torch.Tensor) -> torch.Tensor:
            host = to_cpu(t)
            if not overwrite and host.data_ptr() == t.data_ptr():
                host = host.clone()
            share = primitives.reduce_scatter(self, host, operation).to(t.device)
            if overwrite:
                mark_changed(t)
                return share
            return share.clone() if share.is_cpu else share  # which keeps no more memory than its own

        key = ("reduce_scatter", op, tensor.dtype, tensor.shape, overwrite, name)
        return self._call(key, f"reduce_scatter {op} of {describe(tensor)}", run, name, tensor, wait)

    def gather(self, tensor: torch.Tensor, root: int = 0, name: str | None = None, wait: bool = True) -> Any:
        """On the root the list of all ranks' tensors (first dimensions may differ), elsewhere None."""
        self._check_root(root)
        check_tensor(tensor)
        return self._call(
            ("gather", tensor.dtype, tensor.dim(), tensor.shape[1:], root, name),
            f"gather to rank {root} of {describe_rows(tensor)}",
            lambda t: to_device(primitives.gather(self, to_cpu(t), root), t.device),
            name,
            tensor,
            wait,
        )

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, root: int = 0, name: str | None = None, wait: bool = True
    ) -> Any:
        """This rank's part of the list that the root gives; the others give None."""
        self._check_root(root)
        if (parts is not None) != (self.rank == root):
            raise ValueError(f"scatter: rank {root}, the root, gives the parts and the others give None")
        if parts is not None and len(parts) != self.size:
            raise ValueError(f"scatter: {len(parts)} parts for {self.size} ranks")
        return self._call(
            ("scatter", root, name),
            f"scatter from rank {root}",
            lambda p: primitives.scatter(self, None if p is None else [to_cpu(t) for t in p], root),
            name,
            parts,
            wait,
        )

    def all_to_all(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        splits: Sequence[int] | None = None,
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Part r goes to rank r; returns the list of what arrived, in order of rank. A tensor is cut along its rows,
        evenly or by `splits`."""
        if isinstance(parts, torch.Tensor):
            if parts.dim() == 0:
                raise ValueError("all_to_all cuts a tensor along its rows; a scalar has none")
            if splits is None:
                splits = [math.ceil((parts.shape[0] - r) / self.size) for r in range(self.size)]
            if len(splits) != self.size or sum(splits) != parts.shape[0]:
                raise ValueError(
                    f"all_to_all: splits {list(splits)} do not cut {parts.shape[0]} rows for {self.size} ranks"
                )
            parts = list(parts.split(list(splits)))
        elif splits is not None:
            raise ValueError("all_to_all: splits cut a tensor; a list is cut already")
        if len(parts) != self.size:
            raise ValueError(f"all_to_all: {len(parts)} parts for {self.size} ranks")
        for part in parts:
            check_tensor(part)
        return self._call(
            ("all_to_all", parts[0].dtype, name),
            f"all_to_all of {dtype_name(parts[0].dtype)}",
            lambda p: to_device(primitives.all_to_all(self, [to_cpu(t) for t in p]), p[0].device),
            name,
            parts,
            wait,
        )

    def barrier(self, name: str | None = None, wait: bool = True) -> Any:
        """Returns once every rank has called it."""
        return self._call(("barrier", name), "barrier", lambda _: primitives.barrier(self), name, None, wait)

    def send(self, tensor: torch.Tensor, to: int, name: str | None = None, wait: bool = True) -> Any:
        """Sends to one rank, which must call `recv` with the same shape and dtype."""
        fingerprint = self._check_message(self.rank, to, to, tensor, name)
        transfer = self.transport.send(to, to_cpu(tensor).view(-1), POINT_TO_POINT, fingerprint)
        return self._finish_transfer(transfer, tensor, None, wait)

    def recv(self, tensor: torch.Tensor, source: int, name: str | None = None, wait: bool = True) -> Any:
        """Receives from one rank, in place. Messages between two ranks arrive in the order they were sent."""
        fingerprint = self._check_message(source, self.rank, source, tensor, name)
        flat, copy_back = flatten(tensor)
        transfer = self.transport.recv(source, flat, POINT_TO_POINT, fingerprint)
        return self._finish_transfer(transfer, tensor, copy_back or (lambda: mark_changed(tensor)), wait)

    def _check_message(self, source: int, target: int, peer: int, tensor: torch.Tensor, name: str | None) -> int:
        """The fingerprint of the next message, if it can be exchanged with `peer`."""
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot exchange with rank {peer}: another of 0 to {self.size - 1}")
        check_tensor(tensor)
        key = ("message", source, target, tensor.dtype, tensor.shape, name)
        text = f"message from {source} to {target} of {describe(tensor)}"
        return self.consistency.message(source, target, self._plan(key, text, lambda _: None, name))

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not a rank of this group: 0 to {self.size - 1}")

    # -- other groups and memory -------------------------------------------------------------------------------------

    def new_group(self, ranks: Sequence[int], transport: str = "auto") -> Any:
        """A group of some of these ranks. Every rank of this group calls it; those left out get a `NonMember`."""
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size or len(chosen) != len(ranks):
            raise ValueError(f"new_group: {list(ranks)} are not distinct ranks between 0 and {self.size - 1}")

        def run(_: None) -> Group | NonMember:
            primitives.barrier(self)
            return self._subgroup(chosen, transport, False) or NonMember(self.rank, chosen)

        text = f"new_group of ranks {chosen} over {transport}"
        return self._call(("new_group", tuple(chosen), transport), text, run, None, None, True)

    def clone(self) -> Group:
        """Another group of all these ranks, with calls and failures of its own. Collective.

        Its transport is of the same kind, or what 'auto' falls back to if that one's resources may run out."""
        kind = "auto" if self.transport.clone_as_auto else self.transport.kind
        group: Group = self.new_group(range(self.size), kind)
        return group

    def _subgroup(self, ranks: list[int], kind: str, part: bool) -> Group | None:
        if self._make_subgroup is None:
            raise HoraError("this group cannot make others")
        return self._make_subgroup(ranks, kind, part)

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        """Registered memory of `numel` elements per rank: collective, and only where ranks share memory."""
        check_dtype(dtype)

        def run(_: None) -> RegisteredBuffer:
            primitives.barrier(self)  # all ranks open the same one
            return self.transport.buffer(f"buffer/{self.consistency.number}", numel, dtype)

        text = f"buffer {name!r} of {dtype_name(dtype)} [{numel}]"
        buffer: RegisteredBuffer = self._call(("buffer", name, numel, dtype), text, run, None, None, True)
        return buffer

    def close(self) -> None:
        """Releases everything: the group makes no more calls. Not collective."""
        for release in list(self.on_close):
            release()
        self._close_executor()
        if self._hierarchy is not None:
            self._hierarchy.close()
        for transport in (self.transport, *self._engines.values()):
            transport.close()
        self._staging = None

    # -- what the algorithms use -------------------------------------------------------------------------------------

    @property
    def staging(self) -> shared.StagingSlots:
        """The shared slots that ordinary tensors pass through."""
        if self._staging is None:
            raise ValueError(
                f"'shared' needs ranks that share memory; this group runs over {self.transport.kind}: "
                "use 'ring' or 'auto'"
            )
        return self._staging

    @property
    def hierarchy(self) -> HostHierarchy:
        """The ranks by host; made at first use, by all ranks in the same call."""
        if self._hierarchy is None:
            self._hierarchy = HostHierarchy(self, lambda ranks, kind: self._subgroup(ranks, kind, True))
        return self._hierarchy

    def engine(self, backend: str) -> EngineTransport:
        """The engine's transport over the same ranks; made at first use, by all ranks in the same call."""
        if isinstance(self.transport, EngineTransport) and backend == "auto":
            return self.transport
        found = self._engines.get(backend)
        if found is None:
            if self._open_transport is None:
                raise HoraError("this group has no engine")
            opened = self._open_transport(f"engine:{backend}")
            assert isinstance(opened, EngineTransport)
            found = self._engines[backend] = opened
            self.consistency.include(found, self.consistency)
        return found

    @property
    def sent_bytes(self) -> list[int]:
        """What this rank has sent to each rank of the group, also between the leaders of hosts. It does not count what
        others read in shared memory, nor what an engine's own collectives send."""
        totals = list(self.transport.sent_bytes)
        if self._hierarchy is not None:
            self._hierarchy.add_sent_bytes(totals)
        return totals


class NonMember:
    """What `new_group` returns to a rank that it left out: false in a condition, and every call on it raises."""

    def __init__(self, rank: int, ranks: list[int]) -> None:
        self.rank = None
        self.size = len(ranks)
        self._text = f"rank {rank} is not in this group of ranks {ranks}: make the call under `if group:`"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._text)
