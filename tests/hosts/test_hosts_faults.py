"""What goes wrong on one of several machines is named with its host, and no machine keeps anybody of a run that ended.

Times are printed, and compared with what is promised plus what a busy machine takes.
"""

from __future__ import annotations

import base64
import os
import pathlib
import re
import signal
import time

import pytest

from hora.runs import exit_codes

from .conftest import Make
from .machines import Machines, Run

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

SLACK_S = 7.0
CTRL_C_S = 3.0
NAMED_S = 5.0
CUT_S = 25.0  # a host whose launcher is silent ends its ranks by itself
SCRIPT = "training.py"


def training(those: Machines, *options: object, ranks: int, folder: pathlib.Path) -> Run:
    """A run that goes on until the file `enough` is in the folder; all its ranks have stepped."""
    endless = ["--epochs", 100000, "--pause", 0.1, "--until", folder / "enough"]
    run = those.start("run", *options, SCRIPT, *endless)
    run.wait_for(*(rf"\[{rank}\] step 3\b" for rank in range(ranks)), limit_s=90)
    return run


def last(run: Run) -> str:
    return run.err[-1] if run.err else ""


def test_a_script_that_fails_on_another_host_is_named_with_it_and_its_traceback_comes_last(machines: Make) -> None:
    run = machines().hora("run", "--hosts", "a:2,b:2", "--strategy", "ring", SCRIPT, "--raises", 2)
    assert run.code == exit_codes.SCRIPT_FAILED, run
    blamed = [number for number, line in enumerate(run.err) if re.match(r"hora: rank 2 \(host b\b.*failed", line)]
    assert len(blamed) == 1, run
    after = run.err[blamed[0] + 1 :]
    assert "Traceback (most recent call last):" in after[0] and after[-1].strip() == "RuntimeError: bad sample", run


