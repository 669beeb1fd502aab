"""`hora bench quality`: quality of strategies that synchronise in rounds, after the same number of samples.

Every run goes through the real launcher, and its workers are hora_benchmarks.bench.quality_rank: handwritten digits and
a small character-level GPT, under the ring and under Local SGD and DiLoCo, from the same seeds, in the same order of
samples. Each row has the learning rate that a sweep (as `--sweep`, with seeds that are used nowhere else) found best
for it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hora.launch.launched import ending_on_signals, launched
from hora.runs import exit_codes
from hora.strategies import parse
from hora.strategies.local.config import DiLoCo

if TYPE_CHECKING:
    from rich.table import Table

RING = "ring"
DILOCO = "diloco:every=32,outer_momentum=0.6"
STRATEGIES = (
    RING, "local:every=8", "local:every=32", "diloco:every=32", DILOCO, f"{DILOCO},fragments=4,overlap=2",
    f"{DILOCO},wire=int8",
)  # fmt: skip
STEPS = {"digits": 640, "gpt": 3072}  # 20 and 96 rounds of 32
QUICK_STEPS = 64
SEEDS = {"digits": 3, "gpt": 1}
RATES = {"digits": (5e-4, 1e-3, 2e-3, 4e-3), "gpt": (4e-3, 8e-3, 1.2e-2, 1.6e-2)}
SWEEP_SEED = 100
BEST = {  # docs/results/2026-11-15-local.md says how they were found
    "digits": dict.fromkeys(STRATEGIES, 2e-3) | {"diloco:every=32": 5e-4},
    "gpt": dict.fromkeys(STRATEGIES, 1.2e-2) | {"local:every=8": 1.6e-2, "diloco:every=32": 8e-3},
}
WORKER = ("-m", "hora_benchmarks.bench.quality_rank")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One run. `curve`: after so many samples, loss and accuracy on held-out data, by seed; the last is the end's."""

    task: str
    strategy: str
    workers: int
    lr: float
    seeds: list[int]
    rounds: int
    sent_bytes: float  # per worker
    curve: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return self.curve[-1]["losses"]

    @property
    def accuracies(self) -> list[float]:
        return self.curve[-1]["accuracies"]

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)


def main(
    size: int,
    tasks: Sequence[str],
    json_path: str | None = None,
    plot_path: str | None = None,
    *,
    seeds: int | None = None,
    quick: bool = False,
    sweep: bool = False,
) -> int:
    """Measures, prints a table for each task, draws the curves; returns the exit code."""
    rows: list[Row] = []
    failures: list[str] = []
    with ending_on_signals():
        for task, strategy, lr in _runs(tasks, sweep):
            _log(f"{task}: {strategy}, learning rate {lr:g}")
            those = [SWEEP_SEED] if sweep else list(range(1 if quick else seeds or SEEDS[task]))
            steps = QUICK_STEPS if quick else STEPS[task]
            try:
                rows.append(measure(task, strategy, size, lr, steps, those))
            except RuntimeError as error:
                failures.append(f"{task} under {error}")
    from hora.net.machine import machine_text

    for task in tasks:
        _print([row for row in rows if row.task == task])
    print(machine_text())
    if json_path:
        lines = [json.dumps({"name": "quality", **dataclasses.asdict(row)}) for row in rows]
        pathlib.Path(json_path).write_text("".join(f"{line}\n" for line in lines))
    if plot_path and rows:
        _plot(rows, plot_path)
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


def _runs(tasks: Sequence[str], sweep: bool) -> Iterator[tuple[str, str, float]]:
    for task in tasks:
        for strategy in STRATEGIES:
            for lr in RATES[task] if sweep else (BEST[task][strategy],):
                yield task, strategy, lr


def measure(task: str, strategy: str, size: int, lr: float, steps: int, seeds: Sequence[int]) -> Row:
    """One run through the launcher. RuntimeError if it fails."""
    found = launched(WORKER, task, lr, steps, *seeds, size=size, strategy=strategy)
    return Row(task=task, strategy=strategy, workers=size, lr=lr, seeds=list(seeds), **found)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what is shown -----------------------------------------------------------------------------------------------------


def outer_text(strategy: str) -> str:
    """The outer learning rate and momentum, where there are any."""
    chosen = parse(strategy)
    return f"{chosen.outer_lr:g}, {chosen.outer_momentum:g}" if isinstance(chosen, DiLoCo) else ""


def _print(rows: Sequence[Row]) -> None:
    from rich.console import Console

    if rows:
        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(_table(rows))


def _table(rows: Sequence[Row]) -> Table:
    """Each row against the ring's best, where the ring was measured."""
    from rich.table import Table

    first = rows[0]
    title = f"{first.task}, {first.workers} workers, after {first.curve[-1]['samples']:,} samples"
    if len(first.seeds) > 1:
        title += f": mean of {len(first.seeds)} seeds (least to most)"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    shown = "test accuracy" if first.task == "digits" else "validation loss"
    headings = ("learning\nrate", "outer rate,\nmomentum", shown, "against\nthe ring's", "MB sent\nper worker",
                "of the\nring's", "rounds")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    ring = min((row for row in rows if row.strategy == RING), key=_badness, default=None)
    for row in rows:
        table.add_row(
            row.strategy,
            f"{row.lr:g}",
            outer_text(row.strategy),
            value_text(row),
            difference_text(row, ring) if ring is not None else "",
            f"{row.sent_bytes / 1e6:,.2f}",
            f"{row.sent_bytes / ring.sent_bytes:.2%}" if ring is not None and ring.sent_bytes else "",
            f"{row.rounds:,}",
        )
    return table


def _badness(row: Row) -> float:
    return -row.accuracy if row.task == "digits" else row.loss


def value_text(row: Row) -> str:
    """The mean, and where there are several seeds their spread."""
    values, form = (row.accuracies, ".1%") if row.task == "digits" else (row.losses, ".3f")
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def difference_text(row: Row, ring: Row) -> str:
    """Points of accuracy, or per cent of the loss."""
    if row.task == "digits":
        return f"{100 * (row.accuracy - ring.accuracy):+.1f} points"
    return f"{row.loss / ring.loss - 1:+.1%}"


def _plot(rows: Sequence[Row], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row.task for row in rows))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(7 * len(tasks), 5), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for row in (row for row in rows if row.task == task):
            samples = [point["samples"] for point in row.curve]
            middle = [statistics.mean(point["losses"]) for point in row.curve]
            (line,) = axis.plot(samples, middle, marker="o", markersize=3, label=f"{row.strategy} (lr {row.lr:g})",
                                linewidth=2.4 if row.strategy == RING else 1.2)  # fmt: skip
            low, high = ([worst(point["losses"]) for point in row.curve] for worst in (min, max))
            axis.fill_between(samples, low, high, color=line.get_color(), alpha=0.12)
        axis.set_yscale("log")
        axis.set_title(f"{task}, {rows[0].workers} workers (bands: all seeds)")
        axis.set_xlabel("samples, all workers together")
        axis.set_ylabel("loss on the test set" if task == "digits" else "validation loss")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
