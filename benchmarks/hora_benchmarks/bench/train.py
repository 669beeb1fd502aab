"""`hora bench train`: a training step of plain PyTorch, of DDP and of every strategy, interleaved in one run.

Each contestant is a set of processes of its own, started as its user would start it and running the same loop
(hora_benchmarks.bench.train_rank). They take turns: R rounds of K steps each, the order rotated from round to round, so
that other load on the machine affects all alike. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from hora.errors import did_you_mean
from hora.launch.launched import ending_on_signals
from hora.net.machine import machine_text, num_cores
from hora.runs import exit_codes

from .train_conductor import LEAVE_S, Answer, Conductor, Contestant

WARM_UP_STEPS = 3
ROUGH_START_S = 4.0  # a process imports torch and builds its model, on a core of its own
ROUGH_STEP_S = {"mlp": 0.18, "gpt": 0.85, "cnn": 0.06, "gpt34m": 0.05, "gpt236m": 0.2}
DEFAULT = (
    "single", "independent", "independent/kept", "single/kept", "ddp/gloo", "hora/1",
    "ring", "shared", "shared/sharded", "ring/serial", "shared/serial", "ps", "ps/colocated",
)  # fmt: skip

CUDA_DEFAULT = (
    "single", "independent", "ddp/1", "path/1", "ddp", "ring", "shared", "auto", "ring/sharded", "shared/sharded",
)  # fmt: skip

Row = dict[str, Any]


def contestants(ranks: int) -> dict[str, Contestant]:
    """Everything that can be measured with so many ranks, by name."""
    found = [
        Contestant(name="single", ranks=1),
        Contestant(name="single/kept", ranks=1, how="kept"),
        Contestant(name="independent", ranks=ranks),
        Contestant(name="independent/kept", ranks=ranks, how="kept"),
        Contestant(name="ddp/gloo", ranks=ranks, how="ddp"),
        Contestant(name="hora/1", ranks=1, how="hora"),
    ]
    strategies = {name: name for name in ("ring", "tree", "halving", "star", "shared", "engine", "auto")}
    strategies |= {f"{name}/sharded": f"{name}:update=sharded" for name in ("shared", "ring")}
    strategies |= {f"{name}/serial": f"{name}:overlap=false" for name in ("shared", "ring")}
    found += [Contestant(name=name, ranks=ranks, how="hora", strategy=text) for name, text in strategies.items()]
    served = {"ps": ("ps", "1"), "ps/colocated": ("ps", "colocated"), "ps/async": ("ps:mode=async", "1")}
    found += [
        Contestant(name=name, ranks=ranks, how="hora", strategy=text, servers=servers)
        for name, (text, servers) in served.items()
    ]
    return {one.name: one for one in found}


def cuda_contestants(ranks: int) -> dict[str, Contestant]:
    """The same on a GPU. Between ranks that share one, `ring` is NCCL over sockets and `shared` CUDA IPC."""
    found = [
        Contestant(name="single", ranks=1),
        Contestant(name="independent", ranks=ranks),
        Contestant(name="ddp/1", ranks=1, how="ddp"),
        Contestant(name="ddp", ranks=ranks, how="ddp"),
        Contestant(name="hora/1", ranks=1, how="hora"),
        Contestant(name="path/1", ranks=1, how="path", strategy="ring"),
    ]
    strategies = {name: name for name in ("ring", "shared", "auto", "engine")}
    strategies |= {f"{name}/sharded": f"{name}:update=sharded" for name in ("shared", "ring")}
    strategies |= {"local": "local:every=8", "ps": "ps"}
    found += [Contestant(name=name, ranks=ranks, how="hora", strategy=text) for name, text in strategies.items()]
    return {one.name: one for one in found}


def choose(
    ranks: int, names: Sequence[str] | None = None, *, everything: bool = False, device: str = "cpu"
) -> list[Contestant]:
    """Those with these names, or the default selection, or all. Raises ValueError for an unknown name."""
    there = cuda_contestants(ranks) if device == "cuda" else contestants(ranks)
    wanted = list(there) if everything else names or (CUDA_DEFAULT if device == "cuda" else DEFAULT)
    for name in wanted:
        if name not in there:
            hint = did_you_mean(name, there)
            raise ValueError(f"there is no contestant {name!r}; {hint}there are: {', '.join(there)}")
    return [there[name] for name in dict.fromkeys(wanted)]


def main(
    those: Sequence[Contestant],
    model: str,
    steps: int = 5,
    rounds: int = 10,
    json_path: str | None = None,
    plot_path: str | None = None,
    device: str = "cpu",
) -> int:
    """Measures, prints the tables, writes JSON lines and the plot; returns the exit code."""
    rows, failures = measure(those, model, steps, rounds, device)

    from . import train_table  # loads torch: after the contestants were started

    title = f"training step of {model}, one thread per rank, {rounds} rounds of {steps} steps"
    if device == "cuda":
        title = f"training step of {model} on {gpu_text()}, {rounds} rounds of {steps} steps"
    train_table.print_steps(rows, title)
    train_table.print_overheads(rows)
    print(machine_text())
    if json_path:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if plot_path and rows:
        missing = train_table.plot_steps(rows, f"{title}\n{machine_text()}", plot_path)
        if missing:
            print(f"no plot: {missing}", file=sys.stderr)
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


def gpu_text() -> str:
    """The GPU, and whether its processes share it through NVIDIA's MPS."""
    import torch

    mps = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
    return f"{torch.cuda.get_device_name()} (MPS {'on' if mps else 'off'})"


