"""Members: the workers and servers of a run, and what they did together. Those who left first are forgotten first."""

from __future__ import annotations

import math
from typing import NamedTuple

from .stragglers import median
from .worker_stats import ServerStats, WorkerStats

MAX_TRACKS = 256  # of workers, and of servers
NOTABLE = 1.05  # the slowest worker is named if its compute is this many times the others'


class RunTotals(NamedTuple):
    """Of all workers, over the whole run."""

    steps: int = 0
    exposed_s: float = 0.0
    comm_s: float = 0.0
    sent_bytes: int = 0

    @property
    def hidden(self) -> float | None:
        """The share of communication that computation hid; None if there was none."""
        return max(0.0, 1.0 - self.exposed_s / self.comm_s) if self.comm_s > 0 else None

    def plus(self, track: WorkerStats) -> RunTotals:
        return RunTotals(
            self.steps + track.steps,
            self.exposed_s + track.exposed_s,
            self.comm_s + track.comm_s,
            self.sent_bytes + track.sent_bytes,
        )


class Members:
    """`seen` counts all workers that there ever were."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerStats] = {}
        self.servers: dict[int, ServerStats] = {}
        self.live_ranks: set[int] = set()
        self.seen = 0
        self._ended = False
        self._gone = RunTotals()
        self._forgotten: list[int] = []

    def worker(self, rank: int, name: str) -> WorkerStats | None:
        """That worker's track, a new one if another process has taken the rank; None if there are too many alive."""
        track = self.workers.get(rank)
        if track is not None and track.name == name:
            return track
        if track is not None:
            self._forget(track)
        elif len(self.workers) >= MAX_TRACKS:
            gone = next((each for each in self.workers.values() if not each.alive), None)
            if gone is None:
                return None
            self._forget(gone)
        self.seen += 1
        track = self.workers[rank] = WorkerStats(rank, name)
        if self._ended:
            track.state = "stopped"
        else:
            self.live_ranks.add(rank)
        return track

    def server(self, number: int, name: str) -> ServerStats | None:
        """The same for a server, in the process of that name."""
        track = self.servers.get(number)
        if track is None or track.name != name:
            if track is None and len(self.servers) >= MAX_TRACKS:
                return None
            track = self.servers[number] = ServerStats(number, name)
            if self._ended:
                track.state = "stopped"
        return track

    def change(self, role: str, number: int, name: str, kind: str) -> WorkerStats | None:
        """A member has joined, left or died, and the servers in its process with it."""
        alive = "stopped" if self._ended else "alive"
        state = alive if kind == "joined" else kind
        for server in self.servers.values():
            if server.name == name or (role == "server" and server.number == number):
                server.state = state
        if role == "server":
            return None
        track = self.workers.get(number)
        if (track is None or track.name != name) and "(" in name:
            track = self.worker(number, name)
        if track is not None:
            track.state = state
            (self.live_ranks.add if track.alive else self.live_ranks.discard)(track.rank)
        return track

    def end(self) -> None:
        """The run is over: whoever was still there has stopped."""
        self._ended = True
        self.live_ranks.clear()
        everyone: list[WorkerStats | ServerStats] = [*self.workers.values(), *self.servers.values()]
        for each in everyone:
            if each.state == "alive":
                each.state = "stopped"

    def take_forgotten(self) -> list[int]:
        """Ranks of workers that are not kept any more."""
        taken, self._forgotten = self._forgotten, []
        return taken

    def live(self) -> list[WorkerStats]:
        """The live workers, by rank."""
        return [self.workers[rank] for rank in sorted(self.live_ranks)]

    def standing(self) -> list[WorkerStats]:
        """Those who know how far the run is: the live workers, else those that stopped or left well. Where all have
        died, the one that was heard last."""
        everyone = self.workers.values()
        last = max(everyone, key=lambda track: track.heard_at or 0.0, default=None)
        return self.live() or [track for track in everyone if track.state != "died"] or ([last] if last else [])

    def totals(self) -> RunTotals:
        totals = self._gone
        for track in self.workers.values():
            totals = totals.plus(track)
        return totals

    def least_exposed_s(self) -> float:
        """Per step, of all live workers that have taken one."""
        found = [track.exposed_per_step() for track in self.live() if track.steps]
        return min(found, default=math.inf)

    def slowest(self) -> str:
        """The worker that computed longest per step over the whole run, if notably longer than the others."""
        stepped = [track for track in self.workers.values() if track.steps]
        if len(stepped) < 2:
            return ""
        longest = max(stepped, key=lambda track: track.compute_per_step)
        others = median(track.compute_per_step for track in stepped if track is not longest)
        return longest.name if longest.compute_per_step >= NOTABLE * max(others, 1e-9) else ""

    def _forget(self, track: WorkerStats) -> None:
        self._gone = self._gone.plus(track)
        self._forgotten.append(track.rank)
        del self.workers[track.rank]
        self.live_ranks.discard(track.rank)
