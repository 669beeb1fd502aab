"""The example of a pipeline trains the same on any number of workers, and a lost rank ends it by name."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from launching import Launcher

pytestmark = pytest.mark.usefixtures("forkserver")

EXAMPLE = str(pathlib.Path(__file__).parent.parent / "examples" / "pipeline.py")
WAIT_S = 55
TINY = ["--characters", "3000", "--layers", "2", "--width", "16", "--batch", "8", "--micro-batches", "2"]


def started(size: int, *arguments: str) -> subprocess.Popen[str]:
    launcher = ["-m", "hora.cli.main", "run", "-n", str(size)] if size > 1 else []
    return subprocess.Popen(
        [sys.executable, *launcher, EXAMPLE, *TINY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HORA_DASHBOARD": "off"},
    )


def run(size: int, *arguments: str) -> str:
    process = started(size, *arguments)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    return re.sub(r"^\[0\] ?", "", out, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def alone() -> str:
    return run(1)


@pytest.mark.full
@pytest.mark.parametrize("size, schedule", [(2, "gpipe"), pytest.param(4, "1f1b", marks=pytest.mark.full)])
def test_a_pipeline_learns_and_writes_what_one_process_does(alone: str, size: int, schedule: str) -> None:
    assert "it writes:" in alone
    assert run(size, "--schedule", schedule) == alone


@pytest.mark.full
def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    process = started(1, "--batch", "7")
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert err == (
        "7 windows on 1 worker(s) make no pipelines of 1 with 2 equal micro-batches each; "
        "try hora run -n 2 examples/pipeline.py --batch 16\n"
    )


@pytest.mark.full
def test_a_text_shorter_than_a_batch_is_refused() -> None:
    process = started(1, "--characters", "512")
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode != 0
    assert err.startswith("1 epoch(s) of 512 characters make no batch of 8 windows; ") and "Traceback" not in err


def test_a_predictor_has_nothing_to_serve_and_does_no_harm(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--serve", 0, EXAMPLE, *TINY)
    assert done.returncode == 0 and "it writes:" in done.stdout
    assert "Traceback" not in done.stderr and "the predictor served nothing" in done.stderr, done.stderr


def test_a_killed_stage_ends_the_run_and_is_named(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, EXAMPLE, *TINY, "--epochs", 1000)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert "[1] step 50: loss " in line, line + process.stderr.read()
    stage = next(pid for pid in launcher.alive() if b"HORA_RANK=1" in _environment(pid))
    os.kill(stage, signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=WAIT_S)
    assert time.monotonic() - killed < 15
    assert re.search(r"\[0\] stopped: rank 0 .* lost rank 1 .* in torch's own communication: killed by SIGKILL\n", err)
    assert err.endswith("killed by SIGKILL; the others were stopped.\n") and "Traceback" not in err


def _environment(pid: int) -> list[bytes]:
    return pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
