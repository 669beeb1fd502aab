"""`hora bench start`: time to start and end ranks that only call `hora.init()`, and their private memory.

`python`, torchrun and `hora run` start the same two lines in turn, so that other load on the machine affects all alike.
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
from collections.abc import Sequence
from typing import Any

import click

from ..net.machine import machine_text
from .options import PositiveInt

TORCHRUN_MAX = 8  # ranks; more take minutes
MEMORY_RANKS = 8
TIMEOUT_S = 300.0

START = "import torch, hora\n\nhora.init()\n"
MEMORY = """import torch, hora

job = hora.init()
hora.barrier()
with open("/proc/self/smaps_rollup") as rollup:
    held = sum(int(line.split()[1]) for line in rollup if line.startswith("Private_"))
hora.barrier()  # pages are private once the process that shares them has ended
print("private kB:", held, flush=True)
"""

Row = dict[str, Any]


@click.command()
@click.option("--ranks", default="2,8,32", metavar="LIST", help="Numbers of ranks. E.g. --ranks 2,8. Default: 2,8,32.")
@click.option("--repeats", type=PositiveInt(), default=5, help="Repeats of each. E.g. --repeats 9. Default: 5.")
@click.option("--json", "json_path", metavar="FILE", help="Also write results as JSON lines. E.g. --json out.jsonl.")
def start(ranks: str, repeats: int, json_path: str | None) -> int:
    """Time to start and end ranks, against python and torchrun; and their memory.

    \b
      hora bench start --ranks 2,8
    """
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in ranks.split(",")]
    if not all(sizes):
        raise click.UsageError(f"--ranks takes whole numbers of at least 1, not {ranks!r}; e.g. --ranks 2,8")
    with tempfile.TemporaryDirectory(prefix="hora-start-") as folder:
        rows = measure_times(pathlib.Path(folder), sizes, repeats) + measure_memory(pathlib.Path(folder))
    if json_path is not None:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_rows(rows)
    return 0


def _hora(size: int, script: str, *options: str) -> list[str]:
    where = ["--run-dir", f"{script}-{size}-{time.monotonic_ns()}", "--dashboard", "off"]
    return [sys.executable, "-m", "hora.cli.main", "run", "-n", str(size), *where, *options, script]


def measure_times(folder: pathlib.Path, sizes: Sequence[int], repeats: int) -> list[Row]:
    script = str(folder / "start.py")
    pathlib.Path(script).write_text(START)
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats):
        commands = {("python", 1): [sys.executable, script]}
        for size in sizes:
            commands["hora run", size] = _hora(size, script)
            if size <= TORCHRUN_MAX:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), script]
                commands["torchrun", size] = torchrun
        for key, command in commands.items():
            begin = time.perf_counter()
            _run(command)
            seconds.setdefault(key, []).append(time.perf_counter() - begin)
        print(f"round {repeat + 1} of {repeats}")
    python = statistics.median(seconds["python", 1])
    return [
        {"kind": "start", "name": name, "ranks": size, "seconds": each, "median_s": statistics.median(each),
         "times_python": statistics.median(each) / python}
        for (name, size), each in seconds.items()
    ]  # fmt: skip


def measure_memory(folder: pathlib.Path, size: int = MEMORY_RANKS) -> list[Row]:
    """Memory of each rank that no other process shares, after `hora.init()`."""
    if not os.path.exists("/proc/self/smaps_rollup"):
        return []
    script = folder / "memory.py"
    script.write_text(MEMORY)
    rows: list[Row] = []
    for options in ((), ("--no-fork",)):
        private = re.findall(r"private kB: (\d+)", _run(_hora(size, str(script), *options)))
        held = [int(number) * 1024 for number in private]
        rows.append({"kind": "memory", "name": " ".join(("hora run", *options)), "ranks": size, "private_bytes": held})
    return rows


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise click.ClickException(
            f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}"
        )
    return done.stdout


def print_rows(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

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
