"""Show: what is known of a run, from its record and, while it lives, from its coordinator."""

from __future__ import annotations

import contextlib
import datetime
import shlex
from typing import Any

from hora.errors import HoraError

from . import runfile
from .joining import visit
from .runfile import Found


def show(name: str, directory: str | None = None, *, data: bool = False) -> str:
    """A run's card, or with `data` its ledger's two views; ValueError if there is no such run."""
    found = runfile.find(name, directory)
    try:
        return _data(found) if data else _card(found)
    except ValueError:
        again = runfile.find(name, directory)
        if not found.live or again.live:
            raise
        return _data(again)  # it has ended meanwhile, and its record tells


def _card(found: Found) -> str:
    begun, ended = found.begun, found.ended or {}
    strategy, there = begun.get("strategy") or ended.get("strategy"), ""
    if found.live and "joins" not in begun:
        with contextlib.suppress(HoraError, ValueError), visit(found) as line:
            members = line.roll()
            there = "; ".join(_roll([m.rank for m in members if m.role == role], role) for role in ("worker", "server"))
            strategy = strategy or line.get("strategy", 0.2).decode()
    rows = {
        "run": found.name,
        "state": _state(found),
        "cause": ended.get("cause"),
        "lost": "; ".join(ended.get("lost", [])),
        "joins": begun.get("joins"),
        "command": shlex.join(["-m"] * bool(begun.get("module")) + list(begun.get("command", []))),
        "strategy": strategy or "as the script says",
        "workers": begun.get("size"),
        "servers": begun.get("servers"),
        "there now": there.strip("; "),
        "started": begun.get("started"),
        "ended": ended.get("ended"),
        "host": f"{begun.get('host')}, pid {begun.get('pid')}, in {begun.get('cwd')}",
        "record": found.path,
    }
    shown = {key: value for key, value in rows.items() if value not in (None, "")}
    width = max(map(len, shown))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in shown.items())


def _state(found: Found) -> str:
    if found.ended is not None:
        code, seconds = found.ended.get("code"), found.ended.get("seconds")
        return f"{'ended well' if code == 0 else f'failed with exit code {code}'} after {seconds} s"
    if not found.live:
        return "ended without a word: its launcher was killed"
    since = _seconds_since(found.begun.get("started"))
    return "running" if since is None else f"running for {since:.0f} s"


def _roll(ranks: list[int], role: str) -> str:
    return f"{role}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""


def _seconds_since(when: Any) -> float | None:
    try:
        started = datetime.datetime.fromisoformat(str(when))
    except ValueError:
        return None
    return (datetime.datetime.now().astimezone() - started).total_seconds()


def _data(found: Found) -> str:
    """Of a live run its coordinator tells; of one that ended, its record."""
    if "joins" in found.begun:
        joined = found.begun["joins"]
        raise ValueError(f"{found.name!r} has joined run {joined!r}, which keeps the ledger: hora show {joined} --data")
    if not found.live:
        if found.ended is None:
            raise ValueError(f"run {found.name!r} {_state(found)}, so nothing tells which samples were done")
        return str(found.ended.get("data", ""))
    from hora.coordinator.book import describe

    try:
        with visit(found) as line:
            return describe(line.views())
    except HoraError as problem:
        raise ValueError(f"run {found.name!r} does not answer: {problem}") from None
