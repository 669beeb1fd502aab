"""Where the time of a trace went, in words."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from click.testing import CliRunner

import spanfiles
from hora.cli.trace import trace as command
from hora.monitor import trace, trace_summary
from hora.monitor.trace_summary import Intervals, overlap

TRAINING, COMMUNICATION, SERVER = "training", "communication", "server"


def step(at: float, *, forward: float, waiting: float) -> list[list[Any]]:
    """20 ms in all, of which 2 are data, 6 backward, 1 launching, 2 optimizer, and the rest is nobody's."""
    t = at + 2 + forward
    journey = {"bucket": 0, "bytes": 4_000_000, "work_us": 1000 * (waiting + 3)}
    return [
        [TRAINING, "data", at, at + 2],
        [TRAINING, "forward", at + 2, t],
        [TRAINING, "launch", t + 3, t + 4, {"bucket": 0}],
        [TRAINING, "waiting", t + 7, t + 7 + waiting],
        [COMMUNICATION, "bucket 0", t + 3, t + 7 + waiting, journey],
        [TRAINING, "backward", t, t + 7 + waiting],
        [TRAINING, "step", at + 18, at + 20, {"step": 1, "optimizer": 0}],
        [TRAINING, "step", at + 20, at + 20, {"step": 1, "optimizer": 1}],
    ]  # fmt: skip


def run(folder: pathlib.Path, name: str = "run.json") -> pathlib.Path:
    """Rank 1 is slow, rank 0 waits for it."""
    folder.mkdir(exist_ok=True)
    spanfiles.write(folder, "worker", 0, [s for k in range(5) for s in step(20 * k, forward=3, waiting=4)])
    spanfiles.write(folder, "worker", 1, [s for k in range(5) for s in step(20 * k, forward=6, waiting=1)])
    trace.merge(str(folder), str(folder / name))
    return folder / name


def lines(path: pathlib.Path) -> list[str]:
    ranks, problem = trace_summary.read(str(path))
    assert not problem
    return trace_summary.describe(ranks)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_it_says_where_the_time_went(tmp_path: pathlib.Path, name: str) -> None:
    assert lines(run(tmp_path, name)) == [
        "2 ranks: 5 steps in 100.0 ms, 20.0 ms each",
        "rank 0 (host a, pid 100): data 10 %, forward 15 %, backward 30 %, step 10 %, exchange 5 %, waiting 20 %, "
        "other 10 %",
        "rank 1 (host a, pid 101): data 10 %, forward 30 %, backward 30 %, step 10 %, exchange 5 %, waiting 5 %, "
        "other 10 %",
        # 7 and 4 ms of work on buckets, of which 4 and 1 were waited for, and 1 each of launching before it
        "communication: 6.5 ms per step and rank; computation hid 46 % of it, 3.5 ms were exposed",
        "rank 1 (host a, pid 101) is slowest: 18.0 ms of own work per step, rank 0 15.0 ms; "
        "waiting per step: 1.0 ms, rank 0 4.0 ms",
        "longest communication: bucket 0 of rank 0 (host a, pid 100), 8.0 ms for 4.00 MB, at 0.008 s",
    ]


def test_it_says_that_nobody_is_slow(tmp_path: pathlib.Path) -> None:
    for rank in range(3):
        spanfiles.write(tmp_path, "worker", rank, step(0, forward=3 + rank / 10, waiting=1))
    trace.merge(str(tmp_path), str(tmp_path / "run.json"))
    assert "no rank is slower than the others by 5 % or more" in lines(tmp_path / "run.json")


