"""`hora bench serve`: what live predictions cost the training, and how many there are, during it and after it.

Each figure is a run of its own through the real launcher, the kinds in turn, so that other load on the machine affects
all alike:

    off          training alone
    idle         a predictor without requests
    json × c     c clients that ask for one row as JSON, again and again; then the same after the training
    binary × c   the same in the Open Inference Protocol's binary form
"""

from __future__ import annotations

import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hora.net.machine import machine_text
from hora_benchmarks.bench.bench_table import Row

from .serve_client import Clients, Reply, Request, binary, plain

WIDTH = 110
START_S = 60.0
NUM_INPUTS = 784


class Kind(NamedTuple):
    """What is measured: how the predictor is asked, if there is one."""

    name: str
    serves: bool
    clients: int = 0
    form: str = "json"


KINDS = (
    Kind("off", False),
    Kind("idle", True),
    Kind("json × 1", True, 1),
    Kind("json × 8", True, 8),
    Kind("binary × 8", True, 8, "binary"),
)


def choose(names: Sequence[str] | None) -> list[Kind]:
    """The kinds with these names, besides `off`, with which all are compared; ValueError says what there is."""
    known = {kind.name: kind for kind in KINDS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no {name!r} to measure; there are: {', '.join(known)}")
    return [kind for kind in KINDS if names is None or kind.name in names or not kind.serves]


def main(kinds: Sequence[Kind], size: int, strategy: str, seconds: float, repeats: int, json_path: str | None) -> int:
    measured: dict[str, list[dict[str, Any]]] = {kind.name: [] for kind in kinds}
    for repeat in range(repeats):
        for kind in kinds:
            try:
                measured[kind.name].append(_measure(kind, size, strategy, seconds))
            except RuntimeError as problem:
                print(f"hora bench serve: {kind.name}: {problem}", file=sys.stderr, flush=True)
                return 1
            print(f"{repeat + 1} of {repeats}: {kind.name}", file=sys.stderr, flush=True)
    rows = [_row(kind, measured[kind.name], measured["off"]) for kind in kinds]
    _print(rows, size, strategy, seconds, repeats)
    if json_path is not None:
        facts = {"size": size, "strategy": strategy, "seconds": seconds, "machine": machine_text()}
        lines = [json.dumps({**facts, **row, "runs": measured[row["name"]]}) for row in rows]
        pathlib.Path(json_path).write_text("\n".join(lines) + "\n")
    return 0


def _measure(kind: Kind, size: int, strategy: str, seconds: float) -> dict[str, Any]:
    """One run."""
    with tempfile.TemporaryDirectory(prefix="hora-bench-serve-") as name:
        folder = pathlib.Path(name)
        flags = ["--serve", "0", *(["--serve-after"] if kind.clients else [])] if kind.serves else []
        command = [
            sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), "--strategy", strategy, *flags,
            "--run-dir", str(folder / "run"), "-m", "hora_benchmarks.bench.serve_rank", "--model", "mlp",
            "--seconds", str(seconds), "--folder", str(folder),
        ]  # fmt: skip
        with open(folder / "output", "wb") as output:
            run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return _watch(kind, run, folder, seconds)
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                run.wait(20)


def _watch(kind: Kind, run: subprocess.Popen[bytes], folder: pathlib.Path, seconds: float) -> dict[str, Any]:
    _await(folder / "began", run, folder, START_S)
    found: dict[str, Any] = {}
    clients = None
    if kind.clients:
        url = _url(folder)
        clients = Clients(url, _request(kind, url), kind.clients)
        clients.start()
    _await(folder / "result.json", run, folder, START_S + 10 * seconds)
    result = json.loads((folder / "result.json").read_text())
    found["samples_per_s"] = result["samples_per_s"]
    if clients is None:
        if run.wait(60) != 0:
            raise RuntimeError(_tail(folder))
        return found
    time.sleep(1.0)  # the workers are leaving
    after = time.monotonic()
    time.sleep(seconds)
    replies = clients.stop()
    if clients.problems:
        raise RuntimeError(clients.problems[0])
    found["during"] = _figures(replies, result["from"], result["to"])
    found["after"] = _figures(replies, after, after + seconds)
    return found


def _await(path: pathlib.Path, run: subprocess.Popen[bytes], folder: pathlib.Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(_tail(folder))
        time.sleep(0.05)


def _url(folder: pathlib.Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        match = re.search(r"serving '.*?' on (http://\S+)", (folder / "output").read_text(errors="replace"))
        if match:
            return match[1]
        time.sleep(0.05)
    raise RuntimeError(f"no predictor came: {_tail(folder)}")


def _request(kind: Kind, url: str) -> Request:
    row = [round(0.001 * number, 3) for number in range(NUM_INPUTS)]
    return plain(row) if kind.form == "json" else binary("serve_rank", row)


def _tail(folder: pathlib.Path) -> str:
    lines = (folder / "output").read_text(errors="replace").splitlines()
    return " · ".join(lines[-3:]) or "it ended without a word"


def _figures(replies: Sequence[Reply], begin: float, end: float) -> dict[str, float]:
    times = sorted(reply.seconds for reply in replies if begin <= reply.at <= end)
    if not times:
        raise RuntimeError("not one answer came in time")
    return {
        "requests_per_s": len(times) / (end - begin),
        "p50_s": times[len(times) // 2],
        "p99_s": times[min(len(times) - 1, len(times) * 99 // 100)],
    }


def _row(kind: Kind, runs: list[dict[str, Any]], off: list[dict[str, Any]]) -> Row:
    row: Row = {"name": kind.name, "clients": kind.clients, **_spread("samples_per_s", runs)}
    row["share"] = row["samples_per_s"] / statistics.median(run["samples_per_s"] for run in off)
    for when in ("during", "after"):
        if when in runs[0]:
            told = [run[when] for run in runs]
            row[when] = {key: value for name in told[0] for key, value in _spread(name, told).items()}
    return row


def _spread(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    values = [run[name] for run in runs]
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _print(rows: list[Row], size: int, strategy: str, seconds: float, repeats: int) -> None:
    title = (
        f"MLP of 20 M parameters, {size} workers, {strategy}; {repeats} runs of {seconds:g} s each, in turn\n"
        f"{machine_text()}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("", "training samples/s (min to max)", "of off"):
        table.add_column(heading, justify="left" if not heading else "right")
    for when in ("during", "after"):
        table.add_column(f"{when}: requests/s", justify="right")
        table.add_column("p50 / p99 ms", justify="right")
    for row in rows:
        cells = [f"{row['samples_per_s']:.0f} ({row['samples_per_s_min']:.0f} to {row['samples_per_s_max']:.0f})"]
        cells.append(f"{row['share']:.1%}")
        for when in ("during", "after"):
            told = row.get(when)
            cells.append(f"{told['requests_per_s']:.0f}" if told else "")
            cells.append(f"{told['p50_s'] * 1e3:.1f} / {told['p99_s'] * 1e3:.1f}" if told else "")
        table.add_row(row["name"], *cells)
    table.caption = "clients, predictor and workers share the cores; medians over the runs"
    table.caption_justify = "left"
    Console(width=WIDTH).print(table)
