"""Where the time of a trace went, in words. It reads what trace.py has written, line by line."""

from __future__ import annotations

import array
import collections
import dataclasses
import gzip
import statistics
import zlib
from collections.abc import Iterator
from typing import IO, Any

import msgspec

from .spans import COMMUNICATION, SERVER, TRAINING
from .trace import DEPTH, MAX_LINE_BYTES, VERSION

SLOWER = 1.05  # than the others: from here on it is worth a word
OWN = ("data", "forward", "backward", "step")  # what a worker does by itself, in a step
EXCHANGE = ("launch", "exchange", "push", "pull", "settle")  # communication that the training thread does
COLUMNS = (*OWN, "exchange", "waiting", "evaluation", "checkpoint")


class _Process(msgspec.Struct):
    pid: int
    role: str
    rank: int
    name: str


class _About(msgspec.Struct):
    hora: int
    processes: list[_Process] = []


class _First(msgspec.Struct):
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
    """A set of intervals of time, as they come."""

    def __init__(self) -> None:
        self._edges = array.array("d")

    def add(self, begin: float, end: float) -> None:
        edges = self._edges
        if edges and edges[-2] <= begin <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        elif end > begin:
            edges.extend((begin, end))

    def union(self) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        for begin, end in sorted(zip(self._edges[::2], self._edges[1::2], strict=True)):
            if found and begin <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], end))
            else:
                found.append((begin, end))
        return found


def length(stretches: list[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in stretches)


def common(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """How long both are under way; each is in order and does not overlap itself."""
    total, at = 0.0, 0
    for begin, end in ones:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        look = at
        while look < len(others) and others[look][0] < end:
            total += min(end, others[look][1]) - max(begin, others[look][0])
            look += 1
    return total


@dataclasses.dataclass
class RankTrace:
    """One process. Times in microseconds; those in `own` are without what spans enclose."""

    name: str
    role: str
    own: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    begin: float = float("inf")
    end: float = 0.0
    steps: int = 0
    updates: int = 0
    busy: float = 0.0
    served: tuple[float, float] | None = None
    work: Intervals = dataclasses.field(default_factory=Intervals)  # communication beside the training thread
    open: Intervals = dataclasses.field(default_factory=Intervals)  # that of the training thread
    longest: _Event | None = None  # of its buckets
    _above: collections.deque[tuple[float, float]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=DEPTH)
    )

    def hear(self, event: _Event) -> None:
        begin, end = event.ts, event.ts + event.dur
        if event.cat == TRAINING:
            self.begin, self.end = min(self.begin, begin), max(self.end, end)
            self.own[_column(event.name)] += event.dur - self._enclosed(begin)
            self._above.append((begin, event.dur))
            self.steps += event.name == "step" and not event.args.get("optimizer")
            if event.name in EXCHANGE or event.name == "waiting":
                self.open.add(begin, end)
        elif event.cat == COMMUNICATION:
            work = event.args.get("work_us")
            if isinstance(work, int | float):
                self.work.add(max(begin, end - work), end)
            if "bucket" in event.args and (self.longest is None or event.dur > self.longest.dur):
                self.longest = event
        elif event.cat == SERVER:
            first, last = self.served or (begin, end)
            self.served = min(first, begin), max(last, end)
            self.busy += event.dur if event.name == "serving" else 0.0
            self.updates += event.name == "update"

    def _enclosed(self, begin: float) -> float:
        """How much of a span that begins then, and is the newest to end, others have had that lie in it."""
        total = 0.0
        while self._above and self._above[-1][0] >= begin:
            total += self._above.pop()[1]
        return total

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin) / 1e6

    @property
    def work_s(self) -> float:
        """Its own work per step, the user's code included: all but what it waited, exchanged, saved or evaluated."""
        others = sum(time for name, time in self.own.items() if name in COLUMNS and name not in OWN)
        return max(0.0, self.seconds - others / 1e6) / max(1, self.steps)

    @property
    def waiting_s(self) -> float:
        return self.own["waiting"] / 1e6 / max(1, self.steps)

    def shares(self) -> dict[str, float]:
        """Of its time, by what it was spent on; `other` is the user's own code, and what has no span."""
        whole = max(1e-9, self.end - self.begin)
        found = {name: self.own[name] / whole for name in COLUMNS if self.own[name]}
        return {**found, "other": max(0.0, 1.0 - sum(found.values()))}

    def communication(self) -> tuple[float, float]:
        """Seconds of it that computation hid, and that it did not."""
        work, exposed = self.work.union(), self.open.union()
        return max(0.0, length(work) - common(work, exposed)) / 1e6, length(exposed) / 1e6


def _column(name: str) -> str:
    return "exchange" if name in EXCHANGE else name


