"""Runs as the page finds them: directories with run.json, and memories that the real Board and Memory have written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pathlib
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from hora.coordinator.messages import Member
from hora.monitor.messages import HistogramReport, MetricsRow, Notice, ServerReport, WorkerReport
from hora.monitor.run_state import RunState
from hora.runs.database import RunDatabase
from hora.runs.run_directory import DATABASE


class FakeRun:
    """One run whose processes are played: `go` makes `steps` of each worker and tells the run_state of them."""

    def __init__(
        self, home: pathlib.Path, name: str, *, strategy: str = "ring", size: int = 4, servers: int = 0, seed: int = 0,
        slow: int | None = None, log: tuple[str, ...] = ("loss", "accuracy"), algorithm: str = "", serving: str = "",
    ) -> None:  # fmt: skip
        self.name, self.size, self.servers, self.slow, self.log = name, size, servers, slow, log
        self.strategy, self.kind = strategy, algorithm or strategy.partition(":")[0]
        self.path = home / name
        self.path.mkdir(parents=True)
        self.facts = {
            "name": name, "run": name, "command": ["train.py", "--lr", "0.1"], "size": size, "strategy": strategy,
            "servers": servers or None, "host": "a", "cwd": "/work", "pid": 7, "timeout_s": 60.0,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            "serve": {"port": 8000} if serving else None, "versions": {"hora": "0.1.0", "torch": "2.13.0"},
        }  # fmt: skip
        (self.path / "run.json").write_text(json.dumps(self.facts))
        self._lock: int | None = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.run_state = RunState(run=name, size=size, strategy=strategy)
        self.run_state.update(algorithm=algorithm or None, serving=serving or None)
        self.database = RunDatabase(str(self.path / DATABASE), self._warn)
        self.random = random.Random(seed)
        self.clock, self.step, self.rounds, self.every = 0.0, 0, 0, 8
        self.lags: list[dict[int, int]] = [{} for _ in range(servers)]
        for rank in range(size):
            self.run_state.on_event("joined", str(self.member(rank)), f"{self.member(rank)} has joined", self.clock)
        self.write()

    def member(self, rank: int, role: str = "worker") -> Member:
        return Member(role, rank, "a", 400 + rank + (100 if role == "server" else 0))

    def go(
        self, steps: int = 5, *, step_s: float = 0.05, values: dict[str, float] | None = None, write: bool = True
    ) -> None:
        """`steps` of all workers, which take a report's time together."""
        spent_s = steps * step_s
        if self.slow is not None:
            spent_s *= 2.6
        self.clock += spent_s
        self.step += steps
        pause = steps // self.every if "local" in self.strategy or "diloco" in self.strategy else None
        if pause is not None:
            self.rounds = self.step // self.every
        for rank in range(self.size):
            self.run_state.on_report(self.member(rank), self._work(rank, steps, spent_s, values), self.clock)
        for number in range(self.servers):
            self.run_state.on_report(self.member(number, "server"), self._keeping(number, steps, spent_s), self.clock)
        self.run_state.tick(self.clock)
        if write:
            self.write()

    def write(self) -> None:
        self.database.write(self.run_state, self.run_state.status(self.clock))

    def event(self, kind: str, who: str, text: str) -> None:
        self.run_state.on_event(kind, who, text, self.clock)

    def end(self, code: int = 0) -> None:
        """As the launcher ends it: the database first, end.json, then the lock."""
        if self._lock is None:
            return
        self.database.put("end", {"code": code})
        self.event("end", "run", f"the run has ended with code {code}")
        self.write()
        summary = self.run_state.status(self.clock).summary()
        self.database.close()
        facts = {"code": code, "cause": "a rank failed" if code else "", "seconds": self.clock, "summary": summary}
        (self.path / "end.json").write_text(
            json.dumps({**facts, "strategy": self.strategy, "ended": "2026-01-01T00:00:00+00:00"})
        )
        self.leave()

    def leave(self) -> None:
        """As a launcher that was killed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def going(self, every_s: float = 0.1, steps: int = 4) -> Iterator[None]:
        """A thread keeps it going."""
        over = threading.Event()

        def keep_on() -> None:
            while not over.wait(every_s):
                self.go(steps)

        thread = threading.Thread(target=keep_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _work(self, rank: int, steps: int, spent_s: float, values: dict[str, float] | None) -> WorkerReport:
        step_s = spent_s / steps
        slow = rank == self.slow
        own = step_s * (0.92 if slow else 0.32 if self.slow is not None else 0.62) * self.random.uniform(0.94, 1.06)
        rows = []
        if rank == 0:
            rows = [
                MetricsRow(
                    self.step - steps + one + 1,
                    self.clock - (steps - one - 1) * step_s,
                    1,
                    values or self._logged(self.step - steps + one + 1),
                )
                for one in range(steps)
            ]
        sent = steps * 4_000_000
        told, saved = rank == 0 and self.step % 20 == 0, rank == 0 and self.step % 200 == 0
        notes = {"lag": float(self.size - 1)} if self.servers else {}
        return WorkerReport(
            sent_at=self.clock, step=self.step, steps=steps, seconds=spent_s,
            exposed_s=max(0.0, (step_s - own) * steps),
            comm_s=steps * step_s * 0.55, sent_bytes=sent, samples=steps * 64, computes=[own] * min(steps, 8),
            epoch=1 + self.step // 400, epochs=5, progress=min(0.99, self.step / 4000),
            rounds=self.rounds if self.every and ("local" in self.strategy or "diloco" in self.strategy) else None,
            local_steps=(self.step + rank) % self.every if "local" in self.strategy else 0,
            peers=self._peers(rank, sent), notes=notes, rows=rows,
            histograms=[HistogramReport("grad/fc1", self.step, self.clock, -0.3, 0.3, self._bell())] if told else [],
            notices=[Notice(self.step, self.clock, "checkpoint", f"step-{self.step} was written")] if saved else [],
        )  # fmt: skip

    def _logged(self, step: int) -> dict[str, float]:
        noise = self.random.gauss(0, 1)
        found = {}
        for name in self.log:
            if "loss" in name:
                found[name] = 0.25 + 2.1 * math.exp(-step / 350) + 0.06 * noise * math.exp(-step / 900)
            elif "acc" in name:
                found[name] = min(0.99, 0.95 - 0.85 * math.exp(-step / 400) + 0.012 * noise)
            elif "lr" in name:
                found[name] = 0.1 * 0.5 * (1 + math.cos(min(step, 4000) / 4000 * math.pi))
            else:
                found[name] = 1.0 + 0.3 * math.sin(step / 60) + 0.1 * noise
        return found

    def _peers(self, rank: int, sent: int) -> dict[int, int]:
        if self.servers or self.size == 1:
            return {}
        if self.kind == "ring":
            return {(rank + 1) % self.size: sent}
        if self.kind == "star":
            return {0: sent} if rank else dict.fromkeys(range(1, self.size), sent)
        if self.kind == "halving":
            return {rank ^ bit: sent for bit in (1, 2, 4, 8) if rank ^ bit < self.size}
        if self.kind == "tree":
            return {rank - (rank & -rank): sent} if rank else {}
        return {}

    def _keeping(self, number: int, steps: int, spent_s: float) -> ServerReport:
        lags = self.lags[number]
        loose = "async" in self.strategy or "ssp" in self.strategy
        for _ in range(steps * self.size):
            lag = max(0, round(self.random.gauss(self.size - 1, 1.4))) if loose else 0
            lags[lag] = lags.get(lag, 0) + 1
        return ServerReport(
            sent_at=self.clock, server=number, seconds=spent_s, updates=steps * self.size,
            busy_s=spent_s * min(0.97, 0.42 + 0.17 * number), bytes_in=steps * 2_000_000, bytes_out=steps * 2_000_000,
            queue=number % 3, load_bytes=2_400_000, lags=dict(lags),
        )  # fmt: skip

    def _bell(self) -> list[int]:
        return [
            int(1000 * math.exp(-(((place - 15.5) / 6) ** 2)) * self.random.uniform(0.8, 1.2)) for place in range(32)
        ]

    @staticmethod
    def _warn(text: str) -> None:
        raise AssertionError(text)


def older(home: pathlib.Path, name: str, **end: Any) -> None:
    """A run without a database: run.json and end.json are all there is."""
    (home / name).mkdir(parents=True)
    (home / name / "run.json").write_text(
        json.dumps({"name": name, "size": 2, "strategy": "ring", "started": "2025-01-01T00:00:00+00:00"})
    )
    (home / name / "end.json").write_text(json.dumps({"code": 0, "seconds": 12.5, **end}))
