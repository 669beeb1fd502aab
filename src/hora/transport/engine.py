"""The engines' own links: torch.distributed (Gloo, and NCCL by the same code) and MPI through mpi4py.

Engines carry no header or token of ours: their links are not authenticated. Between two ranks we send the stamp as a
message before the data; a collective of the engine's is preceded by a barrier that carries it. A wait inside
torch.distributed can last without end when a peer is lost, so it is left to a thread of its own while ours stays able
to raise; after an abort the engine is never used again.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from ..coordinator import CoordinatorConnection
from ..errors import HoraError
from ..net import interface
from ..net.tensor_bytes import tensor_bytes
from .base import SLICE_S, BoundedWait, GroupSpec, Land, Transfer, Transport
from .task_thread import TaskHandle, TaskThread

log = logging.getLogger(__name__)

ABORT_TAG = 1 << 20  # nobody sends with it
CLOSE_S = 1.0

TORCH_OPERATIONS = { "sum": "SUM", "mean": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "and": "BAND", "or":
"BOR", "xor": "BXOR",
}  # fmt: skip
MPI_OPERATIONS = {
    "sum": "SUM", "mean": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "and": "BAND", "or": "BOR", "xor": "BXOR",
}  # fmt: skip
MPI_TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T", torch.int32: "INT32_T",
    torch.int16: "INT16_T", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
}  # fmt: skip


class EngineBackend(abc.ABC):
    """One engine: starts work and says when it is done. `test()` of the work is cheap and raises what went wrong."""

    name: str

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork: ...

    @abc.abstractmethod
    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork: ...

    @abc.abstractmethod
    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork: ...

    def abort(self) -> None:
        """Ends what is under way, as far as the engine can."""

    def close(self) -> None: ...


class EngineFailed(Exception):
    """What the engine itself said."""


class EngineWork(abc.ABC):
    @abc.abstractmethod
    def test(self) -> bool: ...

    @abc.abstractmethod
    def rest(self, seconds: float) -> None:
        """Sleeps until it is done or the time is over."""


class EngineTransport(Transport):
    kind = "engine"
    left_s = 5.0  # the engine has threads and buffers of its own; a link that closed is noticed at once in any case

    def __init__(self, spec: GroupSpec, backend: EngineBackend) -> None:
        super().__init__(spec)
        self.backend = backend

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """The engine's own, in place. 'mean' divides after the sum."""
        self._finish(self.backend.all_reduce(tensor, op))
        if op == "mean" and self.size > 1:
            tensor.div_(self.size)

    def _finish(self, work: EngineWork) -> None:
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        patience = None
        while not self.finished(work, others):
            patience = patience or BoundedWait(self, others)
            patience.check()
            work.rest(SLICE_S)

    def finished(self, work: EngineWork, peers: tuple[int, ...]) -> bool:
        """Whether the work is done; the cause, rather than the engine's own words, if it went wrong."""
        try:
            return work.test()
        except EngineFailed as problem:
            raise self.broken(peers, problem) from None

    def abort(self, cause: HoraError) -> None:
        if self.cause is None:
            super().abort(cause)
            self.backend.abort()

    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Transfer:
        return _Send(self, peer, channel, stamp, tensor)

    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Transfer:
        return _Recv(self, peer, channel, stamp, tensor, land)

    def _idle(self, handle: Transfer, rounds: int) -> None:
        for pending in self._pending(handle.channel):
            if isinstance(pending, (_Send, _Recv)) and pending.works:
                pending.works[-1].rest(min(SLICE_S, 20e-6 * rounds))
                return

    def close(self) -> None:
        self.backend.close()


class _Send(Transfer):
    """A message is two of the engine's: stamp, generation and length, then the data. So it is checked as elsewhere."""

    __slots__ = ("parts", "works")

    def __init__(self, transport: EngineTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor) -> None:
        super().__init__(transport, peer, channel)
        self.parts = [_head(transport, stamp, tensor), tensor] if tensor.numel() else [_head(transport, stamp, tensor)]
        self.works: list[EngineWork] | None = None

    def advance(self) -> bool:
        transport = self.transport
        assert isinstance(transport, EngineTransport)
        if self.works is None:
            self.works = [transport.backend.send(self.peer, part, self.channel) for part in self.parts]
        self.done = all(transport.finished(work, (self.peer,)) for work in self.works)
        return self.done


