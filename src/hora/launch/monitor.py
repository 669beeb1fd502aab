"""RunMonitor: the thread of the launcher that turns reports and events into the run's state, and writes them to disk.

Callers never wait: what does not fit into its queue is dropped and counted. Neither an error in here nor a slow disk
ends or delays a run.
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
IDLE_S = 1.0  # the same, while nothing arrives
SLOWEST_S = 2.0
SHARE = 0.02  # of its time that the thread may work: where a write costs more, there are fewer
CLOSE_S = 2.5
RECENT = 2
MAX_WAITING = 4096
MAX_WAITING_BYTES = 32 << 20
MANY_WAITING = 512  # these wake the thread


class RunMonitor:
    """`directory` has the run database: the run's directory, or, if that is None or cannot be written, a temporary one
    that is removed at `close`. ValueError if a database of another version is there, or TensorBoard is not installed.

    Thread-safe. Only `close` waits for a disk, for CLOSE_S at most. `warn` and `log` are called from the monitor's
    thread, `warn` at most once; unless a disk hangs, not after `close` has returned.
    """

    def __init__(
        self,
        run_directory: str | None,
        name: str,
        size: int,
        strategy: str,
        config_facts: Mapping[str, object],
        warn: Callable[[str], None],
        log: Callable[[str], None],
        tensorboard_dir: str | None = None,
        make_folder: Callable[[str], str] = lambda prefix: tempfile.mkdtemp(prefix=prefix),
    ) -> None:
        self._began_at = time.monotonic()
        self._warn, self._log = warn, log
        self._warned = False
        if run_directory is not None:
            database.check(os.path.join(run_directory, DATABASE))
        self._state = RunState(run=name, size=size)
        self._state.update(**_described(strategy))
        self._tensorboard = TensorBoard(tensorboard_dir, self._warn_once) if tensorboard_dir is not None else None
        self.temporary: str | None = None
        self._database, self.directory = self._open_database(run_directory, make_folder)
        self._database.put("config", dict(config_facts))
        self._json_lines: JsonLines | None = None
        if run_directory is not None and self.directory == run_directory and not self._database.failed:
            self._json_lines = JsonLines(os.path.join(run_directory, json_lines.NAME), self._warn_once)
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._queue: collections.deque[tuple[float, Callable[[float], None], int]] = collections.deque()
        self._queued_bytes = 0
        self._dropped = 0
        self._closing = False
        self._end_facts: dict[str, object] = {}
        self._status = self._state.status(0.0)
        self.recent: list[RunEvent] = []  # the newest events
        self._summary = self._status.summary()
        self._thread = threading.Thread(target=self._run, name="hora-monitor", daemon=True)
        self._thread.start()

    def on_report(self, member: Member, body: bytes) -> None:
        """A report of that member, still encoded."""
        self._put(lambda now: self._state.on_report(member, decode(body), now), len(body))

    def on_event(self, kind: str, who: str, text: str) -> None:
        """See RunState.on_event."""
        self._put(lambda now: self._state.on_event(kind, who, text, now), len(text))

    def update(
        self,
        *,
        strategy: str | None = None,
        algorithm: str | None = None,
        serving: str | None = None,
        waiting: str | None = None,
    ) -> None:
        """See RunState.update."""
        known = {**_described(strategy), "algorithm": algorithm, "serving": serving, "waiting": waiting}
        self._put(lambda now: self._state.update(**known), 0)

    def status(self) -> RunStatus:
        """The run as it was a moment ago; not to be modified."""
        return self._status

    @property
    def num_queued(self) -> int:
        """Reports and events that are not handled yet."""
        return len(self._queue)

    def close(self, end_facts: Mapping[str, object]) -> dict[str, object]:
        """Writes what is left and how the run ended, and returns the run's summary."""
        with self._lock:
            timeout_s = 0.0 if self._closing else CLOSE_S  # a second call does not wait for a hanging disk again
            self._end_facts = self._end_facts or dict(end_facts)
            self._closing = True
        self._woken.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn_once(f"the disk of {self.directory} does not answer; the last reports may be missing there")
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
            self._woken.set()

    # -- the monitor's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as problem:  # an error in here must not end the run
            self._warn_once(f"the run is not monitored any more: {problem!r}; the run goes on")

    def _loop(self) -> None:
        due, written_at = EVERY_S, 0.0
        while True:
            self._woken.wait(max(0.0, due - self._elapsed_s()))
            self._woken.clear()
            begun = time.thread_time()
            closing = self._closing
            handled = self._handle_queued()
            now = self._elapsed_s()
            if closing:
                self._finish(now)
                return
            if now < due and not self._state.metrics.rows_half_full:
                continue
            self._refresh(now)
            if handled or now - written_at >= IDLE_S:
                self._write()
                written_at = now
            cost_s = time.thread_time() - begun
            due = now + min(SLOWEST_S, max(EVERY_S, cost_s / SHARE))

    def _handle_queued(self) -> bool:
        with self._lock:
            waiting, self._queue = self._queue, collections.deque()
            self._queued_bytes = 0
            dropped, self._dropped = self._dropped, 0
        self._state.lost_reports += dropped
        for at, act, _ in waiting:
            try:
                act(at)
            except Exception:  # a malformed report must affect neither the run nor the other reports
                self._state.lost_reports += 1
        return bool(waiting)

    def _refresh(self, now: float) -> None:
        self._state.tick(now)
        self._status = self._state.status(now)
        self.recent = list(self._state.event_log.events)[-RECENT:]
        self._summary = self._status.summary()

    def _write(self) -> None:
        rows, events = self._state.metrics.take_rows(), self._state.event_log.take()
        for event in events:
            if event.kind in ("slow", "even"):
                self._log(event.text)
        if self._json_lines is not None:
            self._json_lines.write(rows, events)
        if self._tensorboard is not None:
            self._tensorboard.write(rows, self._state, self._status)
        self._database.write(self._state, self._status)

    def _finish(self, now: float) -> None:
        if self._status.state != "ended" and not any(event.kind == "end" for event in self._state.event_log.events):
            cause = self._end_facts.get("cause")
            self._state.on_event("end", "", str(cause) if cause else "the run has ended", now)
        self._refresh(now)
        self._database.put("end", self._end_facts)
        self._write()
        for writer in (self._json_lines, self._tensorboard, self._database):
            if writer is not None:
                writer.close()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_at

    # -- disks -------------------------------------------------------------------------------------------------------

    def _open_database(self, directory: str | None, make_folder: Callable[[str], str]) -> tuple[RunDatabase, str]:
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
    """The properties of a strategy that RunState needs; for an unknown one, its spelling alone."""
    try:
        known = strategies.parse(strategy) if strategy else None
    except ValueError:
        known = None
    if known is None:
        return {"strategy": strategy}
    return {"strategy": strategy, "synchronous": known.synchronous, "topology": known.topology, "unit": known.unit}
