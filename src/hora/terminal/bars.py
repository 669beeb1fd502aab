"""Bars of the panel: a line for each worker and server, as far as there is room; the others are counted.

rank 0  ████████████████▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░  412 ms   3,210/s
rank 1  ████████████████████████████████████████████████████████▒▒▒▒▒▒▒▒  412 ms   3,210/s  ▲ slow: 4.1×
… 6 more, all even
server 0  ███████████████·········   62 % busy   queue 0   38.2 updates/s   4.2 MB
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.text import Text

from hora.monitor.status import RunStatus, ServerStatus, WorkerStatus

from .format import count, milliseconds, percent, rate, sanitize, size

MAX_WORKERS = 8
FEW_WORKERS = 6  # shown if there are more than MAX_WORKERS
MAX_SERVERS = 4
BLOCKS = (("█", "compute", "cyan"), ("▒", "communication", "magenta"), ("░", "waiting", "bright_black"))
QUIET = "bright_black"
_ALIKE = 0.94  # steps longer than this share of the longest are drawn as long as it
_MAX_STEP_S = 1e9


def num_rows(status: RunStatus) -> int:
    """Number of worker and server lines if the terminal had room for all of them."""
    num_workers, num_servers = len(status.workers), len(status.servers)
    return _num_lines(num_workers, _max_workers(num_workers)) + _num_lines(num_servers, MAX_SERVERS)


def _max_workers(num_workers: int) -> int:
    return MAX_WORKERS if num_workers <= MAX_WORKERS else FEW_WORKERS


def _num_lines(total: int, shown: int) -> int:
    return min(total, shown) + (shown < total)


def bars(status: RunStatus, room: int, width: int) -> list[Text]:
    """At most `room` lines."""
    workers, servers = status.workers, status.servers
    num_servers, num_workers = min(len(servers), MAX_SERVERS), min(len(workers), _max_workers(len(workers)))
    half = room - min(_num_lines(len(workers), num_workers), max(room // 2, 2))
    while num_servers and _num_lines(len(servers), num_servers) > half:
        num_servers -= 1
    rest = room - (_num_lines(len(servers), num_servers) if num_servers else 0)
    while num_workers and _num_lines(len(workers), num_workers) > rest:
        num_workers -= 1
    chosen = _choose(workers, num_workers)
    names = [f"rank {worker.rank}" for worker in chosen] + [f"server {each.number}" for each in servers[:num_servers]]
    start = max(map(len, names), default=0) + 3
    lines = _worker_lines(chosen, start, width)
    if len(chosen) < len(workers):
        lines.append(_count_others(workers, chosen))
    lines += [_server_line(server, start, width) for server in servers[:num_servers]]
    if 0 < num_servers < len(servers):
        lines.append(Text(f" … {len(servers) - num_servers} more", QUIET))
    return lines[:room]


def _choose(workers: Sequence[WorkerStatus], num_workers: int) -> list[WorkerStatus]:
    """The stragglers, then the dead, then the slowest, by rank. Rounding keeps the choice stable."""
    if len(workers) <= num_workers:
        return list(workers)
    median = statistics.median(_parts(worker)[0] for worker in workers) or 1.0

    def order(worker: WorkerStatus) -> tuple[bool, bool, int, int]:
        return (not worker.slow, worker.state != "died", -round(4 * _parts(worker)[0] / median), worker.rank)

    return sorted(sorted(workers, key=order)[:num_workers], key=lambda worker: worker.rank)


def _count_others(workers: Sequence[WorkerStatus], chosen: Sequence[WorkerStatus]) -> Text:
    shown = {worker.rank for worker in chosen}
    rest = [worker for worker in workers if worker.rank not in shown]
    slow = [worker.rank for worker in rest if worker.slow and worker.state == "alive"]
    notes = [f"slow: rank {', '.join(map(str, slow[:5]))}{', …' * (len(slow) > 5)}"] if slow else []
    for state in ("died", "left", "stopped"):
        if number := sum(worker.state == state for worker in rest):
            notes.append(f"{number} {state}")
    how = "; ".join(notes) or ("all even" if len(rest) > 1 else "even")
    who = f"{len(rest)} more" if chosen else count(len(rest), "worker")
    return Text(f" … {who}, {how}", "yellow" if slow else QUIET)


def _worker_lines(workers: Sequence[WorkerStatus], start: int, width: int) -> list[Text]:
    """Each worker's step as a bar of compute, communication and waiting."""
    steps = [sum(_parts(worker)) for worker in workers]
    times = [milliseconds(step) if step > 0 else "–" for step in steps]
    speeds = [f"{rate(worker.samples_per_s)}/s" if width >= 50 else "" for worker in workers]
    time_width, speed_width = (max(map(len, texts), default=0) for texts in (times, speeds))
    tails = [
        f"  {time:>{max(7, time_width)}}" + f"  {speed:>{max(8, speed_width)}}" * bool(speed)
        for time, speed in zip(times, speeds, strict=True)
    ]
    slow = {w.rank: f"  ▲ {'slow: ' if width >= 60 else ''}{w.slow:.1f}×" for w in workers if w.slow}
    length = width - start - max(map(len, tails), default=0) - max(map(len, slow.values()), default=0)
    lines = []
    for worker, tail in zip(workers, tails, strict=True):
        line = Text(f" {f'rank {worker.rank}':<{start - 1}}")
        if worker.state != "alive":
            line.append(_end_state(worker.state)).append(f" after step {worker.step:,}", _end_style(worker.state))
        else:
            line.append(_step_bar(_parts(worker), max(steps), length)).append(tail)
            line.append(slow.get(worker.rank, ""), "bold yellow")
        lines.append(line)
    return lines


