"""The "memory" transport: ranks are threads of one process. For tests, and for a world of one."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .arena import round_up
from .base import POLL_S, BoundedWait, GroupSpec, RegisteredBuffer, Transfer, Transport

if TYPE_CHECKING:
    from .context import TransportContext


class InProcessHub:
    """What the threads of one run share: the messages in flight and the registered memory."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.messages: dict[tuple[str, int, int, int], collections.deque[tuple[int, torch.Tensor]]] = {}
        self.shared: dict[str, Any] = {}

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The one object under `key`, made by the first rank that asks."""
        with self.changed:
            if key not in self.shared:
                self.shared[key] = make()
            return self.shared[key]


class _Send(Transfer):
    transport: InProcessTransport

    def advance(self) -> bool:
        transport = self.transport
        with transport.hub.changed:
            queue = transport.queue(transport.rank, self.peer, self.channel)
            queue.append((self.fingerprint, self.tensor.clone()))
            transport.hub.changed.notify_all()
        self.done = True
        return True


class _Recv(Transfer):
    transport: InProcessTransport

    def advance(self) -> bool:
        transport = self.transport
        with transport.hub.changed:
            queue = transport.queue(self.peer, transport.rank, self.channel)
            if not queue:
                return False
            fingerprint, data = queue.popleft()
        tensor = self.tensor
        if fingerprint != self.fingerprint or data.dtype != tensor.dtype or data.numel() != tensor.numel():
            raise transport.observer.mismatch(self.peer, self.channel)
        if data.numel():
            (self.combine or torch.Tensor.copy_)(tensor, data)
        self.done = True
        return True


class InProcessTransport(Transport):
    kind = "memory"
    auto_order = 0
    limits_rate = True  # it sends nothing
    shares_memory = True
    send_transfer, recv_transfer = _Send, _Recv

    @classmethod
    def usable(cls, context: TransportContext, spec: GroupSpec) -> bool:
        return context.hub is not None

    @classmethod
    def open(cls, context: TransportContext, spec: GroupSpec, option: str = "") -> Transport:
        if context.hub is None:
            raise ValueError("the memory transport connects threads of one process, not processes")
        return cls(spec, context.hub)

    def __init__(self, spec: GroupSpec, hub: InProcessHub) -> None:
        super().__init__(spec)
        self.hub = hub

    def queue(self, source: int, target: int, channel: int) -> collections.deque[tuple[int, torch.Tensor]]:
        return self.hub.messages.setdefault((self.spec.name, source, target, channel), collections.deque())

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        if self.size == 1:
            return InProcessBuffer(self, _Parts(1, numel, dtype))
        key = f"{self.spec.name}/{name}"
        return InProcessBuffer(self, self.hub.once(key, lambda: _Parts(self.size, numel, dtype)))

    def _idle(self, transfer: Transfer, rounds: int) -> None:
        with self.hub.changed:
            if self.cause is None and not self.queue(transfer.peer, self.rank, transfer.channel):
                self.hub.changed.wait(POLL_S)

    def _wake(self) -> None:
        with self.hub.changed:
            self.hub.changed.notify_all()


class _Parts:
    """The memory of all ranks, their flags and fingerprints."""

    def __init__(self, size: int, numel: int, dtype: torch.dtype) -> None:
        self.flags = [0] * size
        self.fingerprints = [[0, 0] for _ in range(size)]
        num_bytes = numel * dtype.itemsize
        stride = round_up(num_bytes, 128)
        self.storage = torch.zeros(size * stride, dtype=torch.uint8)
        self.peers = [self.storage[at : at + num_bytes].view(dtype) for at in range(0, size * stride, stride)]


class InProcessBuffer(RegisteredBuffer):
    def __init__(self, transport: InProcessTransport, parts: _Parts) -> None:
        self._transport = transport
        self._parts = parts
        self.peers = parts.peers
        self.mine = parts.peers[transport.rank]
        self.storage = parts.storage

    def signal(self, value: int, fingerprint: int | None = None) -> None:
        with self._transport.hub.changed:
            if fingerprint is not None:
                self._parts.fingerprints[self._transport.rank][(value >> 2) & 1] = fingerprint
            self._parts.flags[self._transport.rank] = value
            self._transport.hub.changed.notify_all()

    def fingerprint_of(self, peer: int, value: int) -> int:
        return self._parts.fingerprints[peer][(value >> 2) & 1]

    def await_signal(self, peer: int, value: int) -> None:
        wait = None
        while self._parts.flags[peer] < value:
            wait = wait or BoundedWait(self._transport, (peer,))
            wait.check()
            with self._transport.hub.changed:
                if self._parts.flags[peer] < value and self._transport.cause is None:
                    self._transport.hub.changed.wait(POLL_S)

    def await_all(self, value: int) -> None:
        for peer in range(self._transport.size):
            self.await_signal(peer, value)

    def reached(self, value: int) -> bool:
        rank = self._transport.rank
        return all(flag >= value for peer, flag in enumerate(self._parts.flags) if peer != rank)
