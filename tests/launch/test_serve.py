"""The predictor as a process of a real run: what it answers, and that the training does not notice."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from predictions import LIMIT_S, Run, ask, running

from hora import checkpoint
from hora.cli.main import main
from hora.launch import outcome
from hora.runs import exit_codes
from launching import Launcher

# Several processes import torch on whatever cores there are.
pytestmark = pytest.mark.timeout(240)


def collect(run: Run, count: int) -> list[dict[str, Any]]:
    """So many answers, the last of them of a later step than the first."""
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + LIMIT_S
    while len(answers) < count or len({answer["step"] for answer in answers}) < 3:
        status, answer = ask(run.port)
        assert status == 200, answer
        answers.append(answer)
        time.sleep(0.01)
        assert time.monotonic() < deadline, answers[-1]
    return answers


def steps_never_go_back(answers: list[dict[str, Any]]) -> bool:
    steps = [answer["step"] for answer in answers]
    return steps == sorted(steps)


def written(path: Path) -> dict[int, list[list[float]]]:
    return dict(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--strategy", "ring"), id="ring"),
        pytest.param(("--strategy", "shared:update=sharded"), id="sharded"),
        pytest.param(("--strategy", "ps", "--servers", 1), id="ps-sync"),
        pytest.param(("--strategy", "ps", "--servers", 2), id="ps-sync-2"),
        pytest.param(("--strategy", "ps", "--servers", "colocated"), id="ps-colocated"),
    ],
)
def test_an_answer_of_step_s_is_rank_0s_own_after_step_s(launcher: Launcher, tmp_path: Path, flags: tuple[Any]) -> None:
    told, enough = tmp_path / "told", tmp_path / "enough"
    with running(
        launcher, "run", "-n", 2, *flags, "--serve", 0, "--serve-every", "step", "serving.py",
        "--steps", 10**6, "--pause", 0.002, "--told", told, "--until", enough,
    ) as run:  # fmt: skip
        answers = collect(run, 40)
        enough.touch()
        assert run.end() == exit_codes.OK, run.text
    assert steps_never_go_back(answers)
    outputs = written(told)
    for answer in answers:
        assert answer["outputs"] == outputs[answer["step"]], f"step {answer['step']} in full"
    assert "came past prepare" not in run.text


def test_under_async_an_answer_carries_the_lowest_version_and_the_spread(launcher: Launcher, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with running(
        launcher, "run", "-n", 2, "--strategy", "ps:mode=async", "--servers", 2, "--serve", 0, "serving.py",
        "--steps", 10**6, "--pause", 0.002, "--until", enough,
    ) as run:  # fmt: skip
        answers = collect(run, 40)
        enough.touch()
        assert run.end() == exit_codes.OK, run.text
    assert steps_never_go_back(answers)
    assert all(0 <= answer["spread"] < 50 for answer in answers)


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", ["average", "newest"])
def test_answers_do_not_wait_for_a_round_and_say_which_it_was(launcher: Launcher, tmp_path: Path, source: str) -> None:
    enough = tmp_path / "enough"
    with running(
        launcher, "run", "-n", 2, "--strategy", "local:every=8", "--serve", 0, "--serve-from", source,
        "--serve-every", "step", "serving.py", "--steps", 10**6, "--pause", 0.002, "--until", enough,
    ) as run:  # fmt: skip
        answers = collect(run, 40)
        enough.touch()
        assert run.end() == exit_codes.OK, run.text
    assert steps_never_go_back(answers)
    assert all(answer["step"] == 8 * answer["round"] + answer["local_step"] for answer in answers)
    within = [answer for answer in answers if answer["local_step"]]
    assert bool(within) == (source == "newest")


def test_a_predictor_that_is_killed_is_named_and_the_training_goes_on(launcher: Launcher, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with running(
        launcher, "run", "-n", 2, "--serve", 0, "--log-dir", tmp_path / "logs", "serving.py", "--steps", 10**6,
        "--pause", 0.002, "--until", enough,
    ) as run:  # fmt: skip
        assert ask(run.port)[0] == 200
        (predictor,) = [pid for pid in launcher.alive() if _role(pid) == "predictor"]
        os.kill(predictor, signal.SIGKILL)
        run.await_line(rf"hora: the predictor \(host .*, pid {predictor}\) was killed by SIGKILL; training goes on")
        enough.touch()
        assert run.end() == exit_codes.OK, run.text
    assert len(re.findall("ended at", run.text)) == 2
    assert "serving 'serving'" in (tmp_path / "logs" / "predictor.err").read_text()


def test_only_an_end_of_its_own_is_explained_by_an_exception() -> None:
    for code, how, explained in ((1, "exit code 1", True), (-9, "killed by SIGKILL", False)):
        child: Any = SimpleNamespace(
            name="predictor", host="h", pid=1, returncode=code, how=how, exception="ValueError: old"
        )
        assert ("ValueError: old" in outcome.predictor_failed(child, training=True)) == explained


def await_end_of(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)


def _role(pid: int) -> str:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"HORA_ROLE="):
                return variable.partition(b"=")[2].decode()
    return ""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "failed with exit code 1: RuntimeError: no predictor today; training"),
        pytest.param("other-model", "the models differ: the predictor has 0.weight [9, 6]", marks=pytest.mark.full),
        pytest.param("no-init", "the predictor served nothing", marks=pytest.mark.full),
    ],
)
def test_whatever_is_wrong_with_the_predictor_the_training_ends_well(launcher: Launcher, fault: str, said: str) -> None:
    done = launcher.run("run", "-n", 2, "--serve", 0, "serving.py", "--steps", 1200, "--pause", 0.002, "--fault", fault)
    assert done.returncode == exit_codes.OK, done.stderr
    assert said in done.stderr
    assert len(re.findall("ended at", done.stdout)) == 2


def test_a_port_that_is_taken_is_a_mistake_on_the_command_line(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = launcher.run("run", "--serve", port, "serving.py")
    assert done.returncode == exit_codes.USAGE and done.stdout == ""
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "--serve 0" in done.stderr


def test_serve_after_goes_on_with_the_last_parameters_until_ctrl_c(launcher: Launcher, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with running(
        launcher, "run", "-n", 2, "--serve", 0, "--serve-after", "serving.py", "--steps", 20, "--told", told
    ) as run:
        run.await_line("training has ended; still serving, until Ctrl-C")
        await_end_of(run.workers)
        status, answer = ask(run.port)
        last = max(written(told))
        assert (status, answer["step"], answer["outputs"]) == (200, last, written(told)[last])
        run.process.send_signal(signal.SIGINT)
        assert run.end() == exit_codes.OK, run.text
    assert "the predictor closes; training had ended" in run.text and "Traceback" not in run.text


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_servers_parameters_are_served_after_the_servers_end(launcher: Launcher, tmp_path: Path, mode: str) -> None:
    told = tmp_path / "told"
    with running(
        launcher, "run", "-n", 1, "--strategy", f"ps:mode={mode}", "--servers", 2, "--serve", 0, "--serve-after",
        "--serve-every", "60s", "serving.py", "--steps", 30, "--told", told,
    ) as run:  # fmt: skip
        run.await_line("training has ended; still serving, until Ctrl-C")
        servers = [pid for pid in launcher.alive() if _role(pid) == "server"]
        await_end_of(run.workers + servers)
        status, answer = ask(run.port)
        last = max(written(told))
        assert (status, answer["step"], answer["outputs"]) == (200, last, written(told)[last])
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == exit_codes.OK, run.text


def test_bad_requests_and_checkpoints_during_training_harm_nobody(launcher: Launcher, tmp_path: Path) -> None:
    told, enough = tmp_path / "told", tmp_path / "enough"
    with running(
        launcher, "run", "-n", 2, "--serve", 0, "--serve-every", "step", "serving.py", "--steps", 10**6,
        "--pause", 0.002, "--told", told, "--until", enough, "--save", tmp_path / "saved",
    ) as run:  # fmt: skip
        answers = []
        deadline = time.monotonic() + LIMIT_S
        while len(list((tmp_path / "saved").glob("step-*"))) < 2 and time.monotonic() < deadline:
            for body in (b"", b"{", b"[[1]]", b"[" * 5000, b'{"inputs": "NaN"}', b'{"inputs": [["x"]]}', b"\xff" * 99):
                status, answer = ask(run.port, body)
                assert 400 <= status < 500 and answer["error"], (body[:20], answer)
            assert ask(run.port, Host="evil.example")[0] == 403
            answers.append(ask(run.port)[1])
        enough.touch()
        assert run.end() == exit_codes.OK, run.text
    assert steps_never_go_back(answers)
    outputs = written(told)
    assert all(answer["outputs"] == outputs[answer["step"]] for answer in answers)
    assert max(outputs) == max(int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*"))


def test_hora_serve_answers_as_the_saved_model_does(launcher: Launcher, tmp_path: Path) -> None:
    saved, told = tmp_path / "saved", tmp_path / "told"
    done = launcher.run("run", "serving.py", "--steps", 60, "--save", saved, "--told", told)
    assert done.returncode == exit_codes.OK, done.stderr
    found = checkpoint.newest(saved)
    assert found is not None and "FP32" in found.record["signature"]
    with running(launcher, "serve", "--port", 0, saved, "serving.py") as run:
        status, answer = ask(run.port)
        assert (status, answer["step"], answer["outputs"]) == (200, found.step, written(told)[found.step])
        run.process.send_signal(signal.SIGINT)
        assert run.end() == exit_codes.OK, run.text


@pytest.mark.full
def test_hora_serve_answers_from_any_step_and_refuses_another_model(launcher: Launcher, tmp_path: Path) -> None:
    saved, told = tmp_path / "saved", tmp_path / "told"
    done = launcher.run("run", "serving.py", "--steps", 60, "--save", saved, "--told", told)
    assert done.returncode == exit_codes.OK, done.stderr
    for where, step in ((saved / "step-50", 50),):
        with running(launcher, "serve", "--port", 0, where, "serving.py") as run:
            status, answer = ask(run.port)
            assert (status, answer["step"], answer["outputs"]) == (200, step, written(told)[step])
            status, answer = ask(run.port, b"[[1, 2]]")
            assert status == 400 and "[2" not in answer["error"].partition("expected")[2]
            run.process.send_signal(signal.SIGINT)
            assert run.end() == exit_codes.OK, run.text
    other = launcher.run("serve", "--port", 0, saved, "serving.py", "--width", 9)
    assert other.returncode == exit_codes.SCRIPT_FAILED
    assert re.search(
        r"HoraError: 0.weight has shape \[8, 6\] in .*: the checkpoint was saved from another model", other.stderr
    )
    early = launcher.run("serve", "--port", 0, saved, "serving.py", "--fault", "no-prepare")
    assert early.returncode == exit_codes.SCRIPT_FAILED
    assert early.stderr == ("hora serve: the script ended before job.prepare(model, optimizer): nothing was served\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("none",), "there is no checkpoint 'none'"),
        (("empty",), "there is no checkpoint in 'empty'"),
        (("--port", "x", "empty"), "--port takes [HOST:]PORT, not 'x'; e.g. --port 8000"),
    ],
)
def test_what_hora_serve_cannot_do_is_told_before_the_script_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: tuple[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "step-7").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    assert main(["serve", *given, "train.py"]) == exit_codes.USAGE
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--serve", "x"), "--serve takes [HOST:]PORT"),
        (("--serve", 0, "--serve-every", "often"), "--serve-every takes step"),
        (("--serve", 0, "--serve-batch", "no"), "--serve-batch takes rows"),
        (("--serve-after",), "--serve-after does nothing without --serve"),
        (("--serve", 0, "--serve-from", "newest", "--strategy", "ring"), "strategy 'ring' has no rounds"),
        (("--serve", 0, "--join", "other"), "--serve with --join other"),
    ],
)
def test_wrong_flags_are_told_before_anything_starts(launcher: Launcher, flags: tuple[Any], said: str) -> None:
    done = launcher.run("run", *flags, "serving.py")
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1
