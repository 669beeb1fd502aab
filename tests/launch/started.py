"""Started: processes that another launcher than Hora's own has started, ended with the test."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys

from launching import SCRIPTS, SRC

SALLOC = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NODELIST": "n[1-4]"}


class Started:
    """Processes of one launch, in a session of their own that is ended with the test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = folder  # what a killed process leaves behind under another launcher stays in here

    def start(self, command: list[str], *arguments: object, **env: str) -> subprocess.Popen[str]:
        drop = re.compile(r"HORA_|OMPI_COMM_|PMIX_|SLURM_|RANK$|WORLD_SIZE$|MASTER_")
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=SCRIPTS,
            env={key: value for key, value in os.environ.items() if not drop.match(key)}
            | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
            | {"PYTHONPATH": os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])}
            | {"TMPDIR": str(self._folder)}
            | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def run(self, command: list[str], *arguments: object, **env: str) -> tuple[int, str]:
        process = self.start(command, *arguments, **env)
        out, _ = process.communicate(timeout=100)
        return process.returncode, out

    def step(self, *arguments: object, size: int = 2, **env: str) -> list[tuple[int, str]]:
        """As srun would start the script, `size` times on one host."""
        step = SALLOC | {"SLURM_JOB_ID": secrets.token_hex(4), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
        step |= {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NODELIST": "n1"}
        tasks = [
            self.start([sys.executable], *arguments, **step, **env, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in range(size)
        ]
        return [(task.wait(100), _said_by(task)) for task in tasks]

    def end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _said_by(task: subprocess.Popen[str]) -> str:
    """What it wrote itself: the pipe may still be held by workers that outlived it."""
    assert task.stdout is not None
    os.set_blocking(task.stdout.fileno(), False)
    return (os.read(task.stdout.fileno(), 1 << 16) or b"").decode()
