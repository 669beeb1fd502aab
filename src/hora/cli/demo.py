"""`hora demo`: a small net learns handwritten digits with one worker, then with several under every strategy.

Every run uses the real launcher; its workers run this module, `python -m hora.cli.demo RESULT EPOCHS SLOWNESS`. The
global batch is the same everywhere, so all synchronous runs must end with the same model, up to rounding.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..launch.launched import ending_on_signals, launched
from ..launch.peak_memory import peak_bytes
from ..net.machine import num_cores

if TYPE_CHECKING:
    from rich.console import Console


STRATEGIES = ("auto", "shared", "shared:update=sharded", "ring", "halving", "tree", "star", "engine")
SERVED = ("ps", "ps:mode=ssp,staleness=2", "ps:mode=async,sync_every=8", "ps:mode=async")
LOCAL = ("local:every=8", "local:every=8,pace=time", "diloco:every=32")
UNEVEN = (  # also run with a straggler
    "ring", "ps:mode=ssp,staleness=2", "ps:mode=async", "local:every=8", "local:every=8,pace=time",
)  # fmt: skip
SLOWNESS = 4
UNEVEN_EPOCHS = 3
EPOCHS = 6
GLOBAL_BATCH = 60
LEARNING_RATE = 2e-3
SHOW_EVERY = 10  # steps
UNKNOWN = "–"
MAX_REACHED = 1.005  # of the ideal, rounded to 100 %; above it the even run was disturbed
WIDTH = 100
WORKER = ("-m", "hora.cli.demo")

Result = dict[str, Any]
Progress = Callable[[int, int], None]  # steps done, total


def main(epochs: int = EPOCHS) -> int:
    """Runs every strategy with a progress bar or line each, and prints tables at the end; 1 if a run failed, else 0."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    workers = 4 if num_cores() >= 4 else 2
    runs = [("auto", 1, 1), *((strategy, workers, 1) for strategy in (*STRATEGIES, *SERVED, *LOCAL))]
    runs += [(strategy, workers, SLOWNESS) for strategy in UNEVEN]
    console.print(
        f"A small convolutional net learns 1,500 handwritten digits, {epochs} epochs each time:\n"
        f"with 1 worker, then with {workers} under each strategy; finally with one of them {SLOWNESS} times slower.\n"
    )
    results: list[Result] = []
    failures: list[str] = []
    with ending_on_signals(), _progress_display(console) as display:
        for strategy, size, slowness in runs:
            what = f"{size} worker{'s' if size > 1 else ''}" if slowness == 1 else f"one {slowness}x slower"
            with display(f"{strategy}, {what}") as progress:
                length = epochs if slowness == 1 else min(epochs, UNEVEN_EPOCHS)
                try:
                    results.append(_run(strategy, size, length, slowness, progress))
                except RuntimeError as error:
                    failures.append(str(error))
    if results:
        _print_results([row for row in results if row["slowness"] == 1], console)
        _print_uneven(results, console)
    for failure in failures:
        print(f"hora demo: {failure}", file=sys.stderr, flush=True)
    print("Next: hora run -n 2 examples/gpt.py · hora explain ring · hora bench train -n 2 (against DDP)", flush=True)
    return 1 if failures else 0


@click.command()
def demo() -> int:
    """Train handwritten digits under every strategy, and compare.

    \b
      hora demo
    """
    return main()


