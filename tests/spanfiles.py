"""Span files, made up; and what must hold of every trace."""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

MS = 1_000_000


def write(
    folder: pathlib.Path,
    role: str,
    rank: int,
    spans: list[list[Any]],
    *,
    host: str = "a",
    clock: str = "one",
    perf_ns: int = 1000 * MS,
    time_ns: int = 10**18,
) -> pathlib.Path:
    """`spans` are [lane, name, begin, end, facts…] in milliseconds after `perf_ns`."""
    header = {"spans": 1, "role": role, "rank": rank, "host": host, "pid": 100 + rank, "clock": clock,
              "perf_ns": perf_ns, "time_ns": time_ns}  # fmt: skip
    lines = [json.dumps(header)]
    for lane, name, begin, end, *facts in spans:
        at = perf_ns + round(begin * MS)
        lines.append(json.dumps([lane, name, at, round((end - begin) * MS), facts[0] if facts else None]))
    path = folder / f"{role}-{rank}.spans"
    path.write_text("\n".join(lines) + "\n")
    return path


def check(trace: Any) -> list[dict[str, Any]]:
    """That it is what ui.perfetto.dev reads; its events."""
    events = trace["traceEvents"]
    named: dict[str, set[Any]] = collections.defaultdict(set)
    threads: dict[tuple[int, int], list[tuple[float, float]]] = collections.defaultdict(list)
    arrows: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for event in events:
        assert isinstance(event["pid"], int) and event["pid"] > 0 and isinstance(event["tid"], int), event
        assert isinstance(event["name"], str) and isinstance(event["ts"], int | float) and event["ts"] >= 0, event
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
        elif event["ph"] == "X":
            assert isinstance(event["dur"], int | float) and event["dur"] >= 0, event
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            assert event["id"] and event["cat"] and (event["ph"] == "s" or event["bp"] == "e")
            arrows[event["id"]].append(event)
        else:
            assert event["ph"] == "C" and all(isinstance(value, int | float) for value in event["args"].values())
    for (pid, tid), spans in threads.items():
        assert (pid, tid) in named["thread_name"] and (pid, 0) in named["process_name"]
        open_until: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, f"spans of thread {tid} overlap"
            open_until.append(end)
    for number, (one, *others) in arrows.items():
        assert len(others) <= 1, number
        if others:
            begin, end = sorted([one, *others], key=lambda event: event["ph"], reverse=True)
            assert (begin["ph"], end["ph"]) == ("s", "f") and begin["ts"] <= end["ts"]
    return events
