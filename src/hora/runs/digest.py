"""Digest: a run, live or past, in a few facts, from its records and from its memory where it has one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from . import exit_codes, run_directory
from .run_directory import RunRecord
from .summary import amount, values

if TYPE_CHECKING:
    from hora.runs.reader import RunReader

_ENDS = {
    exit_codes.OK: "ended well",
    exit_codes.SCRIPT_FAILED: "failed",
    exit_codes.RANK_KILLED: "rank killed",
    exit_codes.INTERRUPTED: "interrupted",
    exit_codes.OUTPUT_CLOSED: "output closed",
    exit_codes.TERMINATED: "terminated",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDigest:
    """`summary` is as Board.summary() has it, empty if nothing is known; `problem` says why a memory cannot be read."""

    name: str
    path: str
    live: bool
    state: str
    strategy: str
    workers: int | None
    servers: int | str | None
    started: str
    ended: str
    seconds: float | None
    summary: dict[str, Any]
    command: list[str]
    problem: str = ""

    @property
    def steps(self) -> int:
        return int(amount(self.summary, "steps"))

    @property
    def samples(self) -> int:
        return int(amount(self.summary, "samples"))

    @property
    def samples_per_s(self) -> float:
        return amount(self.summary, "samples_per_s")

    @property
    def values(self) -> dict[str, float]:
        return values(self.summary)

    def as_json(self) -> dict[str, Any]:
        """For `--json`: what is no number there is null."""
        told = dataclasses.asdict(self)
        plain: dict[str, Any] = jsonable(told)
        return plain


def digest(found: RunRecord) -> RunDigest:
    """What is known of a run without asking it."""
    begun, ended = found.config, found.end or {}
    told, problem, state = ended.get("summary"), "", ""
    strategy = begun.get("strategy") or ended.get("strategy")
    if not isinstance(told, dict):
        told = {}
        try:
            with reading(found) as memory:
                if memory is not None:
                    now = memory.status()
                    told, state = _summary(memory, now), now.state
                    strategy = strategy or now.strategy
        except ValueError as unreadable:
            problem = str(unreadable)
    seconds = ended.get("seconds")
    if seconds is None:
        seconds = amount(told, "seconds") or None
    workers, command = begun.get("size"), begun.get("command")
    return RunDigest(
        name=found.name,
        path=found.path,
        live=found.live,
        state=_state(found, state),
        strategy=str(strategy or ""),
        workers=workers if isinstance(workers, int) else None,
        servers=begun.get("servers"),
        started=str(begun.get("started") or ""),
        ended=str(ended.get("ended") or ""),
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
        summary=told,
        command=["-m"] * bool(begun.get("module"))
        + [str(word) for word in (command if isinstance(command, list) else ())],
        problem=problem,
    )


@contextlib.contextmanager
def reading(found: RunRecord) -> Iterator[RunReader | None]:
    """The run's memory, None if it has none; ValueError, here or inside, if it cannot be read."""
    path = os.path.join(found.path, run_directory.DATABASE)
    if not os.path.exists(path):
        yield None
        return
    from hora.runs.reader import RunReader

    try:
        memory = RunReader(path)
        try:
            yield memory
        finally:
            memory.close()
    except (sqlite3.Error, OSError, msgspec.MsgspecError) as problem:
        raise ValueError(f"{path} cannot be read: {problem}") from None


def jsonable(value: Any) -> Any:
    """The same, with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _state(found: RunRecord, told: str) -> str:
    if found.end is not None:
        code = found.end.get("code")
        return _ENDS.get(code, "failed") if isinstance(code, int) else "failed"
    if not found.live:
        return "broken off"
    return told if told in ("starting", "running") else "running"


def _summary(memory: RunReader, now: Any) -> dict[str, Any]:
    """As it was written at the end, or as it stands."""
    told = memory.get("summary")
    if isinstance(told, dict) and told:
        return told
    return {
        "samples": now.samples,
        "seconds": now.seconds,
        "samples_per_s": now.samples_per_s or (now.samples / now.seconds if now.seconds > 0 else 0.0),
        "steps": now.step,
        "bytes_per_step": now.bytes_per_step,
        "hidden": now.hidden,
        "slowest": now.slowest,
        "checkpoints": now.checkpoints,
        "skipped": now.skipped,
        "rounds": now.rounds,
        "values": now.values,
        "workers": len(now.workers),
    }
