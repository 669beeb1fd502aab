"""The parameter server as real processes: servers beside the workers, killed workers, joiners, wrong models."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from hora.runs import exit_codes
from launching import SCRIPTS, Launcher, read_until

pytestmark = pytest.mark.timeout(240)  # several processes import torch on whatever cores there are

ASYNC = ("--strategy", "ps:mode=async")


def ends(text: str) -> list[tuple[int, int, str]]:
    """What each worker printed at its end: steps, samples, hash of its parameters."""
    found = re.findall(r"ended at step (\d+), (\d+) samples, parameters (\w+), finite True", text)
    return [(int(step), int(samples), digest) for step, samples, digest in found]


def ours(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("hora: ")]


# -- roles -----------------------------------------------------------------------------------------------------------


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("workers", "servers", "strategy"),
    [
        (1, 3, "ps:mode=async"),
        (3, 1, "ps"),
        (2, 2, "ps:mode=ssp,staleness=1"),
        (2, "colocated", "ps"),
        (2, "colocated", "ps:backup=1"),
        (2, "colocated", "ps:mode=async,sync_every=4"),
        (2, "colocated", "ps:mode=ssp"),
    ],
)
def test_workers_and_servers_in_any_ratio_train_and_end_with_the_same_parameters(
    launcher: Launcher, workers: int, servers: int | str, strategy: str
) -> None:
    done = launcher.run("run", "-n", workers, "--servers", servers, "--strategy", strategy, "ps_train.py")
    assert done.returncode == 0, done.stderr
    found = ends(done.stdout)
    assert len(found) == workers and len({digest for _, _, digest in found}) == 1
    if "backup" not in strategy:
        assert sum(samples for _, samples, _ in found) == 120, "every sample of two epochs once"
    assert "came past prepare" not in done.stdout
    number = workers if servers == "colocated" else servers
    assert len(re.findall(r"server \d .*updates", done.stderr)) == number, "each says what it has done"


def test_a_script_alone_is_its_own_server(launcher: Launcher) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "ps_train.py", "--strategy", "ps:mode=async"],
        env=launcher.env, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ends(done.stdout)[0][:2] == (60, 120)
    assert "all workers: 30 of 30 batches done, 0 leased, 0 pending; 60 of 60 samples done" in done.stdout


@pytest.mark.full
def test_async_and_ssp_reach_the_accuracy_of_sync_in_the_same_number_of_samples(launcher: Launcher) -> None:
    """The mean over eight nets with plain SGD, on the digits' test set, after 16 epochs: from the 12th on one process
    is at its plateau of 92 %, so that the smaller, more frequent updates of async are no advantage."""
    reached = {}
    for strategy in ("ps", "ps:mode=async", "ps:mode=ssp,staleness=3"):
        done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", strategy, "ps_digits.py")
        assert done.returncode == 0, done.stderr
        reached[strategy] = float(re.search(r"accuracy (\S+)", done.stdout)[1])  # type: ignore[index]
    assert reached["ps"] > 0.9
    assert min(reached.values()) >= reached["ps"] - 0.01, reached


# -- a worker is killed ----------------------------------------------------------------------------------------------


class Told:
    """What the workers of a run wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, worker: int) -> list[list[str]]:
        path = self.folder / f"worker-{worker}"
        return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps(self, worker: int) -> list[int]:
        return [int(line[1]) for line in self.lines(worker) if line[0] == "step"]

    def samples(self, worker: int, word: str) -> list[int]:
        return [int(line[2]) for line in self.lines(worker) if line[0] == word]

    def pid(self, worker: int) -> int | None:
        return next((int(line[1]) for line in self.lines(worker) if line[0] == "pid"), None)


