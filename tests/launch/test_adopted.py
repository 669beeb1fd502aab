"""The same script under other launchers: torchrun and mpirun for real, srun by its variables, and plain python."""

from __future__ import annotations

import pathlib
import re
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from started import SALLOC, Started

from hora.runs import exit_codes
from launching import Launcher

pytestmark = pytest.mark.timeout(240)  # several processes import torch on whatever cores there are

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", "-n", "2", sys.executable]
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed here (Debian: apt install openmpi-bin)"
)


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


@pytest.mark.full
@pytest.mark.parametrize("env", [{}, pytest.param(SALLOC, marks=pytest.mark.full)], ids=["plain", "salloc"])
def test_plain_python_is_a_world_of_one_even_in_a_shell_of_salloc(started: Started, env: dict[str, str]) -> None:
    code, out = started.run([sys.executable], "agree.py", **env)
    assert (code, agreed(out)) == (0, ["rank 0 of 1 under alone over memory by auto"]), out


# mpirun and torchrun send SIGTERM to the other ranks as soon as one has died, so here those are deaf to it.


@pytest.mark.full
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


# -- training ----------------------------------------------------------------------------------------------------------


def parameters(folder: pathlib.Path) -> list[torch.Tensor]:
    """Those of every worker that wrote its own, by rank."""
    files = sorted(folder.glob("worker-*"))
    return [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float64) for file in files]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """What plain python makes of the digits."""
    folder = tmp_path_factory.mktemp("one")
    started = Started(tmp_path_factory.mktemp("tmp"))
    try:
        code, out = started.run([sys.executable], "digits_alike.py", folder)
        assert code == 0, out
    finally:
        started.end()
    (found,) = parameters(folder)
    return found


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"],
    "mpirun": ["mpirun", "--oversubscribe", "-n", "3", sys.executable],
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "servers", "workers"),
    [("ps", "1", 2)]
    + [
        pytest.param(*each, marks=pytest.mark.full)
        for each in (("ring", "", 3), ("ps", "2", 1), ("ps", "colocated", 3), ("ps", "", 3))
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_digits_are_learnt_as_by_one_process(
    started: Started,
    one_process: torch.Tensor,
    tmp_path: pathlib.Path,
    launcher: str,
    strategy: str,
    servers: str,
    workers: int,
) -> None:
    chosen = {"HORA_STRATEGY": strategy} | ({"HORA_SERVERS": servers} if servers else {})
    code, out = started.run(LAUNCHERS[launcher], "digits_alike.py", tmp_path, **chosen)
    assert code == 0, out
    wanted = [f"trained: rank {rank} of {workers} under {launcher} by {strategy}" for rank in range(workers)]
    assert sorted(re.findall(r"trained: .*", out)) == wanted
    found = parameters(tmp_path)
    assert len(found) == workers
    for each in found:
        assert each.equal(found[0])
        torch.testing.assert_close(each, one_process, rtol=1e-9, atol=1e-12)
    number = {"": 0, "colocated": 3}.get(servers, servers) if strategy == "ps" and servers else 3 * (strategy == "ps")
    assert len(re.findall(r"server \d .*updates", out)) == int(number), "each server says what it has done"


@pytest.mark.full
@pytest.mark.parametrize("other", ["torchrun", pytest.param("mpirun", marks=needs_mpirun)])
def test_local_sgd_is_the_same_as_by_hora_run(
    started: Started, launcher: Launcher, tmp_path: pathlib.Path, other: str
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    done = launcher.run("run", "-n", 3, "--strategy", "local:every=4", "digits_alike.py", ours)
    assert done.returncode == 0, done.stderr
    code, out = started.run(LAUNCHERS[other], "digits_alike.py", theirs, HORA_STRATEGY="local:every=4")
    assert code == 0, out
    assert len(parameters(theirs)) == 3
    for mine, its in zip(parameters(ours), parameters(theirs), strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HORA_SERVERS": "2", "HORA_STRATEGY": "ps"}, "HORA_SERVERS=2 of 2 ranks leaves no worker"),
        pytest.param(
            {"HORA_SERVERS": "1", "HORA_STRATEGY": "ring"},
            "strategy 'ring' uses none; with servers: local, ps",
            marks=pytest.mark.full,
        ),
    ],
)
def test_servers_that_cannot_be_are_refused_in_one_sentence(started: Started, env: dict[str, str], words: str) -> None:
    done = started.step("digits_alike.py", ".", **env)
    for code, out in done:
        assert code == 1 and out.count(words) == 1, out


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.full)])
def test_a_server_ends_when_the_rank_that_hosts_the_coordinator_is_killed(started: Started, mode: str) -> None:
    """As srun would have it, without --kill-on-bad-exit: nobody ends the others for us."""
    done = started.step(
        "ps_train.py", "--fault", "kill-before", "--rank", "0", "--pause", "0.05", size=3,
        HORA_SERVERS="1", HORA_STRATEGY=f"ps:mode={mode}",
    )  # fmt: skip
    assert done[0][0] == -signal.SIGKILL
    for code, out in done[1:]:
        assert code == exit_codes.SECONDARY_FAILURE, out
        assert "stopped: " in out and "lost rank 0 (host" in out, out