@contextlib.contextmanager
def _progress_display(console: Console) -> Iterator[Callable[[str], contextlib.AbstractContextManager[Progress]]]:
    """A bar for each run on a terminal, elsewhere a line when it has ended."""
    if not sys.stdout.isatty():
        yield _line
        return
    from rich import progress

    @contextlib.contextmanager
    def bar(name: str) -> Iterator[Progress]:
        task = bars.add_task(f"{name:<{len('ps:mode=async,sync_every=8, 2 workers')}}", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
        bars.stop_task(task)

    steps = (progress.MofNCompleteColumn(), progress.TextColumn("steps"), progress.TimeElapsedColumn())
    description = progress.TextColumn("{task.description}")
    with progress.Progress(description, progress.BarColumn(), *steps, console=console) as bars:
        yield bar


@contextlib.contextmanager
def _line(name: str) -> Iterator[Progress]:
    begin, steps = time.monotonic(), [0]
    yield lambda done, total: steps.append(done)
    print(f"{name}: {steps[-1]} steps in {time.monotonic() - begin:.1f} s", flush=True)


def _run(strategy: str, size: int, epochs: int, slowness: int, progress: Progress) -> Result:
    """One run through the launcher. Raises RuntimeError if it fails."""

    def on_line(line: str) -> bool:
        steps = re.fullmatch(r"\[0\] step (\d+) of (\d+)\n", line)
        if steps:
            progress(int(steps[1]), int(steps[2]))
        return steps is not None

    result = launched(WORKER, epochs, slowness, size=size, strategy=strategy, on_line=on_line)
    return {**result, "strategy": strategy}


def _print_results(results: list[Result], console: Console) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("strategy", no_wrap=True)
    headings = "workers|samples\nper s|final\nloss|test\naccuracy|time\nwaiting|bytes\nper step|peak\nmemory"
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    for row in results:
        counted = row["workers"] == 1 or row["bytes_per_step"] > 0
        table.add_row(
            row["strategy"],
            str(row["workers"]),
            f"{row['samples_per_s']:,.0f}",
            f"{row['loss']:.4f}",
            f"{row['accuracy']:.1%}",
            f"{row['waiting']:.1%}",
            f"{row['bytes_per_step']:,.0f}" if counted else UNKNOWN,
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        )
    console.print()
    console.print(table)
    sent = {row["strategy"]: row["bytes_per_step"] for row in results}
    engine = f"; {UNKNOWN} the engine does not count" if "engine" in sent else ""
    ratios = [f"{name} {sent[name] / sent['ring']:.0%}" for name in LOCAL if name in sent and sent.get("ring")]
    against = f"\nbytes against the ring's: {', '.join(ratios)}" if ratios else ""
    console.print(
        f"time waiting: share of training spent on communication, or waiting for it\nbytes per step: sent by each "
        f"worker, on average{engine}{against}\npeak memory: of a worker\n",
        style="dim",
    )


def _print_uneven(results: list[Result], console: Console) -> None:
    """What one straggler costs, against the sum of all workers' own speeds."""
    from rich.table import Table

    even = {row["strategy"]: row["samples_per_s"] for row in results if row["slowness"] == 1 and row["workers"] > 1}
    slow = [row for row in results if row["slowness"] > 1]
    if not slow:
        return
    table = Table(title=f"one worker {SLOWNESS} times slower", title_justify="left")
    table.add_column("strategy", overflow="fold")
    for heading in ("samples\nper s", "all even", "without\nwaiting", "reached"):
        table.add_column(heading, justify="right")
    for row in slow:
        if (all_even := even.get(row["strategy"])) is None:
            continue
        ideal = all_even * (row["workers"] - 1 + 1 / SLOWNESS) / row["workers"]
        numbers = [f"{value:,.0f}" for value in (row["samples_per_s"], all_even, ideal)]
        reached = row["samples_per_s"] / ideal
        table.add_row(row["strategy"], *numbers, f"{reached:.0%}" if reached <= MAX_REACHED else UNKNOWN)
    console.print(table)
    console.print(
        "without waiting: the fast workers at their speed in the even run, the slow one at its part of it\n"
        f"reached: {UNKNOWN} where it exceeds 100 %, because other programs slowed the even run down\n",
        style="dim",
    )


def worker(path: str, epochs: int, slowness: int) -> None:
    """One rank: an ordinary training loop; rank 0 writes the result."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import hora
    from hora.datasets import digits

    job = hora.init()
    torch.manual_seed(0)
    train, test = digits()
    model = nn.Sequential(  # GroupNorm, not BatchNorm: results do not depend on how batches are split
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
    ).to(job.device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    job.prepare(model, optimizer)
    loader = job.shard(train, global_batch=GLOBAL_BATCH, shuffle=True)
    total = epochs * len(loader)
    begin, first, seen = time.perf_counter(), 0, 0
    is_slow = slowness > 1 and job.rank == job.size - 1
    for epoch in job.epochs(epochs):
        sum_of_losses = torch.zeros(())
        for x, y in loader:
            started = time.perf_counter()
            loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            if is_slow:
                time.sleep((slowness - 1) * (time.perf_counter() - started))
            optimizer.step()
            seen += len(x)
            optimizer.zero_grad()
            job.log(loss=loss)
            sum_of_losses += loss.detach().cpu() * len(x)
            if job.rank == 0 and (job.step % SHOW_EVERY == 0 or job.step == total):
                print(f"step {job.step} of {total}", flush=True)
        if epoch == 0 and epochs > 1:  # the first epoch warms up
            job.traffic.reset()
            begin, first, seen = time.perf_counter(), job.step, 0
    seconds, steps, traffic = time.perf_counter() - begin, job.step - first, job.traffic
    mine = [traffic.exposed_s / seconds, traffic.sent_bytes / max(1, steps), seen / seconds]
    model.eval()
    with torch.no_grad():
        parts = job.shard(test, batch_size=100)
        right = sum(int((model(x.to(job.device)).argmax(1).cpu() == y).sum()) for x, y in parts)
    sums = hora.all_reduce(torch.tensor([sum_of_losses.item(), right, *mine], dtype=torch.float64)).tolist()
    peak = hora.all_reduce(torch.tensor([peak_bytes()], dtype=torch.float64), "max").item()
    if job.rank == 0:
        result = {
            "workers": job.size,
            "slowness": slowness,
            "samples_per_s": sums[4],
            "loss": sums[0] / len(train),
            "accuracy": sums[1] / len(test),
            "waiting": sums[2] / job.size,
            "bytes_per_step": sums[3] / job.size,
            "peak_bytes": peak,
        }
        pathlib.Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