def check_history(folder: Path, servers: int, steps: dict[int, list[int]]) -> None:
    """No acknowledged update is lost, none is applied twice."""
    for server in range(servers):
        said = [json.loads(line) for line in (folder / f"server-{server}.jsonl").read_text().splitlines()]
        applied = Counter((e["worker"], e["step"], e["chunk"]) for e in said if e["kind"] == "apply")
        chunks = {chunk for _, _, chunk in applied}
        assert chunks and set(applied.values()) == {1}, "applied twice"
        complete = {(e["worker"], e["step"]) for e in said if e["kind"] == "step"}
        for worker, told in steps.items():
            for step in told:  # counted from 1, by the servers from 0
                assert (worker, step - 1) in complete, f"worker {worker} was told of step {step}"
                assert all(applied[worker, step - 1, chunk] for chunk in chunks)


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(each, marks=pytest.mark.full) for each in range(1, 5)),
        *(pytest.param(each, marks=pytest.mark.chaos) for each in range(5, 50)),
    ],
)
def test_workers_killed_at_random_steps_cost_no_acknowledged_update_and_no_sample(
    launcher: Launcher, tmp_path: Path, seed: int
) -> None:
    """Four of five workers, one after the other, each at a random step: twenty kills in all."""
    dice = random.Random(seed)
    told = Told(tmp_path / "told")
    told.folder.mkdir()
    strategy = dice.choice(["ps:mode=async", "ps:mode=ssp,staleness=2", "ps:mode=async,prefetch=true"])
    process = launcher.start(
        "run", "-n", 5, "--name", "x", "--servers", dice.randint(1, 2), "--strategy", strategy, "ps_train.py", "--told",
        told.folder, "--samples", 300, "--pause", 0.01, HORA_HISTORY=str(tmp_path),
    )  # fmt: skip
    victims = dice.sample(range(5), 4)
    reached = {}
    for number, victim in enumerate(victims):
        wanted = 5 * number + dice.randint(1, 5)
        while len(told.steps(victim)) < wanted:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.003)
        time.sleep(dice.random() * 0.012)
        os.kill(told.pid(victim), signal.SIGKILL)  # type: ignore[arg-type]
        reached[victim] = len(told.steps(victim))
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    for victim in victims:
        (said,) = re.findall(rf"^hora: rank {victim} \(.*\) was killed by SIGKILL(.*); the others go on", err, re.M)
        step = re.fullmatch(r" after step (\d+)", said)
        assert step and int(step[1]) <= reached[victim] + 1, said
    assert "hora: the run ended well; lost on the way: rank " in err and len(ends(out)) == 1
    servers = len(list(tmp_path.glob("server-*.jsonl")))
    steps = {worker: told.steps(worker) for worker in range(5)}
    if "prefetch" in strategy:  # there a step returns before its update is acknowledged
        steps = {worker: those[:-1] for worker, those in steps.items()}
    check_history(tmp_path, servers, steps)
    done = Counter(n for worker in range(5) for n in told.samples(worker, "done"))
    last = Counter(n for victim in victims for n in told.samples(victim, "begun")[-2:])
    assert max(done.values()) <= 2, "a block that was acknowledged was done again"
    assert all(done[n] + last[n] >= 2 for n in range(300)), "a sample of the two epochs is missing"


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", ["kill-between", "kill-after"])
def test_a_run_that_saves_after_it_lost_a_worker_is_restored(launcher: Launcher, tmp_path: Path, fault: str) -> None:
    arguments = ["run", "-n", 3, "--servers", 1, *ASYNC, "ps_train.py", "--save", tmp_path / "kept", "--pause", 0.005]
    done = launcher.run(*arguments, "--fault", fault, "--rank", 0 if fault == "kill-after" else 1)
    assert done.returncode == 0, done.stderr
    found = ends(done.stdout)
    assert len(found) == 2 and len({digest for _, _, digest in found}) == 1
    kept = re.findall(r"saved (\S+)", done.stdout)  # by the lowest that is left, and perhaps by one that came later
    assert kept and all(os.path.isdir(path) for path in kept)
    again = launcher.run("run", "-n", 2, "--servers", 2, *ASYNC, "ps_train.py", "--save", tmp_path / "kept")
    assert again.returncode == 0, again.stderr
    assert {digest for _, _, digest in ends(again.stdout)} == {found[0][2]}, "nothing was left to do"


