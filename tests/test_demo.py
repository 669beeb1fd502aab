"""The demo is what a newcomer sees first: it must end well and show what it promises."""

from __future__ import annotations

import subprocess
import sys


def test_the_demo_explains_the_ring_and_runs_every_algorithm_for_real() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hora.launch.cli", "demo"], capture_output=True, text=True, timeout=55, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "scatter-reduce" in done.stdout and "all-gather" in done.stdout
    assert done.stdout.count("I am rank") == 4
    for algorithm in ("auto", "shared", "ring", "tree", "halving", "star"):
        assert f"[0] {algorithm} " in done.stdout
    assert "every time: yes" in done.stdout
