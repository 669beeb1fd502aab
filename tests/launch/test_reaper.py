"""The reaper alone: when it acts, on whom, and when it does not."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hora.launch import reaper
from hora.launch.reaper import Reaper, sweep


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(run: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HORA_RUN": run}
    return subprocess.Popen(
        [sys.executable, "-S", "-c", "print(flush=True); import time; time.sleep(60)"],
        env=env,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def begin(run: str, sleepers: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    process = sleeper(run)
    sleepers.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_sweep_ends_this_run_and_no_other(sleepers: list[subprocess.Popen[bytes]]) -> None:
    run = secrets.token_hex(8)
    ours, others = begin(run, sleepers), begin(run + "0", sleepers)
    assert sweep(run) == 1
    assert ours.wait(timeout=5) == -signal.SIGKILL
    assert others.poll() is None
    assert sweep(run) == 0


def test_the_end_of_the_pipe_ends_groups_and_strays_and_removes_files(
    sleepers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run = secrets.token_hex(8)
    group, stray, forgotten = begin("another", sleepers), begin(run, sleepers), begin("another", sleepers)
    path = tmp_path / "a name with \n in it"
    path.write_text("")
    watching = Reaper(run)
    watching.group(group.pid)
    watching.group(forgotten.pid)
    watching.forget(forgotten.pid)
    watching.file(str(path))
    process = watching._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    process.wait(timeout=5)
    assert group.wait(timeout=5) == stray.wait(timeout=5) == -signal.SIGKILL
    assert forgotten.poll() is None
    assert not path.exists()


def test_done_sends_it_home_and_nobody_is_hurt(sleepers: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    run = secrets.token_hex(8)
    process = begin(run, sleepers)
    path = tmp_path / "kept"
    path.write_text("")
    watching = Reaper(run)
    watching.group(process.pid)
    watching.file(str(path))
    watching.done()
    assert process.poll() is None
    assert path.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_ignores_the_signals_that_stop_a_launcher(number: signal.Signals) -> None:
    watching = Reaper(secrets.token_hex(8))
    assert watching.pid is not None
    ignored = f"/proc/{watching.pid}/status"
    deadline = time.monotonic() + 10
    while not _ignores(ignored, number) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(watching.pid, number)
    process = watching._process
    assert process is not None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    watching.done()
    assert process.returncode == 0


def test_it_needs_the_standard_library_only_and_starts_fast() -> None:
    command = [sys.executable, "-I", "-S", "-X", "importtime", reaper.__file__, "run"]
    done = subprocess.run(command, input=b"done\n", capture_output=True, timeout=20)
    assert done.returncode == 0
    for heavy in (b"subprocess", b"typing", b"site-packages", b"hora"):
        assert heavy not in done.stderr


def _ignores(status: str, number: int) -> bool:
    line = next(line for line in Path(status).read_text().splitlines() if line.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
