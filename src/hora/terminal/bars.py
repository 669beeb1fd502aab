"""Bars: a line for each worker and each server of a run, as far as there is room; the others in words.

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

from .format import count, harmless, milliseconds, percent, rate, size

MAX_WORKERS = 8
FEW_WORKERS = 6  # shown where there are more than MAX_WORKERS
MAX_SERVERS = 4
BLOCKS = (("█", "compute", "cyan"), ("▒", "communication", "magenta"), ("░", "waiting", "bright_black"))
QUIET = "bright_black"
_ALIKE = 0.94  # shares of the longest step above this are drawn as long as it
_LONGEST_S = 1e9


def num_rows(now: RunStatus) -> int:
    """Lines of workers and servers that there would be, were there room for all that are worth one."""
    return _num_lines(len(now.workers), _most(now.workers)) + _num_lines(len(now.servers), MAX_SERVERS)


def _most(workers: Sequence[WorkerStatus]) -> int:
    return MAX_WORKERS if len(workers) <= MAX_WORKERS else FEW_WORKERS


def _num_lines(there: int, shown: int) -> int:
    return min(there, shown) + (shown < there)


def bars(now: RunStatus, room: int, wide: int) -> list[Text]:
    """A line for each worker and server, as far as there is room for them; the others in words."""
    workers, servers = now.workers, now.servers
    num_servers, num_workers = min(len(servers), MAX_SERVERS), min(len(workers), _most(workers))
    half = room - min(_num_lines(len(workers), num_workers), max(room // 2, 2))
    while num_servers and _num_lines(len(servers), num_servers) > half:
        num_servers -= 1
    rest = room - (_num_lines(len(servers), num_servers) if num_servers else 0)
    while num_workers and _num_lines(len(workers), num_workers) > rest:
        num_workers -= 1
    chosen = _most_telling(workers, num_workers)
    names = [f"rank {worker.rank}" for worker in chosen] + [f"server {each.number}" for each in servers[:num_servers]]
    start = max(map(len, names), default=0) + 3
    lines = _crew(chosen, start, wide)
    if len(chosen) < len(workers):
        lines.append(_others(workers, chosen))
    lines += [_server(server, start, wide) for server in servers[:num_servers]]
    if 0 < num_servers < len(servers):
        lines.append(Text(f" … {len(servers) - num_servers} more", QUIET))
    return lines[:room]


def _most_telling(workers: Sequence[WorkerStatus], most: int) -> list[WorkerStatus]:
    """Those who are slow or gone, then the slowest; in order of rank, and without jumping for a few percent."""
    if len(workers) <= most:
        return list(workers)
    middle = statistics.median(_parts(worker)[0] for worker in workers) or 1.0

    def dullness(worker: WorkerStatus) -> tuple[bool, bool, int, int]:
        return (not worker.slow, worker.state != "died", -round(4 * _parts(worker)[0] / middle), worker.rank)

    return sorted(sorted(workers, key=dullness)[:most], key=lambda worker: worker.rank)


def _others(workers: Sequence[WorkerStatus], chosen: Sequence[WorkerStatus]) -> Text:
    """Those who have no line."""
    there = {worker.rank for worker in chosen}
    rest = [worker for worker in workers if worker.rank not in there]
    slow = [worker.rank for worker in rest if worker.slow and worker.state == "alive"]
    told = [f"slow: rank {', '.join(map(str, slow[:5]))}{', …' * (len(slow) > 5)}"] if slow else []
    for state in ("died", "left", "stopped"):
        many = sum(worker.state == state for worker in rest)
        told += [f"{many} {state}"] * bool(many)
    how = "; ".join(told) or ("all even" if len(rest) > 1 else "even")
    who = f"{len(rest)} more" if chosen else count(len(rest), "worker")
    return Text(f" … {who}, {how}", "yellow" if slow else QUIET)


def _crew(workers: Sequence[WorkerStatus], start: int, wide: int) -> list[Text]:
    """Each worker's step: who computes, who communicates, who waits."""
    steps = [sum(_parts(worker)) for worker in workers]
    longest = max(steps, default=0.0)
    times = [milliseconds(step) if step > 0 else "–" for step in steps]
    speeds = [f"{rate(worker.samples_per_s)}/s" if wide >= 50 else "" for worker in workers]
    time_room, speed_room = (max(map(len, texts), default=0) for texts in (times, speeds))
    tails = [
        f"  {time:>{max(7, time_room)}}" + f"  {speed:>{max(8, speed_room)}}" * bool(speed)
        for time, speed in zip(times, speeds, strict=True)
    ]
    lines = []
    slow = {w.rank: f"▲ {'slow: ' if wide >= 60 else ''}{w.slow:.1f}×" for w in workers if w.slow}
    mark_room = max((len(mark) + 2 for mark in slow.values()), default=0)
    length = wide - start - max(map(len, tails), default=0) - mark_room
    for worker, tail in zip(workers, tails, strict=True):
        line = Text(f" {f'rank {worker.rank}':<{start - 1}}")
        lines.append(line)
        if worker.state != "alive":
            died = worker.state == "died"
            text = f"{'✗ ' if died else ''}{harmless(worker.state, 12)} after step {worker.step:,}"
            line.append(text, "red" if died else QUIET)
            continue
        line.append(_shares(_parts(worker), longest, length)).append(tail)
        if worker.rank in slow:
            line.append(f"  {slow[worker.rank]}", "bold yellow")
    return lines


def _parts(worker: WorkerStatus) -> tuple[float, float, float]:
    """Seconds of a step, in the order of BLOCKS; what cannot be is nothing."""
    seconds = [each if 0 <= each < _LONGEST_S else 0.0 for each in (worker.compute_s, worker.comm_s, worker.wait_s)]
    return seconds[0], seconds[1], seconds[2]


def _shares(parts: Sequence[float], longest: float, length: int) -> Text:
    """Parts of a step as blocks, to the scale of the longest; whatever takes two percent of a step can be seen."""
    total = sum(parts)
    if longest <= 0 or total <= 0 or length <= 0:
        return Text("·" * max(0, length), QUIET)
    share = total / longest
    whole = length if share > _ALIKE else max(1, round(length * share))
    cells = [int(whole * part / total) for part in parts]
    by_rest = sorted(range(len(parts)), key=lambda i: cells[i] - whole * parts[i] / total)
    for index in by_rest[: whole - sum(cells)]:
        cells[index] += 1
    for index, part in enumerate(parts):
        if not cells[index] and part >= 0.02 * total and max(cells) > 1:
            cells[cells.index(max(cells))] -= 1
            cells[index] = 1
    bar = Text()
    for (sign, _, style), num_cells in zip(BLOCKS, cells, strict=True):
        bar.append(sign * num_cells, style)
    return bar.append(" " * (length - whole))


def _server(server: ServerStatus, start: int, wide: int) -> Text:
    line = Text(f" {f'server {server.number}':<{start - 1}}")
    if server.state != "alive":
        died = server.state == "died"
        return line.append(f"{'✗ ' if died else ''}{harmless(server.state, 12)}", "red" if died else QUIET)
    busy = min(1.0, max(0.0, server.busy))
    told = [f"{percent(busy):>5} busy", f"queue {server.queue}"]
    if wide >= 60:
        told.append(f"{rate(server.updates_per_s)} updates/s")
    if wide >= 80:
        told.append(size(server.load_bytes))
    text = ("   " if wide >= 70 else "  ").join(told)
    length = max(4, min(24, wide - start - len(text) - 2))
    full = round(busy * length)
    return line.append("█" * full, "blue").append("·" * (length - full), QUIET).append(f"  {text}")