def _end_state(state: str) -> Text:
    return Text(f"{'✗ ' if state == 'died' else ''}{sanitize(state, 12)}", _end_style(state))


def _end_style(state: str) -> str:
    return "red" if state == "died" else QUIET


def _parts(worker: WorkerStatus) -> tuple[float, float, float]:
    """Seconds of a step, in the order of BLOCKS; impossible values are 0."""
    seconds = [each if 0 <= each < _MAX_STEP_S else 0.0 for each in (worker.compute_s, worker.comm_s, worker.wait_s)]
    return seconds[0], seconds[1], seconds[2]


def _step_bar(parts: Sequence[float], longest: float, length: int) -> Text:
    """Parts of a step as blocks, to the scale of the longest step; a part of 2 % or more gets at least one block."""
    total = sum(parts)
    if longest <= 0 or total <= 0 or length <= 0:
        return Text("·" * max(0, length), QUIET)
    share = total / longest
    whole = length if share > _ALIKE else max(1, round(length * share))
    cells = [int(whole * part / total) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: cells[i] - whole * parts[i] / total)
    for index in by_remainder[: whole - sum(cells)]:
        cells[index] += 1
    for index, part in enumerate(parts):
        if not cells[index] and part >= 0.02 * total and max(cells) > 1:
            cells[cells.index(max(cells))] -= 1
            cells[index] = 1
    bar = Text()
    for (sign, _, style), num_cells in zip(BLOCKS, cells, strict=True):
        bar.append(sign * num_cells, style)
    return bar.append(" " * (length - whole))


def _server_line(server: ServerStatus, start: int, width: int) -> Text:
    line = Text(f" {f'server {server.number}':<{start - 1}}")
    if server.state != "alive":
        return line.append(_end_state(server.state))
    busy = min(1.0, max(0.0, server.busy))
    parts = [f"{percent(busy):>5} busy", f"queue {server.queue}"]
    if width >= 60:
        parts.append(f"{rate(server.updates_per_s)} updates/s")
    if width >= 80:
        parts.append(size(server.load_bytes))
    text = ("   " if width >= 70 else "  ").join(parts)
    length = max(4, min(24, width - start - len(text) - 2))
    full = round(busy * length)
    return line.append("█" * full, "blue").append("·" * (length - full), QUIET).append(f"  {text}")
