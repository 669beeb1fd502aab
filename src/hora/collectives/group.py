"""Group: the ranks that act together, and the collectives they call.

Every rank of a group makes the same calls in the same order; the group's accord notices when they do not. Calls block,
or with `wait=False` return a handle: then a thread of the group does the work while the caller computes. Blocking calls
and handles keep their order. A group is for one thread at a time; use `new_group` for another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..coordinator import CoordinatorConnection
from ..errors import HoraError
from ..transport import RegisteredBuffer, Transfer, Transport
from ..transport.base import CAME, COLLECTIVES, POINT_TO_POINT
from ..transport.task_thread import TaskHandle, TaskThread
from . import auto, engine, halving, moves, ring, shared, star, tree
from .consistency import CallPlan, ConsistencyChecker, SubgroupChecker
from .deadlock import DeadlockDetector
from .handles import NonMember, TransferHandle, changed, received
from .hierarchy import BETWEEN, Between, HostHierarchy
from .reduction import Operation, check_dtype, check_tensor, operation_for

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # how long the end of a group waits for calls that are still under way

Algorithm = Callable[["Group", torch.Tensor, Operation], None]
ALGORITHMS: dict[str, Algorithm] = {
    "star": star.all_reduce,
    "ring": ring.all_reduce,
    "tree": tree.all_reduce,
    "halving": halving.all_reduce,
    "shared": shared.all_reduce,
    "engine": engine.all_reduce,
    "auto": auto.all_reduce,
}


class Group:
    """Ranks 0 to size − 1 over one transport. Made by the world or by `new_group`, by all its ranks together: where
    they share memory the staging slots are taken here, and OutOfMemory is raised on all of them if that is refused.

    `algorithm` is what "auto" stands for in `all_reduce`; `hosts` says which ranks share a host; `companion(kind)`
    makes a second transport over the same ranks (the engine's) when a call needs it; `found(ranks, transport, part)`
    makes a group out of some of them, of its own or as a part of this one: then `whole` is this one.
    """

    def __init__(
        self,
        transport: Transport,
        control: CoordinatorConnection,
        *,
        algorithm: str = "auto",
        deterministic: bool = False,
        hosts: Sequence[int] | None = None,
        companion: Callable[[str], Transport] | None = None,
        found: Callable[[list[int], str, bool], Group | None] | None = None,
        closed: Callable[[], None] | None = None,
        whole: Group | None = None,
        deadlocks: DeadlockDetector | None = None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.generation = transport.spec.generation
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.algorithm = algorithm
        self.deterministic = deterministic
        self.hosts = tuple(hosts) if hosts is not None else (0,) * self.size  # of each rank, the same number: one host
        self.auto_table: auto.AlgorithmTable | None = None
        self.own_gpus: bool | None = None  # whether each rank has a GPU of its own, once it was asked
        self._control = control
        self._companion = companion
        self._found = found
        self._closed = closed
        self._engines: dict[str, Transport] = {}
        self._hierarchy: HostHierarchy | None = None
        self.consistency: ConsistencyChecker = (
            ConsistencyChecker(transport, control)
            if whole is None
            else SubgroupChecker(transport, control, whole.consistency)
        )
        self.describe_wait: Callable[[], str] = lambda: self.consistency.doing()  # what a wait in it is for, in words
        self.before_call: Callable[[], None] | None = None
        self.deadlocks = deadlocks
        self.wait_scope: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext()
        )  # around waits for other ranks
        if deadlocks is not None:
            self.consistency.on_long_wait = deadlocks.on_long_wait
            self.wait_scope = deadlocks.scope(
                transport.spec.name, lambda: self.describe_wait(), lambda: transport.cause is not None
            )
        self._staging = shared.StagingSlots.open(transport) if transport.shares_memory else None
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._turn = threading.RLock()  # whoever has it makes a call
        self._failed: list[TaskHandle] = []
        self._calls = TaskThread("hora-group", on_error=self._failed.append)
        self._transfers = TaskThread("hora-transfers")

    def __repr__(self) -> str:
        return f"<hora.Group rank {self.rank} of {self.size} over {self.transport.kind}, generation {self.generation}>"

    # -- the collectives -------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        algorithm: str = "auto",
        name: str | None = None,
        wait: bool = True,
        between: Between | None = None,
    ) -> Any:
        """Everybody's tensor becomes the reduction of all of them, in place. Returns it, or a handle.

        Where ranks are on several hosts 'ring', 'shared' and 'auto' go by host (see Hierarchy). With `between` every
        algorithm does, and this function is what the hosts' leaders exchange by; on one host it is not called."""
        try:
            key = ("all_reduce", op, algorithm, between, tensor.is_cuda, tensor.dtype, tensor.shape, name)
            plan = self._plans.get(key)
        except (AttributeError, TypeError):
            check_tensor(tensor)
            raise
        if plan is None:
            plan = self._plan_all_reduce(key, tensor, op, algorithm, between)
        return self._issue(plan, tensor, wait)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, name: str | None = None, wait: bool = True) -> Any:
        """Everybody's tensor becomes the root's, in place."""
        self._check_root(root)
        check_tensor(tensor)
        plan = self._plan(
            ("broadcast", tensor.dtype, tensor.shape, root, name),
            f"broadcast from rank {root} of {_tensor_text(tensor)}",
            lambda t: self._in_place(t, lambda flat: moves.broadcast(self, flat, root)),
        )
        return self._issue(plan, tensor, wait)

    def reduce(
        self, tensor: torch.Tensor, root: int = 0, op: str = "sum", name: str | None = None, wait: bool = True
    ) -> Any:
        """The root's tensor becomes the reduction of all, in place; the others' stay as they are."""
        self._check_root(root)
        check_tensor(tensor)
        operation = operation_for(op, tensor.dtype)
        plan = self._plan(
            ("reduce", op, tensor.dtype, tensor.shape, root, name),
            f"reduce {op} to rank {root} of {_tensor_text(tensor)}",
            lambda t: self._in_place(t, lambda flat: moves.reduce(self, flat, operation, root), self.rank == root),
        )
        return self._issue(plan, tensor, wait)

    def all_gather(self, tensor: torch.Tensor, name: str | None = None, wait: bool = True) -> Any:
        """The list of everybody's tensors, in order of rank; their first dimensions may differ."""
        check_tensor(tensor)
        plan = self._plan(
            ("all_gather", tensor.dtype, tensor.dim(), tensor.shape[1:], name),
            f"all_gather of {_rows_text(tensor)}",
            lambda t: _to_device(moves.all_gather(self, _host(t)), t.device),
        )
        return self._issue(plan, tensor, wait)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        name: str | None = None,
        wait: bool = True,
        *,
        overwrite: bool = False,
    ) -> Any:
        """This rank's share of the reduction: the rows are dealt in order, sizes differ by at most one.

        With `overwrite` no copy is made: the tensor's rows are lost, and the share may be a part of it.
        """
        check_tensor(tensor)
        if tensor.dim() == 0:
            raise ValueError("reduce_scatter deals out rows; a scalar has none")
        operation = operation_for(op, tensor.dtype)

        def work(t: torch.Tensor) -> torch.Tensor:
            host = _host(t)
            if not overwrite and host.data_ptr() == t.data_ptr():
                host = host.clone()
            share = moves.reduce_scatter(self, host, operation).to(t.device)
            if overwrite:
                changed(t)
                return share
            return share.clone() if share.is_cpu else share  # which keeps no more than itself

        plan = self._plan(
            ("reduce_scatter", op, tensor.dtype, tensor.shape, overwrite, name),
            f"reduce_scatter {op} of {_tensor_text(tensor)}",
            work,
        )
        return self._issue(plan, tensor, wait)

    def gather(self, tensor: torch.Tensor, root: int = 0, name: str | None = None, wait: bool = True) -> Any:
        """On the root the list of everybody's tensors (first dimensions may differ), elsewhere None."""
        self._check_root(root)
        check_tensor(tensor)
        plan = self._plan(
            ("gather", tensor.dtype, tensor.dim(), tensor.shape[1:], root, name),
            f"gather to rank {root} of {_rows_text(tensor)}",
            lambda t: _to_device(moves.gather(self, _host(t), root), t.device),
        )
        return self._issue(plan, tensor, wait)

    def scatter(
        self, parts: Sequence[torch.Tensor] | None, root: int = 0, name: str | None = None, wait: bool = True
    ) -> Any:
        """This rank's part of the list that the root gives; the others give None."""
        self._check_root(root)
        if (parts is not None) != (self.rank == root):
            raise ValueError(f"scatter: rank {root}, the root, gives the parts and the others give None")
        if parts is not None and len(parts) != self.size:
            raise ValueError(f"scatter: {len(parts)} parts for {self.size} ranks")
        plan = self._plan(
            ("scatter", root, name),
            f"scatter from rank {root}",
            lambda p: moves.scatter(self, None if p is None else [_host(t) for t in p], root),
        )
        return self._issue(plan, parts, wait)

    def all_to_all(
        self,
        parts: torch.Tensor | Sequence[torch.Tensor],
        splits: Sequence[int] | None = None,
        name: str | None = None,
        wait: bool = True,
    ) -> Any:
        """Part r goes to rank r; the list of what came, in order of rank. A tensor is cut along its rows, evenly or by
        `splits`."""
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
        plan = self._plan(
            ("all_to_all", parts[0].dtype, name),
            f"all_to_all of {_short(parts[0].dtype)}",
            lambda p: _to_device(moves.all_to_all(self, [_host(t) for t in p]), p[0].device),
        )
        return self._issue(plan, parts, wait)

    def barrier(self, name: str | None = None, wait: bool = True) -> Any:
        """Returns once every rank has called it."""
        plan = self._plan(("barrier", name), "barrier", lambda _: moves.barrier(self))
        return self._issue(plan, None, wait)

    def send(self, tensor: torch.Tensor, to: int, name: str | None = None, wait: bool = True) -> Any:
        """Sends to one rank, which must call `recv` with the same shape and dtype."""
        self._check_partner(to)
        check_tensor(tensor)
        flat = _host(tensor).view(-1)
        stamp = self._letter(self.rank, to, tensor, name)
        return self._transit(self.transport.send(to, flat, POINT_TO_POINT, stamp), tensor, None, wait)

    def recv(self, tensor: torch.Tensor, source: int, name: str | None = None, wait: bool = True) -> Any:
        """Receives from one rank, in place. Messages between two ranks arrive in the order they were sent."""
        self._check_partner(source)
        check_tensor(tensor)
        flat, finish = self._flat(tensor)
        stamp = self._letter(source, self.rank, tensor, name)
        handle = self.transport.recv(source, flat, POINT_TO_POINT, stamp)
        return self._transit(handle, tensor, received(tensor, finish), wait)

    def new_group(self, ranks: Sequence[int], transport: str = "auto") -> Any:
        """A group of some of these ranks. Every rank of this group calls it; those left out get an `Outside`."""
        chosen = sorted(set(ranks))
        if not chosen or chosen[0] < 0 or chosen[-1] >= self.size or len(chosen) != len(ranks):
            raise ValueError(f"new_group: {list(ranks)} are not distinct ranks between 0 and {self.size - 1}")
        if self._found is None:
            raise HoraError("this group cannot make others")
        found = self._found

        def gather(_: None) -> Group | NonMember:
            moves.barrier(self)
            return found(chosen, transport, False) or NonMember(self.rank, chosen)

        text = f"new_group of ranks {chosen} over {transport}"
        return self._issue(self._plan(("new_group", tuple(chosen), transport), text, gather), None, True)

    def clone(self) -> Group:
        """Another group of all these ranks, with calls and failures of its own. Collective.

        Its transport is of the same kind, or what 'auto' falls back to if that one's resources run out."""
        group: Group = self.new_group(range(self.size), self.transport.clone_kind)
        return group

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        """Registered memory of `numel` elements per rank: collective, and only where ranks share memory."""
        check_dtype(dtype)
        plan = self._plan(
            ("buffer", name, numel, dtype),
            f"buffer {name!r} of {_short(dtype)} [{numel}]",
            lambda _: self._open_buffer(name, numel, dtype),
        )
        return self._issue(plan, None, True)

    def _open_buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        moves.barrier(self)  # all mean the same one
        registered = self.transport.buffer(f"buffer/{self.consistency.number}", numel, dtype)
        registered.name = f"{name} ({self.consistency.number})"
        return registered

    def all_reduce_registered(
        self, registered: RegisteredBuffer, op: str = "sum", numel: int | None = None, name: str | None = None
    ) -> torch.Tensor:
        """Reduces everybody's `registered.mine`. The result is a view that all ranks share: read it, never write it.

        It is valid until `registered.release()`; before writing `mine` again, `registered.claim()`."""
        count = registered.mine.numel() if numel is None else numel
        if not 0 <= count <= registered.mine.numel():
            raise ValueError(f"{count} elements of a buffer that has {registered.mine.numel()}")
        key = ("registered", registered.name, op, registered.mine.dtype, count, name)
        plan = self._plans.get(key)
        if plan is None:
            operation = operation_for(op, registered.mine.dtype)
            plan = self._plan(
                key,
                f"all_reduce {op} of buffer {registered.name}, {_short(registered.mine.dtype)} [{count}]",
                lambda memory: shared.reduce_registered(self, memory, operation, count),
            )
        return self._issue(plan, registered, True)

    # -- what the algorithms use -----------------------------------------------------------------------------------

    def give(self, peer: int, flat: torch.Tensor) -> Transfer:
        """Sends a piece of the call under way."""
        return self.transport.send(peer, flat, COLLECTIVES, self.consistency.stamp)

    def take(self, peer: int, flat: torch.Tensor, land: Callable[[Any, Any], object] | None = None) -> Transfer:
        """Receives a piece of the call under way; `land` reduces it into `flat` instead of replacing it."""
        return self.transport.recv(peer, flat, COLLECTIVES, self.consistency.stamp, land)

    def meet(self, registered: RegisteredBuffer, turn: int) -> None:
        """Says that I have come to this turn, waits for everybody, and compares the stamps of their calls."""
        stamp, value = self.consistency.stamp, 4 * turn + CAME
        registered.signal(value, stamp)
        registered.await_all(value)
        for peer in self.others:
            if registered.stamp_of(peer, value) != stamp:
                raise self.consistency.differ(peer, COLLECTIVES)

    @property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    @property
    def sent_bytes(self) -> list[int]:
        """What this rank has given to each rank of the group over links, also between the leaders of hosts. What others
        read in shared memory was not sent, and what an engine's own collectives send is the engine's business."""
        totals = list(self.transport.sent_bytes)
        if self._hierarchy is not None:
            self._hierarchy.add_sent_bytes(totals)
        return totals

    @property
    def crossed_bytes(self) -> int:
        """Of these, what went to other hosts."""
        mine = self.hosts[self.rank]
        return sum(sent for sent, host in zip(self.sent_bytes, self.hosts, strict=True) if host != mine)

    @property
    def staging(self) -> shared.StagingSlots:
        """The shared slots that ordinary tensors pass through."""
        if self._staging is None:
            raise ValueError(
                f"'shared' needs ranks that share memory; this group runs over {self.transport.kind}: "
                "use 'ring' or 'auto'"
            )
        return self._staging

    def engine(self, backend: str) -> Transport:
        """The engine's transport over the same ranks; made at first use, by all ranks in the same call."""
        if self.transport.kind == "engine" and backend == "auto":
            return self.transport
        found = self._engines.get(backend)
        if found is None:
            if self._companion is None:
                raise HoraError("this group has no engine")
            found = self._engines[backend] = self._companion(f"engine:{backend}")
            self.consistency.include(found, self.consistency)
        return found

    def adopt(self, table: auto.AlgorithmTable) -> None:
        """From now on "auto" follows this table; rank 0 leaves it with the coordinator, which keeps it with the run."""
        self.auto_table = table
        if self.rank == 0:
            with contextlib.suppress(HoraError):
                self._control.put(f"auto/{self.transport.spec.name}", table.json())

    def perform(self, plan: CallPlan, argument: Any) -> Any:
        """Runs one call now."""
        self.consistency.begin(plan)
        try:
            return plan.run(argument)
        except ValueError:
            raise  # the caller's mistake, refused by every rank before a message of it left
        except BaseException as error:
            self._break_off(plan.text, error)
            raise

    def begin_call(self, text: str) -> None:
        """Begins a call that is made of many parts, `text`; its parts carry its stamp, and it ends with the next."""
        self.consistency.begin(self._plan(("announced", text, None), text, lambda _: None))

    @contextlib.contextmanager
    def part_of_call(self) -> Iterator[None]:
        """Around each part of an announced call: what goes wrong here ends the group on every rank."""
        try:
            yield
        except BaseException as error:
            self._break_off(self.consistency.doing(), error)
            raise

    def _break_off(self, doing: str, error: BaseException) -> None:
        words = f"{doing} ended on {self.transport.name_of(self.rank)} with {type(error).__name__}: {error}"
        self.consistency.abort(error if isinstance(error, HoraError) else HoraError(words))

    # -- planning and issuing --------------------------------------------------------------------------------------

    def _plan(self, key: tuple[Any, ...], text: str, run: Callable[[Any], Any]) -> CallPlan:
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > 4096:  # names that change with every call
                self._plans.clear()
            name = key[-1] if key[0] not in ("new_group", "buffer") else None
            words = f"{text} named {name!r}" if name is not None else text
            plan = self._plans[key] = CallPlan(self.transport.spec.name, words, run)
        return plan

    def _plan_all_reduce(
        self, key: tuple[Any, ...], tensor: torch.Tensor, op: str, algorithm: str, between: Between | None
    ) -> CallPlan:
        chosen = self.algorithm if algorithm == "auto" else algorithm
        if chosen not in ALGORITHMS:
            raise ValueError(f"unknown algorithm {algorithm!r}; there are: {', '.join(ALGORITHMS)}")
        check_tensor(tensor)
        operation = operation_for(op, tensor.dtype)
        text = f"all_reduce {op} of {_tensor_text(tensor)}" + (f" by {chosen}" if chosen != "auto" else "")
        if between is not None and self.num_hosts > 1:
            text += f" and {getattr(between, '__name__', type(between).__name__)} between hosts"
        reduce = self._route(chosen, tensor.numel() * tensor.element_size(), between)
        if tensor.is_cuda and between is None and (chosen == "engine" or chosen in BETWEEN):
            text += " on cuda"  # all ranks or none: some of them do not reach the others' GPUs
            if chosen != "engine":
                reduce = functools.partial(engine.by_gpu, by_host=reduce)
            return self._plan(key, text, lambda t: self._on_device(t, lambda flat: reduce(self, flat, operation)))
        in_place = self._in_place if chosen != "engine" else self._on_device
        return self._plan(key, text, lambda t: in_place(t, lambda flat: reduce(self, flat, operation)))

    def _route(self, chosen: str, num_bytes: int, between: Between | None) -> Algorithm:
        """Which way a vector on the host takes."""
        if self.num_hosts > 1:
            if between is not None:
                return functools.partial(_by_host, between=between)
            if chosen in BETWEEN:
                if self.num_hosts < self.size:
                    return functools.partial(_by_host, between=BETWEEN[chosen])
                chosen = "ring" if chosen == "shared" else chosen
        table = auto.known(self) if chosen == "auto" else None
        if chosen == "shared":
            _ = self.staging  # refuses here, before any rank is under way
        return ALGORITHMS[table.choose(num_bytes) if table else chosen]

    def by_host(self, flat: torch.Tensor, operation: Operation, between: Between) -> None:
        """Reduces by the group's hierarchy, which is made at first use, by all ranks in the same call."""
        if self._hierarchy is None:
            assert self._found is not None
            found = self._found
            self._hierarchy = HostHierarchy(self, lambda ranks, kind: found(ranks, kind, True))
        self._hierarchy.all_reduce(self, flat, operation, between)

    def _issue(self, plan: CallPlan, argument: Any, wait: bool) -> Any:
        if self.before_call is not None:
            self.before_call()
        if not wait or self.size == 1:
            return self._give(plan, argument, wait)
        with self.wait_scope:
            return self._give(plan, argument, wait)

    def _give(self, plan: CallPlan, argument: Any, wait: bool) -> Any:
        if wait and (self._calls.idle or self._calls.is_current):
            with self._turn:
                return self.perform(plan, argument)
        if isinstance(argument, torch.Tensor) and argument.is_cuda:
            torch.cuda.current_stream(argument.device).synchronize()  # the thread has a stream of its own
        inference = torch.is_inference_mode_enabled()
        handle = self._calls.submit(lambda: self._perform_beside(plan, argument, inference), plan.text)
        return handle.wait() if wait else handle

    def _perform_beside(self, plan: CallPlan, argument: Any, inference: bool) -> Any:
        """On the group's thread, while the caller computes."""
        with self._turn, torch.inference_mode(inference):
            self.transport.background = True
            try:
                return self.perform(plan, argument)
            finally:
                self.transport.background = False

    def _in_place(
        self, tensor: torch.Tensor, work: Callable[[torch.Tensor], None], result: bool = True
    ) -> torch.Tensor:
        """Runs `work` on the tensor as a flat CPU vector and brings the result back."""
        flat, finish = self._flat(tensor)
        version = None if tensor.is_inference() else tensor._version
        work(flat)
        if finish and result:
            finish()
        if result and version is not None and tensor._version == version:
            changed(tensor)
        return tensor

    def _on_device(self, tensor: torch.Tensor, work: Callable[[torch.Tensor], None]) -> torch.Tensor:
        plain = tensor.detach()
        _refuse_expanded(plain)
        flat = plain.resolve_neg().contiguous().view(-1)
        work(flat)
        if flat.data_ptr() != plain.data_ptr():
            plain.copy_(flat.view(plain.shape))
        else:
            changed(tensor)
        return tensor

    def _flat(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg():
            return (tensor if tensor.dim() == 1 else tensor.view(-1)), None
        _refuse_expanded(tensor)
        copy = tensor.to("cpu").resolve_neg().contiguous()

        def bring_back() -> None:
            tensor.copy_(copy)

        return copy.view(-1), bring_back

    def _letter(self, source: int, target: int, tensor: torch.Tensor, name: str | None) -> int:
        text = f"message from {source} to {target} of {_tensor_text(tensor)}"
        key = ("letter", source, target, tensor.dtype, tensor.shape, name)
        return self.consistency.letter(source, target, self._plan(key, text, lambda _: None))

    def _transit(self, handle: Transfer, tensor: torch.Tensor, finish: Callable[[], None] | None, wait: bool) -> Any:
        transit = TransferHandle(handle, tensor, finish)
        if wait:
            return transit.wait()
        if not handle.done:  # it goes on while its rank does something else, a collective perhaps
            self._transfers.submit(handle.wait)
        return transit

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is not a rank of this group: 0 to {self.size - 1}")

    def _check_partner(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(f"rank {self.rank} cannot exchange with rank {peer}: another of 0 to {self.size - 1}")

    def close(self) -> None:
        """Gives everything back: the group makes no calls any more. Every rank closes for itself."""
        self._calls.close(CLOSE_S)
        self._transfers.close()
        for handle in self._failed:
            if not handle.waited_for:
                log.error("%s failed, and its handle was never waited for: %s", handle.name, handle.error)
        if self._hierarchy is not None:
            self._hierarchy.close()
        for transport in (self.transport, *self._engines.values()):
            transport.close()
        self._plans.clear()
        self._staging = None
        if self._closed:
            self._closed()


def _by_host(group: Group, flat: torch.Tensor, operation: Operation, between: Between) -> None:
    group.by_host(flat, operation, between)


def _refuse_expanded(tensor: torch.Tensor) -> None:
    if 0 in tensor.stride() and tensor.numel() > 1:
        raise ValueError("an expanded tensor has several names for one place; clone() it first")


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").resolve_neg().contiguous()


def _to_device(parts: list[torch.Tensor] | None, device: torch.device) -> list[torch.Tensor] | None:
    return None if parts is None else [part.to(device) for part in parts]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"{_short(tensor.dtype)} {list(tensor.shape)}"


def _rows_text(tensor: torch.Tensor) -> str:
    shape = ", ".join(map(str, ("any", *tensor.shape[1:]) if tensor.dim() else ()))
    return f"{_short(tensor.dtype)} [{shape}]"
