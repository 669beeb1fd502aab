"""The default number of parameter servers, from the measured speed of this machine's memory.

In one step each of n workers copies its S bytes of gradients in and S bytes of parameters out, and each of k servers
updates its share for every worker, n·S/k bytes:

    a worker   S · c_w         c_w: two copies of a byte, in and out
    a server   n · S/k · c_s   c_s: one update of a byte: gradient and parameter are read, and written where they lie

The servers do not delay the workers when n · S/k · c_s <= S · c_w. S cancels, so the smallest such number is

    k = ceil(n · c_s / c_w), at least 1, and at most the cores that n workers leave

Copies are timed as libc's memcpy, an update as its memcmp, which reads two streams too, on buffers larger than caches:
about 100 ms in all. The optimizer's arithmetic and state are left out, since the launcher knows neither the model nor
the optimizer; docs/PS.md has the table by which the rule was checked.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import time
from collections.abc import Callable

SAMPLE_BYTES = 64 << 20
REPEATS = 3
SLACK = 0.1  # a tenth of a server is not worth a process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerCosts:
    """Nanoseconds per byte of the model and step."""

    worker_ns: float
    server_ns: float


def measure() -> ServerCosts:
    """Times this machine's memory: the best of a few repeats, since other load can only add."""
    kind = ctypes.c_char * SAMPLE_BYTES
    one, other = bytearray(SAMPLE_BYTES), bytearray(SAMPLE_BYTES)
    here, there = (ctypes.addressof(kind.from_buffer(buffer)) for buffer in (one, other))
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    for address in (here, there):
        ctypes.memset(address, 1, SAMPLE_BYTES)  # pages are mapped now, and memcmp reads equal buffers to the end
    copy = _best(lambda: ctypes.memmove(here, there, SAMPLE_BYTES))
    read = _best(lambda: compare(here, there, SAMPLE_BYTES))
    return ServerCosts(worker_ns=2 * copy, server_ns=read)


def _best(work: Callable[[], object]) -> float:
    """Nanoseconds per byte."""
    took = []
    for _ in range(REPEATS):
        started_at = time.perf_counter_ns()
        work()
        took.append(time.perf_counter_ns() - started_at)
    return max(1, min(took)) / SAMPLE_BYTES


def default(workers: int, cores: int, costs: ServerCosts) -> tuple[int, str]:
    """The number of servers for so many workers, and one line that explains it."""
    needed = max(1, math.ceil(workers * costs.server_ns / costs.worker_ns - SLACK))
    left = max(1, cores - workers)
    count = max(1, min(needed, left))
    why = (
        f"{_count(count, 'server')} for {_count(workers, 'worker')}: a push-pull costs a worker {costs.worker_ns:.3f} "
        f"ns/byte here, its update a server {costs.server_ns:.3f}, so ⌈{workers} × {costs.server_ns:.3f} / "
        f"{costs.worker_ns:.3f}⌉ = {needed} would keep up"
    )
    if needed > left:
        spare = max(0, cores - workers)
        why += f", and of {_count(cores, 'core')} the workers leave {spare}"
    return count, f"{why}; --servers N to choose"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