class _Recv(Transfer):
    __slots__ = ("body", "head", "land", "tensor", "wanted", "works")

    def __init__(
        self, transport: EngineTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor, land: Land
    ) -> None:
        super().__init__(transport, peer, channel)
        self.tensor = tensor
        self.land = land
        self.wanted = _head(transport, stamp, tensor)
        self.head = torch.zeros_like(self.wanted)
        self.body: torch.Tensor | None = None
        self.works: list[EngineWork] | None = None

    def advance(self) -> bool:
        transport = self.transport
        assert isinstance(transport, EngineTransport)
        if self.works is None:
            self.works = [transport.backend.recv(self.peer, self.head, self.channel)]
        if not transport.finished(self.works[0], (self.peer,)):
            return False
        if self.body is None:
            if not torch.equal(self.head, self.wanted):
                raise transport.watcher.differ(self.peer, self.channel)
            self.body = self.tensor if self.land is torch.Tensor.copy_ else torch.empty_like(self.tensor)
            if self.tensor.numel():
                self.works = [transport.backend.recv(self.peer, self.body, self.channel)]
                if not transport.finished(self.works[0], (self.peer,)):
                    return True
        if self.body is not self.tensor and self.tensor.numel():
            self.land(self.tensor, self.body)
        self.done = True
        return True


def _head(transport: EngineTransport, stamp: int, tensor: torch.Tensor) -> torch.Tensor:
    signed = stamp - (1 << 64) if stamp >= 1 << 63 else stamp
    return torch.tensor([signed, transport.spec.generation, tensor.numel() * tensor.element_size()])


# -- torch.distributed -------------------------------------------------------------------------------------------------


