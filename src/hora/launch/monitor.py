"""Watcher: hears all that a run tells of itself, and keeps it, in the launcher's process and in a thread of its own.

Whoever tells it something never waits: what does not fit into its queue is dropped and counted. Nothing that it does,
and no disk that it writes to, ends a run or holds it up.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from .. import strategies
from ..coordinator.messages import Member
from ..monitor import json_lines
from ..monitor.json_lines import JsonLines
from ..monitor.messages import decode
from ..monitor.run_state import RunState
from ..monitor.status import RunEvent, RunStatus
from ..monitor.tensorboard import TensorBoard
from ..runs import database
from ..runs.database import RunDatabase
from ..runs.run_directory import DATABASE

EVERY_S = 0.25  # between two writes, at least
IDLE_S = 1.0  # the same, while nothing is heard
SLOWEST_S = 2.0
SHARE = 0.02  # of its time that the watcher may work: where a write costs more, there are fewer
CLOSE_S = 2.5
RECENT = 2
MAX_WAITING = 4096
MAX_WAITING_BYTES = 32 << 20
MANY_WAITING = 512  # these are heard at once


class RunMonitor:
    """`directory` is where the memory lies: the run's, or, if that is None or cannot be written, a temporary one which
    is removed at `close`. ValueError if another version's memory lies there, or TensorBoard's package is missing.

    All methods may be called from any thread and none waits for a disk, but `close`, for CLOSE_S at most. `warn` and
    `say` are called from the watcher's thread; `warn` at most once. What there is to say or to warn of while it closes
    is told before `close` returns, unless a disk hangs.
    """

    def __init__(
        self,
        run_directory: str | None,
        name: str,
        size: int,
        strategy: str,
        config_facts: Mapping[str, object],
        warn: Callable[[str], None],
        say: Callable[[str], None],
        tensorboard_dir: str | None = None,
        make_folder: Callable[[str], str] = lambda prefix: tempfile.mkdtemp(prefix=prefix),
    ) -> None:
        self._began_at = time.monotonic()
        self._warn, self._say = warn, say
        self._warned = False
        if run_directory is not None:
            database.check(os.path.join(run_directory, DATABASE))
        self._board = RunState(run=name, size=size)
        self._board.update(**_described(strategy))
        self._events = TensorBoard(tensorboard_dir, self._warn_once) if tensorboard_dir is not None else None
        self.temporary: str | None = None
        self._memory, self.directory = self._open_memory(run_directory, make_folder)
        self._memory.put("config", dict(config_facts))
        self._lines: JsonLines | None = None
        if run_directory is not None and self.directory == run_directory and not self._memory.failed:
            self._lines = JsonLines(os.path.join(run_directory, json_lines.NAME), self._warn_once)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._queue: collections.deque[tuple[float, Callable[[float], None], int]] = collections.deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._closing = False
        self._end_facts: dict[str, object] = {}
        self._now = self._board.status(0.0)
        self.recent: list[RunEvent] = []  # the newest events
        self._summary = self._board.summary()
        self._thread = threading.Thread(target=self._run, name="hora-watcher", daemon=True)
        self._thread.start()

    def hear(self, member: Member, body: bytes) -> None:
        """A report of that member, as it came."""
        self._put(lambda now: self._board.on_report(member, decode(body), now), len(body))

    def event(self, kind: str, who: str, text: str) -> None:
        """Something that the launcher or the coordinator has seen; see RunState.on_event."""
        self._put(lambda now: self._board.on_event(kind, who, text, now), len(text))

    def settle(
        self,
        *,
        strategy: str | None = None,
        algorithm: str | None = None,
        serving: str | None = None,
        waiting: str | None = None,
    ) -> None:
        """What has become known of the run; see RunState.update."""
        known = {**_described(strategy), "algorithm": algorithm, "serving": serving, "waiting": waiting}
        self._put(lambda now: self._board.update(**known), 0)

    def now(self) -> RunStatus:
        """The run as it was a moment ago. Nobody changes it, and its reader must not either."""
        return self._now

    @property
    def waiting(self) -> int:
        """How much was told and is not heard yet."""
        return len(self._queue)

    def close(self, end_facts: Mapping[str, object]) -> dict[str, object]:
        """Writes what is left and how the run ended, and returns the run in a few numbers."""
        with self._lock:
            self._end_facts = self._end_facts or dict(end_facts)
            self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._warn_once(
                f"the disk of {self.directory} does not answer; the end of what was seen may be missing there"
            )
        elif self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        return self._summary

    def _put(self, act: Callable[[float], None], size: int) -> None:
        with self._lock:
            full = len(self._queue) >= MAX_WAITING or self._queued_bytes + size > MAX_WAITING_BYTES
            if full or self._closing:
                self._dropped += 1
                return
            self._queue.append((time.monotonic() - self._began_at, act, size))
            self._queued_bytes += size
            many = len(self._queue) >= MANY_WAITING
        if many:
            self._wake.set()

    # -- the watcher's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as problem:  # a mistake in here must not show in the run
            self._warn_once(f"what is shown of the run stands still from now on: {problem!r}; the run goes on")

    def _watch(self) -> None:
        due, written_at = EVERY_S, 0.0
        while True:
            self._wake.wait(max(0.0, due - self._seconds()))
            self._wake.clear()
            begun = time.thread_time()
            closing = self._closing
            heard = self._hear_all()
            now = self._seconds()
            if closing:
                self._finish(now)
                return
            if now < due and not self._board.metrics.rows_half_full:
                continue
            self._look(now)
            if heard or now - written_at >= IDLE_S:
                self._write()
                written_at = now
            cost_s = time.thread_time() - begun
            due = now + min(SLOWEST_S, max(EVERY_S, cost_s / SHARE))

    def _hear_all(self) -> bool:
        with self._lock:
            waiting, self._queue = self._queue, collections.deque()
            self._queued_bytes = 0
            dropped, self._dropped = self._dropped, 0
        self._board.lost_reports += dropped
        for at, act, _ in waiting:
            try:
                act(at)
            except Exception:  # whatever it was told: the run is not to be harmed, and the others are still heard
                self._board.lost_reports += 1
        return bool(waiting)

    def _look(self, now: float) -> None:
        self._board.tick(now)
        self._now = self._board.status(now)
        self.recent = list(self._board.event_log.events)[-RECENT:]
        self._summary = self._board.summary(now)

    def _write(self) -> None:
        rows, events = self._board.metrics.take_rows(), self._board.event_log.take()
        for event in events:
            if event.kind in ("slow", "even"):
                self._say(event.text)
        if self._lines is not None:
            self._lines.write(rows, events)
        if self._events is not None:
            self._events.write(rows, self._board, self._now)
        self._memory.write(self._board, self._now)

    def _finish(self, now: float) -> None:
        if self._now.state != "ended" and not any(event.kind == "end" for event in self._board.event_log.events):
            cause = self._end_facts.get("cause")
            self._board.on_event("end", "", str(cause) if cause else "the run has ended", now)
        self._look(now)
        self._memory.put("end", self._end_facts)
        self._write()
        for kept in (self._lines, self._events, self._memory):
            if kept is not None:
                kept.close()

    def _seconds(self) -> float:
        return time.monotonic() - self._began_at

    # -- disks -------------------------------------------------------------------------------------------------------

    def _open_memory(self, directory: str | None, make_folder: Callable[[str], str]) -> tuple[RunDatabase, str]:
        if directory is not None:
            kept = RunDatabase(os.path.join(directory, DATABASE), self._warn_once)
            if not kept.failed:
                return kept, directory
        place = directory or tempfile.gettempdir()
        with contextlib.suppress(OSError):
            place = self.temporary = make_folder("hora-watch-")
        return RunDatabase(os.path.join(place, DATABASE), self._warn_once), place

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)


def _described(strategy: str | None) -> dict[str, Any]:
    """What a strategy, as it is spelled, says of itself; of one that is not known here, its spelling alone."""
    try:
        known = strategies.parse(strategy) if strategy else None
    except ValueError:
        known = None
    if known is None:
        return {"strategy": strategy}
    return {"strategy": strategy, "synchronous": known.synchronous, "topology": known.topology, "unit": known.unit}
