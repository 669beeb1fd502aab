"""Reports as workers and servers send them, for the tests of what hears them."""

from __future__ import annotations

from typing import Any

from hora.coordinator.messages import Member
from hora.monitor.messages import MetricsRow, ServerReport, WorkerReport


def worker(rank: int, pid: int = 0) -> Member:
    return Member("worker", rank, "a", pid or 100 + rank)


def server(number: int) -> Member:
    return Member("server", number, "a", 200 + number)


def worker_report(step: int = 1, **fields: Any) -> WorkerReport:
    """One step of 100 ms, a fifth of it exposed communication, of 8 samples."""
    told: dict[str, Any] = {
        "sent_at": 1000.0, "step": step, "steps": 1, "seconds": 0.1, "exposed_s": 0.02, "comm_s": 0.04,
        "sent_bytes": 1000, "samples": 8, "computes": [0.08],
    }  # fmt: skip
    return WorkerReport(**{**told, **fields})


def row(step: int, before_s: float = 0.0, count: int = 1, **values: float) -> MetricsRow:
    """Logged `before_s` ahead of its report."""
    return MetricsRow(step, 1000.0 - before_s, count, values)


def server_report(number: int = 0, **fields: Any) -> ServerReport:
    told: dict[str, Any] = {
        "sent_at": 1000.0, "server": number, "seconds": 0.5, "updates": 10, "busy_s": 0.25, "bytes_in": 4000,
        "bytes_out": 2000, "queue": 3, "load_bytes": 1 << 20,
    }  # fmt: skip
    return ServerReport(**{**told, **fields})
