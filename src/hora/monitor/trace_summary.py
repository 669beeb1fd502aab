"""Summary of a trace in words: where the time of each rank went. Reads line by line what trace.py has written."""

from __future__ import annotations

import array
import collections
import dataclasses
import gzip
import statistics
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec

from .spans import COMMUNICATION, SERVER, TRAINING
from .trace import DEPTH, MAX_LINE_BYTES, VERSION

NOTABLE = 1.05  # times the others' work per step: from here on a rank is called slowest
OWN = ("data", "forward", "backward", "step")  # a worker's own work in a step
EXCHANGE = ("launch", "exchange", "push", "pull", "settle")  # communication on the training thread
COLUMNS = (*OWN, "exchange", "waiting", "evaluation", "checkpoint")
_DAMAGED = (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError)


class _Process(msgspec.Struct):
    pid: int
    role: str
    rank: int
    name: str


class _About(msgspec.Struct):
    hora: int
    processes: list[_Process] = []


class _FirstLine(msgspec.Struct):
    otherData: _About


class _Event(msgspec.Struct):
    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int = 0
    tid: int = 0
    args: dict[str, Any] = {}


class Intervals:
    """A set of time intervals, added in any order."""

    def __init__(self) -> None:
        self._edges = array.array("d")

    def add(self, begin: float, end: float) -> None:
        edges = self._edges
        if edges and edges[-2] <= begin <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        elif end > begin:
            edges.extend((begin, end))

    def union(self) -> list[tuple[float, float]]:
        """Ordered and disjoint."""
        found: list[tuple[float, float]] = []
        for begin, end in sorted(zip(self._edges[::2], self._edges[1::2], strict=True)):
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            else:
                found.append((begin, end))
        return found


