"""Spans: what a process did, and from when to when, for the trace of its run (trace.py). Off until `open` was called.

    begin = spans.clock() if spans.on else 0
    …
    if spans.on:
        spans.add(spans.TRAINING, "forward", begin)

Off, a call site costs a test. On, `add` appends to a list and a thread writes that to a file, twice a second; a process
that is killed leaves what was written. All times are nanoseconds of CLOCK_MONOTONIC, the same for all processes of a
host. The file has a line of JSON for each span, after one that says who this is:

    {"spans": 1, "role": "worker", "rank": 0, "host": "a", "pid": 411, "clock": …, "perf_ns": …, "time_ns": …}
    ["training", "forward", begin, duration, {"what": "else"}]
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pathlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

log = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".spans"
TRAINING, COMMUNICATION, SERVER = "training", "communication", "server"  # the lanes
FLUSH_S = 0.5
CHUNK = 500  # spans that are written in one go: the other threads wait that long
MAX_SPANS = 1_000_000  # of one process

Span = tuple[str, str, int, int, dict[str, Any] | None]  # lane, name, begin, duration, facts

on = False
clock = time.perf_counter_ns
_pending: list[Span] = []
_writer: Writer | None = None


def add(lane: str, name: str, begin: int, end: int = 0, **facts: Any) -> None:
    """From `begin` to `end`, or to now. Thread-safe. A `begin` of 0 was before `open`: nothing is added."""
    if begin:
        _pending.append((lane, name, begin, (end or clock()) - begin, facts or None))


def since(seconds: float) -> int:
    """What time.perf_counter() said, as `add` wants it."""
    return int(seconds * 1e9)


@contextlib.contextmanager
def during(lane: str, name: str, **facts: Any) -> Iterator[None]:
    """What happens inside is a span; for what is rare."""
    begin = clock() if on else 0
    try:
        yield
    finally:
        if on:
            add(lane, name, begin, **facts)


def open(directory: str, role: str, rank: int, host: str = "") -> None:
    """From now on this process's spans are written there. If they cannot be, a warning says so, and there are none."""
    global on, _writer
    if _writer is not None:
        return
    try:
        _writer = Writer(directory, role, rank, host or socket.gethostname())
    except OSError as problem:
        log.warning("no trace of this process: %s", problem)
        return
    on = True
    atexit.register(close)


def close() -> None:
    """Writes what is left. Calling it again does nothing."""
    global on, _writer
    on = False
    if _writer is not None:
        _writer.end()
        _writer = None


def _forget() -> None:
    """In a child of this process, which has no thread that writes."""
    global on, _writer
    on, _writer = False, None
    _pending.clear()


def _give_up(text: str) -> None:
    global on
    on = False
    _pending.clear()
    log.warning("%s", text)


class Writer:
    """The file, and the thread that writes it."""

    def __init__(self, directory: str, role: str, rank: int, host: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, f"{role}-{rank}{SUFFIX}")
        if os.path.exists(self.path):  # another run's, perhaps
            self.path = os.path.join(directory, f"{role}-{rank}-{os.getpid()}{SUFFIX}")
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._num_written = 0
        self._encoder = msgspec.json.Encoder()
        self._ending = threading.Event()
        header = {
            "spans": FORMAT,
            "role": role,
            "rank": rank,
            "host": host,
            "pid": os.getpid(),
            "clock": _boot(),
            "perf_ns": clock(),
            "time_ns": time.time_ns(),
        }
        self._file.write(self._encoder.encode_lines([header]))
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="hora-spans", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.wait(FLUSH_S):
                self._flush()
            self._flush()
        except OSError as problem:
            _give_up(f"{self.path} cannot be written: {problem}; the trace ends here, the training goes on")
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def _flush(self) -> None:
        while _pending and self._num_written < MAX_SPANS:
            chunk = _pending[: min(CHUNK, MAX_SPANS - self._num_written)]
            del _pending[: len(chunk)]  # whoever appends meanwhile does so behind
            self._file.write(self._encoder.encode_lines(chunk))
            self._num_written += len(chunk)
        if self._num_written >= MAX_SPANS and on:
            text = f"the trace of this process ends here: it has {MAX_SPANS:,} spans, which is the limit"
            self._file.write(self._encoder.encode_lines([{"note": text}]))
            _give_up(text)
        self._file.flush()


def _boot() -> str:
    """Names the clock: processes for which it is the same can be compared by it."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


os.register_at_fork(after_in_child=_forget)
