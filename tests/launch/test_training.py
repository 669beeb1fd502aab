"""Scripts as users write them, trained by real processes through the real launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import SCRIPTS, Launcher, read_until

TOTAL = 24  # 61 samples in batches of 8: 8 a epoch, the last of 5


def ends(text: str) -> list[tuple[int, int, str]]:
    """What each rank printed at its end: steps, workers, hash of its parameters."""
    found = re.findall(r"step (\d+) of (\d+) workers, parameters (\w+)", text)
    return [(int(step), int(size), digest) for step, size, digest in found]


@pytest.mark.full
def test_one_rank_under_the_launcher_trains_as_python_alone_does(launcher: Launcher) -> None:
    plain = subprocess.run(
        [sys.executable, SCRIPTS / "train_plain.py"], env=launcher.env, capture_output=True, text=True, timeout=40
    )
    done = launcher.run("run", "-n", 1, "train_plain.py")
    assert (plain.returncode, done.returncode) == (0, 0), plain.stderr + done.stderr
    assert ends(plain.stdout) == ends(done.stdout) and ends(plain.stdout)[0][:2] == (TOTAL, 1)
    assert "all workers: 8 of 8 batches done, 0 leased, 0 pending; 61 of 61 samples done" in plain.stdout


@pytest.mark.parametrize("strategy", ["ring", "shared", "shared:update=sharded", "engine"])
def test_two_workers_train_the_example_and_end_with_the_same_parameters(launcher: Launcher, strategy: str) -> None:
    done = launcher.run("run", "-n", 2, "--strategy", strategy, "train_plain.py")
    assert done.returncode == 0, done.stderr
    first, *others = ends(done.stdout)
    assert first[:2] == (TOTAL, 2) and others == [first]
    shown = re.findall(r"step (\d+) .*loss \S+  rate 0\.006", done.stderr)
    assert shown and shown[-1] == str(TOTAL)  # the last values, at the end, by rank 0 alone
    assert "[1] step" not in done.stderr


def test_max_steps_ends_all_workers_and_says_so_once(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--max-steps", 10, "train_plain.py")
    assert done.returncode == 0 and {step for step, _, _ in ends(done.stdout)} == {10}
    assert done.stderr.count("stopped after step 10: --max-steps 10 reached") == 1


@pytest.mark.parametrize(("fault", "strategy"), [("stop", "ring"), ("break", "shared:update=sharded")])
def test_a_worker_that_stops_or_breaks_ends_all_after_the_same_step(
    launcher: Launcher, fault: str, strategy: str
) -> None:
    done = launcher.run("run", "-n", 3, "--strategy", strategy, "train_plain.py", "--fault", fault, "--rank", 2)
    assert done.returncode == 0, done.stderr
    first, *others = ends(done.stdout)
    assert others == [first, first] and first[0] == (5 if fault == "stop" else 4)
    reason = "it is good enough" if fault == "stop" else r"rank 2 \(.*\) left its loop after step 4"
    assert len(re.findall(f"stopped after step {first[0]}: {reason}", done.stderr)) == 1, done.stderr


def test_the_exception_of_one_worker_is_printed_last(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "train_plain.py", "--fault", "raise")
    assert done.returncode == 1
    assert "RuntimeError: bad sample" in done.stderr.strip().splitlines()[-1], done.stderr


def test_nan_on_one_rank_is_named_last(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--strategy", "shared", "train_plain.py", "--fault", "nan")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "is not finite" in last and "on rank 1" in last and "0.weight" in last, done.stderr


def test_a_killed_rank_is_named_and_the_others_stop(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "train_plain.py", "--fault", "kill")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "rank 1" in last and "SIGKILL" in last, done.stderr


def test_ctrl_c_ends_a_training(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "train_plain.py", "--fault", "slow", "--epochs", 1000)
    read_until(process, "[0] step 5", "[1] step 5")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err


def test_a_run_in_two_halves_has_the_parameters_of_one_with_dropout_too(launcher: Launcher, tmp_path: Path) -> None:
    arguments = ["run", "-n", 2, "--strategy", "shared"]
    script = ["train_plain.py", "--dropout", 0.3, "--save"]
    whole = launcher.run(*arguments, *script, tmp_path / "whole")
    first = launcher.run(*arguments, "--max-steps", 11, *script, tmp_path / "halves")
    assert {step for step, _, _ in ends(first.stdout)} == {11} and "restored None" in first.stdout
    second = launcher.run(*arguments, *script, tmp_path / "halves")
    assert "restored 11" in second.stdout, second.stderr
    assert ends(second.stdout) == ends(whole.stdout) and ends(whole.stdout)[0][0] == TOTAL
    assert sorted(os.listdir(tmp_path / "halves")) == ["step-11", f"step-{TOTAL}"]


def test_init_in_a_dataloader_worker_is_refused(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "train_loading.py")
    assert done.returncode == 1
    assert "hora.init() was called in a child of the process that is this rank" in done.stderr