def overlap(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The total time that is in both unions."""
    total, first = 0.0, 0
    for begin, end in ones:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        index = first
        while index < len(others) and others[index][0] < end:
            total += min(end, others[index][1]) - max(begin, others[index][0])
            index += 1
    return total


@dataclasses.dataclass
class RankTrace:
    """One process. Times in microseconds; `own` is by column, without the time of enclosed spans."""

    name: str
    role: str
    own: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    begin: float = float("inf")
    end: float = 0.0
    steps: int = 0
    updates: int = 0
    busy: float = 0.0
    served: tuple[float, float] | None = None
    hidden: Intervals = dataclasses.field(default_factory=Intervals)  # communication beside the training thread
    exposed: Intervals = dataclasses.field(default_factory=Intervals)  # communication of the training thread
    longest: _Event | None = None  # of its buckets
    _open: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=DEPTH)
    )

    def add(self, event: _Event) -> None:
        begin, end = event.ts, event.ts + event.dur
        if event.cat == TRAINING:
            self.begin, self.end = min(self.begin, begin), max(self.end, end)
            column = "exchange" if event.name in EXCHANGE else event.name
            self.own[column] += event.dur - self._enclosed(begin)
            self._open.append((begin, event.dur))
            self.steps += event.name == "step" and not event.args.get("optimizer")
            if column in ("exchange", "waiting"):
                self.exposed.add(begin, end)
        elif event.cat == COMMUNICATION:
            work = event.args.get("work_us")
            if isinstance(work, int | float):
                self.hidden.add(max(begin, end - work), end)
            if "bucket" in event.args and (self.longest is None or event.dur > self.longest.dur):
                self.longest = event
        elif event.cat == SERVER:
            first, last = self.served or (begin, end)
            self.served = min(first, begin), max(last, end)
            self.busy += event.dur if event.name == "serving" else 0.0
            self.updates += event.name == "update"

    def _enclosed(self, begin: float) -> float:
        """Total duration of the spans inside the newest span, which began at `begin`."""
        total = 0.0
        while self._open and self._open[-1][0] >= begin:
            total += self._open.pop()[1]
        return total

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin) / 1e6

    @property
    def work_s(self) -> float:
        """Its own work per step, user code included: without waiting, exchange, checkpoints and evaluation."""
        others = sum(time for name, time in self.own.items() if name in COLUMNS and name not in OWN)
        return max(0.0, self.seconds - others / 1e6) / max(1, self.steps)

    @property
    def waiting_s(self) -> float:
        return self.own["waiting"] / 1e6 / max(1, self.steps)

    def shares(self) -> dict[str, float]:
        """Shares of its time by column; `other` is user code and what has no span."""
        whole = max(1e-9, self.end - self.begin)
        found = {name: self.own[name] / whole for name in COLUMNS if self.own[name]}
        return {**found, "other": max(0.0, 1.0 - sum(found.values()))}

    def communication(self) -> tuple[float, float]:
        """Seconds that computation hid, and that it did not."""
        hidden, exposed = self.hidden.union(), self.exposed.union()
        hidden_us, exposed_us = (sum(end - begin for begin, end in each) for each in (hidden, exposed))
        return max(0.0, hidden_us - overlap(hidden, exposed)) / 1e6, exposed_us / 1e6


def read(path: str) -> tuple[list[RankTrace], str]:
    """All processes of a trace, and what could not be read, or "". ValueError if Hora has not written it."""
    try:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_gzip else open(path, "rb") as lines:
            ranks = {each.pid: RankTrace(_printable(each.name), each.role) for each in _processes(path, lines)}
            problem = ""
            try:
                for event in _events(lines):
                    if event.ph == "X" and event.pid in ranks:
                        ranks[event.pid].add(event)
            except _DAMAGED:
                problem = f"{path} is damaged or cut off: this is about what came before"
            return list(ranks.values()), problem
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _processes(path: str, file: Any) -> list[_Process]:
    try:
        about = msgspec.json.decode(file.readline(MAX_LINE_BYTES).rstrip() + b"]}", type=_FirstLine).otherData
    except _DAMAGED:
        raise ValueError(
            f"{path} is not a trace of Hora: hora run --trace FILE writes one; open others in ui.perfetto.dev"
        ) from None
    if about.hora != VERSION:
        raise ValueError(
            f"{path} was written by another version of Hora (trace version {about.hora}, this one reads {VERSION}): "
            "open it with that version, or in ui.perfetto.dev"
        )
    return about.processes


def _events(file: Any) -> Iterator[_Event]:
    decode = msgspec.json.Decoder(_Event).decode
    while line := file.readline(MAX_LINE_BYTES):
        text = line.rstrip().rstrip(b",")
        if text == b"]}":
            return
        yield decode(text)
    raise EOFError


def describe(ranks: list[RankTrace]) -> list[str]:
    """The summary, one fact per line."""
    workers = [rank for rank in ranks if rank.role == "worker" and rank.seconds]
    lines = [_overview(ranks, workers)]
    for rank in workers:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in rank.shares().items())
        lines.append(f"{rank.name}: {shares}")
    lines += _communication(workers)
    lines += _slowest([worker for worker in workers if worker.steps])
    lines += _longest_bucket(workers)
    for rank in ranks:
        if rank.served is not None:
            share = rank.busy / max(1e-9, rank.served[1] - rank.served[0])
            name = rank.name if rank.role == "server" else f"the server of {rank.name}"
            per_update = _duration(rank.busy / max(1, rank.updates) / 1e6)
            lines.append(
                f"{name}: busy {100 * share:.0f} % of the time, {rank.updates:,} block updates, {per_update} each"
            )
    return lines


def _overview(ranks: list[RankTrace], workers: list[RankTrace]) -> str:
    servers = sum(rank.role == "server" for rank in ranks)
    parts = [
        f"{count} {noun}{'s' if count != 1 else ''}" for count, noun in ((len(workers), "rank"), (servers, "server"))
    ]
    steps = max((worker.steps for worker in workers), default=0)
    seconds = max((worker.seconds for worker in workers), default=0.0)
    each = f", {_duration(seconds / steps)} each" if steps else ""
    return f"{' and '.join(parts if servers else parts[:1])}: {steps:,} steps in {_duration(seconds)}{each}"


def _communication(workers: list[RankTrace]) -> list[str]:
    each = [worker.communication() for worker in workers]
    hidden, exposed = sum(pair[0] for pair in each), sum(pair[1] for pair in each)
    steps = sum(worker.steps for worker in workers)
    if not steps or not hidden + exposed:
        return ["communication: none"] if workers else []
    share = 100 * hidden / (hidden + exposed)
    return [
        f"communication: {_duration((hidden + exposed) / steps)} per step and rank; "
        f"computation hid {share:.0f} % of it, {_duration(exposed / steps)} were exposed"
    ]


def _slowest(workers: list[RankTrace]) -> list[str]:
    """The rank with the most own work per step, if notably more than the others."""
    if len(workers) < 2:
        return []
    slowest = max(workers, key=lambda worker: worker.work_s)
    others = [worker for worker in workers if worker is not slowest]
    work_s = statistics.median(worker.work_s for worker in others)
    if slowest.work_s < NOTABLE * work_s:
        return ["no rank is slower than the others by 5 % or more"]
    waiting_s = statistics.median(worker.waiting_s for worker in others)
    who = "the others" if len(others) > 1 else others[0].name.partition(" (")[0]
    text = f"{slowest.name} is slowest: {_duration(slowest.work_s)} of own work per step, {who} {_duration(work_s)}"
    if waiting_s > slowest.waiting_s:
        text += f"; waiting per step: {_duration(slowest.waiting_s)}, {who} {_duration(waiting_s)}"
    return [text]


def _longest_bucket(workers: list[RankTrace]) -> list[str]:
    longest = [(worker.longest, worker) for worker in workers if worker.longest is not None]
    if not longest:
        return []
    event, worker = max(longest, key=lambda pair: pair[0].dur)
    size = event.args.get("bytes")
    of = f" for {size / 1e6:.2f} MB" if isinstance(size, int | float) else ""
    name, at = _printable(event.name), event.ts / 1e6
    return [f"longest communication: {name} of {worker.name}, {_duration(event.dur / 1e6)}{of}, at {at:.3f} s"]


def _printable(text: str) -> str:
    """Without control characters, which a terminal would interpret."""
    return "".join(char if char.isprintable() else "?" for char in text[:200])


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
