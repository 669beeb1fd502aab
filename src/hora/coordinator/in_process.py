"""The coordinator inside one process: for ranks that are threads, and for a world of one."""

from __future__ import annotations

import threading
import time

from .connection import CoordinatorConnection
from .messages import AnyRequest
from .state import Coordinator, Out


class InProcessCoordinator:
    """Drives the state machine directly. `line()` is one member's Control; `died` plays the launcher's part."""

    def __init__(self, size: int, servers: int = 0) -> None:
        self.coordinator = Coordinator(size, servers)
        self._lines: dict[int, InProcessConnection] = {}
        self._order = threading.RLock()

    def connect(self) -> InProcessConnection:
        with self._order:
            line = InProcessConnection(self, len(self._lines))
            self._lines[line.number] = line
            return line

    def died(self, rank: int, reason: str, role: str = "worker") -> None:
        with self._order:
            self._deliver(self.coordinator.died(role, rank, reason))

    def handle(self, number: int, request: AnyRequest) -> None:
        with self._order:
            self._deliver(self.coordinator.handle(number, request, time.monotonic()))

    def _deliver(self, out: Out) -> None:
        for number, answer in out:
            self._lines[number]._receive(answer)


class InProcessConnection(CoordinatorConnection):
    def __init__(self, hub: InProcessCoordinator, number: int) -> None:
        super().__init__()
        self.number = number
        self._hub = hub

    def _transmit(self, request: AnyRequest) -> None:
        self._hub.handle(self.number, request)

    def close(self) -> None:
        self._break("closed")
