"""`hora run --trace FILE`: one timeline of all processes, and `hora trace` that tells it in words."""

from __future__ import annotations

import collections
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launching import Launcher

sys.path.insert(0, str(Path(__file__).parents[1] / "watch"))
import spanfiles

STEPS = 8  # 61 samples in batches of 8


def counted(events: list[dict[str, Any]]) -> dict[int, collections.Counter[str]]:
    """By process: how many spans of each name."""
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"]][event["name"]] += 1
    return found


def test_a_ring_is_told_from_forward_to_step(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "run.json.gz"
    done = launcher.run("run", "-n", 2, "--strategy", "ring", "--trace", path, "train_plain.py", "--epochs", 1,
                        "--save", tmp_path / "saved")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"trace {path}" in done.stdout + done.stderr
    events = spanfiles.check(json.loads(gzip.decompress(path.read_bytes())))
    for names in counted(events).values():
        for name in ("data", "forward", "backward", "step", "launch", "bucket 0", "exchange"):
            assert names[name] == STEPS, name
        assert names["waiting"] >= STEPS and names["checkpoint"] == 2
    words = launcher.run("trace", path, "--summary")
    assert words.returncode == 0 and f"2 ranks: {STEPS} steps" in words.stdout and "waiting" in words.stdout


@pytest.mark.full
def test_servers_updates_and_a_killed_workers_spans_are_in_it(launcher: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    done = launcher.run("run", "-n", 2, "--strategy", "ps:mode=async", "--servers", 1, "--trace", path, "ps_train.py",
                        "--fault", "kill-after", "--at", 4, "--pause", 0.2)  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = spanfiles.check(json.loads(path.read_bytes()))
    first, second, server = (counted(events)[pid] for pid in (1, 2, 3))
    assert server["update"] >= first["step"] + second["step"] and server["serving"]
    assert first["pull"] and first["step"] > second["step"] > 0
    whose = {event["args"]["worker"] for event in events if event["ph"] == "X" and event["name"] == "update"}
    assert whose == {0, 1}


def test_a_file_that_cannot_be_written_costs_the_trace_alone(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("run", "-n", 1, "--trace", tmp_path / "nowhere" / "run.json", "train_plain.py", "--epochs", 1)
    said = done.stdout + done.stderr
    assert "nowhere" in said and "Traceback" not in said
    assert done.returncode in (0, 2), "said before the start, or after the end"