def read(path: str) -> tuple[list[RankTrace], str]:
    """All processes of a trace, and what of it could not be read, if anything. ValueError if it is none of Hora's."""
    try:
        with _open(path) as file:
            about = _about(path, file)
            ranks = {each.pid: RankTrace(_plain(each.name), each.role) for each in about.processes}
            problem = ""
            try:
                for event in _events(file):
                    if event.ph == "X" and event.pid in ranks:
                        ranks[event.pid].hear(event)
            except (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
                problem = f"{path} is damaged or cut off: this is about what came before"
            return list(ranks.values()), problem
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _open(path: str) -> IO[bytes]:
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_gzip else open(path, "rb")  # type: ignore[return-value]


def _about(path: str, file: IO[bytes]) -> _About:
    try:
        line = file.readline(MAX_LINE_BYTES).rstrip()
        about = msgspec.json.decode(line + b"]}", type=_First).otherData
    except (msgspec.MsgspecError, EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError):
        raise ValueError(
            f"{path} is no trace that Hora has written: hora run --trace FILE writes one; others can be opened in "
            "ui.perfetto.dev"
        ) from None
    if about.hora != VERSION:
        raise ValueError(
            f"{path} was written by another version of Hora (its traces are of version {about.hora}, this one reads "
            f"{VERSION}): open it with that version, or in ui.perfetto.dev"
        )
    return about


def _events(file: IO[bytes]) -> Iterator[_Event]:
    decode = msgspec.json.Decoder(_Event).decode
    while line := file.readline(MAX_LINE_BYTES):
        text = line.rstrip().rstrip(b",")
        if text == b"]}":
            return
        yield decode(text)
    raise EOFError


def describe(ranks: list[RankTrace]) -> list[str]:
    """What there is to say, one line each."""
    workers = [rank for rank in ranks if rank.role == "worker" and rank.seconds]
    lines = [_about_all(ranks, workers)]
    for rank in workers:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in rank.shares().items())
        lines.append(f"{rank.name}: {shares}")
    lines += _about_communication(workers)
    lines += _about_slowest([worker for worker in workers if worker.steps])
    lines += _about_buckets(workers)
    for rank in ranks:
        if rank.served is not None:
            whole = max(1e-9, rank.served[1] - rank.served[0])
            whose = "" if rank.role == "server" else "the server of "
            each = rank.busy / max(1, rank.updates) / 1e6
            lines.append(
                f"{whose}{rank.name}: busy {100 * rank.busy / whole:.0f} % of the time, {rank.updates:,} updates of "
                f"blocks, {_time(each)} of work for each"
            )
    return lines


def _about_all(ranks: list[RankTrace], workers: list[RankTrace]) -> str:
    servers = sum(rank.role == "server" for rank in ranks)
    parts = [f"{len(workers)} rank{'s' if len(workers) != 1 else ''}"]
    if servers:
        parts.append(f"{servers} server{'s' if servers != 1 else ''}")
    steps = max((worker.steps for worker in workers), default=0)
    seconds = max((worker.seconds for worker in workers), default=0.0)
    each = f", {_time(seconds / steps)} each" if steps else ""
    return f"{' and '.join(parts)}: {steps:,} steps in {_time(seconds)}{each}"


def _about_communication(workers: list[RankTrace]) -> list[str]:
    each = [worker.communication() for worker in workers]
    hidden, exposed = sum(pair[0] for pair in each), sum(pair[1] for pair in each)
    steps = sum(worker.steps for worker in workers)
    if not steps or not hidden + exposed:
        return ["communication: none"] if workers else []
    share = 100 * hidden / (hidden + exposed)
    return [
        f"communication: {_time((hidden + exposed) / steps)} per step and rank; computation hid {share:.0f} % of it, "
        f"{_time(exposed / steps)} were exposed"
    ]


def _about_slowest(workers: list[RankTrace]) -> list[str]:
    """Whose own work per step is longest, if it is so by enough for others to wait."""
    if len(workers) < 2:
        return []
    slowest = max(workers, key=lambda worker: worker.work_s)
    others = [worker for worker in workers if worker is not slowest]
    theirs = statistics.median(worker.work_s for worker in others)
    if slowest.work_s < SLOWER * theirs:
        return ["no rank is slower than the others by 5 % or more"]
    waiting = statistics.median(worker.waiting_s for worker in others)
    who = ("the others", "they wait") if len(others) > 1 else (others[0].name.partition(" (")[0], "that one waits")
    text = f"{slowest.name} is slowest: {_time(slowest.work_s)} of work of its own per step, {who[0]} {_time(theirs)}"
    if waiting > slowest.waiting_s:
        text += f"; {who[1]} {_time(waiting)} per step, it {_time(slowest.waiting_s)}"
    return [text]


def _about_buckets(workers: list[RankTrace]) -> list[str]:
    longest = [(worker.longest, worker) for worker in workers if worker.longest is not None]
    if not longest:
        return []
    event, worker = max(longest, key=lambda pair: pair[0].dur)
    size = event.args.get("bytes")
    of = f" for {size / 1e6:.2f} MB" if isinstance(size, int | float) else ""
    return [f"the longest journey: {_plain(event.name)} of {worker.name}, {_time(event.dur / 1e6)}{of}, "
            f"at {event.ts / 1e6:.3f} s"]  # fmt: skip


def _plain(text: str) -> str:
    """Without anything that a terminal would act on."""
    return "".join(sign if sign.isprintable() else "?" for sign in text[:200])


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
