"""The demo is what a newcomer sees first: it must end well and show what it promises."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from hora.cli import demo
from hora.runs import exit_codes
from hora.strategies import known

pytestmark = pytest.mark.usefixtures("forkserver")

DEMO = [sys.executable, "-m", "hora.cli.main", "demo"]


@pytest.fixture
def home(
    tmp_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """Whatever the demo would leave behind, it would leave here."""
    for name in ("HOME", "XDG_STATE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    torchs = tmp_path_factory.mktemp("torch")  # torch would make it in TMPDIR
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(torchs))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def processes_in(folder: pathlib.Path) -> list[str]:
    """The command lines of those that were started with this home."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


@pytest.mark.full
@pytest.mark.timeout(420)
def test_the_demo_trains_under_every_strategy_and_all_learn_the_same(home: pathlib.Path) -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=410, check=False)
    assert done.returncode == 0, done.stderr
    rows = [row for row in rows_of(done.stdout) if len(row) == 8]
    assert [row[0] for row in rows] == ["auto", *demo.STRATEGIES, *demo.SERVED, *demo.LOCAL]
    assert [row[0] for row in rows_of(done.stdout) if len(row) == 5] == list(demo.UNEVEN)
    workers = [int(row[1]) for row in rows]
    assert workers[0] == 1 and set(workers[1:]) in ({2}, {4})
    for row in rows:
        assert float(row[2].replace(",", "")) > 0 and float(row[3]) < 0.1 and float(row[4].rstrip("%")) >= 94
        assert 0 <= float(row[5].rstrip("%")) <= 100 and re.fullmatch(r"[\d,]+ MB", row[7])
        if row[0] != "engine":
            assert (int(row[6].replace(",", "")) > 0) == (row[1] != "1")
    assert next(row for row in rows if row[0] == "engine")[6] == demo.UNKNOWN
    apart = [text for text in (*demo.SERVED, *demo.LOCAL) if text != "ps"]
    losses = [float(row[3]) for row in rows if row[0] not in apart]  # those that step together
    assert max(losses) - min(losses) <= 0.02 * max(losses)
    sent = {row[0]: int(row[6].replace(",", "")) for row in rows if row[0] != "engine"}
    assert max(sent[text] for text in demo.LOCAL) < 0.3 * sent["ring"]
    assert re.search(r"against the ring's: local:every=8 \d+%, .*diloco:every=32 \d%", done.stdout)
    assert "ring, 2 workers: 150 steps in" in done.stdout or "ring, 4 workers: 150 steps in" in done.stdout
    assert "examples/gpt.py" in done.stdout and "\x1b" not in done.stdout and "━ " not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert not done.stderr
    assert not list(home.iterdir())


def test_every_strategy_is_in_the_demo() -> None:
    assert {text.partition(":")[0] for text in (*demo.STRATEGIES, *demo.SERVED, *demo.LOCAL)} == set(known())


@pytest.mark.full
def test_a_run_that_fails_is_shown_with_its_last_lines_and_the_others_finish(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = home / "worker.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['HORA_SIZE'] != '1':\n"
        "    if os.environ['HORA_RANK'] == '0':\n"
        "        print('step 1 of 9', flush=True)\n"
        "    raise RuntimeError('out of luck')\n"
        "runpy.run_module('hora.cli.demo', run_name='__main__')\n"
    )
    monkeypatch.setattr(demo, "WORKER", (str(script),))
    monkeypatch.setattr(demo, "STRATEGIES", ("ring",))
    monkeypatch.setattr(demo, "SERVED", ())
    monkeypatch.setattr(demo, "LOCAL", ())
    monkeypatch.setattr(demo, "UNEVEN", ())
    assert demo.main(epochs=1) == 1
    out, err = capfd.readouterr()
    assert [row[:2] for row in rows_of(out)] == [["auto", "1"]]
    assert re.search(r"^hora demo: ring with \d ended with exit code 1:$", err, re.MULTILINE)
    assert "RuntimeError: out of luck" in err and "step 1 of 9" not in err
    assert list(home.iterdir()) == [script]


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, exit_codes.INTERRUPTED),
        pytest.param(signal.SIGTERM, exit_codes.TERMINATED, marks=pytest.mark.full),
    ],
)
def test_a_demo_that_is_stopped_leaves_nothing(home: pathlib.Path, number: int, code: int) -> None:
    with subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        while "auto, 1 worker: 150 steps" not in running.stdout.readline():
            assert running.poll() is None
        time.sleep(0.5)
        os.kill(running.pid, number)
        assert running.wait(15) == code
    deadline = time.monotonic() + 20
    while (left := processes_in(home)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not list(home.iterdir())
