"""`hora bench observe`: what monitoring costs. All of it on against all of it off, in turns; and the memory of the
launcher after a million records.

On: the panel on a terminal, reports, the run database, JSON lines, a trace, TensorBoard files if that package is
installed, and the dashboard with one live client, which reads and draws nothing, as a browser elsewhere would draw.
Off: none of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from typing import Any

from hora.launch.launched import ending_on_signals
from hora.runs import exit_codes

from .train_conductor import LEAVE_S, Answer, Conductor, Contestant

WARM_UP_STEPS = 5
STEPS = {"mlp": 7, "gpt": 2}
ROUNDS = {"mlp": 30, "gpt": 16}
RECORDS = (10_000, 100_000, 1_000_000)
PAGE_S = 20.0
LIMITS = {"mlp": 3.0, "gpt": 1.0}  # per cent: the target


def contestants(ranks: int) -> list[Contestant]:
    on = ["--progress", "auto", "--dashboard", "0", "--trace", "{folder}/trace.json"]
    if importlib.util.find_spec("tensorboard") is not None:
        on += ["--tensorboard", "{folder}/tensorboard"]
    off = ("--progress", "off", "--dashboard", "off")
    return [
        Contestant(name="off", ranks=ranks, how="logged", flags=off, env=(("HORA_WATCH", "off"),)),
        Contestant(name="on", ranks=ranks, how="logged", flags=tuple(on), terminal=True),
    ]


def main(ranks: int, models: list[str], rounds: int | None, records: int | None, json_path: str | None) -> int:
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for model in models:
        row, failed = measure(ranks, model, rounds or ROUNDS[model])
        failures += failed
        if row is not None:
            rows.append(row)
            print(_sentence(row), flush=True)
    limits = [limit for limit in RECORDS if limit < (records or RECORDS[-1])] + [records or RECORDS[-1]]
    memory = measure_memory(limits)
    rows.append(memory)
    kept = ", ".join(f"{mb:.1f} MB after {int(number):,}" for number, mb in memory["rss_mb"].items())
    print(f"memory of the watcher's process: {kept} records ({memory['records_per_s']:,.0f} records/s)")
    from hora.net.machine import machine_text

    print(machine_text())
    if json_path:
        pathlib.Path(json_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for failure in failures:
        print(f"hora bench: {failure}", file=sys.stderr)
    return exit_codes.SCRIPT_FAILED if failures else exit_codes.OK


def measure(ranks: int, model: str, rounds: int) -> tuple[dict[str, Any] | None, list[str]]:
    """Both take turns, the one that begins changing; of each round the cost is the ratio of the two."""
    those, steps = contestants(ranks), STEPS[model]
    turns: dict[str, list[float]] = {one.name: [] for one in those}
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="hora-bench-") as folder:
        conductor = Conductor(those, model, folder)
        leave_s = 0.0
        try:
            conductor.start()
            for one in those:
                conductor.turn(one.name, WARM_UP_STEPS)
            with _visitor(conductor.running["on"].folder / "0.err") as seen:
                for round in range(rounds):
                    for one in those if round % 2 else those[::-1]:
                        answers = conductor.turn(one.name, steps)
                        if answers is None:
                            return None, conductor.failures
                        turns[one.name].append(_seconds(answers))
                updates = seen()
            leave_s = LEAVE_S
        finally:
            conductor.close(leave_s)
        batch = conductor.running["on"].batch_size
    speeds = {name: [ranks * batch * steps / seconds for seconds in taken] for name, taken in turns.items()}
    costs = sorted(100 * (off - on) / off for on, off in zip(speeds["on"], speeds["off"], strict=True))
    row = {
        "model": model,
        "ranks": ranks,
        "rounds": rounds,
        "steps": steps,
        "on_samples_per_s": statistics.median(speeds["on"]),
        "off_samples_per_s": statistics.median(speeds["off"]),
        "cost_percent": statistics.median(costs),
        "cost_quartiles": [costs[len(costs) // 4], costs[(3 * len(costs)) // 4]],
        "page_updates": updates,
        "tensorboard": importlib.util.find_spec("tensorboard") is not None,
    }
    return row, conductor.failures


def _seconds(answers: list[Answer]) -> float:
    """Of all steps of a turn, each as long as on its slowest rank."""
    return sum(max(step) for step in zip(*(answer["seconds"] for answer in answers), strict=True))


def _sentence(row: dict[str, Any]) -> str:
    low, high = row["cost_quartiles"]
    return (
        f"{row['model']}, {row['ranks']} workers: {row['on_samples_per_s']:,.1f} samples/s with everything on, "
        f"{row['off_samples_per_s']:,.1f} with everything off; cost {row['cost_percent']:+.2f} % (median of "
        f"{row['rounds']} rounds, half of them between {low:+.2f} and {high:+.2f}); at most {LIMITS[row['model']]:g} % "
        f"is the aim; the page's visitor got {row['page_updates']} updates"
    )


@contextlib.contextmanager
def _visitor(stderr: pathlib.Path) -> Any:
    """Follows the dashboard of the run that writes `stderr`; yields a function that returns what it received."""
    count = [0]
    ending = threading.Event()
    address = _address(stderr)

    def follow() -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=PAGE_S) as stream:
            for line in stream:
                count[0] += line.startswith(b"data:")
                if ending.is_set():
                    return

    thread = threading.Thread(target=follow, name="hora-bench-visitor", daemon=True)
    thread.start()
    yield lambda: count[0]
    ending.set()


def _address(stderr: pathlib.Path) -> str:
    deadline = time.monotonic() + PAGE_S
    while time.monotonic() < deadline:
        match = re.search(rb"(http://127\.0\.0\.1:\d+)/runs/([\w.-]+)", stderr.read_bytes())
        if match:
            return f"{match[1].decode()}/api/runs/{match[2].decode()}/live"
        time.sleep(0.1)
    raise RuntimeError(f"no page was announced in {PAGE_S:g} s")


def measure_memory(limits: list[int]) -> dict[str, Any]:
    """In a process of its own, so that nothing else is in it."""
    command = [sys.executable, "-m", "hora_benchmarks.bench.observe_records", *map(str, limits)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)
