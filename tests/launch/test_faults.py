"""What happens to a run in which something goes wrong: who is told what, how soon, and what the launcher says last."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

from hora.runs import exit_codes
from launching import Launcher, read_until, without_advice

LINKS = ["auto", "tcp", "engine"]
LOST = re.compile(r"\[(\d)\] at ([\d.]+): rank \d lost \[1\]: (.*)")


def delays(out: str, word: str) -> dict[int, float]:
    """By survivor: how long after rank 1's last word it had lost that rank."""
    ended = re.search(rf"\[1\] at ([\d.]+): rank 1 {word}", out)
    assert ended, out
    return {int(rank): float(at) - float(ended[1]) for rank, at, _ in LOST.findall(out)}


def quiet(err: str) -> str:
    """Without what an engine always says at its start."""
    return "".join(line for line in without_advice(err).splitlines(True) if "are not authenticated" not in line)


@pytest.mark.parametrize("transport", ["auto", "tcp", "engine"])
def test_a_rank_killed_in_a_collective_is_lost_to_every_survivor_within_a_second(
    launcher: Launcher, transport: str
) -> None:
    done = launcher.run("run", "-n", 3, "fault.py", "killed", transport)
    found = delays(done.stdout, "killed")
    assert found.keys() == {0, 2}, done.stdout + done.stderr
    assert max(found.values()) < 3.0
    for _, _, said in LOST.findall(done.stdout):
        assert re.search(r"lost rank 1 \(host .*, pid \d+\) in all_reduce sum of float32 \[1000\]", said)
        assert "named 'the last' (call 2): killed by SIGKILL" in said
    assert done.returncode == exit_codes.RANK_KILLED
    assert re.fullmatch(r"hora: rank 1 \(host .*\) killed by SIGKILL; the others were stopped\.\n", quiet(done.stderr))


def test_when_a_rank_raises_the_others_stop_with_one_line_each(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, "fault.py", "raises", "auto")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    # A rank that takes more than a second from its traceback to its end is shown twice: as it came, and last.
    said = [line for line in done.stderr.splitlines() if not line.startswith("[1] ")]
    for rank, line in zip((0, 2), sorted(said[:2]), strict=True):
        assert line.startswith(f"[{rank}] stopped: rank {rank} (host ")
        assert "lost rank 1 (host " in line and line.endswith("(call 2): ValueError: boom")
    assert said[2].startswith("hora: rank 1 (host ") and "failed with exit code 1; the others were" in said[2]
    assert said[3].strip() == "Traceback (most recent call last):" and said[-1].strip() == "ValueError: boom"


@pytest.mark.parametrize("transport", LINKS)
def test_a_rank_that_ends_early_has_left_the_run(launcher: Launcher, transport: str) -> None:
    done = launcher.run("run", "-n", 2, "fault.py", "leaves", transport)
    found = delays(done.stdout, "leaves")
    assert found.keys() == {0}, done.stdout + done.stderr
    assert found[0] < 3.0
    assert "which has left the run: its script ended. Do all ranks make the same calls?" in done.stdout
    assert (done.returncode, quiet(done.stderr)) == (exit_codes.OK, "")


def test_a_rank_that_ends_early_is_lost_to_all_the_others(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, "fault.py", "leaves", "tcp")
    assert delays(done.stdout, "leaves").keys() == {0, 2}


def test_a_rank_that_exits_with_a_code_is_to_blame_though_others_may_end_before_it(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "fault.py", "exits", "auto")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert re.search(r"\nhora: rank 1 \(.*\) failed with exit code 5; the others were stopped\.\n$", done.stderr)
    assert re.search(
        r"\[0\] (stopped: rank 0 .* lost rank 1 .*: exit code 5|hora\.errors\.PeerLost: .* needs rank 1 )", done.stderr
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("exits", 5)])
def test_a_rank_that_takes_long_to_end_is_to_blame_for_those_that_lost_it(
    launcher: Launcher, how: str, code: int
) -> None:
    done = launcher.run("run", "-n", 2, "fault.py", how, "auto", "lingers")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert f" failed with exit code {code}; the others were stopped." in done.stderr
    assert re.search(r"^hora: rank 1 ", done.stderr, re.M) and "hora: rank 0" not in done.stderr


