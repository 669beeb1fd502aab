"""The identity of a process, read from an environment given as a dict; token files and Slurm node lists."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hora.errors import HoraError
from hora.http.serve_config import ServeConfig
from hora.rendezvous import environment
from hora.rendezvous.context import ProcessIdentity
from hora.rendezvous.environment import read
from hora.rendezvous.rendezvous import first_host, read_token_file, rendezvous

HORA = {"HORA_RANK": "1", "HORA_SIZE": "2", "HORA_CONTROL": "127.0.0.1:5", "HORA_TOKEN_FD": "7", "HORA_RUN": "r"}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "42",
}
SALLOC = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NODELIST": "n[1-2]"}
STEP = SALLOC | {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
}


@pytest.mark.parametrize(
    ("env", "launcher", "rank", "size"),
    [
        (HORA | TORCHRUN | MPIRUN | STEP, "hora", 1, 2),
        (TORCHRUN | MPIRUN | STEP, "torchrun", 2, 4),
        (MPIRUN | STEP, "mpirun", 3, 6),
        (STEP, "slurm", 4, 8),
        ({}, "alone", 0, 1),
    ],
)
def test_the_inner_launcher_knows_better(env: dict[str, str], launcher: str, rank: int, size: int) -> None:
    found = read(env)
    assert (found.launcher, found.rank, found.size) == (launcher, rank, size)


@pytest.mark.parametrize("env", [{}, TORCHRUN, MPIRUN, STEP])
def test_a_predictor_of_a_checkpoint_is_one_under_any_launcher(env: dict[str, str]) -> None:
    found = read(env | {"HORA_SERVE": ServeConfig(checkpoint="saved").to_json()})
    assert (found.role, found.launcher, found.size) == ("predictor", "alone", 1)
    assert read(TORCHRUN | {"HORA_SERVE": ServeConfig().to_json()}).role == "worker"


def test_each_launcher_says_where_and_with_whom() -> None:
    ours = read(HORA)
    assert (ours.address, ours.token_fd, ours.job, ours.local_size) == ("127.0.0.1:5", 7, "r", 2)
    torchrun = read(TORCHRUN)
    assert (torchrun.address, torchrun.local_rank, torchrun.one_host) == ("a:29500", 0, False)
    mpirun = read(MPIRUN)
    assert (mpirun.job, mpirun.local_rank, mpirun.one_host) == ("mpi-42", 1, False)
    step = read(STEP)
    assert (step.job, step.address, step.local_rank, step.one_host) == ("slurm-9.0", "n[3-4]", 1, False)
    assert read(STEP | {"SLURM_STEP_NUM_NODES": "1"}).one_host


def test_a_restarted_torchrun_is_another_job() -> None:
    first, again = (read(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": count}) for count in "01")
    assert first.job != again.job


@pytest.mark.parametrize(
    "env", [SALLOC, SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}], ids=["salloc", "sbatch"]
)
def test_outside_a_slurm_step_a_process_is_alone(env: dict[str, str]) -> None:
    assert read(env) == ProcessIdentity()


def test_an_interactive_step_of_one_task_is_a_world_of_one() -> None:
    found = read(STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"})
    assert (found.launcher, found.rank, found.size, found.one_host) == ("slurm", 0, 1, True)


def test_a_rank_without_a_size_is_somebody_elses_variable() -> None:
    assert read({"RANK": "3"}) == ProcessIdentity()
    assert read({"WORLD_SIZE": "3"}) == ProcessIdentity()
    assert read({"OMPI_COMM_WORLD_RANK": "3"}) == ProcessIdentity()


def test_a_rank_and_a_size_without_an_address_ask_for_one() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT: set both to the address of rank 0"):
        read({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (HORA | {"HORA_RANK": "one"}, "HORA_RANK"),
        (HORA | {"HORA_SIZE": ""}, "HORA_SIZE"),
        (HORA | {"HORA_TOKEN_FD": "x"}, "HORA_TOKEN_FD"),
        ({"HORA_RANK": "0"}, "HORA_SIZE is not set"),
        (TORCHRUN | {"WORLD_SIZE": "2.0"}, "WORLD_SIZE"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT"),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "?"}, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ({"HORA_TIMEOUT_S": "soon"}, "HORA_TIMEOUT_S"),
        ({"HORA_TIMEOUT_S": "-1"}, "HORA_TIMEOUT_S"),
        ({"HORA_TIMEOUT_S": "nan"}, "HORA_TIMEOUT_S"),
    ],
)
def test_a_bad_number_is_refused_by_the_name_of_its_variable(env: dict[str, str], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        read(env)


@pytest.mark.parametrize("rank", ["4", "-1"])
def test_a_rank_outside_the_world_is_refused(rank: str) -> None:
    with pytest.raises(ValueError, match=f"torchrun gave rank {rank} of 4"):
        read(TORCHRUN | {"RANK": rank})


@pytest.mark.parametrize(
    "env", [HORA, TORCHRUN, MPIRUN, STEP, {}], ids=["hora", "torchrun", "mpirun", "slurm", "alone"]
)
def test_a_users_settings_count_beside_every_launcher(env: dict[str, str]) -> None:
    plain = read(env)
    assert (plain.strategy, plain.timeout_s, plain.bind, plain.token_file) == (None, None, "", "")
    settings = {"HORA_STRATEGY": "ring", "HORA_TIMEOUT_S": "2.5", "HORA_BIND": "10.0.0.1", "HORA_TOKEN_FILE": "t"}
    found = read(env | settings)
    assert (found.strategy, found.timeout_s, found.bind, found.token_file) == ("ring", 2.5, "10.0.0.1", "t")
    assert (found.launcher, found.rank, found.size) == (plain.launcher, plain.rank, plain.size)


@pytest.mark.parametrize("env", [TORCHRUN, MPIRUN, STEP], ids=["torchrun", "mpirun", "slurm"])
def test_the_last_ranks_are_the_servers(env: dict[str, str]) -> None:
    rank = next(name for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in env)
    total = read(env).num_processes
    seats = [read(env | {rank: str(number), "HORA_SERVERS": "2"}) for number in range(total)]
    workers = [("worker", number) for number in range(total - 2)]
    assert [(seat.role, seat.rank) for seat in seats] == [*workers, ("server", 0), ("server", 1)]
    assert {(seat.size, seat.servers, seat.num_processes) for seat in seats} == {(total - 2, 2, total)}
    assert {(seat.local_rank, seat.local_size) for seat in seats} == {(read(env).local_rank, read(env).local_size)}
    assert [seat.hosts_coordinator for seat in seats] == [True] + [False] * (total - 1)


def test_servers_among_the_ranks_do_not_change_on_how_many_hosts_they_are() -> None:
    here = STEP | {"SLURM_STEP_NUM_NODES": "1", "HORA_SERVERS": "3"}
    assert read(here).one_host and not read(STEP | {"HORA_SERVERS": "3"}).one_host


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("4", "HORA_SERVERS=4 of 4 ranks leaves no worker: let torchrun start more, or use HORA_SERVERS=colocated"),
        ("9", "HORA_SERVERS=9 of 4 ranks leaves no worker"),
        ("0", "HORA_SERVERS takes a number of servers, 1 or more, or colocated, not '0'"),
        ("two", "HORA_SERVERS takes a number of servers, 1 or more, or colocated, not 'two'"),
    ],
)
def test_servers_that_leave_no_worker_or_are_no_number_are_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(TORCHRUN | {"HORA_SERVERS": text})


def test_colocated_servers_take_no_rank() -> None:
    found = read(TORCHRUN | {"HORA_SERVERS": "colocated"})
    assert (found.role, found.rank, found.size, found.servers, found.colocated) == ("worker", 2, 4, None, True)


def test_a_host_is_called_as_the_user_calls_it() -> None:
    assert read({}).host == socket.gethostname()
    assert read(HORA | {"HORA_HOST": "b"}).host == "b"


def test_an_interface_may_be_named() -> None:
    assert read({}).interface == ""
    assert read(TORCHRUN | {"HORA_INTERFACE": "eth1"}).interface == "eth1"


def test_all_addresses_at_once_are_none_by_which_another_host_could_reach_us() -> None:
    with pytest.raises(ValueError, match=r"HORA_BIND=0\.0\.0\.0: .* cannot reach this process .* HORA_INTERFACE"):
        rendezvous(read(TORCHRUN | {"HORA_BIND": "0.0.0.0"}))


def test_a_taken_rank_is_known_by_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.owner_of_rank({}) is None
    assert environment.owner_of_rank({"HORA_PID": "?"}) is None
    monkeypatch.setenv("HORA_PID", "1")
    environment.take_rank()
    assert environment.owner_of_rank() == os.getpid()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n[07-09,12],m1", "n07"), ("gpu-a[3]", "gpu-a3"), ("a,b[1-2]", "a"), ("x.y-1", "x.y-1")],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_an_empty_node_list_is_said() -> None:
    with pytest.raises(HoraError, match="names no host"):
        first_host("")


def test_a_token_file_is_long_private_and_there(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(HoraError, match="cannot be read"):
        read_token_file(str(path))
    path.write_bytes(b"t" * 32)
    path.chmod(0o640)
    with pytest.raises(HoraError, match=f"can be read by other users: chmod 600 {path}"):
        read_token_file(str(path))
    path.chmod(0o600)
    assert read_token_file(str(path)) == b"t" * 32
    path.write_bytes(b"t" * 31)
    with pytest.raises(HoraError, match="holds 31 bytes"):
        read_token_file(str(path))
