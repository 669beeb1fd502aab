"""RemoteDataset: a dataset that only one rank has, read by the others batch by batch over TCP.

    reader                                      source, a thread per connection
      loader, indices of the samples   ──▶      reads and collates them
                                       ◀──      the batch: its structure as plain values, its tensors as bytes

A request is a length and msgpack. A response is the lengths of its two parts and the parts: msgpack [error, structure],
and a safetensors file. Nothing is pickled. Both ends prove the run's token.

The source reads one batch at a time, for others and for itself: the dataset need not be thread-safe. Readers that
prefetch do so in worker processes, each with a connection of its own. Each sample is sent once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from .. import checkpoint
from ..checkpoint.tensor_file import TensorFile
from ..coordinator import CoordinatorEvent
from ..errors import HoraError, PeerLost, Timeout
from ..net import handshake
from ..net.fork import forget_after_fork
from ..net.framing import recv_exactly
from ..net.handshake import connect
from ..rendezvous.context import RunContext

log = logging.getLogger(__name__)

PURPOSE = "samples"
SLOW_S = 10.0  # a longer wait is logged
MAX_REQUEST_BYTES = 256 << 20
_REQUEST = struct.Struct("<I")
_RESPONSE = struct.Struct("<IQ")


class SampleExchange:
    """Sends samples of this process's datasets to other ranks, and makes RemoteDatasets of theirs. `close` once."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._control = context.control
        self._offered: dict[int, tuple[ServedDataset, Callable[[list[Any]], Any]]] = {}
        self._listener: handshake.AuthenticatedListener | None = None
        self._address: tuple[str, int] | None = None
        self._connections: set[socket.socket] = set()
        self._remotes: list[RemoteDataset] = []
        self._lock = threading.Lock()
        self._gone: dict[int, str] = {}  # ranks that have ended, and why
        self._closed = False
        self._control.subscribe(self._on_event)
        forget_after_fork(self)

    # -- the source ----------------------------------------------------------------------------------------------------

    def offer(self, number: int, dataset: Any, collate: Callable[[list[Any]], Any]) -> ServedDataset:
        """Offers `dataset` to the other ranks as that of loader `number`. This rank must read the returned one."""
        offered = ServedDataset(dataset)
        self._offered[number] = (offered, collate)
        if self._listener is None:
            bind = self._context.bind
            family = socket.AF_INET6 if ":" in bind else socket.AF_INET
            sock = socket.create_server((bind, 0), family=family, backlog=128)
            self._address = (bind, sock.getsockname()[1])
            self._listener = handshake.AuthenticatedListener(sock, self._context.token, PURPOSE, self._accept)
        self._publish(number, {"address": self._address, "num_samples": len(offered)})
        return offered

    def refuse(self, number: int, why: str) -> None:
        """This rank has no dataset for this loader: the others raise the same error."""
        self._publish(number, {"error": f"rank {self._context.rank} cannot send samples: {why}"})

    def _publish(self, number: int, offer: dict[str, Any]) -> None:
        self._control.put(f"samples/{number}", msgspec.msgpack.encode(offer))

    def _accept(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._closed:
                sock.close()
                return
            self._connections.add(sock)
        threading.Thread(target=self._serve, args=(sock,), name="hora-samples", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while True:
                (length,) = _REQUEST.unpack(recv_exactly(sock, _REQUEST.size))
                if length > MAX_REQUEST_BYTES:
                    raise ValueError(f"request of {length} bytes")
                number, indices = msgspec.msgpack.decode(recv_exactly(sock, length), type=tuple[int, list[int]])
                head, body = self._read(number, indices)
                sock.sendall(_RESPONSE.pack(len(head), len(body)) + head)
                sock.sendall(body)
        except (OSError, ValueError, msgspec.MsgspecError) as problem:
            if not isinstance(problem, ConnectionError):
                log.info("dropped a reader of samples: %s", problem)
        finally:
            sock.close()
            with self._lock:
                self._connections.discard(sock)

    def _read(self, number: int, indices: list[int]) -> tuple[bytes, bytes]:
        try:
            offered, collate = self._offered[number]
            return pack(collate(offered.__getitems__(indices)))
        except Exception as error:  # the dataset's own, of any kind: raised by the rank that asked
            text = f"rank {self._context.rank} could not send samples: {type(error).__name__}: {error}"
            return msgspec.msgpack.encode([text, None]), b""

    # -- the readers ---------------------------------------------------------------------------------------------------

    def receive(self, number: int, source: int) -> RemoteDataset:
        """The dataset of loader `number`, which rank `source` has. Blocks until it has offered it."""
        if all((member.role, member.rank) != ("worker", source) for member in self._control.members()):
            self._gone.setdefault(source, "it is not in the run")
        timeout_s = self._context.timeout_s
        value = self._control.get(f"samples/{number}", timeout_s, check=lambda: self._check(source))
        offer = msgspec.msgpack.decode(value)
        if offer.get("error"):
            raise HoraError(offer["error"])
        host, port = offer["address"]
        remote = RemoteDataset((host, port), self._context.token, number, source, offer["num_samples"], timeout_s)
        remote.connect()  # now: the source stays as long as a reader is connected
        self._remotes.append(remote)
        return remote

    def _check(self, source: int) -> None:
        if source in self._gone:
            raise PeerLost(
                f"rank {self._context.rank} waits for samples of rank {source}, which has ended: {self._gone[source]}",
                (source,),
            )

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.kind in ("died", "left") and event.member is not None and event.member.role == "worker":
            self._gone[event.member.rank] = event.text

    def close(self, linger_s: float) -> None:
        """Reports that this rank reads no more. A source waits until all others have done so or ended."""
        if self._remotes:
            with contextlib.suppress(HoraError):
                self._control.put(_finished_key(self._context.rank), b"")
        for remote in self._remotes:
            remote.close()
        if self._listener is None:
            return
        if linger_s > 0:
            with contextlib.suppress(HoraError):  # Timeout, or no coordinator any more
                self._await_readers(linger_s)
        self._listener.close()
        with self._lock:
            self._closed = True
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _await_readers(self, linger_s: float) -> None:
        deadline = time.monotonic() + linger_s
        for member in self._control.members():
            if member.role == "worker" and member.rank != self._context.rank:
                with contextlib.suppress(PeerLost):
                    self._control.get(
                        _finished_key(member.rank),
                        max(0.1, deadline - time.monotonic()),
                        check=lambda rank=member.rank: self._check(rank),  # type: ignore[misc]
                    )

    def forget(self) -> None:
        """In a forked child: closes the inherited descriptors, so that the end of this process is noticed at once."""
        if self._listener is not None:
            self._listener.forget()
        for sock in self._connections:
            sock.close()


class ServedDataset:
    """The source's dataset, read by one thread at a time. Its length is fixed when it is offered."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._length = len(dataset)
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._pid != os.getpid():
            self._renew()  # another thread of the parent may have held its lock at the fork
        with self._lock:
            if hasattr(self.dataset, "__getitems__"):
                return self.dataset.__getitems__(indices)
            return [self.dataset[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_length": self._length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()


@dataclasses.dataclass(eq=False)
class RemoteDataset:
    """The dataset of the rank `source`. It returns whole collated batches: use `as_is` to collate them."""

    address: tuple[str, int]
    token: bytes = dataclasses.field(repr=False)
    number: int  # of the loader
    source: int
    num_samples: int
    timeout_s: float
    _sock: socket.socket | None = None
    _pid: int = 0  # of the process that has connected

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        self.connect()
        assert self._sock is not None
        body = msgspec.msgpack.encode([self.number, indices])
        try:
            self._sock.settimeout(self.timeout_s)
            self._sock.sendall(_REQUEST.pack(len(body)) + body)
            self._await()
            head_bytes, body_bytes = _RESPONSE.unpack(recv_exactly(self._sock, _RESPONSE.size))
            head, data = recv_exactly(self._sock, head_bytes), recv_exactly(self._sock, body_bytes)
        except TimeoutError:
            self.close()
            raise Timeout(f"rank {self.source} has sent no samples for {self.timeout_s:.0f} s") from None
        except OSError as problem:
            self.close()
            raise PeerLost(f"rank {self.source}, which has the dataset, has ended: {problem}", (self.source,)) from None
        error, batch = unpack(head, data)
        if error:
            raise HoraError(error)
        return batch

    def _await(self) -> None:
        """Waits until the response begins; logs a long wait."""
        assert self._sock is not None
        started, patience = time.monotonic(), SLOW_S
        poller = select.poll()  # select() takes no descriptor beyond 1023
        poller.register(self._sock, select.POLLIN)
        while not poller.poll(patience * 1000):
            waited = time.monotonic() - started
            if waited >= self.timeout_s:
                raise TimeoutError
            log.warning("waited %.0f s for samples of rank %d", waited, self.source)
            patience = min(2 * patience, max(0.1, self.timeout_s - waited))

    def connect(self) -> None:
        """Connects, unless this process has done so: an inherited connection is its parent's."""
        if self._sock is not None and self._pid == os.getpid():
            return
        if self._sock is not None:
            self._sock.close()
        try:
            self._sock = connect(self.address, self.token, PURPOSE, min(30.0, self.timeout_s))
        except HoraError as problem:
            raise PeerLost(f"rank {self.source} sends no samples any more: {problem}", (self.source,)) from None
        self._pid = os.getpid()

    def close(self) -> None:
        if self._sock is not None and self._pid == os.getpid():
            self._sock.close()
            self._sock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sock": None}


def _finished_key(rank: int) -> str:
    """The coordinator's key that says that this rank reads no more; a source that waits long prints it."""
    return f"samples/read by rank {rank}"


def as_is(batch: Any) -> Any:
    """Collates batches that the source has collated."""
    return batch


def pack(batch: Any) -> tuple[bytes, bytes]:
    """A batch as plain values and tensors; ValueError names what cannot be sent."""
    try:
        plain, tensors = checkpoint.encode(batch)
        data = b"".join(bytes(piece) for piece in TensorFile("the batch", tensors).pieces())
    except ValueError as error:
        problem = str(error).replace(", which a checkpoint cannot hold", "").replace("the tree", "the batch")
        raise ValueError(
            f"{problem}; batches for other ranks may hold dense tensors, numbers, strings, lists, tuples and dicts: "
            "collate_fn must make these"
        ) from None
    return msgspec.msgpack.encode(["", plain]), data


def unpack(head: bytes, data: bytes) -> tuple[str, Any]:
    """What `pack` made: an error, or the batch."""
    error, plain = msgspec.msgpack.decode(head, type=tuple[str, Any])
    return error, None if error else checkpoint.decode(plain, checkpoint.parse(data, "a batch from another rank"))
