"""Ranks that are forked see what a new interpreter would see, and end as one would."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hora.launch.forkserver import interpreter
from hora.launch.forkserver.client import ForkServer
from hora.launch.messages import MAX_DESCRIPTORS, ProcessEnded, ProcessStarted, ServerReady
from hora.net.framing import frame
from hora.runs import exit_codes
from launching import ALONE, SCRIPTS, Launcher, read_until

ENDINGS = ("raise", "exit", "words", "none", "interrupt", "kill", "hook", "chain", "syntax", "late")


def probed(launcher: Launcher, *options: str, script: str = "probe.py", **env: str) -> list[dict[str, object]]:
    done = launcher.run("run", "-n", 2, *options, script, "a b", "", "-n", **env)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.partition("] ")[2]) for line in sorted(done.stdout.splitlines())]
    for rank, facts in enumerate(found):
        token = facts["env"].pop("HORA_TOKEN_FD")  # type: ignore[attr-defined]
        assert token.isdecimal()
        assert facts["env"].pop("HORA_RANK") == str(rank)  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("env", [{}, ALONE], ids=["shared", "its own"])
def test_a_forked_rank_sees_what_an_interpreter_sees(launcher: Launcher, env: dict[str, str]) -> None:
    forked, started = probed(launcher, **env), probed(launcher, "--no-fork", **env)
    for mine, theirs in zip(forked, started, strict=True):
        for name in theirs:
            assert mine[name] == theirs[name], name


def test_so_does_a_module_and_a_folder_with_a_main(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    for options, script in ((("-m",), "probe"), ((), str(tmp_path / "app"))):
        if not options:
            (tmp_path / "app").mkdir()
            (tmp_path / "app" / "__main__.py").write_text((SCRIPTS / "probe.py").read_text())
        forked = probed(launcher, *options, script=script)
        started = probed(launcher, "--no-fork", *options, script=script)
        assert forked == started


def test_the_command_line_in_proc_names_the_script(launcher: Launcher) -> None:
    done = launcher.run("run", "probe.py", "--command", "x", **ALONE)
    assert f"[0] command {sys.executable} probe.py --command x\n" in done.stdout


@pytest.mark.parametrize("how", ENDINGS)
def test_every_ending_is_that_of_an_interpreter(launcher: Launcher, tmp_path: pathlib.Path, how: str) -> None:
    """Exit code, output and traceback; the process numbers differ."""
    said = []
    for options in ((), ("--no-fork",)):
        file = tmp_path / f"file{len(options)}"
        done = launcher.run("run", *options, "ending.py", how, str(file))
        text = re.sub(r"pid \d+", "pid", done.stdout + done.stderr)
        said.append((done.returncode, sorted(text.splitlines()), file.read_text() if file.exists() else ""))
    assert said[0] == said[1]
    if how == "late":
        assert said[0][2] == "flushed" and {"[0] deleted", "[0] at exit", "[0] thread", "[0] from C"} <= set(said[0][1])


def test_every_rank_has_random_numbers_of_its_own(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "random_numbers.py"
    script.write_text(
        "import random, numpy, torch\n"
        "print(torch.initial_seed(), torch.rand(1).item(), random.random(), numpy.random.rand(), hash(object))\n"
    )
    done = launcher.run("run", "-n", 3, script)
    numbers = [line.split()[1:5] for line in done.stdout.splitlines()]
    assert len(numbers) == 3
    for those in zip(*numbers, strict=True):
        assert len(set(those)) == 3


@pytest.mark.full
def test_threads_are_as_many_as_the_variable_says(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text("import os, torch\nprint(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])\n")
    plain = {count: launcher.python(script, OMP_NUM_THREADS=count).strip() for count in ("1", "2")}
    for env in ({}, ALONE):
        for count in ("1", "2"):
            done = launcher.run("run", "-n", 2, script, OMP_NUM_THREADS=count, **env)
            assert sorted(done.stdout.splitlines()) == [f"[{rank}] {plain[count]}" for rank in range(2)], done.stderr


def test_a_variable_that_comes_too_late_is_named_with_the_way_out(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "late.py"
    script.write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch, hora\nhora.init()\n")
    done = launcher.run("run", "-n", 2, script, OMP_NUM_THREADS="1")
    assert done.returncode == 0
    assert done.stderr.count("OMP_NUM_THREADS") == 2 and done.stderr.count("--no-fork") == 1
    assert "[0] the script sets OMP_NUM_THREADS, which has no effect" in done.stderr
    assert "--env OMP_NUM_THREADS=2" in done.stderr
    assert launcher.run("run", "-n", 2, "--no-fork", script, OMP_NUM_THREADS="1").stderr == ""


def test_a_module_beside_the_script_comes_before_one_that_was_imported(
    launcher: Launcher, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "colorsys.py").write_text("name = 'mine'\n")
    (tmp_path / "fractions.py").write_text("name = 'mine'\n")
    (tmp_path / "train.py").write_text("import colorsys, fractions\nprint(colorsys.name, fractions.name)\n")
    done = launcher.run("run", "-n", 2, tmp_path / "train.py")
    assert sorted(done.stdout.splitlines()) == ["[0] mine mine", "[1] mine mine"], done.stderr


def test_where_threads_run_after_the_import_interpreters_are_started(
    launcher: Launcher, tmp_path: pathlib.Path
) -> None:
    """A fork of a process with threads may wait for ever for what one of them held."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), launcher.env["PYTHONPATH"]])
    done = launcher.run("run", "-n", 2, "hello.py", PYTHONPATH=path, **ALONE)
    assert done.returncode == 0 and "[1] hello 1 []" in done.stdout
    assert "each rank is started as a new interpreter, since importing torch has left 2 threads running" in done.stderr


