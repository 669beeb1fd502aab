"""Show: what is known of a run, from its record and its memory and, while it lives, from its coordinator."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shlex
from typing import Any

import msgspec

from hora.errors import HoraError

from ..launch.joining import visit
from ..runs import run_directory
from ..runs.digest import digest, jsonable, reading
from ..runs.run_directory import RunRecord
from ..runs.summary import single_worker_speed, steps_taken, summary_lines
from ..terminal.format import happening, harmless, size

EVENTS = 10


def show(name: str, directory: str | None = None, *, data: bool = False) -> str:
    """A run's card, or with `data` its ledger's two views; ValueError if there is no such run. `name` may be the path
    of its directory."""
    found = _find(name, directory)
    try:
        return _data(found) if data else _card(found)
    except ValueError:
        again = _find(name, directory)
        if not found.live or again.live:
            raise
        return _data(again)  # it has ended meanwhile, and its record tells


def as_json(name: str, directory: str | None = None) -> str:
    """The same for programs, with the records as they are; ValueError if there is no such run."""
    found = _find(name, directory)
    told = digest(found).as_json()
    events, problem = _events(found)
    memory = _memory_path(found)
    told |= {"events": events, "memory": memory, "problem": problem or told["problem"]}
    return json.dumps(jsonable({**told, "record": {"run": found.config, "end": found.end}}), indent=2)


def _find(name: str, directory: str | None) -> RunRecord:
    return run_directory.find(name, directory) if directory else run_directory.look_up(name)


def _card(found: RunRecord) -> str:
    begun, ended = found.config, found.end or {}
    known = digest(found)
    events, problem = _events(found)
    strategy, there = known.strategy, ""
    if found.live and "joins" not in begun:
        with contextlib.suppress(HoraError, ValueError), visit(found) as line:
            members = line.members()
            there = "; ".join(_roll([m.rank for m in members if m.role == role], role) for role in ("worker", "server"))
            strategy = strategy or line.get("strategy", 0.2).decode()
    rows: dict[str, object] = {
        "run": found.name,
        "state": _state(found),
        "cause": ended.get("cause"),
        "lost": _sentences(ended.get("lost")),
        "joins": begun.get("joins"),
        "command": shlex.join(known.command),
        "strategy": strategy or "as the script says",
        "workers": begun.get("size"),
        "servers": begun.get("servers"),
        "there now": there.strip("; "),
        "started": begun.get("started"),
        "ended": ended.get("ended"),
        "host": f"{begun.get('host')}, pid {begun.get('pid')}, in {begun.get('cwd')}",
        "record": found.path,
        "memory": problem or _memory(found),
    }
    told: list[tuple[str, str]] = [
        (key, harmless(value, 4000)) for key, value in rows.items() if value not in (None, "")
    ]
    told += _under(
        "summary", summary_lines(known.summary, single=single_worker_speed(begun, steps_taken(known.summary)))
    )
    told += _under("events", [_event(event) for event in events])
    width = max(len(key) for key, _ in told)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in told)


def _under(key: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(key if index == 0 else "", line) for index, line in enumerate(lines)]


def _event(event: dict[str, Any]) -> str:
    return f"{event['at']:.1f} s, step {event['step']}: {happening(event['kind'], event['who'], event['text'])}"


def _events(found: RunRecord) -> tuple[list[dict[str, Any]], str]:
    """The last few of the run's events; and why there are none, where its memory cannot be read."""
    try:
        with reading(found) as memory:
            told = list(memory.events())[-EVENTS:] if memory is not None else []
    except ValueError as problem:
        return [], str(problem)
    return [msgspec.to_builtins(event) for event in told], ""


def _memory_path(found: RunRecord) -> str | None:
    path = os.path.join(found.path, run_directory.DATABASE)
    return path if os.path.exists(path) else None


def _memory(found: RunRecord) -> str:
    path = _memory_path(found)
    if path is None:
        return ""
    with contextlib.suppress(OSError):
        return f"{path} ({size(os.path.getsize(path))})"
    return path


def _sentences(lost: Any) -> str:
    return "; ".join(map(str, lost)) if isinstance(lost, list) else ""


def _state(found: RunRecord) -> str:
    if found.end is not None:
        code, seconds = found.end.get("code"), found.end.get("seconds")
        return f"{'ended well' if code == 0 else f'failed with exit code {code}'} after {seconds} s"
    if not found.live:
        return "broken off: its launcher was killed"
    since = _seconds_since(found.config.get("started"))
    return "running" if since is None else f"running for {since:.0f} s"


def _roll(ranks: list[int], role: str) -> str:
    return f"{role}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def _seconds_since(when: Any) -> float | None:
    try:
        started = datetime.datetime.fromisoformat(str(when))
    except ValueError:
        return None
    return (datetime.datetime.now().astimezone() - started).total_seconds()


def _data(found: RunRecord) -> str:
    """Of a live run its coordinator tells; of one that ended, its record."""
    if "joins" in found.config:
        joined = found.config["joins"]
        raise ValueError(f"{found.name!r} has joined run {joined!r}, which keeps the ledger: hora show {joined} --data")
    if not found.live:
        if found.end is None:
            raise ValueError(f"run {found.name!r} {_state(found)}, so nothing tells which samples were done")
        return str(found.end.get("data", ""))
    from hora.coordinator.lease_manager import describe

    try:
        with visit(found) as line:
            return describe(line.views())
    except HoraError as problem:
        raise ValueError(f"run {found.name!r} does not answer: {problem}") from None