class TorchBackend(EngineBackend):
    """A process group of our own, not torch's default one, so that a user's `init_process_group` stays possible.

    The store that the ranks meet in listens on the run's own address; its port travels over the coordinator.
    """

    def __init__(self, spec: GroupSpec, control: CoordinatorConnection, name: str, bind: str) -> None:
        import torch.distributed as dist

        self.name = name
        self._dist = dist
        limit = datetime.timedelta(seconds=spec.timeout_s + 60)  # our own wait gives up first, and says more
        store = meet_in_store(f"{spec.name}/engine-{name}", spec, control, bind, limit)
        self._store = store
        prefixed = dist.PrefixStore(name, store)
        if name == "nccl":
            name_interface(bind)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group: Any = dist.ProcessGroupNCCL(prefixed, spec.rank, spec.size, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = limit
            options._threads = 2
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=bind)]
            self._group = dist.ProcessGroupGloo(prefixed, spec.rank, spec.size, options)
        self._threads = EngineThreads()
        self._peer = (spec.rank + 1) % spec.size

    def _watch(self, start: Callable[[], Any], wait: Callable[[Any], None] | None = None) -> EngineWork:
        """Starts on the caller's thread, which keeps the order of messages; the end is awaited apart."""
        try:
            work = start()
        except RuntimeError as problem:  # a link that is known to be broken refuses at once
            return _Threaded(self._threads.submit(functools.partial(_raise, problem)))
        return _Threaded(self._threads.submit(work.wait if wait is None else lambda: wait(work)))

    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork:
        if self.name == "gloo" and tensor.dtype is torch.bool:
            raise ValueError("Gloo reduces no bools; use uint8, or an algorithm of Hora's own such as 'ring'")
        options = self._dist.AllreduceOptions()
        options.reduceOp = getattr(self._dist.ReduceOp, TORCH_OPERATIONS[op])
        wait = functools.partial(self._synchronize, tensor.device) if tensor.is_cuda else None
        return self._watch(lambda: self._group.allreduce([tensor], options), wait)

    @staticmethod
    def _synchronize(device: torch.device, work: Any) -> None:
        """NCCL's wait only orders streams; ours means that the result is there."""
        with torch.cuda.device(device):
            work.wait()
            torch.cuda.current_stream(device).synchronize()

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return self._watch(lambda: self._group.send([tensor], peer, tag))

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return self._watch(lambda: self._group.recv([tensor], peer, tag))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self.name == "nccl":
                self._group.abort()
            else:
                # Gloo's own abort leaves a pending receive waiting. A receive that times out closes all its links,
                # which ends everything that is pending on them.
                nothing = self._group.recv([torch.zeros(1)], self._peer, ABORT_TAG)
                nothing.wait(datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        if not self._threads.idle:
            self.abort()
        self._threads.close(CLOSE_S)
        with contextlib.suppress(Exception):
            self._group.shutdown()


def meet_in_store(
    key: str, spec: GroupSpec, control: CoordinatorConnection, bind: str, limit: datetime.timedelta
) -> Any:
    """Collective: torch's store, which rank 0 hosts on the run's own address; its port travels under `key`."""
    from torch.distributed import TCPStore

    if spec.rank == 0:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        listening = socket.create_server((bind, 0), family=family)
        port = listening.getsockname()[1]
        store = TCPStore(
            bind, port, spec.size, True, limit, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        control.put(key, f"{bind} {port}".encode())
        return store
    host, port_text = control.get(key, limit.total_seconds()).decode().split()
    return TCPStore(host, int(port_text), spec.size, False, limit, wait_for_workers=False)


def name_interface(bind: str) -> None:
    """NCCL picks an interface by its own lights; ours is the one that this run's address lies on."""
    if not interface.is_loopback(bind) and (found := interface.name_of(bind)):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found}")


class EngineThreads:
    """As many threads as wait for the engine at the same time. One may wait without end, so they are daemons."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[TaskThread] = []

    def submit(self, work: Callable[[], Any]) -> TaskHandle:
        with self._lock:
            thread = next((thread for thread in self._threads if thread.idle), None)
            if thread is None:
                thread = TaskThread("hora-engine")
                self._threads.append(thread)
            return thread.submit(work)

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the threads. One that is still inside the engine when Python exits would abort the process."""
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.close()
        for thread in self._threads:
            thread.close(max(0.0, end - time.monotonic()))

    @property
    def idle(self) -> bool:
        return all(thread.idle for thread in self._threads)


class _Threaded(EngineWork):
    def __init__(self, handle: TaskHandle) -> None:
        self._handle = handle

    def test(self) -> bool:
        if self._handle.done and self._handle.error is not None:
            raise EngineFailed(f"the engine says: {self._handle.error}") from None
        return self._handle.done

    def rest(self, seconds: float) -> None:
        self._handle.wait_done(seconds)


def _raise(problem: Exception) -> None:
    raise problem


# -- MPI ---------------------------------------------------------------------------------------------------------------


class MpiBackend(EngineBackend):
    """MPI through mpi4py, for ranks that mpirun started: the spec must be the whole of MPI's world."""

    name = "mpi"

    def __init__(self, spec: GroupSpec) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as problem:
            raise ValueError(f"the engine 'mpi' needs mpi4py and an MPI library: {problem}") from None
        if MPI.COMM_WORLD.Get_size() != spec.size or MPI.COMM_WORLD.Get_rank() != spec.rank:
            raise ValueError("the engine 'mpi' needs ranks that mpirun started: mpirun -n N python script.py")
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()

    def _spec(self, tensor: torch.Tensor) -> list[Any]:
        if tensor.dtype not in MPI_TYPES:
            raise ValueError(f"MPI reduces no {tensor.dtype}; use an algorithm of Hora's own such as 'ring'")
        return [tensor_bytes(tensor), getattr(self._mpi, MPI_TYPES[tensor.dtype])]

    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork:
        operation = getattr(self._mpi, MPI_OPERATIONS[op])
        return _Request(self._comm.Iallreduce(self._mpi.IN_PLACE, self._spec(tensor), operation))

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return _Request(self._comm.Isend([tensor_bytes(tensor), self._mpi.BYTE], peer, tag))

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return _Request(self._comm.Irecv([tensor_bytes(tensor), self._mpi.BYTE], peer, tag))


class _Request(EngineWork):
    def __init__(self, request: Any) -> None:
        self._request = request

    def test(self) -> bool:
        return bool(self._request.Test())

    def rest(self, seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, 0.001)  # MPI moves data only while it is asked
        while time.monotonic() < deadline and not self._request.Test():
            os.sched_yield()


def open_engine(
    spec: GroupSpec, control: CoordinatorConnection, backend: str, bind: str, check: Callable[[], None]
) -> EngineTransport:
    """Collective: the engine over these ranks; 'auto' is Gloo, which is everywhere.

    `check` raises when a rank of the spec is lost: the engine's own meeting would wait for it.
    """
    name = "gloo" if backend == "auto" else backend
    if name == "mpi":
        return EngineTransport(spec, MpiBackend(spec))
    if spec.rank == 0:
        log.warning("the engine's links (%s) are not authenticated: keep them inside a trusted network", name)
    return EngineTransport(spec, run_checked(lambda: TorchBackend(spec, control, name, bind), check))


def run_checked(work: Callable[[], Any], check: Callable[[], None]) -> Any:
    """The result of `work`, which may block without end, on a thread of its own while this one calls `check`."""
    thread = TaskThread("hora-engine")
    opening = thread.submit(work)
    thread.close()
    while not opening.wait_done(SLICE_S):
        check()
    return opening.wait()
