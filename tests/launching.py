"""Launching: the real `hora` as a test starts it, with an environment of its own. The fixture `launcher` makes one."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent / "launch" / "scripts"
SRC = Path(__file__).parents[1] / "src"
MARK = "MARK_OF_HORA_TEST"  # a variable by which a test finds all that descends from it
ALONE = {"HORA_FORKSERVER": ""}  # a launch that has a fork server of its own, as users have it
LEAVE_S = 20.0  # nobody may be left; how soon is for the tests that ask


_OWN = re.compile(r"HORA_|OMPI_COMM_|PMIX_|SLURM_|OMP_NUM_THREADS$|NO_COLOR$|RANK$|WORLD_SIZE$|MASTER_")


def environment() -> dict[str, str]:
    """For processes that a test starts: this one's, without what tells them that they belong to a run."""
    path = os.pathsep.join([str(SRC), str(SRC.parent / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {name: value for name, value in os.environ.items() if not _OWN.match(name)} | {"PYTHONPATH": path}


def without_advice(err: str) -> str:
    """Without what depends on how many cores the machine has."""
    return re.sub(r"^\[0\] \d+ workers share \d+ cores of .*\n", "", err, flags=re.MULTILINE)


class Launcher:
    """Starts `hora …` with an environment of its own; `alive()` finds everything that descends from it."""

    def __init__(self, folder: Path, forkserver: str) -> None:
        self.state = folder / "state"
        # Not in `folder`, whose path may be too long for the sockets that torch's DataLoader makes in TMPDIR.
        self.tmp = Path(tempfile.mkdtemp(prefix="launched-"))
        self.mark = f"{MARK}={secrets.token_hex(8)}"
        self.env = environment()
        self.env |= {
            "HORA_FORKSERVER": forkserver,
            MARK: self.mark.partition("=")[2],
            "XDG_STATE_HOME": str(self.state),
            "HORA_DASHBOARD": "off",  # where nobody looks; those who test it say otherwise
            "TMPDIR": str(self.tmp),
            "TORCHINDUCTOR_CACHE_DIR": str(
                folder / "inductor"
            ),  # else torch may make it in TMPDIR, which must stay empty
        }

    def start(self, *arguments: object, cwd: Path = SCRIPTS, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hora.cli.main", *map(str, arguments)],
            cwd=cwd,
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
        )

    def run(self, *arguments: object, cwd: Path = SCRIPTS, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, cwd=cwd, **env)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, without_advice(err))

    def python(self, *arguments: object, **env: str) -> str:
        """What plain python prints."""
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=self.env | env, check=True, stdout=subprocess.PIPE, text=True).stdout

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