def test_servers_are_told_of_wherever_they_are(tmp_path: pathlib.Path) -> None:
    serving = [
        [SERVER, "update", 1, 2, {"worker": 0}],
        [SERVER, "serving", 0, 3],
        [SERVER, "update", 9, 10],
        [SERVER, "serving", 8, 10],
    ]
    spanfiles.write(tmp_path, "worker", 0, [*step(0, forward=3, waiting=1), *serving])
    spanfiles.write(tmp_path, "server", 1, serving)
    trace.merge(str(tmp_path), str(tmp_path / "run.json"))
    first, *_, colocated, other = lines(tmp_path / "run.json")
    assert first.startswith("1 rank and 1 server: 1 steps in 20.0 ms")
    text = "busy 50 % of the time, 2 block updates, 2.5 ms each"
    assert colocated == f"the server of rank 0 (host a, pid 100): {text}"
    assert other == f"server 1 (host a, pid 101): {text}"


def test_a_run_without_steps_has_something_to_say_too(tmp_path: pathlib.Path) -> None:
    spanfiles.write(tmp_path, "worker", 0, [[TRAINING, "evaluation", 0, 5]])
    spanfiles.write(tmp_path, "worker", 1, [])
    trace.merge(str(tmp_path), str(tmp_path / "run.json"))
    first, second, *_ = lines(tmp_path / "run.json")
    assert first == "1 rank: 0 steps in 5.0 ms"
    assert second == "rank 0 (host a, pid 100): evaluation 100 %, other 0 %"


def test_stretches_of_time_are_counted_once() -> None:
    ones, others = Intervals(), Intervals()
    for begin, end in [(0, 4), (2, 6), (10, 12), (1, 3)]:
        ones.add(begin, end)
    for begin, end in [(5, 11), (3, 3.5), (20, 30)]:
        others.add(begin, end)
    assert ones.union() == [(0, 6), (10, 12)]
    assert overlap(ones.union(), others.union()) == 0.5 + 1 + 1 == overlap(others.union(), ones.union())


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"traceEvents": [{"ph": "X", "name": "x", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]}),
        json.dumps([{"ph": "B", "name": "x", "ts": 0, "pid": 1, "tid": 1}]),
        '{"otherData": {"version": "1"},\n"traceEvents": []}',
        "no json",
        "",
        "\x1f\x8b",
    ],
)
def test_a_trace_of_others_is_refused_in_a_sentence(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    outcome = CliRunner().invoke(command, [str(path), "--summary"])
    assert outcome.exit_code == 2 and outcome.output.count("is not a trace of Hora") == 1
    assert "Traceback" not in outcome.output


def test_a_trace_of_another_version_is_refused_with_the_way_out(tmp_path: pathlib.Path) -> None:
    path = run(tmp_path)
    path.write_text(path.read_text().replace('"hora":1', '"hora":9', 1))
    with pytest.raises(ValueError, match=r"another version of Hora.*open it with that version"):
        trace_summary.read(str(path))


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_trace_that_is_cut_off_is_used_as_far_as_it_goes(tmp_path: pathlib.Path, name: str) -> None:
    path = run(tmp_path, name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    ranks, problem = trace_summary.read(str(path))
    assert "cut off" in problem and ranks[0].steps


def test_the_command_says_how_to_open_it(tmp_path: pathlib.Path) -> None:
    path = run(tmp_path)
    short = CliRunner().invoke(command, [str(path)])
    assert short.exit_code == 0 and "ui.perfetto.dev" in short.output and "5 steps" in short.output
    long = CliRunner().invoke(command, [str(path), "--summary"])
    assert long.exit_code == 0 and "is slowest" in long.output
    missing = CliRunner().invoke(command, [str(tmp_path / "none.json")])
    assert missing.exit_code == 2 and "none.json cannot be read: No such file" in missing.output


def test_names_do_nothing_to_a_terminal(tmp_path: pathlib.Path) -> None:
    path = run(tmp_path)
    path.write_text(path.read_text().replace("host a", "host \\u001b[31m").replace("bucket 0", "\\u0007"))
    outcome = CliRunner().invoke(command, [str(path), "--summary"])
    assert outcome.exit_code == 0 and "\x1b" not in outcome.output and "\x07" not in outcome.output
