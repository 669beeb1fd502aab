"""The real launcher on real processes: start, failure, signals, and what is left afterwards (nothing)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hora.runs import exit_codes
from launching import LEAVE_S, SCRIPTS, Launcher, read_until


def test_every_rank_runs_and_the_script_gets_its_arguments_untouched(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, "hello.py", "--help", "-n", "7", "--", "x y", "")
    assert done.returncode == exit_codes.OK
    wanted = [f"[{rank}] hello {rank} ['--help', '-n', '7', '--', 'x y', '']" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == wanted
    *own, _ = done.stderr.splitlines()  # the last is that none called hora.init()
    assert sorted(own) == [f"[{rank}] care {rank}" for rank in range(3)]


def test_a_module_runs_as_with_python_m(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "-m", "pack.job", "-m", "x")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] __main__ ['-m', 'x'] {SCRIPTS}" for rank in range(2)]


def test_a_rank_is_told_who_it_is_and_the_token_travels_by_descriptor_only(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "--strategy", "auto:deterministic=true", "--timeout-s", 5, "identity.py")
    facts = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    for rank, fact in enumerate(facts):
        assert fact["HORA_ROLE"] == "worker"
        assert (fact["HORA_RANK"], fact["HORA_SIZE"]) == (str(rank), "2")
        assert (fact["HORA_LOCAL_RANK"], fact["HORA_LOCAL_SIZE"]) == (str(rank), "2")
        assert fact["HORA_STRATEGY"] == "auto:deterministic=true"
        assert fact["HORA_TIMEOUT_S"] == "5"
        assert fact["HORA_CONTROL"].startswith("127.0.0.1:")
        assert len(fact["token"]) == 64
        assert fact["token"] not in [fact[name] for name in fact if name != "token"]
    assert facts[0]["token"] == facts[1]["token"] and facts[0]["HORA_RUN"] == facts[1]["HORA_RUN"]


def test_what_was_not_asked_for_is_not_in_the_environment(launcher: Launcher) -> None:
    done = launcher.run("run", "identity.py", HORA_STRATEGY="ring", HORA_PID="1", HORA_BIND="::", HORA_RANK="9")
    fact = json.loads(done.stdout.partition("] ")[2])
    assert not {"HORA_STRATEGY", "HORA_PID", "HORA_BIND", "HORA_TIMEOUT_S"} & fact.keys()
    assert fact["HORA_RANK"] == "0"


def test_the_token_is_on_no_command_line_and_in_no_environment(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "--name", "secret", "wait.py")
    read_until(process, "[0] ready", "[1] ready")
    control = launcher.state / "hora" / "runs" / "secret" / "control"
    assert control.stat().st_mode & 0o777 == 0o600
    token = json.loads(control.read_text())["token"]
    pids = launcher.alive()
    assert len(pids) == 4, "launcher, reaper and two ranks"
    for pid in pids:
        for name in ("cmdline", "environ"):
            seen = Path(f"/proc/{pid}/{name}").read_bytes()
            assert token.encode() not in seen and bytes.fromhex(token) not in seen
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)


def test_each_rank_gets_its_share_of_the_cores_unless_the_user_set_it(launcher: Launcher) -> None:
    cores = len(os.sched_getaffinity(0))
    for size in (1, 2):
        first = launcher.run("run", "-n", size, "identity.py").stdout.splitlines()[0]
        assert json.loads(first.partition("] ")[2])["OMP_NUM_THREADS"] == str(max(1, cores // size))
    first = launcher.run("run", "-n", 2, "identity.py", OMP_NUM_THREADS="7").stdout.splitlines()[0]
    assert json.loads(first.partition("] ")[2])["OMP_NUM_THREADS"] == "7"


def test_the_launcher_never_loads_torch(launcher: Launcher) -> None:
    process = launcher.start("run", "wait.py")
    read_until(process, "ready")
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)


def test_the_first_failure_is_printed_last_and_once_with_its_traceback(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 4, "fail.py", 2, "raise")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    head, *tail = done.stderr[done.stderr.index("hora: ") :].splitlines()
    host = re.escape(socket.gethostname())
    assert re.fullmatch(
        rf"hora: rank 2 \(host {host}, pid \d+\) failed with exit code 1; the others were stopped\.", head
    )
    assert tail[0] == "  Traceback (most recent call last):" and tail[-1] == "  ValueError: boom"
    assert done.stderr.count("ValueError: boom") == 1


@pytest.mark.parametrize(("how", "name"), [("kill", "SIGKILL"), ("segv", "SIGSEGV")])
def test_a_killed_rank_is_told_from_a_failed_script(launcher: Launcher, how: str, name: str) -> None:
    done = launcher.run("run", "-n", 2, "fail.py", 1, how)
    assert done.returncode == exit_codes.RANK_KILLED
    assert re.search(rf"hora: rank 1 \(host .*, pid \d+\) killed by {name}; the others were stopped\.", done.stderr)


def test_an_exit_code_without_traceback_is_a_failure(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 1, "fail.py", 0, 9)
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert re.fullmatch(r"hora: rank 0 \(.*\) failed with exit code 9\.\n", done.stderr)


def test_the_others_are_stopped_within_3_s_even_if_they_ignore_sigterm(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 3, "fail.py", 0, "raise", "deaf")
    read_until(process, "[1] waiting", "[2] waiting")
    started_at = time.monotonic()
    process.communicate(timeout=20)
    assert time.monotonic() - started_at < 0.3 + 3.0
    assert process.returncode == exit_codes.SCRIPT_FAILED


def test_an_echo_is_not_the_cause_when_another_rank_fails(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, "echo.py")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert "hora: rank 2 " in done.stderr and done.stderr.endswith("ValueError: the real cause\n")
    assert "rank 1 (" not in done.stderr


def test_an_echo_is_the_failure_when_nobody_else_fails(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 3, "echo.py", "alone", HORA_GRACE="0.2")
    assert done.returncode == exit_codes.SCRIPT_FAILED
    assert "hora: rank 1 " in done.stderr and "lost a rank that it needed" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, exit_codes.INTERRUPTED),
        (signal.SIGTERM, exit_codes.TERMINATED),
        (signal.SIGHUP, exit_codes.TERMINATED),
    ],
)
def test_one_signal_stops_the_run_quietly(launcher: Launcher, number: signal.Signals, code: int) -> None:
    process = launcher.start("run", "-n", 3, "wait.py")
    read_until(process, "[0] ready", "[1] ready", "[2] ready")
    started_at = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started_at < 3.0
    assert process.returncode == code
    assert len(err.splitlines()) == 1 and "stopping 3 ranks" in err
    assert "KeyboardInterrupt" not in err


def test_ctrl_c_once_ends_deaf_ranks_within_3_s(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "wait.py", "deaf")
    read_until(process, "[0] ready", "[1] ready")
    started_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started_at < 3.0
    assert process.returncode == exit_codes.INTERRUPTED
    assert err.splitlines()[-1] == "hora: killed after the grace period: rank 0, 1."


def test_ctrl_c_twice_ends_deaf_ranks_at_once(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "wait.py", "deaf")
    read_until(process, "[0] ready", "[1] ready")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    started_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert time.monotonic() - started_at < 1.0
    assert process.returncode == exit_codes.INTERRUPTED


@pytest.mark.parametrize("after_s", [0.1, 0.15, 0.2])
def test_a_signal_during_the_start_works(launcher: Launcher, after_s: float) -> None:
    process = launcher.start("run", "-n", 8, "wait.py")
    time.sleep(after_s)
    process.send_signal(signal.SIGTERM)
    started_at = time.monotonic()
    process.communicate(timeout=20)
    assert time.monotonic() - started_at < 3.0
    # Before the launcher has taken the signal over, it is the operating system that ends it: nothing was started yet.
    assert process.returncode in (exit_codes.TERMINATED, -signal.SIGTERM)


def test_sigkill_of_the_launcher_leaves_no_process_after_2_s(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "--name", "killed", "family.py")
    said = read_until(process, "[0] ready", "[1] ready")
    host, port = next(line for line in said if "ready" in line).split()[-1].rsplit(":", 1)
    assert len(launcher.alive()) > 8
    process.kill()
    assert launcher.wait_until_nobody(2.0) == []
    process.communicate(timeout=20)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=1)
    assert not (launcher.state / "hora" / "runs" / "killed" / "control").exists()


@pytest.mark.parametrize("after_s", [0.12, 0.16, 0.2])
def test_sigkill_of_the_launcher_during_the_start_leaves_no_process(launcher: Launcher, after_s: float) -> None:
    process = launcher.start("run", "-n", 8, "wait.py", "deaf")
    time.sleep(after_s)
    process.kill()
    assert launcher.wait_until_nobody(2.0) == []
    process.communicate(timeout=20)


KILLED_AFTER_CONTROL = """
import os, signal
from hora.cli.main import main
from hora.runs.run_directory import RunDirectory
write = RunDirectory.open_control
def write_and_die(self, **facts):
    write(self, **facts)
    os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.open_control = write_and_die
