"""Servers beside the workers: how many, what they are told, and what a lost worker or server does to the run."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from hora.cli import main
from hora.launch import servers
from hora.launch.servers import ServerCosts
from hora.rendezvous.environment import read
from hora.runs import exit_codes
from launching import SCRIPTS, Launcher, read_until

PS = ("--strategy", "ps:mode=async")
SYNC = ("--strategy", "ps")
HORA = {"HORA_RANK": "1", "HORA_SIZE": "2", "HORA_CONTROL": "127.0.0.1:5", "HORA_TOKEN_FD": "7"}


def ours(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("hora: ")]


# -- roles -------------------------------------------------------------------------------------------------------------


def test_servers_run_the_same_script_and_are_told_who_they_are(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 2, "identity.py", "--lr", "1")
    assert done.returncode == exit_codes.OK, done.stderr
    found = {line.partition("] ")[0] + "]": json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()}
    assert found.keys() == {"[0]", "[1]", "[server 0]", "[server 1]"}
    for prefix, fact in found.items():
        role, rank = ("server", prefix[8]) if "server" in prefix else ("worker", prefix[1])
        assert (fact["HORA_ROLE"], fact["HORA_RANK"]) == (role, rank)
        assert (fact["HORA_SIZE"], fact["HORA_SERVERS"]) == ("2", "2")
        assert fact["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 4))
    assert len({fact["token"] for fact in found.values()}) == 1


def test_colocated_servers_are_no_processes(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", "colocated", "identity.py", HORA_SERVERS="7")
    facts = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines()]
    assert [(fact["HORA_ROLE"], fact["HORA_SERVERS"]) for fact in facts] == [("worker", "colocated")] * 2


def test_without_a_strategy_nobody_is_told_of_servers(launcher: Launcher) -> None:
    done = launcher.run("run", "identity.py", HORA_SERVERS="7", HORA_JOINED="1")
    fact = json.loads(done.stdout.partition("] ")[2])
    assert not {"HORA_SERVERS", "HORA_JOINED"} & fact.keys()


def test_workers_and_servers_meet_and_servers_end_with_the_last_worker(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "--log-dir", tmp_path / "logs", "--name", "x", "member.py")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "")
    assert "[server 0] joined worker 0, worker 1, server 0 as server 0 of 2 servers=1" in done.stdout
    assert "[server 0] heard worker 1 left" in done.stdout and "[server 0] left" in done.stdout
    assert sorted(os.listdir(tmp_path / "logs")) == sorted(
        f"{name}.{end}" for name in ("rank-0", "rank-1", "server-0") for end in ("out", "err")
    )
    begun = json.loads((launcher.state / "hora" / "runs" / "x" / "run.json").read_text())
    assert (begun["servers"], begun["size"], begun["strategy"]) == (1, 2, "ps:mode=async")


def test_ctrl_c_stops_servers_too(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, *PS, "--servers", 2, "wait.py")
    read_until(process, "[0] ready", "[1] ready", "[server 0] ready", "[server 1] ready")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == exit_codes.INTERRUPTED
    assert err == "hora: interrupted; stopping 2 ranks and 2 servers (Ctrl-C again: at once)\n"


def test_a_server_that_does_not_end_with_the_run_is_made_to_and_that_is_no_failure(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 1, *PS, "--servers", 1, "member.py", "server=deaf", HORA_GRACE="0.03")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "hora: server 0 did not end with the run and is ended\n")


# -- how many ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "cores", "costs", "wanted"),
    [
        (1, 64, (2.0, 1.0), 1),
        (8, 64, (2.0, 1.0), 4),
        (8, 64, (2.0, 1.5), 6),
        (7, 64, (2.0, 1.0), 4),
        (8, 10, (2.0, 1.5), 2),
        (8, 8, (2.0, 1.5), 1),
        (8, 2, (2.0, 1.5), 1),
        (4, 64, (2.0, 0.001), 1),
    ],
)
def test_there_are_as_many_servers_as_keep_up_and_as_cores_are_left(
    workers: int, cores: int, costs: tuple[float, float], wanted: int
) -> None:
    count, why = servers.default(workers, cores, ServerCosts(worker_ns=costs[0], server_ns=costs[1]))
    assert count == wanted
    assert why.startswith(f"{wanted} server") and f"for {workers} worker" in why and "--servers N to choose" in why
    assert f"{costs[0]:.3f} ns/byte" in why


def test_the_memory_is_measured_in_a_moment() -> None:
    started_at = time.monotonic()
    costs = servers.measure()
    assert time.monotonic() - started_at < 2.0
    assert 0 < costs.server_ns < 100 and 0 < costs.worker_ns < 100


def test_a_default_number_of_servers_is_explained_in_one_line_and_recorded(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--name", "x", *PS, "member.py")
    (line,) = done.stderr.splitlines()
    found = re.match(r"hora: (\d+) servers? for 2 workers: .* ns/byte .*; --servers N to choose$", line)
    assert found and done.returncode == exit_codes.OK
    assert len(re.findall(r"\[server \d\] joined", done.stdout)) == int(found[1])
    begun = json.loads((launcher.state / "hora" / "runs" / "x" / "run.json").read_text())
    assert begun["servers"] == int(found[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--strategy", "ring", "--servers", "2"],
            "hora run: --servers 2: strategy 'ring' uses none; strategies with servers",
        ),
        (["--strategy", "ring", "--servers", "colocated"], "--servers colocated: strategy 'ring' uses none"),
        ([*PS, "--servers", "0"], "hora run: --servers takes a whole number of at least 1, or colocated, not '0'"),
        ([*PS, "--servers", "-1"], "--servers takes a whole number of at least 1, or colocated, not '-1'"),
        ([*PS, "--servers", "x"], "--servers takes a whole number of at least 1, or colocated, not 'x'; e.g."),
        ([*PS, "-n", "1000", "--servers", "25"], "-n 1000 and --servers 25 are 1025 processes; the limit is 1024"),
        ([*PS, "-n", "1024"], "-n 1024 and --servers 1 are 1025 processes"),
        ([*PS, "--join", "x"], "--strategy with --join x: the run has its own; leave it out"),
        (["--servers", "2", "--join", "x"], "--servers with --join x: the run has its own"),
    ],
)
def test_a_wrong_number_of_servers_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(SCRIPTS)
    assert main.main(["run", *arguments, "hello.py"]) == exit_codes.USAGE
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err


# -- who am I ----------------------------------------------------------------------------------------------------------


def test_a_server_counts_among_the_servers_and_a_worker_among_the_workers() -> None:
    found = read(HORA | {"HORA_ROLE": "server", "HORA_RANK": "4", "HORA_SERVERS": "5"})
    assert (found.role, found.rank, found.size, found.servers, found.colocated) == ("server", 4, 2, 5, False)
    with pytest.raises(ValueError, match="gave server 5 of 5"):
        read(HORA | {"HORA_ROLE": "server", "HORA_RANK": "5", "HORA_SERVERS": "5"})
    with pytest.raises(ValueError, match="HORA_SERVERS does not say how many"):
        read(HORA | {"HORA_ROLE": "server"})
    with pytest.raises(ValueError, match="gave rank 2 of 2"):
        read(HORA | {"HORA_RANK": "2", "HORA_SERVERS": "5"})


def test_one_that_joined_may_have_a_rank_beyond_the_size() -> None:
    found = read(HORA | {"HORA_RANK": "9", "HORA_JOINED": "1"})
    assert (found.rank, found.size, found.joined) == (9, 2, True)
    with pytest.raises(ValueError, match="gave rank -1"):
        read(HORA | {"HORA_RANK": "-1", "HORA_JOINED": "1"})


@pytest.mark.parametrize("text", ["0", "-1", "x", ""])
def test_a_wrong_number_of_servers_in_the_environment_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="HORA_SERVERS"):
        read(HORA | {"HORA_SERVERS": text})


def test_a_script_alone_can_only_have_a_colocated_server() -> None:
    found = read({"HORA_SERVERS": "colocated"})
    assert (found.servers, found.colocated) == (None, True)
    assert not read({}).colocated
    with pytest.raises(ValueError, match="HORA_SERVERS=2: without a launcher use HORA_SERVERS=colocated"):
        read({"HORA_SERVERS": "2"})


# -- who is lost -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["command line", "script"])
def test_an_elastic_run_goes_on_without_a_killed_worker_and_says_so_twice(launcher: Launcher, how: str) -> None:
    chosen = [*PS, "--servers", "1"] if how == "command line" else []
    done = launcher.run("run", "-n", 3, "--name", "x", *chosen, "member.py", "worker2=kill", "strategy:ps:mode=ssp")
    assert done.returncode == exit_codes.OK, done.stderr
    first, last = done.stderr.splitlines()
    who = r"rank 2 \(host .*, pid \d+\) was killed by SIGKILL after step 12"
    assert re.fullmatch(rf"hora: {who}; the others go on", first)
    assert re.fullmatch(rf"hora: the run ended well; lost on the way: {who}\.", last)
    for prefix in ["[0]", "[1]", *(["[server 0]"] if chosen else [])]:
        assert f"{prefix} heard worker 2 died: killed by SIGKILL" in done.stdout
        assert f"{prefix} left" in done.stdout
    ended = json.loads((launcher.state / "hora" / "runs" / "x" / "end.json").read_text())
    assert ended["code"] == 0 and ended["cause"] == "" and re.fullmatch(who, ended["lost"][0])
    assert ended["strategy"] == ("ps:mode=async" if chosen else "ps:mode=ssp")


def test_an_exception_of_a_worker_ends_an_elastic_run_too(launcher: Launcher) -> None:
    """It is a mistake of the script, which the others have as well."""
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "member.py", "worker1=raise", HORA_GRACE="0.3")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert re.search(r"^hora: rank 1 \(.*\) failed with exit code 1", done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.splitlines()[-1] == "  ValueError: boom"


def test_an_echo_in_an_elastic_run_is_that_workers_failure(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "member.py", "worker1=echo")
    assert done.returncode == exit_codes.OK
    assert re.match(r"hora: rank 1 \(.*\) lost a rank that it needed after step 11; the others go on", done.stderr)


def test_when_the_last_worker_of_an_elastic_run_ends_badly_the_run_has_failed(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "member.py", "worker0=late", "worker1=kill")
    assert done.returncode == exit_codes.RANK_KILLED
    first, last = done.stderr.splitlines()
    assert re.fullmatch(r"hora: rank 1 \(.*\) was killed by SIGKILL after step 11; the others go on", first)
    assert re.fullmatch(r"hora: rank 0 \(.*\) killed by SIGKILL; the others were stopped\.", last)


def test_a_bug_that_every_worker_has_fails_the_run(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "member.py", "worker=raise")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert re.search(r"hora: rank \d \(.*\) failed with exit code 1; the others failed in the same way\.", done.stderr)
    assert done.stderr.splitlines()[-1] == "  ValueError: boom"


def test_a_worker_that_fails_before_the_run_has_formed_ends_it(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, *PS, "--servers", 1, "member.py", "worker1=early")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert re.search(r"hora: rank 1 \(.*\) failed with exit code 1; the others were stopped\.", done.stderr)
    assert done.stderr.splitlines()[-1] == "  ValueError: before it joined"


def test_a_worker_that_is_lost_before_all_have_prepared_ends_the_run(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 1, "member.py", "unbound", "worker1=kill", "worker0=stay")
    assert done.returncode == exit_codes.RANK_KILLED and "go on" not in done.stderr
    assert re.fullmatch(r"hora: rank 1 \(.*\) killed by SIGKILL; the others were stopped\.", ours(done.stderr)[-1])


@pytest.mark.parametrize(("how", "code"), [("kill", exit_codes.RANK_KILLED), ("exit", exit_codes.SCRIPT_FAILED)])
def test_a_server_that_ends_badly_ends_the_run_with_its_parameters(launcher: Launcher, how: str, code: int) -> None:
    done = launcher.run("run", "-n", 2, *PS, "--servers", 2, "member.py", f"server1={how}", "worker=stay")
    assert done.returncode == code
    ended = "killed by SIGKILL" if how == "kill" else "failed with exit code 7"
    assert re.fullmatch(
        rf"hora: server 1 \(host .*, pid \d+\) {ended}, and its parameters are lost with it; the others were stopped\.",
        ours(done.stderr)[-1],
    )
    assert re.search(r"\[0\] heard server 1 died: (killed by SIGKILL|exit code 7)", done.stdout)


def test_a_worker_in_which_a_server_lives_ends_the_run_with_its_parameters(launcher: Launcher) -> None:
    done = launcher.run(
        "run", "-n", 2, *PS, "--servers", "colocated", "member.py", "holds", "worker1=kill", "worker0=stay"
    )
    assert done.returncode == exit_codes.RANK_KILLED
    wanted = r"rank 1 \(.*\) killed by SIGKILL, and its parameters are lost with it; the others were stopped\."
    assert re.fullmatch(f"hora: {wanted}", ours(done.stderr)[-1])


def test_a_killed_worker_ends_a_run_that_is_not_elastic(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, *SYNC, "--servers", 1, "member.py", "worker1=kill", "worker0=stay")
    assert done.returncode == exit_codes.RANK_KILLED
    assert re.fullmatch(r"hora: rank 1 \(.*\) killed by SIGKILL; the others were stopped\.", ours(done.stderr)[-1])
