"""A run as it is seen: what it says at its end, what it keeps, its page, and what happens when these fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hora.runs import database, exit_codes
from launching import Launcher

pytestmark = pytest.mark.timeout(120)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def found(base: str, name: str) -> None:
    """The page knows the run, once its memory was written."""
    deadline = time.monotonic() + 30
    while get(f"{base}/api/runs/{name}")["now"]["run"] != name:
        assert time.monotonic() < deadline, "its memory was never written"
        time.sleep(0.1)


def page_of(process: Any) -> tuple[str, str]:
    """The address of the page and the run's name, from the line that announces them."""
    for line in process.stderr:
        match = re.search(r"(http://127\.0\.0\.1:\d+)/runs/([\w.-]+)", line)
        if match:
            return match[1], match[2]
    raise AssertionError("no page was announced")


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["ring", "ps:mode=async", "local:every=4"])
def test_a_run_leaves_its_curve_its_counts_and_a_summary(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "run"
    servers = ["--servers", 1] if strategy.startswith("ps") else []
    done = launcher.run("run", "-n", 2, "--strategy", strategy, *servers, "--run-dir", folder, "--name", "seen",
                        "watched.py", 24, -1, 0.02)  # fmt: skip
    assert done.returncode == exit_codes.OK, done.stderr
    summary = json.loads((folder / "end.json").read_text())["summary"]
    assert summary["samples"] == 24 * 4 * 2 and summary["workers"] == 2
    assert "192 samples" in done.stderr, done.stderr
    rows = [line for line in lines_of(folder) if "loss" in line]
    assert sum(row["count"] for row in rows if row["rank"] == 0) >= 20
    for rank in (0, 1):
        mine = [row for row in rows if row["rank"] == rank]
        assert mine == sorted(mine, key=lambda row: (row["at"], row["step"]))
    if strategy.startswith("local"):
        assert summary["rounds"] >= 5
    shown = launcher.run("show", "seen", "--run-dir", folder)
    assert shown.returncode == 0 and "loss" in shown.stdout and "\x1b" not in shown.stdout


@pytest.mark.parametrize("strategy", ["ring", pytest.param("local:every=2", marks=pytest.mark.full)])
def test_a_straggler_is_named_within_ten_steps(launcher: Launcher, tmp_path: Path, strategy: str) -> None:
    done = launcher.run(
        "run", "-n", 3, "--strategy", strategy, "--run-dir", tmp_path / "run", "watched.py", 16, 1, 0.05
    )
    assert done.returncode == exit_codes.OK, done.stderr
    slow = [line for line in lines_of(tmp_path / "run") if line.get("event") == "slow"]
    named = [line["step"] for line in slow if line["who"].startswith("rank 1 ")]
    assert named and named[0] <= 10, slow
    assert re.search(r"^hora: rank 1 \(host .*, pid \d+\) is slow: \d+ ms", done.stderr, re.M), done.stderr


def test_progress_off_says_nothing_and_plain_says_lines(launcher: Launcher) -> None:
    off = launcher.run("run", "-n", 2, "--progress", "off", "watched.py", 8)
    plain = launcher.run("run", "-n", 2, "--progress", "plain", "watched.py", 8)
    assert off.returncode == plain.returncode == exit_codes.OK
    assert off.stderr == "" and off.stdout == ""
    assert re.search(r"^\[0\] step 8 .*loss ", plain.stderr, re.M), plain.stderr


def test_the_page_of_a_live_run_and_its_end(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "--dashboard", 0, "watched.py", 400, -1, 0.02)
    base, name = page_of(process)
    found(base, name)
    deadline = time.monotonic() + 60
    while get(f"{base}/api/runs/{name}")["now"]["step"] < 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    whole = get(f"{base}/api/runs/{name}")
    assert (
        whole["now"]["step"] >= 5 and whole["curves"]["value/loss"]["points"] and "value/<b>odd</b>" in whole["curves"]
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{base}/api/runs", headers={"Host": "evil.example"}), timeout=20)
    assert refused.value.code == 403
    metrics = urllib.request.urlopen(f"{base}/metrics", timeout=20).read().decode()
    assert f'hora_step{{run="{name}"}}' in metrics
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED
    assert launcher.wait_until_nobody(5.0) == [], "the page ends with the run"


def test_a_page_that_is_killed_costs_the_run_nothing_and_comes_back(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 1, "--dashboard", 0, "watched.py", 600, -1, 0.02)
    base, name = page_of(process)
    for _ in range(2):
        found(base, name)
        (page,) = [pid for pid in launcher.alive() if b"hora.dashboard" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(page, signal.SIGKILL)
        with contextlib.suppress(OSError):
            while Path(f"/proc/{page}/stat").read_text().split()[2] != "Z":
                time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED


def test_a_port_that_is_taken_is_said_and_the_next_one_taken(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launcher.run("run", "--dashboard", port, "watched.py", 3)
    assert done.returncode == exit_codes.OK
    match = re.search(rf"^hora: port {port} is taken; page http://127.0.0.1:(\d+)/runs/", done.stderr, re.M)
    assert match and int(match[1]) != port, done.stderr


def test_a_run_directory_of_another_version_is_refused_and_left_alone(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "end.json"):
        (folder / name).write_text("{}")
    with contextlib.closing(sqlite3.connect(folder / "memory.sqlite")) as base:
        base.execute(f"PRAGMA application_id = {database.APPLICATION}")
        base.execute("PRAGMA user_version = 77")
        base.execute("CREATE TABLE facts (key TEXT)")
        base.commit()
    before = (folder / "memory.sqlite").read_bytes()
    done = launcher.run("run", "--run-dir", folder, "watched.py", 3)
    assert done.returncode == exit_codes.USAGE and "another version of Hora" in done.stderr and done.stdout == ""
    assert (folder / "memory.sqlite").read_bytes() == before and (folder / "run.json").read_text() == "{}"
    assert (folder / "end.json").read_text() == "{}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system that is too small")
def test_a_full_disk_costs_one_warning(launcher: Launcher, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        done = launcher.run("run", "-n", 2, "--run-dir", small / "run", "watched.py", 60, -1, 0.01)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert done.returncode == exit_codes.OK, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(warnings) == 1, done.stderr


def test_a_directory_that_cannot_be_made_costs_the_record_and_not_the_page(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = launcher.start(
        "run", "--dashboard", 0, "--run-dir", tmp_path / "file" / "run", "watched.py", 200, -1, 0.02
    )
    base, name = page_of(process)
    found(base, name)
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_codes.OK, err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dashboard", "99999"], "--dashboard takes a port"),
        (["--dashboard", "on"], "--dashboard takes a port"),
        (["--progress", "loud"], "plain"),
        (["--trace", "nowhere/run.json"], "there is no folder"),
        (["--trace", "."], "is a folder"),
        (["--tensorboard", "nowhere/at/all"], "there is no folder"),
    ],
)
def test_wrong_flags_are_one_sentence(launcher: Launcher, flags: list[str], said: str) -> None:
    done = launcher.run("run", *flags, "watched.py")
    assert done.returncode == exit_codes.USAGE and said in done.stderr and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )
