"""The training benchmark runs and writes what it promises, and its contestants end. Nothing here looks at how long."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator

import pytest
import torch

from hora.cli import main
from hora.runs import exit_codes
from hora_benchmarks.bench import train, train_table
from hora_benchmarks.bench.models import WORKLOADS
from hora_benchmarks.bench.train_conductor import Conductor, Contestant

HORA = [sys.executable, "-m", "hora.cli.main"]
FIELDS = [
    "name", "model", "ranks", "step_median_s", "step_p10_s", "step_p90_s", "comm_s", "hidden", "samples_per_s",
    "exposed_s", "efficiency", "rounds", "steps",
]  # fmt: skip


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    """In the environment of everything that the test starts; when the test has ended nobody may carry it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv("HORA_TEST_MARK", value)
    text = f"HORA_TEST_MARK={value}".encode()
    yield text
    deadline = time.monotonic() + 20
    while (left := carrying(text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def carrying(mark: bytes) -> list[str]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def bench(out: pathlib.Path, only: str, *more: str) -> subprocess.CompletedProcess[str]:
    settings = ["--model", "cnn", "--steps", "2", "--rounds", "2", "--json", str(out), *more]
    return subprocess.run(
        [*HORA, "bench", "train", "-n", "2", "--only", only, *settings],
        capture_output=True,
        text=True,
        timeout=58,
        check=False,
    )


def rows_of(done: subprocess.CompletedProcess[str], out: pathlib.Path) -> dict[str, dict[str, object]]:
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for row in rows:
        assert list(row) == FIELDS
        assert 0 < row["step_p10_s"] <= row["step_median_s"] <= row["step_p90_s"]
        assert row["model"] == "cnn" and (row["rounds"], row["steps"]) == (2, 2)
        assert row["samples_per_s"] == pytest.approx(64 * row["ranks"] / row["step_median_s"])
    return {row["name"]: row for row in rows}


@pytest.mark.full
@pytest.mark.usefixtures("mark")
def test_plain_pytorch_and_ddp_write_a_line_each(tmp_path: pathlib.Path) -> None:
    out, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
    done = bench(out, "single,independent,ddp/gloo", "--plot", str(plot))
    rows = rows_of(done, out)
    assert {name: row["ranks"] for name, row in rows.items()} == {"single": 1, "independent": 2, "ddp/gloo": 2}
    assert rows["single"]["efficiency"] == 1
    for row in rows.values():
        assert row["comm_s"] is None and row["hidden"] is None and row["efficiency"] is not None
    assert "overhead over independent" in done.stdout and "cores, Python" in done.stdout
    assert "round 2 of 2" in done.stderr and "this takes roughly" in done.stderr.splitlines()[0]
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.full
@pytest.mark.usefixtures("mark")
def test_strategies_write_what_they_sent_and_hid(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "rows.jsonl"
    rows = rows_of(bench(out, "hora/1,ring,shared/sharded,ring/serial,independent/kept"), out)
    assert list(rows) == ["hora/1", "ring", "shared/sharded", "ring/serial", "independent/kept"]
    assert rows["hora/1"]["ranks"] == 1 and rows["hora/1"]["comm_s"] == 0 and rows["hora/1"]["hidden"] is None
    for name in ("ring", "shared/sharded", "ring/serial"):
        comm_s, hidden = rows[name]["comm_s"], rows[name]["hidden"]
        assert isinstance(comm_s, float) and comm_s > 0
        assert isinstance(hidden, float) and 0 <= hidden <= 1
    assert rows["independent/kept"]["comm_s"] is None
    assert all(row["efficiency"] is None for row in rows.values())  # single was not measured


def test_every_strategy_text_of_the_benchmark_exists() -> None:
    from hora.strategies import parse

    there = train.contestants(2)
    assert set(train.DEFAULT) <= set(there)
    for one in there.values():
        if one.strategy is not None:
            parse(one.strategy)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--only", "single,rign"],
            "there is no contestant 'rign'; did you mean 'ring'? there are: single, single/kept,",
        ),
        (["--model", "rnn"], "'rnn' is not one of 'mlp', 'gpt', 'cnn'"),
        (["--steps", "0"], "--steps takes a whole number of at least 1, not '0'"),
        (["--only", "single", "--all"], "--only and --all contradict each other"),
    ],
)
def test_bad_usage_is_one_line_that_says_what_exists(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "train", *arguments]) == exit_codes.USAGE
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.full
@pytest.mark.usefixtures("mark")
def test_a_contestant_that_dies_is_named_and_the_others_finish(capfd: pytest.CaptureFixture[str]) -> None:
    those = [Contestant(name="single", ranks=1), Contestant(name="broken", ranks=1, how="hora", strategy="nonsense")]
    assert train.main(those, "cnn", steps=1, rounds=1) == exit_codes.SCRIPT_FAILED
    out, err = capfd.readouterr()
    assert "single" in out and "broken" not in out
    assert "hora bench: broken: ended before it was ready" in err and "unknown strategy 'nonsense'" in err


@pytest.mark.full
@pytest.mark.usefixtures("mark")
def test_a_rank_that_dies_or_hangs_between_turns_is_told_and_ended() -> None:
    those = [Contestant(name=name, ranks=1) for name in ("well", "killed", "frozen")]
    with tempfile.TemporaryDirectory() as folder:
        conductor = Conductor(those, "cnn", folder)
        try:
            conductor.start()
            assert all(conductor.turn(one.name, 1) for one in those)
            os.kill(conductor.running["killed"].processes[0].pid, signal.SIGKILL)
            os.kill(conductor.running["frozen"].processes[0].pid, signal.SIGSTOP)
            assert conductor.turn("killed", 1) is None
            assert conductor.turn("frozen", 1, limit_s=0.3) is None
            answers = conductor.turn("well", 2)
            assert answers is not None and len(answers) == 1 and len(answers[0]["seconds"]) == 2
            assert conductor.turn("killed", 1) is None
        finally:
            conductor.close()
        killed, frozen = conductor.failures
    assert killed.startswith("killed: ") and "killed by SIGKILL" in killed
    assert frozen.startswith("frozen: no answer from rank 0 in 0.3 s") and "had to be ended" in frozen


@pytest.mark.full
@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, exit_codes.INTERRUPTED),
        pytest.param(signal.SIGTERM, exit_codes.TERMINATED, marks=pytest.mark.full),
    ],
)
def test_a_signal_in_the_middle_ends_all_contestants(
    tmp_path: pathlib.Path, mark: bytes, number: int, code: int
) -> None:
    command = [*HORA, "bench", "train", "--model", "cnn", "--rounds", "1000", "--only", "independent,ring"]
    with open(tmp_path / "err", "w") as err:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=err)
    deadline = time.monotonic() + 40
    while "round 2 of" not in (tmp_path / "err").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [command for command in carrying(mark) if "train_rank" in command and "hora.cli.main run" not in command]
    running.send_signal(number)
    assert running.wait(15) == code
    assert len(ranks) == 4, ranks  # both contestants were at work; that none is left is for `mark` to see


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    turns = [
        [
            {"seconds": [0.1, 0.4], "comm_s": 0.2, "exposed_s": 0.1, "sent_bytes": 8},
            {"seconds": [0.3, 0.2], "comm_s": 0.2, "exposed_s": 0.0, "sent_bytes": 8},
        ]
    ]
    row = train.row_of(Contestant(name="ring", ranks=2, how="hora"), "mlp", 64, turns)
    assert row["step_median_s"] == pytest.approx(0.35)
    assert row["comm_s"] == pytest.approx(0.1) and row["hidden"] == pytest.approx(0.75)
    assert row["samples_per_s"] == pytest.approx(2 * 64 / 0.35)


def test_hidden_is_never_below_zero() -> None:
    turns = [[{"seconds": [0.1], "comm_s": 0.1, "exposed_s": 0.1001, "sent_bytes": 8}]]
    row = train.row_of(Contestant(name="ring/serial", ranks=2, how="hora"), "mlp", 64, turns)
    assert row["hidden"] == 0 and row["exposed_s"] == pytest.approx(0.1001)


def test_one_rank_has_no_communication_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [[{"seconds": [0.1], "comm_s": 0.0, "exposed_s": 0.0, "sent_bytes": 0}]]
    train_table.print_steps([train.row_of(Contestant(name="hora/1", ranks=1, how="hora"), "mlp", 64, turns)], "one")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "│" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells == ["hora/1", "1", "100.0 (100.0 to 100.0)", "", "", "640", ""]


def test_without_matplotlib_there_is_no_plot_but_a_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install hora[plot]" in (train_table.plot_steps([], "none", str(tmp_path / "plot.png")) or "")


def test_what_is_told_of_the_duration_grows_with_the_work() -> None:
    those = train.choose(2)
    assert train.rough_duration_s(those, "mlp", 5, 10) < train.rough_duration_s(those, "gpt", 5, 10)
    assert [train.duration_text(seconds) for seconds in (4, 63, 130)] == ["10 seconds", "60 seconds", "2 minutes"]


def overheads(medians: dict[str, float], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    rows = [
        {"name": name, "model": "mlp", "ranks": 2 - (name[:6] in ("single", "hora/1")), "step_median_s": median}
        for name, median in medians.items()
    ]
    train_table.print_overheads(rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    return {cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines)}


def test_overheads_are_compared_with_independent_and_with_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    medians = {"single": 0.1, "independent": 0.1, "ddp/gloo": 0.14, "hora/1": 0.101, "ring": 0.13, "shared": 0.105}
    assert overheads(medians, capsys) == {
        "ddp/gloo": ["+40.00", "+40.0", "100%", "", "", "", ""],
        "hora/1": ["+1.00", "+1.0", "", "", "", "at most 2 %", "yes"],
        "ring": ["+30.00", "+30.0", "75%", "", "", "at most 50% of DDP's", "no"],
        "shared": ["+5.00", "+5.0", "12%", "", "", "at most 25% of DDP's", "yes"],
    }


def test_overheads_tell_what_is_gained_by_keeping_memory_alone(capsys: pytest.CaptureFixture[str]) -> None:
    medians = {"single": 0.1, "single/kept": 0.08, "hora/1": 0.09, "independent": 0.1, "independent/kept": 0.08}
    assert overheads(medians | {"shared/sharded": 0.1}, capsys) == {
        "single/kept": ["-20.00", "-20.0", "", "", "", "", ""],
        "hora/1": ["-10.00", "-10.0", "", "+10.00", "+12.5", "at most 2 %", "yes"],
        "independent/kept": ["-20.00", "-20.0", "", "", "", "", ""],
        "shared/sharded": ["+0.00", "+0.0", "", "+20.00", "+25.0", "at most 2 %", "yes"],
    }


def test_models_have_the_sizes_that_the_results_are_quoted_for() -> None:
    sizes = {name: sum(p.numel() for p in workload.build().parameters()) for name, workload in WORKLOADS.items()}
    assert sizes["mlp"] == 20_037_642 and sizes["gpt"] == 10_795_136 and sizes["cnn"] < 500_000
    for workload in WORKLOADS.values():
        inputs, targets = workload.batch(torch.Generator().manual_seed(1))
        assert len(inputs) == len(targets) == workload.batch_size
        assert torch.equal(inputs, workload.batch(torch.Generator().manual_seed(1))[0])
