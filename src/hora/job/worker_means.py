"""WorkerMeans: the mean over all workers of a value that each of them gives from time to time."""

from __future__ import annotations

import collections
import math
import threading

import msgspec

from ..coordinator import CoordinatorConnection, CoordinatorEvent

FIRST_S = 1.0  # at the first call: how long to wait for values of all workers; later only those that came are expected
WAIT_S = 0.25  # at later calls, where workers step together
TOPIC = "mean "  # of the messages, followed by the number of the value


class WorkerMeans:
    """Where workers step `together` the k-th values of all make the k-th mean, so that all workers see the same means.
    Otherwise `add` returns the mean of all newest values. Workers that have ended, or give no value, do not count.
    """

    def __init__(self, control: CoordinatorConnection, rank: int, size: int, topic: str, together: bool) -> None:
        self.num_workers = 1  # in the last mean
        self._control = control
        self._rank = rank
        self._size = size
        self._topic = topic
        self._together = together
        self._values: dict[int, list[float]] = {rank: []}
        self._behind: dict[int, int] = {}  # by rank: how many values it lacked after the last wait
        self._ended: set[int] = set()
        self._num_means = 0
        self._changed = threading.Condition()

    def add(self, value: float) -> list[float]:
        """Sends this worker's next value; returns the means that are new since the last call, oldest first.

        Blocks for the other workers' values, at most `FIRST_S` or `WAIT_S`."""
        self._control.send(self._topic, msgspec.msgpack.encode(value))
        with self._changed:
            mine = self._values[self._rank]
            mine.append(value)
            if not self._together:
                newest = [values[-1] for rank, values in self._values.items() if rank not in self._ended]
                self.num_workers = len(newest)
                return [math.fsum(newest) / len(newest)]
            first = len(mine) == 1
            self._changed.wait_for(lambda: self._has_all(first), FIRST_S if first else WAIT_S)
            self._behind = {rank: len(mine) - len(values) for rank, values in self._values.items()}
            known = min(len(values) for rank, values in self._values.items() if rank not in self._ended)
            every = self._values.values()
            rows = [[values[k] for values in every if len(values) > k] for k in range(self._num_means, known)]
            self._num_means = max(known, self._num_means)
        self.num_workers = len(rows[-1]) if rows else self.num_workers
        return [math.fsum(row) / len(row) for row in rows]

    def _has_all(self, first: bool) -> bool:
        if first and len(self._values) < self._size:
            return False
        wanted = len(self._values[self._rank])
        return all(
            len(values) >= wanted - self._behind.get(rank, 0)
            for rank, values in self._values.items()
            if rank not in self._ended
        )

    def on_event(self, event: CoordinatorEvent) -> None:
        """On the connection's thread: another worker has sent a value, or has ended."""
        if event.member is None or event.member.role != "worker":
            return
        rank = event.member.rank
        with self._changed:
            if event.kind == "message" and event.topic == self._topic:
                self._values.setdefault(rank, []).append(msgspec.msgpack.decode(event.body, type=float))
            elif event.kind in ("left", "died") and rank != self._rank:
                self._ended.add(rank)
            self._changed.notify_all()


class WorkerMeansRegistry:
    """Makes the WorkerMeans of one process. Values of workers that were faster to make theirs are kept until then."""

    def __init__(self, control: CoordinatorConnection) -> None:
        self._control = control
        self._made: list[WorkerMeans] = []
        self._events: collections.deque[CoordinatorEvent] = collections.deque(maxlen=1000)
        self._lock = threading.Lock()
        control.subscribe(self._on_event)

    def make(self, rank: int, size: int, together: bool) -> WorkerMeans:
        """The next one: all workers make theirs in the same order."""
        with self._lock:
            topic = f"{TOPIC}{len(self._made)}"
            made = WorkerMeans(self._control, rank, size, topic, together)
            self._made.append(made)
            for event in self._events:
                made.on_event(event)
        return made

    def _on_event(self, event: CoordinatorEvent) -> None:
        if event.kind in ("left", "died") or (event.kind == "message" and event.topic.startswith(TOPIC)):
            with self._lock:
                self._events.append(event)
                for means in self._made:
                    means.on_event(event)
