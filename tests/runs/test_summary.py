"""What is said of a run at its end, and which past run tells what one worker does alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hora.monitor.run_state import RunState
from hora.monitor.status import RunEvent
from hora.runs import run_directory
from hora.runs.run_directory import RunDirectory
from hora.runs.summary import single_worker_speed, summary_lines
from hora.terminal import format

TOLD: dict[str, Any] = {
    "samples": 10272, "seconds": 12.3, "samples_per_s": 840.0, "steps": 1284, "bytes_per_step": 4.2e6, "hidden": 0.83,
    "slowest": "rank 1 (host a, pid 7)", "checkpoints": 2, "skipped": 1, "rounds": 14,
    "values": {"accuracy": 0.9131, "loss": 0.31244}, "workers": 4,
}  # fmt: skip
FACTS: dict[str, Any] = {"command": ["train.py", "--lr", "1"], "module": False, "cwd": "/w", "host": "a", "size": 4}


def test_three_lines_tell_all_that_is_known() -> None:
    assert summary_lines(TOLD, single=239.0) == [
        "1,284 steps, 10,272 samples in 12.2 s: 840 samples/s, 88 % of 4 times what one worker does alone (239)",
        "loss 0.3124, accuracy 0.9131; 14 rounds; 2 checkpoints written; 1 step skipped",
        "each worker sent 4.2 MB per step, 83 % of the communication hidden behind computation; "
        "slowest: rank 1 (host a, pid 7)",
    ]


def test_the_time_of_training_is_told_apart_from_that_of_the_whole() -> None:
    first = summary_lines({**TOLD, "seconds": 100.0}, single=None)[0]
    assert first == "1,284 steps, 10,272 samples in 12.2 s (1 min 40 s from start to end): 840 samples/s"


def test_what_is_not_known_is_not_said() -> None:
    alone = {
        "samples": 0,
        "seconds": 1.0,
        "steps": 3,
        "samples_per_s": 0.0,
        "hidden": None,
        "workers": 1,
        "rounds": None,
    }
    assert summary_lines(alone, single=None) == ["3 steps in 1.0 s"]
    assert (
        summary_lines({**TOLD, "values": {}, "rounds": None, "checkpoints": 0, "skipped": 0}, single=None)[1][:4]
        == "each"
    )


def test_a_run_that_did_not_train_says_nothing() -> None:
    assert summary_lines({}, single=5.0) == []
    assert summary_lines(RunState(run="x", size=2).status(0.0).summary(), single=None) == []


def test_one_worker_is_not_measured_against_itself() -> None:
    assert "alone" not in summary_lines({**TOLD, "workers": 1}, single=840.0)[0]


def test_wrong_types_and_hostile_names_do_no_harm() -> None:
    bad = {
        "samples": "many",
        "steps": 3,
        "seconds": None,
        "values": {"\x1b[31mloss\n": None},
        "slowest": "\x07x",
        "hidden": "a",
    }
    text = "\n".join(summary_lines(bad, single=math.nan))
    assert "loss nan" in text and not set("\x1b\x07") & set(text)


@pytest.fixture
def past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    times = iter(f"2026-11-01T10:{minute:02d}:00+00:00" for minute in range(60))
    monkeypatch.setattr(run_directory, "_now", lambda: next(times))

    def leave(name: str, speed: float, code: int = 0, steps: int = 100, **facts: Any) -> None:
        record = RunDirectory(directory=None, name=name, warn=pytest.fail)
        record.begin({**FACTS, "size": 1, **facts})
        record.end({"code": code, "summary": {"samples_per_s": speed, "steps": steps}})
        record.close()

    return leave


def test_the_newest_run_of_the_same_command_with_one_worker_tells_its_speed(past: Callable[..., None]) -> None:
    assert single_worker_speed(FACTS, 100) is None
    past("old", 100.0)
    past("new", 200.0)
    past("failed", 300.0, code=1)
    past("several", 400.0, size=2)
    past("other", 500.0, command=["train.py"])
    past("elsewhere", 600.0, cwd="/v")
    past("far", 700.0, host="b")
    past("module", 800.0, module=True)
    past("guest", 900.0, joins="new")
    past("nothing", 0.0)
    past("threads", 1000.0, threads=2)
    past("cut short", 1100.0, max_steps=5)
    past("hosts", 1200.0, hosts=["a", "b"])
    assert single_worker_speed(FACTS, 100) == 200.0
    assert single_worker_speed({**FACTS, "command": ("train.py", "--lr", "1")}, 100) == 200.0, "as the launcher has it"
    assert single_worker_speed({**FACTS, "size": 1}, 100) is None
    assert single_worker_speed({**FACTS, "hosts": ["a", "b"]}, 100) is None
    assert single_worker_speed(FACTS, 10_000) is None, "a hundred steps say little about ten thousand"


def test_more_than_is_possible_is_not_printed() -> None:
    assert "% of 2 times" in summary_lines({**TOLD, "workers": 2}, single=TOLD["samples_per_s"] / 1.9)[0]
    assert "alone" not in summary_lines({**TOLD, "workers": 2}, single=TOLD["samples_per_s"] / 2.2)[0]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (format.duration(0.0421), "0.042 s"),
        (format.duration(59.96), "1 min 00 s"),
        (format.duration(3599.6), "1 h 00 min"),
        (format.duration(100_000), "1 d 3 h"),
        (format.duration(math.nan), "?"),
        (format.clock(59.4), "59 s"),
        (format.clock(59.6), "1 min 00 s"),
        (format.number(1e-9), "1e-09"),
        (format.number(123456.0), "123,456"),
        (format.number(-math.inf), "-inf"),
        (format.milliseconds(0.00042), "0.42 ms"),
        (format.milliseconds(2.314), "2.31 s"),
        (format.size(999.6e6), "1.0 GB"),
        (format.size(12), "12 B"),
        (format.percent(0.999), "99 %"),
        (format.percent(1.0), "100 %"),
        (format.rate(3210.4), "3,210"),
        (format.rate(0.0312), "0.0312"),
    ],
)
def test_numbers_are_written_as_people_read_them(told: str, wanted: str) -> None:
    assert told == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\nb\tc\rd", "a b c d"),
        ("\x9b2Jx", "x"),
        ("left\u202eright\u200b", "leftright"),
        ("e" + "\u0301" * 50, "e\u0301\u0301"),
        ("Größe 大小", "Größe 大小"),
        ("x" * 300, "x" * 199 + "…"),
        ("\x1b", ""),
    ],
)
def test_text_from_elsewhere_is_made_harmless(text: str, wanted: str) -> None:
    assert format.sanitize(text) == wanted


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("left", "its script ended", "rank 1 left: its script ended"),
        ("joined", "", "rank 1 joined"),
        ("slow", "rank 1 is slow: 3 ms", "rank 1 is slow: 3 ms"),
        ("checkpoint", "ckpt/step-3", "checkpoint ckpt/step-3"),
        ("skipped", "skipped: nan in w\x07", "skipped: nan in w"),
        ("\x1b[2Jodd", "", "rank 1 odd"),
    ],
)
def test_an_event_is_one_line_that_says_what_it_was(kind: str, text: str, wanted: str) -> None:
    event = RunEvent(number=1, at=0.0, step=0, kind=kind, who="rank 1", text=text)
    assert format.event_text(event) == wanted
