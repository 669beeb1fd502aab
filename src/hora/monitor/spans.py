"""Spans: what this process did and when, written to a file for the trace of the run (trace.py). Off until `open`.

    begin = spans.clock() if spans.on else 0
    …
    if spans.on:
        spans.add(spans.TRAINING, "forward", begin)

Off, a call site costs one test. On, `add` appends to a list, and a thread writes it to a file twice a second; a process
that is killed leaves what was written. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
The file has one line of JSON per span, after a header:

    {"spans": 1, "role": "worker", "rank": 0, "host": "a", "pid": 411, "clock": …, "perf_ns": …, "time_ns": …}
    ["training", "forward", begin, duration, {"further": "facts"}]
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
CHUNK = 500  # spans encoded at a time: the other threads wait that long for the GIL
MAX_SPANS = 1_000_000  # of one process

Span = tuple[str, str, int, int, dict[str, Any] | None]  # lane, name, begin, duration, facts

on = False
clock = time.perf_counter_ns
_pending: list[Span] = []
_writer: SpanWriter | None = None


def add(lane: str, name: str, begin: int, end: int = 0, **facts: Any) -> None:
    """A span from `begin` to `end`, or to now. Thread-safe. A `begin` of 0 is from before `open`: nothing is added."""
    if begin:
        _pending.append((lane, name, begin, (end or clock()) - begin, facts or None))


def since(seconds: float) -> int:
    """A time of time.perf_counter() as `add` takes it."""
    return int(seconds * 1e9)


@contextlib.contextmanager
def during(lane: str, name: str, **facts: Any) -> Iterator[None]:
    """The body is a span; not for hot code."""
    begin = clock() if on else 0
    try:
        yield
    finally:
        if on:
            add(lane, name, begin, **facts)


def open(directory: str, role: str, rank: int, host: str = "") -> None:
    """Write this process's spans to a file there from now on. If that fails, a warning is logged and there are none."""
    global on, _writer
    if _writer is not None:
        return
    try:
        _writer = SpanWriter(directory, role, rank, host or socket.gethostname())
    except OSError as error:
        log.warning("no trace of this process: %s", error)
        return
    on = True
    atexit.register(close)


def close() -> None:
    """Write what is left; idempotent."""
    global on, _writer
    on = False
    if _writer is not None:
        _writer.close()
        _writer = None


def _reset() -> None:
    """In a forked child, which has no writer thread."""
    global on, _writer
    on, _writer = False, None
    _pending.clear()


def _stop(text: str) -> None:
    global on
    on = False
    _pending.clear()
    log.warning("%s", text)


class SpanWriter:
    """The file, and the thread that writes it."""

    def __init__(self, directory: str, role: str, rank: int, host: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self.path = os.path.join(directory, f"{role}-{rank}{SUFFIX}")
        if os.path.exists(self.path):  # of another run, perhaps
            self.path = os.path.join(directory, f"{role}-{rank}-{os.getpid()}{SUFFIX}")
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
        self._num_written = 0
        self._encode_lines = msgspec.json.Encoder().encode_lines
        self._closing = threading.Event()
        header = {
            "spans": FORMAT, "role": role, "rank": rank, "host": host, "pid": os.getpid(), "clock": _clock_id(),
            "perf_ns": clock(), "time_ns": time.time_ns(),
        }  # fmt: skip
        self._file.write(self._encode_lines([header]))
        self._file.flush()
        self._thread = threading.Thread(target=self._run, name="hora-spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(FLUSH_S):
                self._flush()
            self._flush()
        except OSError as error:
            _stop(f"{self.path} cannot be written: {error}; the trace ends here, training continues")
        finally:
            with contextlib.suppress(OSError):
                self._file.close()

    def _flush(self) -> None:
        while _pending and self._num_written < MAX_SPANS:
            chunk = _pending[: min(CHUNK, MAX_SPANS - self._num_written)]
            del _pending[: len(chunk)]  # other threads append behind it meanwhile
            self._file.write(self._encode_lines(chunk))
            self._num_written += len(chunk)
        if self._num_written >= MAX_SPANS and on:
            text = f"the trace of this process ends here: it has {MAX_SPANS:,} spans, which is the limit"
            self._file.write(self._encode_lines([{"note": text}]))
            _stop(text)
        self._file.flush()


def _clock_id() -> str:
    """The clocks of processes with the same id can be compared."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


os.register_at_fork(after_in_child=_reset)