def measure(
    those: Sequence[Contestant], model: str, steps: int, rounds: int, device: str = "cpu"
) -> tuple[list[Row], list[str]]:
    """Every contestant's row, and a message for each that has none."""
    turns, batch_size, failures = take(those, model, steps, rounds, device=device)
    rows = [row_of(one, model, batch_size, turns[one.name]) for one in those if one.name in turns]
    single = next((row["samples_per_s"] for row in rows if row["name"] == "single"), None)
    for row in rows:
        row["efficiency"] = row["samples_per_s"] / (row["ranks"] * single) if single else None
    return rows, failures


def take(
    those: Sequence[Contestant],
    model: str,
    steps: int,
    rounds: int,
    warm_up: int = WARM_UP_STEPS,
    device: str = "cpu",
) -> tuple[dict[str, list[list[Answer]]], int, list[str]]:
    """By name what every rank answered in each round; the model's batch size; a message for each that failed."""
    turns: dict[str, list[list[Answer]]] = {one.name: [] for one in those}
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="hora-bench-") as folder:
        conductor = Conductor(those, model, folder, device)
        leave_s = 0.0  # an interrupted benchmark does not wait for ranks to leave
        try:
            _log(
                f"starting {sum(one.ranks for one in those)} processes; all together this takes roughly "
                f"{duration_text(rough_duration_s(those, model, steps, rounds, warm_up))} where nothing else runs"
            )
            conductor.start()
            for one in those:
                conductor.turn(one.name, warm_up)
            for round in range(rounds):
                _log(f"round {round + 1} of {rounds}")
                first = round % len(those)
                for one in (*those[first:], *those[:first]):
                    answers = conductor.turn(one.name, steps)
                    if answers is not None:
                        turns[one.name].append(answers)
            leave_s = LEAVE_S
        finally:
            conductor.close(leave_s)
    running = conductor.running
    batch_size = max(one.batch_size for one in running.values())  # 0 for one that never answered
    return {name: mine for name, mine in turns.items() if running[name].alive}, batch_size, conductor.failures


def rough_duration_s(
    those: Sequence[Contestant], model: str, steps: int, rounds: int, warm_up: int = WARM_UP_STEPS
) -> float:
    """For the progress line. More ranks than cores share them."""
    cores = num_cores()
    start_s = ROUGH_START_S * max(1.0, sum(one.ranks for one in those) / cores)
    each = warm_up + 1 + rounds * (steps + 1)
    return start_s + sum(each * ROUGH_STEP_S[model] * max(1.0, one.ranks / cores) for one in those)


def duration_text(seconds: float) -> str:
    return f"{max(10, round(seconds, -1)):.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def row_of(one: Contestant, model: str, batch_size: int, turns: Sequence[Sequence[Answer]]) -> Row:
    """One JSON line. `comm_s` and `exposed_s` are per step, the mean over ranks.

    `hidden` is the share of communication that training neither did itself nor waited for.
    """
    seconds = sorted(
        max(step) for ranks in turns for step in zip(*(answer["seconds"] for answer in ranks), strict=True)
    )
    answers = [answer for ranks in turns for answer in ranks]
    comm_s = exposed_s = hidden = None
    if all("comm_s" in answer for answer in answers):
        num_steps = sum(len(answer["seconds"]) for answer in answers)
        comm_s = sum(answer["comm_s"] for answer in answers) / num_steps
        exposed_s = sum(answer["exposed_s"] for answer in answers) / num_steps
        hidden = max(0.0, 1 - exposed_s / comm_s) if comm_s else None  # two clocks: serial may come out a hair below 0
    median = statistics.median(seconds)
    return {
        "name": one.name,
        "model": model,
        "ranks": one.ranks,
        "step_median_s": median,
        "step_p10_s": seconds[len(seconds) // 10],
        "step_p90_s": seconds[(len(seconds) * 9) // 10],
        "comm_s": comm_s,
        "hidden": hidden,
        "samples_per_s": one.ranks * batch_size / median,
        "exposed_s": exposed_s,
        "efficiency": None,
        "rounds": len(turns),
        "steps": len(turns[0][0]["seconds"]),
    }


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
