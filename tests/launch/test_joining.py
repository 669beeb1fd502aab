"""Workers that join a run which is going on, and what `hora show` tells of runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hora.runs import exit_codes
from launching import Launcher, read_until

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(launcher: Launcher) -> Iterator[Start]:
    """Starts a run named x and returns once all of it has met; ends it after the test."""
    begun: list[subprocess.Popen[str]] = []

    def start(*arguments: object, name: str = "x", workers: int = 1) -> subprocess.Popen[str]:
        process = launcher.start("run", "--name", name, "-n", workers, *arguments)
        begun.append(process)
        read_until(process, *(f"[{rank}] joined" for rank in range(workers)))
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)


ASYNC = ("--strategy", "ps:mode=async", "--servers", 1, "member.py")


def test_workers_join_with_new_ranks_and_everybody_hears_of_them(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=host", "worker1=host", workers=2)
    done = launcher.run("run", "--join", "x", "-n", 2, "member.py")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "")
    for rank in (2, 3):
        found = re.search(rf"^\[{rank}\] joined (.*) as worker {rank} of 2 servers=1$", done.stdout, re.MULTILINE)
        assert found and found[1].startswith("worker 0, worker 1, worker ") and found[1].endswith(", server 0")
        assert f"[{rank}] left" in done.stdout
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (exit_codes.OK, "")
    for prefix in ("[0]", "[1]", "[server 0]"):
        assert f"{prefix} heard worker 2 joined" in out and f"{prefix} heard worker 3 joined" in out
    record = launcher.state / "hora" / "runs" / "x-join-2"
    begun, ended = (json.loads((record / name).read_text()) for name in ("run.json", "end.json"))
    assert (begun["joins"], begun["ranks"], begun["strategy"]) == ("x", [2, 3], "ps:mode=async")
    assert ended["code"] == exit_codes.OK


def test_two_who_join_at_once_never_get_the_same_rank(launcher: Launcher, begin: Start) -> None:
    begin(*ASYNC, "worker0=stay")
    both = [launcher.start("run", "--join", "x", "-n", 2, "member.py") for _ in range(2)]
    ranks = [re.findall(r"^\[(\d)\] joined", process.communicate(timeout=20)[0], re.MULTILINE) for process in both]
    assert sorted(ranks[0] + ranks[1]) == ["1", "2", "3", "4"]
    late = launcher.run("run", "--join", "x", "member.py")
    assert "[5] joined worker 0, worker 5, server 0 as worker 5" in late.stdout


def test_one_who_joins_knows_the_run_as_its_own_workers_do(launcher: Launcher, begin: Start) -> None:
    begin("--timeout-s", 7, "--max-steps", 9, *ASYNC, "worker0=stay")
    fact = json.loads(launcher.run("run", "--join", "x", "identity.py").stdout.partition("] ")[2])
    control = json.loads((launcher.state / "hora" / "runs" / "x" / "control").read_text())
    assert (fact["HORA_ROLE"], fact["HORA_RANK"], fact["HORA_SIZE"], fact["HORA_JOINED"]) == ("worker", "1", "1", "1")
    assert (fact["HORA_STRATEGY"], fact["HORA_SERVERS"]) == ("ps:mode=async", "1")
    assert (fact["HORA_TIMEOUT_S"], fact["HORA_MAX_STEPS"]) == ("7", "9")
    assert fact["HORA_CONTROL"] == f"{control['host']}:{control['port']}" and fact["token"] == control["token"]
    assert fact["HORA_RUN"] != control["run"], "each launcher ends only what carries its own mark"


@pytest.mark.parametrize("servers", ["1", "colocated"])
def test_the_run_waits_for_those_who_joined_when_its_own_workers_are_done(
    launcher: Launcher, begin: Start, servers: str
) -> None:
    run = begin("--strategy", "ps:mode=ssp", "--servers", servers, "member.py", "worker0=greet")
    done = launcher.run("run", "--join", "x", "member.py")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "") and "[1] left" in done.stdout
    assert "[1] heard worker 0 left" in done.stdout
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (exit_codes.OK, "")
    assert servers == "colocated" or out.index("[server 0] heard worker 1 left") > out.index("[0] left")


def test_a_run_whose_own_workers_are_lost_lives_in_those_who_joined(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=stay")
    guest = launcher.start("run", "--join", "x", "member.py", "worker1=mourn")
    read_until(run, "[0] heard worker 1 joined")
    os.kill(pid_of(launcher, 0), signal.SIGKILL)
    _, err = run.communicate(timeout=20)
    assert run.returncode == exit_codes.OK
    assert re.match(r"hora: rank 0 \(.*\) was killed by SIGKILL after step 10; the others go on\n", err)
    out, _ = guest.communicate(timeout=20)
    assert guest.returncode == exit_codes.OK and "[1] heard worker 0 died: killed by SIGKILL" in out


def test_a_run_whose_own_workers_and_guests_are_lost_has_failed(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=stay")
    guest = launcher.start("run", "--join", "x", "member.py", "worker1=stay")
    read_until(run, "[0] heard worker 1 joined")
    os.kill(pid_of(launcher, 0), signal.SIGKILL)
    read_until(guest, "[1] heard worker 0 died")
    os.kill(pid_of(launcher, 1), signal.SIGKILL)
    _, err = run.communicate(timeout=20)
    assert run.returncode == exit_codes.RANK_KILLED
    assert re.fullmatch(r"hora: rank 0 \(.*\) killed by SIGKILL\.", err.splitlines()[-1])
    guest.communicate(timeout=20)
    assert guest.returncode == exit_codes.RANK_KILLED


def test_a_worker_that_joined_and_is_killed_is_reported_there_and_heard_here(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=host")
    done = launcher.run("run", "--join", "x", "member.py", "worker1=kill")
    assert done.returncode == exit_codes.RANK_KILLED
    assert re.fullmatch(r"hora: rank 1 \(host .*, pid \d+\) killed by SIGKILL\.\n", done.stderr)
    out, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (exit_codes.OK, "")
    assert "[0] heard worker 1 died: its connection broke" in out


def test_one_of_several_who_joined_may_be_lost(launcher: Launcher, begin: Start) -> None:
    begin(*ASYNC, "worker0=stay")
    done = launcher.run("run", "--join", "x", "-n", 2, "member.py", "worker2=kill")
    assert done.returncode == exit_codes.OK
    assert re.search(r"hora: rank 2 \(.*\) was killed by SIGKILL; the others go on\n", done.stderr)


def test_ctrl_c_ends_those_who_joined_and_not_the_run(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=host")
    guest = launcher.start("run", "--join", "x", "member.py", "worker1=stay")
    read_until(guest, "[1] joined")
    guest.send_signal(signal.SIGINT)
    _, err = guest.communicate(timeout=20)
    assert guest.returncode == exit_codes.INTERRUPTED and err.startswith("hora: interrupted; stopping the rank")
    out, _ = run.communicate(timeout=20)
    assert run.returncode == exit_codes.OK and "[0] heard worker 1 died" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_the_run_ends_those_who_joined_notice_by_their_own_lines(
    launcher: Launcher, begin: Start, number: signal.Signals
) -> None:
    run = begin(*ASYNC, "worker0=stay")
    guest = launcher.start("run", "--join", "x", "member.py", "worker1=stay")
    read_until(guest, "[1] joined")
    run.send_signal(number)
    started_at = time.monotonic()
    _, err = guest.communicate(timeout=20)
    assert time.monotonic() - started_at < 4.0
    assert guest.returncode == exit_codes.SCRIPT_FAILED and "the run is gone" in err


def test_a_run_that_its_script_made_elastic_can_be_joined(launcher: Launcher, begin: Start) -> None:
    begin("member.py", "worker0=host", "strategy:ps:mode=async")
    done = launcher.run("run", "--join", "x", "member.py")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "") and "[1] joined worker 0, worker 1 as" in done.stdout


def test_a_run_elsewhere_is_joined_through_its_directory(launcher: Launcher, begin: Start) -> None:
    folder = launcher.state / "elsewhere"
    begin("--run-dir", folder, *ASYNC, "worker0=stay")
    unknown = launcher.run("run", "--join", "x", "member.py")
    assert unknown.returncode == exit_codes.USAGE and "there is no run 'x'; no run is live" in unknown.stderr
    done = launcher.run("run", "--join", "x", "--run-dir", folder, "member.py")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "")
    assert (launcher.state / "elsewhere-join-1" / "end.json").exists()
    other = launcher.run("run", "--join", "y", "--run-dir", folder, "member.py")
    assert other.returncode == exit_codes.USAGE and "is 'x', not 'y'" in other.stderr


def refused(done: subprocess.CompletedProcess[str], says: str) -> bool:
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("hora run: "), done.stderr
    return done.returncode == exit_codes.USAGE and done.stdout == "" and says in done.stderr


@pytest.mark.parametrize("strategy", ["ring", "ps", "ps:backup=1"])
def test_a_run_that_is_not_elastic_cannot_be_joined(launcher: Launcher, begin: Start, strategy: str) -> None:
    servers = [] if strategy == "ring" else ["--servers", "1"]
    begin("--strategy", strategy, *servers, "member.py", "worker0=stay")
    done = launcher.run("run", "--join", "x", "member.py")
    assert refused(
        done,
        f"run 'x' cannot be joined: its strategy is {strategy}, and workers may join under ps:mode=async, ",
    )


def test_a_run_that_is_not_there_is_told_with_those_that_are(launcher: Launcher, begin: Start) -> None:
    launcher.run("run", "--name", "old", "hello.py")
    assert refused(launcher.run("run", "--join", "y", "hello.py"), "there is no run 'y'; no run is live")
    begin(*ASYNC, "worker0=stay")
    assert refused(launcher.run("run", "--join", "y", "hello.py"), "there is no run 'y'; live runs: x")
    assert refused(launcher.run("run", "--join", "../runs/x", "hello.py"), "there is no run '../runs/x'")
    assert refused(launcher.run("run", "--join", "old", "hello.py"), "run 'old' has ended; live runs: x")


def test_a_control_file_that_others_can_read_is_not_used(launcher: Launcher, begin: Start) -> None:
    begin(*ASYNC, "worker0=stay")
    (launcher.state / "hora" / "runs" / "x" / "control").chmod(0o644)
    assert refused(launcher.run("run", "--join", "x", "hello.py"), "mode 0644), so it is not used: chmod 600 ")


# -- hora show ---------------------------------------------------------------------------------------------------------


def test_show_tells_of_a_live_run_and_nobody_in_it_hears_of_that(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=host", "--lr", "1 2")
    done = launcher.run("show", "x")
    assert (done.returncode, done.stderr) == (exit_codes.OK, "")
    told = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    told = {key.strip(): value.strip() for key, value in told.items()}
    assert told["run"] == "x" and re.fullmatch(r"running for \d+ s", told["state"])
    assert told["command"] == "member.py worker0=host --lr '1 2'" and told["strategy"] == "ps:mode=async"
    assert (told["workers"], told["servers"], told["there now"]) == ("1", "1", "worker 0; server 0")
    assert "ended" not in told
    launcher.run("run", "--join", "x", "member.py")
    out, _ = run.communicate(timeout=20)
    assert "visitor" not in out and len(re.findall(r"heard .* joined", out)) == 2, "rank 1's, by worker and server"


def test_show_tells_the_ledger_of_a_live_run_and_of_one_that_ended(launcher: Launcher, begin: Start) -> None:
    run = begin(*ASYNC, "worker0=lends", "worker1=host", workers=2)
    wanted = (
        "loader 0, epoch 0: 1 of 4 blocks done, 1 leased, 2 pending; 10 of 40 samples done",
        "  rank 0 has done 1 and holds block 1",
    )
    live = launcher.run("show", "x", "--data")
    assert (live.returncode, live.stderr) == (exit_codes.OK, "")
    assert all(line in live.stdout.splitlines() for line in wanted), live.stdout
    launcher.run("run", "--join", "x", "member.py")
    run.communicate(timeout=20)
    ended = launcher.run("show", "x", "--data").stdout
    assert ended.startswith("loader 0, epoch 0: 1 of 4 blocks done, 0 leased, 3 pending; 10 of 40 samples done\n")
    guest = launcher.run("show", "x-join-2", "--data")
    assert guest.returncode == exit_codes.USAGE and "has joined run 'x', which keeps the ledger" in guest.stderr


def test_show_tells_how_a_run_ended(launcher: Launcher) -> None:
    launcher.run("run", "--name", "bad", "-n", 2, "fail.py", 1, "raise")
    done = launcher.run("show", "bad")
    assert re.search(r"^state +failed with exit code 1 after [\d.]+ s$", done.stdout, re.MULTILINE)
    assert re.search(r"^cause +rank 1 \(host .*\) failed with exit code 1$", done.stdout, re.MULTILINE)
    assert re.search(r"^strategy +chosen by the script$", done.stdout, re.MULTILINE)
    unknown = launcher.run("show", "nothing")
    assert unknown.returncode == exit_codes.USAGE
    assert unknown.stderr == "hora show: there is no run 'nothing'; no run is live\n"


def pid_of(launcher: Launcher, rank: int) -> int:
    """The process of that worker."""
    wanted = {b"HORA_ROLE=worker", f"HORA_RANK={rank}".encode()}
    for pid in launcher.alive():
        if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            return pid
    raise AssertionError(f"no worker {rank}")
