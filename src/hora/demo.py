"""`hora demo`: the handwritten digits, learnt by one worker and then by several under every strategy, side by side.

Every run goes through the real launcher; its workers are this module, `python -m hora.demo RESULT EPOCHS`. The global
batch is the same everywhere, so that all runs take the same steps and must end with the same model, up to rounding.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress


STRATEGIES = ("auto", "shared", "shared:update=sharded", "ring", "halving", "tree", "star", "engine")
EPOCHS = 6
GLOBAL_BATCH = 60
LEARNING_RATE = 2e-3
TAIL_LINES = 20

Result = dict[str, Any]


def main(epochs: int = EPOCHS) -> int:
    """Runs all, shows a bar for each and a table at the end; 1 if a run failed, else 0."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(width=None if sys.stdout.isatty() else 120)
    workers = 4 if _num_cores() >= 4 else 2
    runs = [("auto", 1), *((strategy, workers) for strategy in STRATEGIES)]
    console.print(
        f"A small convolutional net learns 1,500 handwritten digits: 1 worker, then {workers}, {epochs} epochs each."
    )
    results: list[Result] = []
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with (
        tempfile.TemporaryDirectory(prefix="hora-demo-") as folder,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        for index, (strategy, size) in enumerate(runs):
            result, complaint = _run(strategy, size, epochs, pathlib.Path(folder) / str(index), progress)
            if result is not None:
                results.append(result)
            else:
                failures.append(complaint)
    _print_results(results, console)
    for failure in failures:
        print(f"hora demo: {failure}", file=sys.stderr)
    print("\nNext: hora run -n 2 examples/gpt.py · hora explain ring · hora bench train -n 2 (against DDP)", flush=True)
    return 1 if failures else 0


def _run(strategy: str, size: int, epochs: int, folder: pathlib.Path, progress: Progress) -> tuple[Result | None, str]:
    """One run through the launcher: its result, or what is to be said of its failure."""
    folder.mkdir()
    path = folder / "result.json"
    command = [sys.executable, "-m", "hora.launch.cli", "run", "-n", str(size), "--strategy", strategy]
    command += ["--run-dir", str(folder / "run"), "-m", "hora.demo", str(path), str(epochs)]
    task = progress.add_task(f"{strategy}, {size} worker{'s' if size > 1 else ''}", total=None)
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    ) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            steps = re.fullmatch(r"\[0\] step (\d+) of (\d+)\n", line)
            if steps:
                progress.update(task, completed=int(steps[1]), total=int(steps[2]))
            else:
                said.append(line)
    progress.stop_task(task)
    if launcher.returncode:
        tail = "".join(f"  {line}" for line in said[-TAIL_LINES:]).rstrip()
        return None, f"{strategy} with {size} ended with exit code {launcher.returncode}:\n{tail}"
    return json.loads(path.read_text()), ""


def _print_results(results: list[Result], console: Any) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("strategy")
    headings = ("workers", "samples/s", "final loss", "test accuracy", "waiting", "bytes/step", "peak memory")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in results:
        table.add_row(
            row["strategy"],
            str(row["workers"]),
            f"{row['samples_per_s']:.0f}",
            f"{row['loss']:.4f}",
            f"{row['accuracy']:.1%}",
            f"{row['waiting']:.1%}",
            f"{row['bytes_per_step']:,.0f}",
            f"{row['peak_bytes'] / 1e6:.0f} MB",
        )
    console.print(table)
    console.print(
        "waiting: share of the time that training waited for communication; bytes/step and peak memory: per worker",
        style="dim",
    )


def worker(path: str, epochs: int) -> None:
    """What each process does: the loop of any user, and a result at the end."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import hora
    from hora.datasets import digits

    job = hora.init()
    torch.manual_seed(0)
    train, test = digits()
    model = nn.Sequential(  # GroupNorm looks at one sample at a time: one worker and many compute the same
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    ).to(job.device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    job.prepare(model, optimizer)
    loader = job.shard(train, global_batch=GLOBAL_BATCH)
    total = epochs * len(loader)
    begin, first = time.perf_counter(), 0
    for epoch in job.epochs(epochs):
        sum_of_losses = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            job.log(loss=loss)
            sum_of_losses += loss.detach().cpu() * len(x)
            if job.rank == 0:
                print(f"step {job.step} of {total}", flush=True)
        if epoch == 0 and epochs > 1:  # the first epoch warms up
            job.traffic.reset()
            begin, first = time.perf_counter(), job.step
    seconds, steps, traffic = time.perf_counter() - begin, job.step - first, job.traffic
    mine = [traffic.exposed_s / seconds, traffic.sent_bytes / steps]
    model.eval()
    with torch.no_grad():
        parts = job.shard(test, batch_size=100, shuffle=False)
        right = sum(int((model(x.to(job.device)).argmax(1).cpu() == y).sum()) for x, y in parts)
    sums = hora.all_reduce(torch.tensor([sum_of_losses.item(), right, *mine], dtype=torch.float64)).tolist()
    peak = hora.all_reduce(torch.tensor([_peak_bytes()], dtype=torch.float64), "max").item()
    if job.rank == 0:
        result = {
            "strategy": job.strategy.spell(),
            "workers": job.size,
            "samples_per_s": steps * GLOBAL_BATCH / seconds,
            "loss": sums[0] / len(train),
            "accuracy": sums[1] / len(test),
            "waiting": sums[2] / job.size,
            "bytes_per_step": sums[3] / job.size,
            "peak_bytes": peak,
        }
        pathlib.Path(path).write_text(json.dumps(result))


def _peak_bytes() -> float:
    """The most memory that this process has held. VmHWM, since ru_maxrss starts with what the parent held."""
    status = pathlib.Path("/proc/self/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if match:
        return float(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) if sys.platform == "darwin" else float(peak) * 1024


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]))