def test_a_torch_that_cannot_be_imported_is_each_scripts_own_to_meet(
    launcher: Launcher, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')\n")
    path = os.pathsep.join([str(tmp_path), launcher.env["PYTHONPATH"]])
    done = launcher.run("run", "hello.py", PYTHONPATH=path, **ALONE)
    assert done.returncode == 0 and "[0] hello 0 []" in done.stdout
    assert "torch cannot be imported (ImportError: no torch today)" in done.stderr


def forkserver_of(launcher: Launcher) -> int:
    (pid,) = [pid for pid in launcher.alive() if b"fork server" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def test_the_end_of_the_fork_server_ends_the_ranks_and_is_named(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "wait.py", **ALONE)
    read_until(process, "[0] ready", "[1] ready")
    pid = forkserver_of(launcher)
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == exit_codes.RANK_KILLED
    assert f"lost with the process that ranks are forked from (pid {pid}) was killed by SIGKILL" in err


def test_launcher_and_reaper_killed_together_leave_nobody(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "family.py", **ALONE)
    read_until(process, "[0] ready", "[1] ready")
    commands = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in launcher.alive()}
    (reaper,) = [pid for pid, command in commands.items() if b"reaper.py" in command]
    for pid in (reaper, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert launcher.wait_until_nobody(5.0) == []
    for path in launcher.tmp.iterdir():  # nobody was left who could have removed it
        subprocess.run(["rm", "-r", str(path)], check=True)
    for path in launcher.state.rglob("control"):
        path.unlink()


def test_the_record_has_the_peak_of_every_process(launcher: Launcher) -> None:
    launcher.run("run", "-n", 2, "--name", "peaks", "hello.py")
    end = json.loads((launcher.state / "hora" / "runs" / "peaks" / "end.json").read_text())
    assert set(end["peak_bytes"]) == {"rank 0", "rank 1"} and min(end["peak_bytes"].values()) > 10 << 20


def test_what_is_shown_of_the_environment_fits_the_room() -> None:
    (name,) = interpreter.ENV_PLACEHOLDER
    assert name.startswith("HORA_") and len(interpreter.ENV_PLACEHOLDER[name]) >= 4096


class Sink:
    def feed(self, data: bytes, now: float) -> None:
        pass


def test_a_process_that_has_ended_before_its_start_was_answered_is_not_missed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reply and exit arrive in one piece, as on a busy machine."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()

        def serve() -> None:
            line = listening.accept()[0]
            with line:
                line.sendall(frame(ServerReady(1, "")))
                _, descriptors, _, _ = socket.recv_fds(line, 1 << 16, MAX_DESCRIPTORS)
                for descriptor in descriptors:
                    os.close(descriptor)
                line.sendall(frame(ProcessStarted("worker", 0, 4321)) + frame(ProcessEnded("worker", 0, 7, 99)))
                line.recv(1)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        forks = ForkServer({"HORA_FORKSERVER": path}, ("torch",))
        process = forks.start(("worker", 0), ["python"], {}, b"t" * 32, Sink(), Sink())
        assert process.has_ended()
        process.reap()
        assert (process.pid, process.returncode, process.peak_bytes) == (4321, 7, 99)
        for pipe in process.pipes:
            os.close(pipe)
        forks.close()
        server.join(10)


LOADERS = """
import torch, hora
from torch.utils.data import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, number): return torch.tensor(number) ** 2

if __name__ == "__main__":
    job = hora.init()
    for context in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=context)
        print(context, torch.cat(list(loader)).sum().item(), flush=True)
"""

COMPILED = """
import torch, hora
job = hora.init()
model = torch.nn.Linear(4, 4)
compiled = torch.compile(model)
x = torch.ones(2, 4)
compiled(x).sum().backward()
print("close", torch.allclose(compiled(x), model(x)), model.weight.grad.sum().item(), flush=True)
"""


@pytest.mark.full
def test_loaders_may_fork_and_spawn_and_models_may_be_compiled(launcher: Launcher, tmp_path: pathlib.Path) -> None:
    (tmp_path / "loaders.py").write_text(LOADERS)
    (tmp_path / "compiled.py").write_text(COMPILED)
    done = launcher.run("run", "-n", 2, tmp_path / "loaders.py", **ALONE)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] {context} 140" for rank in range(2) for context in ("fork", "spawn", "forkserver")
    ), done.stderr
    done = launcher.run("run", "-n", 2, tmp_path / "compiled.py", **ALONE)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] close True 32.0" for rank in range(2)], done.stderr


def test_ctrl_c_while_torch_is_imported_ends_at_once(launcher: Launcher) -> None:
    process = launcher.start("run", "-n", 2, "wait.py", **ALONE)
    deadline = time.monotonic() + 20
    while not any(b"fork server" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() for pid in launcher.alive()):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == exit_codes.INTERRUPTED and "Traceback" not in err
