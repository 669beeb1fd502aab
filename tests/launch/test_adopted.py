"""The same script under other launchers: torchrun and mpirun for real, srun by its variables, and plain python."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import SCRIPTS, SRC

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", "-n", "2", sys.executable]
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed here (Debian: apt install openmpi-bin)"
)
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
        out, _ = process.communicate(timeout=40)
        return process.returncode, out

    def step(self, *arguments: object, size: int = 2) -> list[tuple[int, str]]:
        """As srun would start the script, `size` times on one host."""
        step = SALLOC | {"SLURM_JOB_ID": secrets.token_hex(4), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
        step |= {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NODELIST": "n1"}
        tasks = [
            self.start([sys.executable], *arguments, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in range(size)
        ]
        return [(task.wait(40), _said_by(task)) for task in tasks]

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


@pytest.fixture
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    started = Started(tmp_path_factory.mktemp("tmp"))
    yield started
    started.end()


def agreed(out: str) -> list[str]:
    return sorted(re.findall(r"agreed: (rank \d of \d under \w+ over \w+ by [\w:=]+)", out))


def death_and_echo(out: str) -> tuple[float, str]:
    """How long after the victim's last word a survivor lost it, and what it said."""
    died = re.search(r"at ([\d.]+): rank \d killed", out)
    lost = re.search(r"at ([\d.]+): (rank \d lost .*)", out)
    assert died and lost, out
    return float(lost[1]) - float(died[1]), lost[2]


def test_torchrun_is_adopted(started: Started) -> None:
    code, out = started.run(TORCHRUN, "agree.py")
    assert code == 0, out
    assert agreed(out) == [f"rank {rank} of 2 under torchrun over shm by auto" for rank in range(2)]


@needs_mpirun
def test_mpirun_is_adopted(started: Started) -> None:
    code, out = started.run(MPIRUN, "agree.py", HORA_STRATEGY="ring")
    assert code == 0, out
    assert agreed(out) == [f"rank {rank} of 2 under mpirun over shm by ring" for rank in range(2)]


def test_a_slurm_step_is_adopted(started: Started) -> None:
    done = started.step("agree.py")
    assert [code for code, _ in done] == [0, 0], done
    assert [agreed(out) for _, out in done] == [[f"rank {rank} of 2 under slurm over shm by auto"] for rank in range(2)]


@pytest.mark.parametrize("env", [{}, SALLOC], ids=["plain", "salloc"])
def test_plain_python_is_a_world_of_one_even_in_a_shell_of_salloc(started: Started, env: dict[str, str]) -> None:
    code, out = started.run([sys.executable], "agree.py", **env)
    assert (code, agreed(out)) == (0, ["rank 0 of 1 under alone over memory by auto"]), out


# mpirun and torchrun send SIGTERM to the other ranks as soon as one has died, so here those are deaf to it.


def test_a_rank_killed_under_torchrun_is_named_by_the_survivor(started: Started) -> None:
    code, out = started.run(TORCHRUN, "fault.py", "killed", "auto", "deaf")
    delay, said = death_and_echo(out)
    assert code != 0 and delay < 1.0
    assert "rank 0 lost [1]" in said and "all_reduce sum of float32 [1000] named 'the last'" in said


@needs_mpirun
def test_a_rank_killed_under_mpirun_is_named_by_the_survivor(started: Started) -> None:
    code, out = started.run(MPIRUN, "fault.py", "killed", "auto", "deaf")
    delay, said = death_and_echo(out)
    assert code != 0 and delay < 1.0
    assert "rank 0 lost [1]" in said and "all_reduce sum of float32 [1000] named 'the last'" in said


def test_dataloader_workers_do_not_hide_the_death_of_the_rank_that_hosts_the_coordinator(started: Started) -> None:
    (victim, last_words), (code, out) = started.step("loading.py", "killed", 0)
    assert (victim, code) == (-signal.SIGKILL, 0)
    delay, said = death_and_echo(last_words + out)
    assert delay < 1.0 and "rank 1 lost [0]" in said


@pytest.fixture(scope="module")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What both ranks say who reduce and send through MPI."""
    started = Started(tmp_path_factory.mktemp("mpi"))
    try:
        code, out = started.run(MPIRUN, "mpi.py", HORA_STRATEGY="engine:backend=mpi")
        assert code == 0, out
        return out
    finally:
        started.end()


@needs_mpirun
def test_mpi_reduces_and_sends_as_an_engine(mpi: str) -> None:
    assert mpi.count("done: rank 0") == mpi.count("done: rank 1") == 1


@needs_mpirun
def test_mpi_refuses_a_dtype_that_it_has_no_word_for(mpi: str) -> None:
    assert mpi.count("refused: MPI reduces no torch.float16; use an algorithm of Hora's own") == 2


@needs_mpirun
def test_mpi_names_both_sides_of_a_mismatch(mpi: str) -> None:
    said = re.findall(r"mismatch by ring: (.*)", mpi)
    assert len(said) == 2
    for sentence in said:
        assert "float32 [3]" in sentence and "float32 [4]" in sentence
        assert "rank 0 (host" in sentence and "rank 1 (host" in sentence


@needs_mpirun
def test_mpi_reduces_nothing(mpi: str) -> None:
    assert mpi.count("nothing: reduced") == 2