def test_a_killed_worker_ends_a_sync_run_and_is_named(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", "ps", "ps_train.py", "--fault", "kill-between")
    assert done.returncode == exit_codes.RANK_KILLED
    assert re.fullmatch(r"hora: rank 1 \(.*\) killed by SIGKILL.*", ours(done.stderr)[-1]), done.stderr


def test_a_killed_server_ends_the_run_and_is_named(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start("run", "-n", 2, "--servers", 2, *ASYNC, "ps_train.py", "--fault", "say", "--pause", 0.02,
                             "--epochs", 100)  # fmt: skip
    read_until(process, "[0] step 5", "[1] step 5")
    os.kill(_pid_of(launcher, "server", 1), signal.SIGKILL)
    started_at = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_codes.RANK_KILLED and time.monotonic() - started_at < 5.0
    assert re.fullmatch(
        r"hora: server 1 \(host .*, pid \d+\) killed by SIGKILL, and its parameters are lost with it; the others were "
        r"stopped\.", ours(err)[-1],
    ), err  # fmt: skip


@pytest.mark.parametrize("strategy", ["ps", "ps:mode=ssp,staleness=1"])
def test_ctrl_c_ends_workers_and_servers_within_three_seconds(launcher: Launcher, strategy: str) -> None:
    process = launcher.start("run", "-n", 2, "--servers", 1, "--strategy", strategy, "ps_train.py", "--fault", "say",
                             "--pause", 0.02, "--epochs", 1000)  # fmt: skip
    read_until(process, "[0] step 5", "[1] step 5")
    process.send_signal(signal.SIGINT)
    started_at = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == exit_codes.INTERRUPTED and time.monotonic() - started_at < 3.0
    assert "Traceback" not in err and "KILL" not in err, err


def _pid_of(launcher: Launcher, role: str, rank: int) -> int:
    wanted = {f"HORA_ROLE={role}".encode(), f"HORA_RANK={rank}".encode()}
    for pid in launcher.alive():
        if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
            return pid
    raise AssertionError(f"no {role} {rank}")


# -- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("servers", ["1", "colocated"])
def test_a_worker_joins_a_run_takes_its_part_and_both_end_well(
    launcher: Launcher, tmp_path: Path, servers: str
) -> None:
    told = Told(tmp_path / "told")
    told.folder.mkdir()
    arguments = ["ps_train.py", "--told", told.folder, "--pause", 0.02, "--samples", 200, "--until-joined", 2]
    run = launcher.start("run", "--name", "x", "-n", 2, "--servers", servers, *ASYNC, *arguments, "--epochs", 3,
                         HORA_HISTORY=str(tmp_path))  # fmt: skip
    while len(told.steps(0)) < 3:
        assert run.poll() is None, run.communicate()[1]
        time.sleep(0.01)
    guest = launcher.run("run", "--join", "x", *arguments, "--epochs", 3)
    shown = launcher.run("show", "x", "--data") if run.poll() is None else None
    assert guest.returncode == 0, guest.stderr
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert shown is None or "samples done" in shown.stdout
    found, joined = ends(out), ends(guest.stdout)
    assert len(found) == 2 and len(joined) == 1 and joined[0][0] > 0, "it has done something"
    assert sum(samples for _, samples, _ in [*found, *joined]) == 600, "every sample of three epochs once"
    check_history(tmp_path, 2 if servers == "colocated" else 1, {worker: told.steps(worker) for worker in range(3)})


def test_a_sync_run_cannot_be_joined(launcher: Launcher) -> None:
    run = launcher.start("run", "--name", "x", "-n", 1, "--servers", 1, "--strategy", "ps", "ps_train.py", "--fault",
                         "say", "--pause", 0.02, "--epochs", 50)  # fmt: skip
    read_until(run, "[0] step 1")
    guest = launcher.run("run", "--join", "x", "ps_train.py")
    assert guest.returncode == exit_codes.USAGE and guest.stderr.count("\n") == 1
    assert "run 'x' cannot be joined: its strategy is ps, and workers may join under ps:mode=async" in guest.stderr
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "says"), [
    ("other-worker", r"rank 1.*0\.weight|0\.weight.*rank 1"),
    ("other-server", r"the models differ: rank \d .* has 0\.weight \[8, 6\] .* where server 0 has 0\.weight \[9, 6\]"),
])  # fmt: skip
@pytest.mark.parametrize("strategy", ["ps", "ps:mode=async"])
def test_processes_that_build_different_models_are_named(
    launcher: Launcher, fault: str, says: str, strategy: str
) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", strategy, "ps_train.py", "--fault", fault)
    assert done.returncode not in (0, exit_codes.INTERRUPTED)
    assert re.search(says, done.stderr), done.stderr


