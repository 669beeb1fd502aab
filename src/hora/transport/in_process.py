"""Ranks as threads of one process: for tests, and for a world of one, which is a group without peers."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from .arena import PAGE, Arena, round_up
from .base import (
    SLICE_S,
    BoundedWait,
    GroupSpec,
    Land,
    RegisteredBuffer,
    Transfer,
    Transport,
    element_shares,
    page_shares,
)


class InProcessHub:
    """Where the threads of one run meet: the messages on their way and the memory they share."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.messages: dict[tuple[str, int, int, int], collections.deque[tuple[int, torch.Tensor]]] = {}
        self.shared: dict[str, Any] = {}

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """The one object under `key`, made by whoever comes first."""
        with self.news:
            if key not in self.shared:
                self.shared[key] = make()
            return self.shared[key]


class InProcessTransport(Transport):
    kind = "memory"
    shares_memory = True

    def __init__(self, spec: GroupSpec, hub: InProcessHub) -> None:
        super().__init__(spec)
        self.hub = hub

    def _send(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int) -> Transfer:
        return _Send(self, peer, channel, stamp, tensor)

    def _recv(self, peer: int, tensor: torch.Tensor, channel: int, stamp: int, land: Land) -> Transfer:
        return _Recv(self, peer, channel, stamp, tensor, land)

    def post(self, source: int, target: int, channel: int) -> collections.deque[tuple[int, torch.Tensor]]:
        key = (self.spec.name, source, target, channel)
        return self.hub.messages.setdefault(key, collections.deque())

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> RegisteredBuffer:
        key = f"{self.spec.name}/{name}"
        if self.size == 1:
            return InProcessBuffer(self, _Parts(1, numel, dtype))
        return InProcessBuffer(self, self.hub.once(key, lambda: _Parts(self.size, numel, dtype)))

    def _idle(self, handle: Transfer, rounds: int) -> None:
        with self.hub.news:
            if self.cause is None and not self.post(handle.peer, self.rank, handle.channel):
                self.hub.news.wait(SLICE_S)

    def _wake(self) -> None:
        with self.hub.news:
            self.hub.news.notify_all()


class _Send(Transfer):
    __slots__ = ("stamp", "tensor")

    def __init__(
        self, transport: InProcessTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor
    ) -> None:
        super().__init__(transport, peer, channel)
        self.stamp = stamp
        self.tensor = tensor

    def advance(self) -> bool:
        transport = self.transport
        assert isinstance(transport, InProcessTransport)
        with transport.hub.news:
            transport.post(transport.rank, self.peer, self.channel).append((self.stamp, self.tensor.clone()))
            transport.hub.news.notify_all()
        self.done = True
        return True


class _Recv(Transfer):
    __slots__ = ("land", "stamp", "tensor")

    def __init__(
        self, transport: InProcessTransport, peer: int, channel: int, stamp: int, tensor: torch.Tensor, land: Land
    ) -> None:
        super().__init__(transport, peer, channel)
        self.stamp = stamp
        self.tensor = tensor
        self.land = land

    def advance(self) -> bool:
        transport = self.transport
        assert isinstance(transport, InProcessTransport)
        with transport.hub.news:
            queue = transport.post(self.peer, transport.rank, self.channel)
            if not queue:
                return False
            stamp, data = queue.popleft()
        if stamp != self.stamp or data.dtype != self.tensor.dtype or data.numel() != self.tensor.numel():
            raise transport.watcher.differ(self.peer, self.channel)
        if data.numel():
            self.land(self.tensor, data)
        self.done = True
        return True


class _Parts:
    """The memory itself; the threads see it through one arena, a world of one needs none."""

    def __init__(self, size: int, numel: int, dtype: torch.dtype) -> None:
        self.flags = [0] * size
        self.stamps = [[0, 0] for _ in range(size)]
        part = max(PAGE, round_up(numel * dtype.itemsize, PAGE))
        cut = page_shares(part, size)
        self.shares = element_shares(cut, numel, dtype)
        if size == 1:
            self.peers = [torch.zeros(numel, dtype=dtype)]
            self.whole = self.peers[0]
            self.span = self.peers[0].view(torch.uint8)
            return
        descriptor = Arena.create(size * part)
        woven = [(rank * part + start, stop - start) for rank, (start, stop) in enumerate(cut)]
        arena = Arena(descriptor, size * part, woven)
        os.close(descriptor)
        self.peers = [arena.tensor(rank * part, numel, dtype) for rank in range(size)]
        self.whole = arena.whole(numel, dtype)
        self.span = arena.tensor(0, size * part, torch.uint8)


class InProcessBuffer(RegisteredBuffer):
    def __init__(self, transport: InProcessTransport, parts: _Parts) -> None:
        self._transport = transport
        self._parts = parts
        self.peers = parts.peers
        self.mine = parts.peers[transport.rank]
        self.whole = parts.whole
        self.span = parts.span
        self.shares = parts.shares

    def signal(self, value: int, stamp: int | None = None) -> None:
        with self._transport.hub.news:
            if stamp is not None:
                self._parts.stamps[self._transport.rank][(value >> 2) & 1] = stamp
            self._parts.flags[self._transport.rank] = value
            self._transport.hub.news.notify_all()

    def stamp_of(self, peer: int, value: int) -> int:
        return self._parts.stamps[peer][(value >> 2) & 1]

    def await_signal(self, peer: int, value: int) -> None:
        patience = None
        while self._parts.flags[peer] < value:
            patience = patience or BoundedWait(self._transport, (peer,))
            patience.check()
            with self._transport.hub.news:
                if self._parts.flags[peer] < value and self._transport.cause is None:
                    self._transport.hub.news.wait(SLICE_S)

    def await_all(self, value: int) -> None:
        for peer in range(self._transport.size):
            self.await_signal(peer, value)

    def reached(self, value: int) -> bool:
        rank = self._transport.rank
        return all(flag >= value for peer, flag in enumerate(self._parts.flags) if peer != rank)