main(["run", "-n", "2", "wait.py"])
"""


def test_a_launcher_killed_right_after_it_wrote_the_token_leaves_no_token(launcher: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(KILLED_AFTER_CONTROL)
    killed = subprocess.run([sys.executable, script], cwd=SCRIPTS, env=launcher.env, capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert launcher.wait_until_nobody(LEAVE_S) == []
    assert list(launcher.state.rglob("run.json")) and list(launcher.state.rglob("control")) == []


def test_what_a_rank_leaves_behind_ends_with_the_run(launcher: Launcher) -> None:
    done = launcher.run("run", "-n", 2, "family.py", "end")
    assert done.returncode == exit_codes.OK
    assert launcher.alive() == []


def test_a_dead_reaper_is_replaced_and_the_new_one_guards(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "wait.py", "deaf")
    read_until(process, "[0] ready", "[1] ready")
    assert process.stderr is not None
    os.kill(reaper_of(launcher), signal.SIGKILL)
    assert "reaper" in process.stderr.readline()
    process.kill()
    assert launcher.wait_until_nobody(2.0) == []
    process.communicate(timeout=20)


def test_the_port_is_closed_after_the_run(launcher: Launcher) -> None:
    done = launcher.run("run", "identity.py")
    host, port = json.loads(done.stdout.partition("] ")[2])["HORA_CONTROL"].rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=1)


def test_the_run_directory_tells_what_was_run_and_how_it_ended(launcher: Launcher) -> None:
    launcher.run("run", "-n", 2, "--name", "told", "--strategy", "ring", "fail.py", 1, "raise")
    folder = launcher.state / "hora" / "runs" / "told"
    assert folder.stat().st_mode & 0o777 == 0o700
    begun, ended = (json.loads((folder / name).read_text()) for name in ("run.json", "end.json"))
    assert begun["command"] == ["fail.py", "1", "raise"] and begun["size"] == 2 and begun["strategy"] == "ring"
    assert begun["versions"].keys() == {"hora", "torch"}
    assert ended["code"] == exit_codes.SCRIPT_FAILED and ended["cause"].startswith("rank 1 ") and ended["seconds"] > 0
    assert sorted(os.listdir(folder)) == ["end.json", "memory.sqlite", "metrics.jsonl", "run.json"]


def test_a_run_directory_that_cannot_be_written_costs_one_warning(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = launcher.run("run", "--run-dir", tmp_path / "file" / "run", "hello.py")
    assert done.returncode == exit_codes.OK
    assert [line for line in done.stderr.splitlines() if line.startswith("hora: ")] == [
        f"hora: the run directory {tmp_path}/file/run cannot be written: Not a directory; the run continues without it"
    ]


def test_two_live_runs_cannot_have_one_name(launcher: Launcher) -> None:
    process = launcher.start("run", "--name", "taken", "wait.py")
    read_until(process, "ready")
    second = launcher.run("run", "--name", "taken", "hello.py")
    assert second.returncode == exit_codes.USAGE and "a run is live" in second.stderr
    assert (launcher.state / "hora" / "runs" / "taken" / "control").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert launcher.run("run", "--name", "taken", "hello.py").returncode == exit_codes.OK


def test_a_launcher_inside_a_rank_dies_with_the_outer_run(launcher: Launcher) -> None:
    process: subprocess.Popen[str] = launcher.start("run", "-m", "hora.cli.main", "run", "-n", 2, "wait.py", "deaf")
    read_until(process, "[0] [0] ready", "[0] [1] ready")
    process.kill()
    assert launcher.wait_until_nobody(2.0) == []
    process.communicate(timeout=20)


def reaper_of(launcher: Launcher) -> int:
    for pid in launcher.alive():
        if b"reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no reaper")
