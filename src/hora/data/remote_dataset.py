"""Handout: a dataset that lies with one rank only, handed out to the others batch by batch.

    reader                                      source, a thread per connection
      loader, numbers of the samples   ──▶      reads and collates them
                                       ◀──      the nest of the batch as plain values, and its tensors as bytes

A request is one frame of the control protocol's kind (a length and msgpack). An answer is the lengths of its two parts
and the parts: msgpack [error, plain], and a safetensors file. Nothing is pickled. Both ends prove the run's token.

The source reads for others and for itself one batch at a time: a dataset need not bear two threads. Readers that
prefetch do so in processes of their own, each with a connection of its own. Each sample travels once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from .. import checkpoint
from ..checkpoint.tensor_file import TensorFile
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..errors import HoraError, PeerLost, Timeout
from ..net import handshake
from ..net.framing import recv_exactly
from ..net.handshake import connect

log = logging.getLogger(__name__)

PURPOSE = "samples"
SLOW_S = 10.0  # after this long a wait is said aloud
MAX_REQUEST_BYTES = 256 << 20
_ASK = struct.Struct("<I")
_ANSWER = struct.Struct("<IQ")


class SampleExchange:
    """One per process that hands out samples, or is handed some. `close` once."""

    def __init__(self, control: CoordinatorConnection, rank: int, token: bytes, bind: str, timeout_s: float) -> None:
        self.rank = rank
        self._control = control
        self._token = token
        self._bind = bind
        self._timeout_s = timeout_s
        self._offered: dict[int, tuple[ServedDataset, Callable[[list[Any]], Any]]] = {}
        self._listener: handshake.AuthenticatedListener | None = None
        self._address: tuple[str, int] | None = None
        self._connections: set[socket.socket] = set()
        self._remotes: list[RemoteDataset] = []
        self._order = threading.Lock()
        self._gone: dict[int, str] = {}  # ranks that have ended, and why
        self._closed = False
        control.subscribe(self._hear)
        _forget_after_fork(self)

    # -- the source --------------------------------------------------------------------------------------------------

    def offer(self, number: int, dataset: Any, collate: Callable[[list[Any]], Any]) -> ServedDataset:
        """The samples of `dataset` are there for everybody, as those of loader `number`. For the source's own reading
        use what this returns."""
        offered = ServedDataset(dataset)
        self._offered[number] = (offered, collate)
        if self._listener is None:
            family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
            sock = socket.create_server((self._bind, 0), family=family, backlog=128)
            self._address = (self._bind, sock.getsockname()[1])
            self._listener = handshake.AuthenticatedListener(sock, self._token, PURPOSE, self._welcome)
        self._announce(number, {"address": self._address, "num_samples": len(offered)})
        return offered

    def refuse(self, number: int, why: str) -> None:
        """The source has nothing to hand out for this loader: the others raise the same error."""
        self._announce(number, {"error": f"rank {self.rank} has no samples to hand out: {why}"})

    def _announce(self, number: int, words: dict[str, Any]) -> None:
        self._control.put(f"samples/{number}", msgspec.msgpack.encode(words))

    def _welcome(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._order:
            if self._closed:
                sock.close()
                return
            self._connections.add(sock)
        threading.Thread(target=self._serve, args=(sock,), name="hora-samples", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            while True:
                (length,) = _ASK.unpack(recv_exactly(sock, _ASK.size))
                if length > MAX_REQUEST_BYTES:
                    raise ValueError(f"a request announces {length} bytes")
                number, numbers = msgspec.msgpack.decode(recv_exactly(sock, length), type=tuple[int, list[int]])
                head, body = self._read(number, numbers)
                sock.sendall(_ANSWER.pack(len(head), len(body)) + head)
                sock.sendall(body)
        except (OSError, ValueError, msgspec.MsgspecError) as problem:
            if not isinstance(problem, ConnectionError):
                log.info("a reader of samples was dropped: %s", problem)
        finally:
            sock.close()
            with self._order:
                self._connections.discard(sock)

    def _read(self, number: int, numbers: list[int]) -> tuple[bytes, bytes]:
        try:
            offered, collate = self._offered[number]
            return pack(collate(offered.__getitems__(numbers)))
        except Exception as error:  # the dataset's own, of any kind: it belongs to whoever asked
            words = f"rank {self.rank} could not hand out samples: {type(error).__name__}: {error}"
            return msgspec.msgpack.encode([words, None]), b""

    # -- the others --------------------------------------------------------------------------------------------------

    def receive(self, number: int, source: int) -> RemoteDataset:
        """The samples of loader `number`, which lie with rank `source`. Blocks until it has offered them."""
        if all((member.role, member.rank) != ("worker", source) for member in self._control.members()):
            self._gone.setdefault(source, "it is not in the run")
        value = self._control.get(f"samples/{number}", self._timeout_s, check=lambda: self._check(source))
        words = msgspec.msgpack.decode(value)
        if words.get("error"):
            raise HoraError(words["error"])
        host, port = words["address"]
        remote = RemoteDataset((host, port), self._token, number, source, words["num_samples"], self._timeout_s)
        remote.connect()  # now: the source stays as long as somebody is connected
        self._remotes.append(remote)
        return remote

    def _check(self, source: int) -> None:
        if source in self._gone:
            raise PeerLost(
                f"rank {self.rank} waits for samples of rank {source}, which has ended: {self._gone[source]}", (source,)
            )

    def _hear(self, event: CoordinatorEvent) -> None:
        if event.kind in ("died", "left") and event.member is not None and event.member.role == "worker":
            self._gone[event.member.rank] = event.text

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self, linger_s: float) -> None:
        """Says that this worker reads no more; then, as a source, waits until all others have said so or are gone."""
        if self._remotes:
            with contextlib.suppress(HoraError):
                self._control.put(_has_read(self.rank), b"")
        for remote in self._remotes:
            remote.close()
        if self._listener is None:
            return
        if linger_s > 0:
            with contextlib.suppress(HoraError):  # the line to the coordinator, or the patience, is at its end
                self._await_readers(linger_s)
        self._listener.close()
        with self._order:
            self._closed = True
            for sock in self._connections:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _await_readers(self, linger_s: float) -> None:
        deadline = time.monotonic() + linger_s
        for member in self._control.members():
            if member.role == "worker" and member.rank != self.rank:
                with contextlib.suppress(PeerLost):
                    self._control.get(
                        _has_read(member.rank),
                        max(0.1, deadline - time.monotonic()),
                        check=lambda rank=member.rank: self._check(rank),  # type: ignore[misc]
                    )

    def forget(self) -> None:
        """In a forked child: drops the inherited descriptors, so that the end of this process is seen at once."""
        if self._listener is not None:
            self._listener.forget()
        for sock in self._connections:
            sock.close()


class ServedDataset:
    """The source's dataset, read by one thread at a time. Its length is what it was when it was offered."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._length = len(dataset)
        self._renew()

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if self._pid != os.getpid():
            self._renew()  # the parent's may have been held by another thread at the fork
        with self._lock:
            if hasattr(self.dataset, "__getitems__"):
                return self.dataset.__getitems__(numbers)
            return [self.dataset[number] for number in numbers]

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_length": self._length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()


