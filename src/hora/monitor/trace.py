"""Merging the span files of all processes of a run into one trace for ui.perfetto.dev and chrome://tracing.

Each process of the run is a process of the trace, and each of its lanes (training, communication, server) a thread. In
this format the spans of one thread must nest or follow each other; spans that overlap in a lane, as buckets in flight
do, get further threads. Times are microseconds since the first process began to record: processes of one host share a
clock, hosts are aligned by their time of day.

The file is JSON with one event per line, written as it is made: memory does not grow with the run.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import heapq
import itertools
import os
import pathlib
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from .spans import COMMUNICATION, FORMAT, SERVER, SUFFIX, TRAINING, Span

VERSION = 1  # of the traces that `hora trace` reads
WINDOW = 4096  # the spans of a file are ordered by their ends, except within this many
DEPTH = 1000  # spans of a lane that one span may enclose
LANES = (TRAINING, COMMUNICATION, SERVER)
MAX_THREADS = 100_000  # tids of one lane
MAX_LINE_BYTES = 1 << 20
BATCH = 1000  # events written at a time

_encode = msgspec.json.Encoder().encode


class SpanFileHeader(msgspec.Struct, frozen=True):
    """The first line of a span file."""

    spans: int
    role: str
    rank: int
    host: str
    pid: int
    clock: str
    perf_ns: int
    time_ns: int

    @property
    def name(self) -> str:
        who = f"rank {self.rank}" if self.role == "worker" else f"{self.role} {self.rank}"
        return f"{who} (host {self.host}, pid {self.pid})"


class TraceThreads:
    """Assigns the spans of one lane, in the order of their ends, to threads, so that those of a thread nest or follow
    each other. Without `nests` none may enclose another."""

    def __init__(self, nests: bool) -> None:
        self._nests = nests
        self._threads: list[collections.deque[tuple[int, int]]] = []  # spans that no other encloses yet

    def place(self, begin: int, end: int) -> int:
        number = self._nest(begin) if self._nests else self._follow(begin)
        if number == len(self._threads):
            self._threads.append(collections.deque(maxlen=DEPTH))
        self._threads[number].append((begin, end))
        return number

    def _nest(self, begin: int) -> int:
        """The first thread without a span in progress at `begin`; spans that began later are enclosed."""
        for number, spans in enumerate(self._threads):
            enclosed = 0
            while enclosed < len(spans) and spans[-1 - enclosed][0] >= begin:
                enclosed += 1
            if enclosed == len(spans) or spans[-1 - enclosed][1] <= begin:
                for _ in range(enclosed):
                    spans.pop()
                return number
        return len(self._threads)

    def _follow(self, begin: int) -> int:
        """Of the threads that are free at `begin`, the one that was busy last."""
        free = [(spans[-1][1], -number) for number, spans in enumerate(self._threads) if spans[-1][1] <= begin]
        return -max(free)[1] if free else len(self._threads)


class SpanFile:
    """The spans of one process. After iteration, `problem` says what could not be read."""

    def __init__(self, path: str) -> None:
        """ValueError if it has no valid header."""
        self.problem = ""
        self._path = path
        with open(path, "rb") as file:
            try:
                self.header = msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=SpanFileHeader)
            except msgspec.MsgspecError as error:
                raise ValueError(f"its first line is damaged: {error}") from None
        if self.header.spans != FORMAT:
            raise ValueError(f"it is of format {self.header.spans}, this version reads {FORMAT}")

    def __iter__(self) -> Iterator[Span]:
        """In the order of their ends, as far as WINDOW allows."""
        window: list[tuple[int, int, Span]] = []
        for number, span in enumerate(self._read()):
            item = (span[2] + span[3], number, span)
            if len(window) < WINDOW:
                heapq.heappush(window, item)
            else:
                yield heapq.heappushpop(window, item)[2]
        while window:
            yield heapq.heappop(window)[2]

    def _read(self) -> Iterator[Span]:
        decode = msgspec.json.Decoder(Span).decode
        damaged = 0
        with open(self._path, "rb") as file:
            file.readline(MAX_LINE_BYTES)
            while line := file.readline(MAX_LINE_BYTES):
                try:
                    span = decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    if line.startswith(b'{"note"'):
                        self.problem = str(msgspec.json.decode(line)["note"])
                    elif line.endswith(b"\n"):
                        damaged += 1  # else the process was killed while it wrote the line
                    continue
                if span[3] < 0:
                    damaged += 1
                    continue
                yield span
        if damaged:
            self.problem = f"{damaged} lines of it are damaged"


def merge(
    directory: str, path: str, facts: Mapping[str, str] | None = None, stop: Callable[[], bool] = lambda: False
) -> str:
    """Write `path` (compressed if it ends in .gz) from the span files in `directory`; returns a message for the user.

    ValueError if there are none, if `path` cannot be written, or if `stop()` becomes true; an earlier file at `path`
    is then still there."""
    files, problems = _span_files(directory)
    if not files:
        raise ValueError("; ".join(problems) or f"no process has left any spans in {directory}")
    temporary = os.path.join(os.path.dirname(path) or ".", f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file, contextlib.ExitStack() as stack:
            out: Any = stack.enter_context(gzip.GzipFile("", "wb", 4, file, 0)) if path.endswith(".gz") else file
            num_spans = _write(out, files, facts or {}, stop)
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    problems += [f"{file.header.name}: {file.problem}" for file in files if file.problem]
    spans = f"{num_spans:,} spans of {len(files)} process{'es' if len(files) > 1 else ''}"
    text = f"trace {path}: {spans}; open it in ui.perfetto.dev, or: hora trace {path} --summary"
    return f"{text} ({'; '.join(problems)})" if problems else text


def _span_files(directory: str) -> tuple[list[SpanFile], list[str]]:
    """Workers first, by rank; and why others are left out."""
    files, problems = [], []
    for path in sorted(pathlib.Path(directory).glob(f"*{SUFFIX}")):
        try:
            files.append(SpanFile(str(path)))
        except (OSError, ValueError) as error:
            problems.append(f"{path.name} is left out: {error}")
    return sorted(files, key=lambda file: (file.header.role != "worker", file.header.role, file.header.rank)), problems


def _write(out: IO[bytes], files: list[SpanFile], facts: Mapping[str, str], stop: Callable[[], bool]) -> int:
    offsets = _clock_offsets([file.header for file in files])
    zero = min(file.header.perf_ns + offsets[file.header.clock] for file in files)
    processes = [
        {"pid": pid, "role": file.header.role, "rank": file.header.rank, "name": file.header.name}
        for pid, file in enumerate(files, 1)
    ]
    about = {"hora": VERSION, "processes": processes, **facts}
    out.write(b'{"otherData":' + _encode(about) + b',"displayTimeUnit":"ms","traceEvents":[')
    num_spans, separator = 0, b"\n"
    for pid, file in enumerate(files, 1):
        events = _events(pid, file, zero - offsets[file.header.clock])
        while batch := list(itertools.islice(events, BATCH)):
            if stop():
                raise ValueError("interrupted while it was written")
            num_spans += sum(event["ph"] == "X" for event in batch)
            out.write(separator + b",\n".join(map(_encode, batch)))
            separator = b",\n"
    out.write(b"\n]}\n")
    return num_spans


def _clock_offsets(headers: list[SpanFileHeader]) -> dict[str, int]:
    """By clock: what to add to it so that all clocks agree on the time of day, up to a constant."""
    differences = collections.defaultdict(list)
    for header in headers:
        differences[header.clock].append(header.time_ns - header.perf_ns)
    medians = {clock: statistics.median_high(each) for clock, each in differences.items()}
    return {clock: median - medians[headers[0].clock] for clock, median in medians.items()}


def _events(pid: int, file: SpanFile, zero: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, name=file.header.name)
    yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    lanes = {lane: TraceThreads(nests=lane != COMMUNICATION) for lane in LANES}
    known: set[int] = set()
    queue = None
    for lane, name, begin, duration, facts in file:
        if lane not in lanes:
            continue
        thread = lanes[lane].place(begin, begin + duration)
        tid = (LANES.index(lane) + 1) * MAX_THREADS + thread
        if tid not in known:
            known.add(tid)
            yield _metadata("thread_name", pid, tid, name=f"{lane} {thread + 1}" if thread else lane)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
        at = max(0, begin - zero)
        event = {"ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid, "ts": at / 1e3, "dur": duration / 1e3}
        yield {**event, "args": facts} if facts else event
        if not facts:
            continue
        if "bucket" in facts:
            yield _flow(pid, tid, lane, f"{pid}.{begin}", at, duration)
        if facts.get("queue") != queue and "queue" in facts:
            queue = facts["queue"]
            yield {"ph": "C", "name": "queue", "pid": pid, "tid": tid, "ts": (at + duration) / 1e3,
                   "args": {"gradients": queue}}  # fmt: skip


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _flow(pid: int, tid: int, lane: str, number: str, at: int, duration: int) -> dict[str, Any]:
    """An arrow from a bucket's launch to its communication, which begin at the same time."""
    flow = {"name": "bucket", "cat": "bucket", "id": number, "pid": pid, "tid": tid}
    if lane == TRAINING:
        return {"ph": "s", **flow, "ts": at / 1e3}
    return {"ph": "f", "bp": "e", **flow, "ts": (at + duration // 2) / 1e3}
