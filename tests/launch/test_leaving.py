"""What one rank's way out of its training loop means to the others: an exception is not a `break`."""

from __future__ import annotations

import re

import pytest

from hora.runs import exit_codes
from launching import Launcher

SYNCHRONOUS = ("shared", "ring:update=sharded", "ps", "local:every=4", "diloco:every=4")


@pytest.mark.parametrize(
    "strategy",
    [*SYNCHRONOUS, "ps:mode=async", *(pytest.param(each, marks=pytest.mark.full) for each in ("ring", "ps:mode=ssp"))],
)
def test_an_exception_on_one_rank_raises_on_the_others_and_nothing_after_the_loop_runs(
    launcher: Launcher, strategy: str
) -> None:
    done = launcher.run("run", "-n", 2, "--strategy", strategy, "leaving.py", "raise", HORA_GRACE="0.3")
    assert done.returncode == exit_codes.SCRIPT_FAILED, done.stderr
    assert "after the loop" not in done.stdout and "left its loop" not in done.stderr
    assert re.search(r"\[0\] stopped: rank 0.* lost rank 1 \(.*\).*: ValueError: bad sample", done.stderr), done.stderr
    last = done.stderr.strip().splitlines()
    assert last[-1] == "  ValueError: bad sample"
    cause = r"hora: rank 1 \(.*\) failed with exit code 1; the others were stopped\."
    assert re.search(cause, done.stderr), done.stderr


@pytest.mark.parametrize("strategy", ["shared", "local:every=4", pytest.param("ps", marks=pytest.mark.full)])
def test_a_script_that_ends_inside_its_loop_fails_the_run_unless_all_do(launcher: Launcher, strategy: str) -> None:
    done = launcher.run("run", "-n", 2, "--strategy", strategy, "leaving.py", "exit", HORA_GRACE="0.3")
    assert done.returncode == exit_codes.SCRIPT_FAILED, done.stderr
    assert "after the loop" not in done.stdout
    wanted = r"rank 1 \(.*\): its script ended inside its training loop, after step 5, which the others had not left"
    assert re.search(wanted, done.stderr.splitlines()[-1]), done.stderr
    assert "job.stop(reason)" in done.stderr
    done = launcher.run("run", "-n", 2, "--strategy", strategy, "leaving.py", "all exit")
    assert done.returncode == exit_codes.OK, done.stderr


def test_sync_servers_take_no_step_without_a_worker_that_was_killed(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--servers", 1, "--strategy", "ps", "leaving.py", "kill", HORA_GRACE="0.3")
    assert done.returncode == exit_codes.RANK_KILLED, done.stderr
    assert "hora: 5 steps" in done.stderr  # the server alone decides whether rank 0 comes further


@pytest.mark.parametrize(
    "strategy", ["shared", "ring", "ps", *(pytest.param(each, marks=pytest.mark.full) for each in SYNCHRONOUS[3:])]
)
def test_a_collective_that_one_rank_makes_inside_the_loop_is_refused_within_a_second(
    launcher: Launcher, strategy: str
) -> None:
    """Not after `timeout_s`, which is half an hour here."""
    done = launcher.run("run", "-n", 2, "--strategy", strategy, "leaving.py", "alone", HORA_GRACE="0.3")
    assert done.returncode == exit_codes.SCRIPT_FAILED, done.stderr
    said = done.stderr.splitlines()[-1]
    assert "hora.errors.Mismatch: " in said and "each waits for the other" in said
    assert "waits in all_reduce sum of float32 [1]" in said and re.search(r"waits while .* step \d+", said), said
