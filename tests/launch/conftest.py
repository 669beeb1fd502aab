"""`launcher`: runs the real `hora`, and after each test makes sure that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
SRC = Path(__file__).parents[2] / "src"
MARK = "MARK_OF_HORA_TEST"
LEAVE_S = 20.0  # nobody may be left; how soon is for the tests that ask


def _listen_to_hangups() -> None:
    """The suite may run under nohup, and an ignored signal is inherited."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Launcher:
    """Starts `hora …` with an environment of its own; `alive()` finds everything that descends from it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.mark = f"{MARK}={secrets.token_hex(8)}"
        drop = re.compile(r"HORA_|OMP_NUM_THREADS|NO_COLOR|RANK|WORLD_SIZE")
        self.env = {key: value for key, value in os.environ.items() if not drop.match(key)}
        self.env |= {
            MARK: self.mark.partition("=")[2],
            "XDG_STATE_HOME": str(self.state),
            "HORA_DASHBOARD": "off",  # where nobody looks; those who test it say otherwise
            "TMPDIR": str(self.tmp),
            "TORCHINDUCTOR_CACHE_DIR": str(
                folder / "inductor"
            ),  # else torch may make it in TMPDIR, which must stay empty
            "PYTHONPATH": os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def start(self, *arguments: object, cwd: Path = SCRIPTS, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hora.launch.cli", *map(str, arguments)],
            cwd=cwd,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
            preexec_fn=_listen_to_hangups,
        )

    def run(self, *arguments: object, cwd: Path = SCRIPTS, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, cwd=cwd, **env)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def alive(self) -> list[int]:
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                continue
        return pids

    def wait_until_nobody(self, limit_s: float) -> list[int]:
        """Who is still alive after `limit_s`; returns early when nobody is."""
        deadline = time.monotonic() + limit_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return alive


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    shared_before = {name for name in os.listdir("/dev/shm") if "hora" in name}
    yield launcher
    alive = {pid: command_of(pid) for pid in launcher.wait_until_nobody(LEAVE_S)}
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not alive, "processes of the run were left"
    assert {name for name in os.listdir("/dev/shm") if "hora" in name} <= shared_before
    assert os.listdir(launcher.tmp) == []
    assert list(launcher.state.rglob("control")) == []


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "gone since"


def read_until(process: subprocess.Popen[str], *wanted: str) -> list[str]:
    """Reads the launcher's stdout until each of `wanted` was seen in it, in any order."""
    assert process.stdout is not None
    lines: list[str] = []
    missing = list(wanted)
    while missing:
        line = process.stdout.readline()
        assert line, f"the launcher ended before it said {missing}; it said {lines}"
        lines.append(line.rstrip("\n"))
        missing = [text for text in missing if text not in line]
    return lines
