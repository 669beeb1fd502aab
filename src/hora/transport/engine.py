"""The "engine" transport: connections of torch.distributed (Gloo, and NCCL by the same code) or of MPI (mpi4py).

An engine's messages carry no header or token of ours: its connections are not authenticated. Between two ranks we send
the fingerprint as a message before the data; a barrier that carries it precedes a collective of the engine. A wait in
torch.distributed can last without end when a peer is lost, so it runs on a thread of its own while ours stays able to
raise; after an abort the engine is never used again.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from ..coordinator import CoordinatorConnection
from ..errors import HoraError
from ..net import interface
from ..net.tensor_bytes import tensor_bytes
from .base import POLL_S, BoundedWait, GroupSpec, Transfer, Transport
from .task_thread import TaskHandle, TaskThread

if TYPE_CHECKING:
    from .context import TransportContext

log = logging.getLogger(__name__)

ABORT_TAG = 1 << 20  # no message has it
CLOSE_S = 4.0  # a thread that returns from the engine while Python ends would abort the process

OPERATIONS = {  # names of torch.distributed.ReduceOp and of MPI; the mean is divided here
    "sum": ("SUM", "SUM"), "mean": ("SUM", "SUM"), "prod": ("PRODUCT", "PROD"), "min": ("MIN", "MIN"),
    "max": ("MAX", "MAX"), "and": ("BAND", "BAND"), "or": ("BOR", "BOR"), "xor": ("BXOR", "BXOR"),
}  # fmt: skip
MPI_TYPES = {
    torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T", torch.int32: "INT32_T",
    torch.int16: "INT16_T", torch.int8: "INT8_T", torch.uint8: "UINT8_T",
}  # fmt: skip


class EngineFailed(Exception):
    """The engine's own error."""


class EngineWork(abc.ABC):
    """Work in progress inside the engine."""

    @abc.abstractmethod
    def test(self) -> bool:
        """Whether it is done. Does not block; EngineFailed if it went wrong."""

    @abc.abstractmethod
    def sleep(self, seconds: float) -> None:
        """Blocks until it is done or the time is over."""


class EngineBackend(abc.ABC):
    """One engine. Its calls start work and return at once."""

    name: str

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork: ...

    @abc.abstractmethod
    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork: ...

    @abc.abstractmethod
    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork: ...

    def abort(self) -> None:
        """Ends what is in progress, as far as the engine can."""

    def close(self) -> None: ...


class _Message(Transfer):
    """A message is two of the engine's: fingerprint, generation and length, then the data."""

    __slots__ = ("header", "works")
    transport: EngineTransport

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        signed = self.fingerprint - (1 << 64) if self.fingerprint >= 1 << 63 else self.fingerprint
        num_bytes = self.tensor.numel() * self.tensor.element_size()
        self.header = torch.tensor([signed, self.transport.spec.generation, num_bytes])
        self.works: list[EngineWork] = []


class _Send(_Message):
    __slots__ = ()

    def advance(self) -> bool:
        if not self.works:
            parts = [self.header, self.tensor] if self.tensor.numel() else [self.header]
            self.works = [self.transport.backend.send(self.peer, part, self.channel) for part in parts]
        self.done = all(self.transport.finished(work, (self.peer,)) for work in self.works)
        return self.done


class _Recv(_Message):
    __slots__ = ("body", "received")

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.received = torch.zeros_like(self.header)
        self.body: torch.Tensor | None = None

    def advance(self) -> bool:
        transport, tensor = self.transport, self.tensor
        if not self.works:
            self.works = [transport.backend.recv(self.peer, self.received, self.channel)]
        if not transport.finished(self.works[0], (self.peer,)):
            return False
        if self.body is None:
            if not torch.equal(self.received, self.header):
                raise transport.observer.mismatch(self.peer, self.channel)
            self.body = torch.empty_like(tensor) if self.combine else tensor
            if tensor.numel():
                self.works = [transport.backend.recv(self.peer, self.body, self.channel)]
                if not transport.finished(self.works[0], (self.peer,)):
                    return True
        if self.combine and tensor.numel():
            self.combine(tensor, self.body)
        self.done = True
        return True


class EngineTransport(Transport):
    kind = "engine"
    drain_s = 5.0  # the engine has threads and buffers of its own; a broken connection is noticed at once in any case
    send_transfer, recv_transfer = _Send, _Recv

    @classmethod
    def open(cls, context: TransportContext, spec: GroupSpec, option: str = "") -> EngineTransport:
        """`option` names the backend, else the context does; 'auto' is Gloo, which is everywhere."""
        backend = option if option not in ("", "auto") else context.backend
        if backend == "mpi":
            if context.run.launcher != "mpirun":  # MPI would abort the process instead of raising
                raise ValueError("the engine 'mpi' needs ranks that mpirun started: mpirun -n N python script.py")
            return cls(spec, MpiBackend(spec))
        name = "gloo" if backend == "auto" else backend
        if name == "nccl" and not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            raise ValueError("the engine 'nccl' needs GPUs and a torch with NCCL: on CPUs use 'gloo', or 'ring'")
        if spec.rank == 0:
            log.warning("the engine's connections (%s) are not authenticated: use them in a trusted network", name)

        def make() -> TorchBackend:
            return TorchBackend(spec, context.run.control, name, context.run.bind)

        return cls(spec, run_checked(make, lambda: context.check(None)))

    def __init__(self, spec: GroupSpec, backend: EngineBackend) -> None:
        super().__init__(spec)
        self.backend = backend

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """The engine's own, in place. Blocks."""
        work = self.backend.all_reduce(tensor, op)
        others = tuple(rank for rank in range(self.size) if rank != self.rank)
        wait = None
        while not self.finished(work, others):
            wait = wait or BoundedWait(self, others)
            wait.check()
            work.sleep(POLL_S)
        if op == "mean" and self.size > 1:
            tensor.div_(self.size)

    def finished(self, work: EngineWork, peers: tuple[int, ...]) -> bool:
        """Whether the work is done; raises the cause, rather than the engine's own error, if it went wrong."""
        try:
            return work.test()
        except EngineFailed as problem:
            raise self.lost_error(peers, problem) from None

    def abort(self, cause: HoraError) -> None:
        if self.cause is None:
            super().abort(cause)
            self.backend.abort()

    def _idle(self, transfer: Transfer, rounds: int) -> None:
        for pending in self._pending(transfer.channel):
            if isinstance(pending, _Message) and pending.works:
                pending.works[-1].sleep(min(POLL_S, 20e-6 * rounds))
                return

    def close(self) -> None:
        self.backend.close()


# -- torch.distributed -------------------------------------------------------------------------------------------------