def test_a_rank_killed_on_another_host_is_named_and_the_others_stop(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    run = training(those, "--hosts", "a:2,b:2", "--strategy", "ring", ranks=4, folder=tmp_path)
    os.kill(those.ranks("b", SCRIPT)[3], signal.SIGKILL)
    assert run.end(30) == exit_codes.RANK_KILLED, run
    assert re.match(r"hora: rank 3 \(host b, pid \d+\) killed by SIGKILL", last(run)), run


@pytest.mark.parametrize("kind", ["async", "ssp"])
def test_a_rank_killed_on_another_host_does_not_stop_workers_that_need_not_wait(
    machines: Make, tmp_path: pathlib.Path, kind: str
) -> None:
    those = machines()
    options = ["--hosts", "a:2,b:2", "--strategy", f"ps:mode={kind}", "--servers", 1]
    run = training(those, *options, ranks=4, folder=tmp_path)
    os.kill(those.ranks("b", SCRIPT)[2], signal.SIGKILL)
    run.wait_for(r"rank 2 \(host b, pid \d+\) was killed by SIGKILL.*the others go on", limit_s=20)
    (tmp_path / "enough").touch()
    assert run.end(40) == exit_codes.OK, run
    assert all(f"[{rank}] rank {rank} ended at step" in run.stdout for rank in (0, 1, 3)), run


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_stops_all_on_all_machines(machines: Make, tmp_path: pathlib.Path, times: int) -> None:
    those = machines()
    run = training(those, "--hosts", "a:2,b:2", "--strategy", "ring", ranks=4, folder=tmp_path)
    began = time.monotonic()
    for _ in range(times):
        run.signal(signal.SIGINT)
        time.sleep(0.1)
    assert run.end(20) == exit_codes.INTERRUPTED, run
    left = those.wait_until_nobody(limit_s=5)
    took_s = time.monotonic() - began
    print(f"Ctrl-C {times} times: all over after {took_s:.1f} s")
    assert not left
    assert took_s < CTRL_C_S + SLACK_S


def test_ctrl_c_before_any_rank_has_started_leaves_nobody(machines: Make) -> None:
    those = machines()
    run = those.start("run", "--hosts", "a:2,b:2", SCRIPT)
    deadline = time.monotonic() + 20
    while not those.agents("b") and time.monotonic() < deadline:
        time.sleep(0.005)
    run.signal(signal.SIGINT)
    assert run.end(20) == exit_codes.INTERRUPTED, run
    assert not those.wait_until_nobody(limit_s=5)


def test_sigterm_ends_all_and_says_so_by_its_code(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    run = training(those, "--hosts", "a:1,b:1", "--strategy", "ring", ranks=2, folder=tmp_path)
    run.signal(signal.SIGTERM)
    assert run.end(20) == exit_codes.TERMINATED, run
    assert not those.wait_until_nobody(limit_s=5)


def test_after_kill_9_of_the_launcher_nobody_is_left_on_any_machine(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    run = training(those, "--hosts", "a:2,b:2", "--strategy", "ring", ranks=4, folder=tmp_path)
    began = time.monotonic()
    run.signal(signal.SIGKILL)
    left = those.wait_until_nobody(limit_s=15)
    print(f"kill -9 of the launcher: all over after {time.monotonic() - began:.1f} s")
    assert not left
    run.end(10)
    for control in those.state.rglob("control"):  # the launcher's own, and it had no time
        control.unlink()


def test_after_kill_9_of_an_agent_its_host_is_named_and_nobody_is_left(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    run = training(those, "--hosts", "a:1,b:2", "--strategy", "ring", ranks=3, folder=tmp_path)
    (agent,) = those.agents("b")
    os.kill(agent, signal.SIGKILL)
    assert run.end(30) == exit_codes.RANK_KILLED, run
    assert "host b" in last(run), run
    assert not those.wait_until_nobody(limit_s=5)


def test_a_cut_link_is_named_and_the_ring_stops(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines(3)
    run = training(those, "--hosts", "a:1,b:2,c:1", "--strategy", "ring", ranks=4, folder=tmp_path)
    those.cut("b")
    began = time.monotonic()
    named_at = run.wait_for(r"host b\b.*lost", limit_s=30)
    code = run.end(30)
    ended_at = time.monotonic()
    left = those.wait_until_nobody("b", limit_s=CUT_S + SLACK_S)
    print(
        f"cut: named after {named_at - began:.1f} s, ended after {ended_at - began:.1f} s, "
        f"its own ranks after {time.monotonic() - began:.1f} s"
    )
    assert code == exit_codes.RANK_KILLED, run
    said = [line for line in run.err if re.search(r"host b\b.*lost", line)]
    assert any(those.address("b") in line and re.search(r"ranks? 1,? (and )?(rank )?2\b", line) for line in said), run
    assert named_at - began < NAMED_S + SLACK_S - 2.0
    assert not left


def test_when_the_launchers_own_link_is_cut_every_machine_ends_its_ranks(
    machines: Make, tmp_path: pathlib.Path
) -> None:
    those = machines(3)
    run = training(those, "--hosts", "a:1,b:1,c:1", "--strategy", "ring", ranks=3, folder=tmp_path)
    those.cut("a")
    assert run.end(30) == exit_codes.RANK_KILLED, run
    assert not those.wait_until_nobody(limit_s=CUT_S + SLACK_S)


@pytest.mark.parametrize("kind", ["async", "ssp"])
def test_workers_that_need_not_wait_go_on_without_a_host_that_was_cut_off(
    machines: Make, tmp_path: pathlib.Path, kind: str
) -> None:
    """The server is on c, the last."""
    those = machines(3)
    options = ["--hosts", "a:1,b:1,c:1", "--strategy", f"ps:mode={kind}", "--servers", 1]
    run = training(those, *options, ranks=3, folder=tmp_path)
    those.cut("b")
    began = time.monotonic()
    named_at = run.wait_for(r"host b\b.*lost", limit_s=30)
    print(f"{kind}: named after {named_at - began:.1f} s")
    before = {rank: steps(run, rank) for rank in (0, 2)}
    deadline = time.monotonic() + 30
    while any(steps(run, rank) < before[rank] + 20 for rank in before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(steps(run, rank) >= before[rank] + 20 for rank in before), run
    (tmp_path / "enough").touch()
    assert run.end(60) == exit_codes.OK, run
    assert all(f"[{rank}] rank {rank} ended at step" in run.stdout for rank in (0, 2)), run
    assert named_at - began < NAMED_S + SLACK_S - 2.0
    assert not those.wait_until_nobody("b", limit_s=CUT_S + SLACK_S)


def steps(run: Run, rank: int) -> int:
    """How many steps it has told of."""
    return sum(line.startswith(f"[{rank}] step ") for line in list(run.out))


@pytest.mark.parametrize("strategy", ["ring", "ps:mode=async"])
def test_a_short_interruption_of_a_link_is_waited_for(machines: Make, tmp_path: pathlib.Path, strategy: str) -> None:
    those = machines()
    options = ["--servers", 1] if strategy.startswith("ps") else []
    run = training(those, "--hosts", "a:1,b:1", "--strategy", strategy, *options, ranks=2, folder=tmp_path)
    those.cut("b")
    time.sleep(1.0)
    those.mend("b")
    before = [steps(run, rank) for rank in range(2)]
    deadline = time.monotonic() + 30
    while any(steps(run, rank) < before[rank] + 10 for rank in range(2)) and time.monotonic() < deadline:
        time.sleep(0.1)
    (tmp_path / "enough").touch()
    assert run.end(60) == exit_codes.OK, run
    assert not re.search(r"\blost\b", run.stderr), run


def test_the_token_is_on_no_command_line_and_in_no_environment(machines: Make, tmp_path: pathlib.Path) -> None:
    those = machines()
    run = those.start("run", "--hosts", "a:1,b:1", "secret.py", tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "token").exists():
        assert time.monotonic() < deadline, run
        time.sleep(0.02)
    token = (tmp_path / "token").read_bytes()
    assert len(token) == 32
    spellings = [token, token.hex().encode(), token.hex().upper().encode()]
    spellings += [code(token).rstrip(b"=") for code in (base64.b64encode, base64.urlsafe_b64encode)]
    seen = those.alive()
    assert sum("ssh " in line for line in seen.values()) >= 2 and len(those.agents("b")) == 1, seen
    for pid, line in seen.items():
        for place in ("cmdline", "environ"):
            said = pathlib.Path(f"/proc/{pid}/{place}").read_bytes()
            assert said and not any(spelling in said for spelling in spellings), line
    (tmp_path / "looked").touch()
    assert run.end(30) == exit_codes.OK, run