def test_a_nan_in_sync_is_named_and_ends_all(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", "ps", "ps_train.py", "--fault", "nan")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    last = done.stderr.strip().splitlines()[-1]
    assert "the gradient of 0.weight" in last and "on rank 1" in last and "is not finite" in last, done.stderr


def test_a_nan_in_async_is_named_and_ends_the_run(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, *ASYNC, "ps_train.py", "--fault", "nan", "--pause", 0.005)
    assert done.returncode == exit_codes.SCRIPT_FAILED and ends(done.stdout) == []
    assert "is not finite" in done.stderr.splitlines()[-1] and "hora: rank 1 " in done.stderr


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", ["ps", "ps:mode=async"])
def test_a_nan_is_skipped_where_that_is_wanted(launcher: Launcher, strategy: str) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", strategy, "ps_train.py", "--fault", "nan-skip",
                        "--pause", 0.005)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = ends(done.stdout)
    assert len(found) == 2 and found[0][2] == found[1][2]
    assert "the gradient of 0.weight" in done.stderr and "this step is not taken" in done.stderr


def test_more_servers_than_blocks_is_one_clear_line(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 1, "--servers", 7, *ASYNC, "ps_train.py")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert (
        "7 servers for a model of 6 blocks: each server needs at least one block. Use --servers 6 or fewer"
        in done.stderr
    )


def test_a_worker_that_stops_under_async_ends_all(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, *ASYNC, "ps_train.py", "--fault", "stop", "--pause", 0.005,
                        "--epochs", 500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(ends(done.stdout)) == 2 and "it is good enough" in done.stderr


def test_max_steps_under_async_ends_all(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--max-steps", 10, *ASYNC, "ps_train.py", "--epochs", 500)
    assert done.returncode == 0, done.stderr
    assert len(ends(done.stdout)) == 2 and "--max-steps 10 reached" in done.stderr


# -- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("strategy", ["ps:mode=async", "ps", "ring"])
def test_a_dataset_that_lies_with_one_worker_is_handed_out(launcher: Launcher, strategy: str) -> None:
    servers = ["--servers", 1] if strategy.startswith("ps") else []
    done = launcher.run("run", "-n", 2, *servers, "--strategy", strategy, "ps_train.py", "--source", 0)
    assert done.returncode == 0, done.stderr
    assert sum(samples for _, samples, _ in ends(done.stdout)) == 120
    assert len({digest for _, _, digest in ends(done.stdout)}) == 1


def test_both_views_of_the_ledger_are_shown_while_the_run_lives_and_afterwards(launcher: Launcher) -> None:
    run = launcher.start("run", "--name", "x", "-n", 2, "--servers", 1, *ASYNC, "ps_train.py", "--fault", "say",
                         "--pause", 0.03, "--epochs", 1, "--samples", 300)  # fmt: skip
    read_until(run, "[0] step 4", "[1] step 4")
    live = launcher.run("show", "x", "--data")
    out, err = run.communicate(timeout=150)
    assert run.returncode == 0, err
    assert re.search(r"all workers: \d+ of 150 batches done, [12] leased, \d+ pending; \d+ of 300 samples done", out) \
        or "150 of 150 batches done" in out  # fmt: skip
    assert live.returncode == 0 and "300" in live.stdout and re.search(r"rank [01]", live.stdout), live.stdout
    later = launcher.run("show", "x", "--data")
    assert later.returncode == 0 and "300" in later.stdout, later.stdout