class RemoteDataset:
    """Samples that lie with another rank. Whole batches are asked for, and come collated: collate them by `as_is`."""

    def __init__(
        self, address: tuple[str, int], token: bytes, number: int, source: int, num_samples: int, timeout_s: float
    ) -> None:
        self._address = address
        self._token = token
        self._number = number
        self._source = source
        self._length = num_samples
        self._timeout_s = timeout_s
        self._sock: socket.socket | None = None
        self._pid = 0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])

    def __getitems__(self, numbers: list[int]) -> Any:
        self.connect()
        assert self._sock is not None
        body = msgspec.msgpack.encode([self._number, numbers])
        try:
            self._sock.settimeout(self._timeout_s)
            self._sock.sendall(_ASK.pack(len(body)) + body)
            self._await()
            head_bytes, body_bytes = _ANSWER.unpack(recv_exactly(self._sock, _ANSWER.size))
            head, data = recv_exactly(self._sock, head_bytes), recv_exactly(self._sock, body_bytes)
        except TimeoutError:
            self.close()
            raise Timeout(f"rank {self._source} has handed out no samples for {self._timeout_s:.0f} s") from None
        except OSError as problem:
            self.close()
            raise PeerLost(
                f"rank {self._source}, which hands out the samples, has ended ({problem}): a dataset that lies with "
                "one rank ends with it",
                (self._source,),
            ) from None
        error, batch = unpack(head, data)
        if error:
            raise HoraError(error)
        return batch

    def _await(self) -> None:
        """Until the answer begins to come; says so if that takes long."""
        assert self._sock is not None
        started, patience = time.monotonic(), SLOW_S
        poller = select.poll()  # select() takes no descriptor beyond 1023
        poller.register(self._sock, select.POLLIN)
        while not poller.poll(patience * 1000):
            waited = time.monotonic() - started
            if waited >= self._timeout_s:
                raise TimeoutError
            log.warning("waited %.0f s for rank %d to hand out samples", waited, self._source)
            patience = min(2 * patience, max(0.1, self._timeout_s - waited))

    def connect(self) -> None:
        """Each process has its own connection: one that was inherited is its parent's."""
        if self._sock is not None and self._pid == os.getpid():
            return
        if self._sock is not None:
            self._sock.close()
        try:
            self._sock = connect(self._address, self._token, PURPOSE, min(30.0, self._timeout_s))
        except HoraError as problem:
            raise PeerLost(f"rank {self._source} hands out no samples any more: {problem}", (self._source,)) from None
        self._pid = os.getpid()

    def close(self) -> None:
        if self._sock is not None and self._pid == os.getpid():
            self._sock.close()
            self._sock = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sock": None}


def _has_read(rank: int) -> str:
    """A key of the coordinator's; it shows when the source waits long."""
    return f"rank {rank} has read its last samples"


def as_is(batch: Any) -> Any:
    """Collates what has been collated where it lay."""
    return batch


def pack(batch: Any) -> tuple[bytes, bytes]:
    """A batch as plain values and tensors; ValueError names what cannot travel."""
    try:
        plain, tensors = checkpoint.encode(batch)
        data = b"".join(bytes(piece) for piece in TensorFile("the batch", tensors).pieces())
    except ValueError as error:
        problem = str(error).replace(", which a checkpoint cannot hold", "").replace("the tree", "the batch")
        raise ValueError(
            f"{problem}; what is handed out to other ranks holds dense tensors, numbers, strings, lists, tuples and "
            "dicts: let collate_fn make these"
        ) from None
    return msgspec.msgpack.encode(["", plain]), data


def unpack(head: bytes, data: bytes) -> tuple[str, Any]:
    """What `pack` made: an error, or the batch."""
    error, plain = msgspec.msgpack.decode(head, type=tuple[str, Any])
    return error, None if error else checkpoint.decode(plain, checkpoint.parse(data, "a batch that was handed out"))


def _forget_after_fork(handout: SampleExchange) -> None:
    known = weakref.ref(handout)

    def forget() -> None:
        there = known()
        if there is not None:
            there.forget()

    os.register_at_fork(after_in_child=forget)
