"""InProcessCoordinator: a coordinator in this process, for ranks that are threads and for a run of one process."""

from __future__ import annotations

import threading

from .connection import CoordinatorConnection
from .messages import AnyRequest
from .state import Coordinator, Out


class InProcessCoordinator:
    """Calls the state machine directly. `connect()` makes a member's connection; `died` is the launcher's report."""

    def __init__(self, size: int, servers: int = 0) -> None:
        self.coordinator = Coordinator(size, servers)
        self._connections: list[InProcessConnection] = []
        self._lock = threading.RLock()

    def connect(self) -> InProcessConnection:
        with self._lock:
            self._connections.append(InProcessConnection(self, len(self._connections)))
            return self._connections[-1]

    def died(self, rank: int, reason: str, role: str = "worker") -> None:
        with self._lock:
            self._deliver(self.coordinator.died(role, rank, reason))

    def handle(self, number: int, request: AnyRequest) -> None:
        with self._lock:
            self._deliver(self.coordinator.handle(number, request))

    def _deliver(self, out: Out) -> None:
        for number, answer in out:
            self._connections[number]._receive(answer)


class InProcessConnection(CoordinatorConnection):
    def __init__(self, hub: InProcessCoordinator, number: int) -> None:
        super().__init__()
        self._hub = hub
        self._number = number

    def _transmit(self, request: AnyRequest) -> None:
        self._hub.handle(self._number, request)

    def close(self) -> None:
        self._break("closed")
