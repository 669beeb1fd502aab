"""Trace: the span files of all processes of a run become one file that ui.perfetto.dev and chrome://tracing open.

Every process is one there, and each of its lanes a thread: `training`, `communication`, `server`. What overlaps in a
lane, as buckets on their way do, goes to threads of its own beside it, since in this format spans of one thread nest or
follow each other. All times are on one clock, in microseconds from the moment at which the first process began to
record: processes of one host share theirs, hosts are put beside each other by their time of day.

The file is JSON with one event per line, written as it comes: memory does not grow with the run.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import heapq
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import msgspec

from .spans import COMMUNICATION, FORMAT, SERVER, SUFFIX, TRAINING, Span

VERSION = 1  # of what `hora trace` reads
WINDOW = 4096  # spans of one file come in the order of their ends, but for so many
DEPTH = 1000  # neighbours in a lane that one span may enclose
LANES = (TRAINING, COMMUNICATION, SERVER)
TRACKS = 100_000  # tids of one lane
MAX_LINE_BYTES = 1 << 20

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
    """Deals the spans of one lane to threads, so that in each of them they nest or follow each other.

    They must come in the order of their ends. `nests`: one may enclose others; else it goes beside them."""

    def __init__(self, nests: bool) -> None:
        self._nests = nests
        self._tracks: list[collections.deque[tuple[int, int]]] = []  # spans that no other encloses yet

    def place(self, begin: int, end: int) -> int:
        number = self._nest(begin) if self._nests else self._follow(begin)
        if number == len(self._tracks):
            self._tracks.append(collections.deque(maxlen=DEPTH))
        self._tracks[number].append((begin, end))
        return number

    def _nest(self, begin: int) -> int:
        """The first thread in which nothing is under way at `begin`; those that began later are enclosed."""
        for number, track in enumerate(self._tracks):
            enclosed = 0
            while enclosed < len(track) and track[-1 - enclosed][0] >= begin:
                enclosed += 1
            if enclosed == len(track) or track[-1 - enclosed][1] <= begin:
                for _ in range(enclosed):
                    track.pop()
                return number
        return len(self._tracks)

    def _follow(self, begin: int) -> int:
        """The thread that is free at `begin` and was so for the shortest time."""
        free = [(track[-1][1], -number) for number, track in enumerate(self._tracks) if track[-1][1] <= begin]
        return -max(free)[1] if free else len(self._tracks)


class SpanFile:
    """One process's spans. `problem` says, after they were read, what of them could not be."""

    def __init__(self, path: str) -> None:
        """ValueError if it is none, or has no first line."""
        self.name = os.path.basename(path)
        self.problem = ""
        self._path = path
        with open(path, "rb") as file:
            try:
                self.header = msgspec.json.decode(file.readline(MAX_LINE_BYTES), type=SpanFileHeader)
            except msgspec.MsgspecError as problem:
                raise ValueError(f"its first line is damaged: {problem}") from None
        if self.header.spans != FORMAT:
            raise ValueError(f"it is of format {self.header.spans}, this version reads {FORMAT}")

    def __iter__(self) -> Iterator[Span]:
        """In the order of their ends, as nearly as they were written in it."""
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
                        damaged += 1  # else its process was killed as it wrote
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
    """Writes `path` (compressed if it ends in .gz) out of the span files there; a sentence that says so.

    ValueError if there are none, or `path` cannot be written; then a file that was there before is still there."""
    files, problems = _files(directory)
    if not files:
        raise ValueError("; ".join(problems) or f"no process has left any spans in {directory}")
    temporary = os.path.join(os.path.dirname(path) or ".", f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    try:
        try:
            with _open(temporary, compressed=path.endswith(".gz")) as out:
                num_spans = _write(out, files, facts or {}, stop)
            os.replace(temporary, path)
        except OSError as problem:
            raise ValueError(f"{path} cannot be written: {problem.strerror or problem}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    problems += [f"{file.header.name}: {file.problem}" for file in files if file.problem]
    many = f"{num_spans:,} spans of {len(files)} process{'es' if len(files) > 1 else ''}"
    words = f"trace {path}: {many}; open it in ui.perfetto.dev, or: hora trace {path} --summary"
    return f"{words} ({'; '.join(problems)})" if problems else words


def _files(directory: str) -> tuple[list[SpanFile], list[str]]:
    """Workers first, by rank; and what is wrong with others."""
    files, problems = [], []
    for path in sorted(pathlib.Path(directory).glob(f"*{SUFFIX}")):
        try:
            files.append(SpanFile(str(path)))
        except (OSError, ValueError) as problem:
            problems.append(f"{path.name} is left out: {problem}")
    return sorted(files, key=lambda file: (file.header.role != "worker", file.header.role, file.header.rank)), problems


@contextlib.contextmanager
def _open(path: str, compressed: bool) -> Iterator[IO[bytes]]:
    with open(path, "xb") as file:
        if compressed:
            with gzip.GzipFile("", "wb", 4, file, mtime=0) as out:
                yield out  # type: ignore[misc]
        else:
            yield file


def _write(out: IO[bytes], files: list[SpanFile], facts: Mapping[str, str], stop: Callable[[], bool]) -> int:
    shifts = _shifts([file.header for file in files])
    zero = min(file.header.perf_ns + shifts[file.header.clock] for file in files)
    processes = [
        {"pid": pid, "role": file.header.role, "rank": file.header.rank, "name": file.header.name}
        for pid, file in enumerate(files, 1)
    ]
    about = {"hora": VERSION, "processes": processes, **facts}
    out.write(b'{"otherData":' + _encode(about) + b',"displayTimeUnit":"ms","traceEvents":[\n')
    num_spans = 0
    first = True
    for pid, file in enumerate(files, 1):
        lines = []
        for event in _events(pid, file, zero - shifts[file.header.clock]):
            num_spans += event["ph"] == "X"
            lines.append(_encode(event))
            if len(lines) == 1000:
                if stop():
                    raise ValueError("interrupted while it was put together")
                out.write((b"" if first else b",\n") + b",\n".join(lines))
                lines, first = [], False
        if lines:
            out.write((b"" if first else b",\n") + b",\n".join(lines))
            first = False
    out.write(b"\n]}\n")
    return num_spans


def _shifts(headers: list[SpanFileHeader]) -> dict[str, int]:
    """By clock: what is added to it, so that all agree on the time of day, up to a constant."""
    days = collections.defaultdict(list)
    for header in headers:
        days[header.clock].append(header.time_ns - header.perf_ns)
    between = {clock: sorted(each)[len(each) // 2] for clock, each in days.items()}
    first = between[headers[0].clock]
    return {clock: day - first for clock, day in between.items()}


def _events(pid: int, file: SpanFile, zero: int) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name=file.header.name)
    yield _meta("process_sort_index", pid, 0, sort_index=pid)
    lanes = {lane: TraceThreads(nests=lane != COMMUNICATION) for lane in LANES}
    known: set[int] = set()
    queue = None
    for lane, name, begin, duration, facts in file:
        if lane not in lanes:
            continue
        track = lanes[lane].place(begin, begin + duration)
        tid = (LANES.index(lane) + 1) * TRACKS + track
        if tid not in known:
            known.add(tid)
            yield _meta("thread_name", pid, tid, name=f"{lane} {track + 1}" if track else lane)
            yield _meta("thread_sort_index", pid, tid, sort_index=tid)
        at = max(0, begin - zero)
        event = {"ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid, "ts": at / 1e3, "dur": duration / 1e3}
        yield {**event, "args": facts} if facts else event
        if not facts:
            continue
        if "bucket" in facts:
            yield _arrow(pid, tid, lane, f"{pid}.{begin}", at, duration)
        if facts.get("queue") != queue and "queue" in facts:
            queue = facts["queue"]
            yield {"ph": "C", "name": "queue", "pid": pid, "tid": tid, "ts": (at + duration) / 1e3,
                   "args": {"gradients": queue}}  # fmt: skip


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _arrow(pid: int, tid: int, lane: str, number: str, at: int, duration: int) -> dict[str, Any]:
    """From a bucket's launch to its journey, which begin at the same time."""
    arrow = {"name": "bucket", "cat": "bucket", "id": number, "pid": pid, "tid": tid}
    if lane == TRAINING:
        return {"ph": "s", **arrow, "ts": at / 1e3}
    return {"ph": "f", "bp": "e", **arrow, "ts": (at + duration // 2) / 1e3}
