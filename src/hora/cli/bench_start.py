"""`hora bench start`: how long it takes to start and end ranks that only call `hora.init()`, and what memory they hold.

Everything runs the same two lines: `python`, torchrun, and `hora run`, in turn, so that a busy moment hits all alike.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..terminal.bench_table import Row, machine_text

SIZES = (2, 8, 32)
TORCHRUN_MOST = 8  # ranks; beyond it takes minutes
MEMORY_SIZE = 8
LIMIT_S = 300.0

START = "import torch, hora\n\nhora.init()\n"
MEMORY = """import torch, hora

job = hora.init()
hora.barrier()
with open("/proc/self/smaps_rollup") as rollup:
    held = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
hora.barrier()  # nobody has ended: what all share, all still share
print("private kB:", held, flush=True)
"""


def main(sizes: Sequence[int], repeats: int, json_path: str | None) -> int:
    """Measures, prints a table and, if asked to, writes the rows; 1 if a command failed, else 0."""
    with tempfile.TemporaryDirectory(prefix="hora-start-") as folder:
        rows = times(pathlib.Path(folder), sizes, repeats) + memory(pathlib.Path(folder))
    if json_path is not None:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)
    return 0


def commands(script: str, sizes: Sequence[int]) -> dict[tuple[str, int], list[str]]:
    """By name and number of ranks. What `hora run` keeps of a run goes where the script is."""
    python = [sys.executable, script]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    found = {("python", 1): python}
    for size in sizes:
        found["hora run", size] = [*_hora(size, script), script]
        if size <= TORCHRUN_MOST:
            found["torchrun", size] = [*torchrun, str(size), script]
    return found


def _hora(size: int, script: str, *options: str) -> list[str]:
    where = ["--run-dir", f"{script}-{size}-{time.monotonic_ns()}", "--dashboard", "off"]
    return [sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), *where, *options]


def times(folder: pathlib.Path, sizes: Sequence[int], repeats: int, say: Callable[[str], None] = print) -> list[Row]:
    script = folder / "start.py"
    script.write_text(START)
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(repeats):
        for what, command in commands(str(script), sizes).items():
            begin = time.perf_counter()
            _run(command)
            seconds.setdefault(what, []).append(time.perf_counter() - begin)
        say(f"round {turn + 1} of {repeats}")
    python = statistics.median(seconds["python", 1])
    return [
        {"kind": "start", "name": name, "ranks": size, "seconds": each, "median_s": statistics.median(each),
         "times_python": statistics.median(each) / python}
        for (name, size), each in seconds.items()
    ]  # fmt: skip


def memory(folder: pathlib.Path, size: int = MEMORY_SIZE) -> list[Row]:
    """What each rank holds that no other process shares, after `hora.init()`."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        return []
    script = folder / "memory.py"
    script.write_text(MEMORY)
    rows: list[Row] = []
    for name, options in (("hora run", ()), ("hora run --no-fork", ("--no-fork",))):
        said = _run([*_hora(size, str(script), *options), str(script)])
        held = [int(number) * 1024 for number in re.findall(r"private kB: (\d+)", said)]
        rows.append({"kind": "memory", "name": name, "ranks": size, "private_bytes": held})
    return rows


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def show(rows: list[Row]) -> None:
    console = Console(width=100, highlight=False)
    table = Table(title=f"start and end of ranks that call hora.init()\n{machine_text()}", title_justify="left")
    table.add_column("command")
    for heading in ("ranks", "s, median", "lowest to highest", "times python"):
        table.add_column(heading, justify="right")
    for row in sorted((row for row in rows if row["kind"] == "start"), key=lambda row: (row["ranks"], row["name"])):
        spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
        table.add_row(row["name"], str(row["ranks"]), f"{row['median_s']:.2f}", spread, f"{row['times_python']:.2f}")
    console.print(table)
    for row in rows:
        if row["kind"] == "memory" and row["private_bytes"]:
            held = [number / 1e6 for number in row["private_bytes"]]
            console.print(
                f"{row['name']}, {row['ranks']} ranks: {statistics.median(held):.0f} MB of private memory each "
                f"({min(held):.0f} to {max(held):.0f})"
            )
