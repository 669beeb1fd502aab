"""What a run is told once where it would otherwise be silent, and which rank is blamed for its end."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from hora.net.machine import num_cores
from hora.runs import exit_codes
from launching import Launcher

SLOW_END = """
import atexit, time
atexit.register(time.sleep, 1.5)  # what torch's own end takes on a busy machine; Hora's is registered after it
import torch, hora
job = hora.init()
if job.rank == 1:
    raise ValueError("bad sample")
atexit.unregister(time.sleep)
hora.barrier()
"""


def script(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_copies_that_never_called_init_are_told(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    mine = script(tmp_path, "import sys; print(sys.argv[1:])\n")
    done = launcher.run("run", "-n", 2, "--", mine, "--strategy", "ring")
    assert done.returncode == exit_codes.OK
    assert sorted(done.stdout.splitlines()) == ["[0] ['--strategy', 'ring']", "[1] ['--strategy', 'ring']"]
    misplaced, never = done.stderr.splitlines()
    assert misplaced.endswith(f"to give it to hora run: hora run --strategy ring {mine}")
    assert never.startswith(f"hora: no rank called hora.init(), so 2 copies of {mine} ran side by side")


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="workers that have a GPU to keep busy may share a core")
def test_more_workers_than_cores_are_told_once(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    cores = num_cores()
    process = launcher.start("run", "-n", cores + 1, script(tmp_path, "import hora\nhora.init()\n"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_codes.OK, err
    (line,) = err.splitlines()
    assert re.search(rf"{cores + 1} workers share {cores} cores of .*: -n {cores} is as fast", line)


def test_the_rank_that_failed_is_blamed_however_long_its_end_takes(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    """Rank 0 loses it, and ends long before."""
    done = launcher.run("run", "-n", 2, script(tmp_path, SLOW_END), HORA_GRACE="0.1")
    assert done.returncode == exit_codes.SCRIPT_FAILED, done.stderr
    assert re.search(r"hora: rank 1 \(.*\) failed with exit code 1; the others were stopped\.", done.stderr), (
        done.stderr
    )
    assert done.stderr.splitlines()[-1] == "  ValueError: bad sample"
