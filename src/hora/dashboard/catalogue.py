"""Catalogue: the list of runs, a line of facts for each."""

from __future__ import annotations

from typing import Any

import msgspec

from ..monitor.status import RunStatus
from .runs import StoredRun, StoredRuns
from .view import encode, state_of

FROM_END = ("seconds", "samples", "samples_per_s", "steps", "values", "workers")


def listing(runs: StoredRuns) -> bytes:
    """All runs, live ones first, then the newest. Only live ones' memories are opened, and those of runs without an
    end that tells a summary."""
    return encode({"home": runs.home, "runs": [_told(run) for run in runs.all()]})


def _told(run: StoredRun) -> msgspec.Raw:
    """A run's line. Whatever is wrong with one spoils that one alone."""
    try:
        return msgspec.Raw(encode(_line(run)))
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}".encode(errors="replace").decode()
        odd = {"name": run.name, "live": run.live, "state": state_of(run, ""), "remembered": run.mark is not None}
        return msgspec.Raw(encode({**odd, "problem": f"its facts cannot be shown: {why}"}))


def _line(run: StoredRun) -> dict[str, Any]:
    begun, ended = run.config, run.end or {}
    line: dict[str, Any] = {
        "name": run.name, "live": run.live, "started": begun.get("started"), "ended": ended.get("ended"),
        "strategy": ended.get("strategy") or begun.get("strategy"), "size": begun.get("size"),
        "servers": begun.get("servers"), "command": begun.get("command"), "host": begun.get("host"),
        "code": ended.get("code"), "cause": ended.get("cause"), "seconds": ended.get("seconds"), "problem": "",
        "remembered": run.mark is not None,
    }  # fmt: skip
    told = ""
    summary = ended.get("summary")
    try:
        if not isinstance(summary, dict) or not summary:
            now = _now(run)
            if now is not None:
                told = now.state
                summary = _of(now)
        elif run.mark is not None:
            run.read()  # it says so if it is of another version
    except Exception as problem:  # of this run alone
        line["problem"] = str(problem)
    if isinstance(summary, dict):
        line |= {key: summary[key] for key in FROM_END if summary.get(key) is not None}
    line["strategy"] = line["strategy"] or (summary or {}).get("strategy")
    line["state"] = state_of(run, told)
    return line


def _now(run: StoredRun) -> RunStatus | None:
    reading = run.read()
    return reading.status() if reading is not None else None


def _of(now: RunStatus) -> dict[str, Any]:
    return {
        "seconds": now.seconds, "samples": now.samples, "samples_per_s": now.samples_per_s, "steps": now.step,
        "values": now.values, "workers": now.size, "strategy": now.strategy,
    }  # fmt: skip