class TorchBackend(EngineBackend):
    """A process group of our own, not torch's default one, so that a user's `init_process_group` stays possible."""

    def __init__(self, spec: GroupSpec, control: CoordinatorConnection, name: str, bind: str) -> None:
        import torch.distributed as dist

        self.name = name
        self._dist = dist
        limit = datetime.timedelta(seconds=spec.timeout_s + 60)  # our own wait gives up first, and says more
        store = open_store(f"{spec.name}/engine-{name}", spec, control, bind, limit)
        self._store = store
        prefixed = dist.PrefixStore(name, store)
        if name == "nccl":
            set_nccl_interface(bind)
            for setting in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_FR_BUFFER_SIZE"):
                os.environ.setdefault(setting, "0")  # Hora names calls and causes; a trace of every call costs time
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

    @property
    def process_group(self) -> Any:
        """torch's own, for calls that are ordered by streams and never block."""
        return self._group

    def _start(self, start: Callable[[], Any], wait: Callable[[Any], None] | None = None) -> EngineWork:
        """Starts on the caller's thread, which keeps the order of messages; another thread waits for the end."""
        try:
            work = start()
        except RuntimeError as problem:  # a connection that is known to be broken refuses at once
            return _Threaded(self._threads.submit(functools.partial(_raise, problem)))
        return _Threaded(self._threads.submit(work.wait if wait is None else lambda: wait(work)))

    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork:
        if self.name == "gloo" and tensor.dtype is torch.bool:
            raise ValueError("Gloo reduces no bools; use uint8, or an algorithm of Hora's own such as 'ring'")
        options = self._dist.AllreduceOptions()
        options.reduceOp = getattr(self._dist.ReduceOp, OPERATIONS[op][0])
        wait = functools.partial(self._synchronize, tensor.device) if tensor.is_cuda else None
        return self._start(lambda: self._group.allreduce([tensor], options), wait)

    @staticmethod
    def _synchronize(device: torch.device, work: Any) -> None:
        """NCCL's wait only orders streams; ours means that the result is there."""
        with torch.cuda.device(device):
            work.wait()
            torch.cuda.current_stream(device).synchronize()

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return self._start(lambda: self._group.send([tensor], peer, tag))

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return self._start(lambda: self._group.recv([tensor], peer, tag))

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            if self.name == "nccl":
                self._group.abort()
            else:
                # Gloo's own abort leaves a pending receive waiting. A receive that times out closes all connections,
                # which ends everything that is pending on them.
                nothing = self._group.recv([torch.zeros(1)], self._peer, ABORT_TAG)
                nothing.wait(datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        if not self._threads.idle:
            self.abort()
        self._threads.close(CLOSE_S)
        with contextlib.suppress(Exception):
            self._group.shutdown()


def open_store(key: str, spec: GroupSpec, control: CoordinatorConnection, bind: str, limit: datetime.timedelta) -> Any:
    """Collective: torch's TCPStore, which rank 0 hosts on the run's own address; its port is published as `key`."""
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


def set_nccl_interface(bind: str) -> None:
    """NCCL chooses an interface by itself; ours is the one that has this run's address."""
    if not interface.is_loopback(bind) and (found := interface.name_of(bind)):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={found}")


def run_checked(work: Callable[[], Any], check: Callable[[], None]) -> Any:
    """The result of `work`, which may block without end, on a thread of its own while this one calls `check`."""
    thread = TaskThread("hora-engine")
    handle = thread.submit(work)
    thread.close()
    while not handle.wait_done(POLL_S):
        check()
    return handle.wait()


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
            raise EngineFailed(f"the engine reports: {self._handle.error}") from None
        return self._handle.done

    def sleep(self, seconds: float) -> None:
        self._handle.wait_done(seconds)


def _raise(problem: Exception) -> None:
    raise problem


# -- MPI ---------------------------------------------------------------------------------------------------------------


class MpiBackend(EngineBackend):
    """MPI through mpi4py, for ranks that mpirun started: the group must be the whole of MPI's world."""

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

    def all_reduce(self, tensor: torch.Tensor, op: str) -> EngineWork:
        if tensor.dtype not in MPI_TYPES:
            raise ValueError(f"MPI reduces no {tensor.dtype}; use an algorithm of Hora's own such as 'ring'")
        data = [tensor_bytes(tensor), getattr(self._mpi, MPI_TYPES[tensor.dtype])]
        return _Request(self._comm.Iallreduce(self._mpi.IN_PLACE, data, getattr(self._mpi, OPERATIONS[op][1])))

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return _Request(self._comm.Isend([tensor_bytes(tensor), self._mpi.BYTE], peer, tag))

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> EngineWork:
        return _Request(self._comm.Irecv([tensor_bytes(tensor), self._mpi.BYTE], peer, tag))


class _Request(EngineWork):
    def __init__(self, request: Any) -> None:
        self._request = request

    def test(self) -> bool:
        return bool(self._request.Test())

    def sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + min(seconds, 0.001)  # MPI moves data only while it is polled
        while time.monotonic() < deadline and not self._request.Test():
            os.sched_yield()
