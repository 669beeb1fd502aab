"""Slurm: a small cluster of one's own, in a folder and under this user, ended with the test. Needs root."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

START_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def obstacle() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.getuid() != 0:
        return "not root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"{missing[0]} is not installed (Debian: apt install slurm-wlm)" if missing else ""


class Cluster:
    """Nodes n0, n1 … at `addresses`; `inside[i]` is what a command begins with that is to run on node i."""

    def __init__(self, folder: pathlib.Path, addresses: Sequence[str], inside: Sequence[list[str]]) -> None:
        self._folder = folder
        self._addresses = addresses
        self._inside = inside
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = 17000 + os.getpid() % 8000 * 4

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        folder = self._folder
        (folder / "state").mkdir(mode=0o700)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        (folder / "slurm.conf").write_text(self._config())
        try:
            where = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
            self._start(self._inside[0], "munged", "-F", "--force", f"--socket={folder}/munge.sock", *where)
            self._wait(lambda: (folder / "munge.sock").exists(), "munged")
            self._start(self._inside[0], "slurmctld", "-D")
            for number, inside in enumerate(self._inside):
                (folder / f"spool-n{number}").mkdir()
                self._start(inside, "slurmd", "-D", "-N", f"n{number}")
            self._wait(self._idle, "the nodes")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _config(self) -> str:
        folder, port = self._folder, self._port
        nodes = [
            f"NodeName=n{number} NodeHostname={socket.gethostname()} NodeAddr={address} Port={port + 1 + number} CPUs=8"
            for number, address in enumerate(self._addresses)
        ]
        return "\n".join(
            [
                "ClusterName=hora",
                f"SlurmctldHost={socket.gethostname()}({self._addresses[0]})",
                f"SlurmctldPort={port}",
                "SlurmUser=root",
                "SlurmdUser=root",
                f"AuthInfo=socket={folder}/munge.sock",
                f"StateSaveLocation={folder}/state",
                f"SlurmdSpoolDir={folder}/spool-%n",
                f"SlurmctldPidFile={folder}/slurmctld.pid",
                f"SlurmdPidFile={folder}/slurmd-%n.pid",
                "ProctrackType=proctrack/pgid",
                "TaskPlugin=task/none",
                "SelectType=select/linear",
                "MpiDefault=none",
                "ReturnToService=2",
                "SlurmdParameters=config_overrides",
                *nodes,
                "PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP",
                "",
            ]
        )

    def _start(self, inside: list[str], *command: str) -> None:
        log = open(self._folder / f"{command[0]}-{len(self._processes)}.log", "wb")  # noqa: SIM115
        env = {"PATH": PATH, **self.env}
        with log:
            self._processes.append(
                subprocess.Popen([*inside, *command], env=env, stdout=log, stderr=log, start_new_session=True)
            )

    def _idle(self) -> bool:
        words = [*self._inside[0], "sinfo", "-h", "-N", "-o", "%t"]
        done = subprocess.run(words, env={"PATH": PATH, **self.env}, capture_output=True, text=True, timeout=20)
        return done.stdout.split() == ["idle"] * len(self._addresses)

    def _wait(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not there():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "".join(path.read_text()[-1500:] for path in sorted(self._folder.glob("*.log")))
                raise RuntimeError(f"{what} did not come up; ended: {ended}; {logs}")
            time.sleep(0.2)

    def _end(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        mark = f"SLURM_CONF={self._folder / 'slurm.conf'}".encode()
        for entry in pathlib.Path("/proc").iterdir():  # a step that was under way outlives its slurmd
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