def test_ctrl_c_while_a_rank_takes_long_to_end_stops_the_run(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "fault.py", "exits", "auto", "lingers")
    assert process.stderr is not None
    assert "[0] hora.errors.PeerLost: " in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == exit_codes.INTERRUPTED
    assert "hora: interrupted; stopping the rank (Ctrl-C again: at once)\n" in err and "rank 0 " not in err


@pytest.mark.parametrize("transport", ["shm", "tcp", "engine"])
def test_calls_that_differ_are_refused_on_every_rank_within_a_second(launcher: Launcher, transport: str) -> None:
    process = launcher.start("run", "-n", 3, "mismatch.py", transport)
    lines = read_until(process, "[0] waiting after", "[1] waiting after", "[2] order after")
    said = {way: [line for line in lines if f"] {way} after" in line] for way in SIDES}
    for way, sides in SIDES.items():
        assert len(said[way]) == (2 if way == "waiting" else 3), lines
        for line in said[way]:
            found = re.search(
                r"after ([\d.]+) s: Mismatch: rank (\d) \(.* called .*; rank (\d) \(.* called .*\. All", line
            )
            assert found and float(found[1]) < 3.0, line
            assert 1 in (int(found[2]), int(found[3])) and found[2] != found[3], line
            assert all(side in line for side in sides), line
    if transport == "engine":  # it may keep a rank from its end: the next test's claim
        process.terminate()
    _, err = process.communicate(timeout=20)
    assert transport == "engine" or (process.returncode, quiet(err)) == (exit_codes.OK, "")


SIDES = {
    "shape": ("float32 [4] by ring", "float32 [5] by ring"),
    "dtype": ("float32 [4]", "float64 [4]"),
    "operation": ("all_reduce sum", "all_reduce max"),
    "call": ("called barrier", "called all_gather"),
    "order": ("named 'first'", "named 'second'"),
    "waiting": ("called reduce sum to rank 1", "called broadcast from rank 1"),
}


def test_a_script_that_survived_a_mismatch_on_the_engine_can_end(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 3, "mismatch.py", "engine")
    read_until(process, "[0] waiting after", "[1] waiting after", "[2] order after")
    try:
        _, err = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=20)
        raise
    assert (process.returncode, quiet(err)) == (exit_codes.OK, "")


@pytest.mark.parametrize("transport", ["shm", "engine"])
def test_the_engines_own_reduction_of_different_shapes_is_refused(launcher: Launcher, transport: str) -> None:
    process = launcher.start("run", "-n", 2, "mismatch_engine.py", transport)
    try:
        out, _ = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=20)
        raise
    assert out.count("Mismatch: ") == 6


@pytest.mark.full
def test_a_slow_rank_is_named_after_10_s_and_waited_for(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "slow.py")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (exit_codes.OK, ["[0] sum 2.0", "[1] sum 2.0"])
    assert re.fullmatch(
        r"\[0\] .*rank 0 \(host .*\) has waited 10 s for rank 1 \(host .*, pid \d+\) in all_reduce .* \(call 1\)\n",
        done.stderr,
    )


def test_a_rank_with_dataloader_workers_is_lost_as_soon_and_they_may_not_call_init(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "loading.py", "killed", 1)
    assert delays(done.stdout, "killed").keys() == {0} and delays(done.stdout, "killed")[0] < 3.0
    assert done.returncode == exit_codes.RANK_KILLED
    refusal = (
        r"\[\d\] refused: hora\.init\(\) was called in a child of the process that is this rank \(pid \d+\), a DataL"
    )
    assert len(re.findall(refusal, done.stdout)) == 2


def test_ctrl_c_in_a_collective_ends_the_run_in_silence(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 3, "reducing.py")
    read_until(process, "[0] reducing", "[1] reducing", "[2] reducing")
    started_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - started_at < 3.0
    assert (process.returncode, out) == (exit_codes.INTERRUPTED, "")
    assert without_advice(err) == "hora: interrupted; stopping 3 ranks (Ctrl-C again: at once)\n"


def test_ranks_and_their_dataloader_workers_do_not_outlive_a_killed_launcher(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "loading.py", "waiting", 1)
    read_until(process, "[0] ready", "[1] ready")
    assert len(launcher.alive()) >= 2 + 2 * 3, "launcher, reaper, two ranks with two workers each"
    process.kill()
    process.wait()
    assert launcher.wait_until_nobody(2.0) == []
    process.communicate(timeout=20)
