"""What a process did is written as it happens; off, nothing is recorded; on, training is what it was."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pathlib
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hora.monitor import spans
from hora.monitor.spans import COMMUNICATION, TRAINING
from hora.training.stages import Stages


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where spans go; whatever a test has opened is closed."""
    yield tmp_path
    spans.close()
    spans._pending.clear()


def lines(path: pathlib.Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_nothing_is_recorded_before_open() -> None:
    assert not spans.on
    with spans.during(TRAINING, "something"):
        pass
    assert spans._pending == []


def test_a_file_says_who_it_is_and_has_a_line_for_each_span(folder: pathlib.Path) -> None:
    spans.open(str(folder / "new"), "worker", 3)
    assert spans.on
    spans.add(TRAINING, "forward", 1000, 3500)
    spans.add(COMMUNICATION, "bucket 0", 2000, 9000, bytes=12, bucket=0)
    spans.add(TRAINING, "begun before", 0)
    with spans.during(TRAINING, "checkpoint", step=7):
        pass
    spans.close()
    assert not spans.on
    header, *found = lines(folder / "new" / "worker-3.spans")
    assert (header["spans"], header["role"], header["rank"], header["pid"]) == (1, "worker", 3, os.getpid())
    assert header["time_ns"] > header["perf_ns"] > 0 and header["clock"] and header["host"]
    assert found[:2] == [
        [TRAINING, "forward", 1000, 2500, None],
        [COMMUNICATION, "bucket 0", 2000, 7000, {"bytes": 12, "bucket": 0}],
    ]
    assert found[2][:2] == [TRAINING, "checkpoint"] and found[2][3] >= 0 and found[2][4] == {"step": 7}
    assert len(found) == 3


def test_a_second_process_of_the_same_rank_spoils_nothing(folder: pathlib.Path) -> None:
    (folder / "worker-0.spans").write_text("of a run before\n")
    spans.open(str(folder), "worker", 0)
    spans.close()
    assert (folder / "worker-0.spans").read_text() == "of a run before\n"
    assert lines(folder / f"worker-0-{os.getpid()}.spans")[0]["rank"] == 0


def test_no_span_is_lost_while_it_is_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "FLUSH_S", 0.0005)
    monkeypatch.setattr(spans, "CHUNK", 7)
    spans.open(str(folder), "worker", 0)

    def work(number: int) -> None:
        for each in range(2000):
            spans.add(TRAINING, f"{number}-{each}", 1, 2)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.close()
    names = [span[1] for span in lines(folder / "worker-0.spans")[1:]]
    assert sorted(names) == sorted(f"{number}-{each}" for number in range(4) for each in range(2000))


def test_a_killed_process_leaves_what_it_had_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "FLUSH_S", 0.01)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        spans.open(str(folder), "server", 1)
        for number in itertools.count():
            spans.add(TRAINING, "forward", 1, 2, number=number)
            if number == 100:
                os.write(theirs, b"!")
            select.select([], [], [], 0.001)
    os.close(theirs)
    assert os.read(ours, 1) == b"!"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    found = [json.loads(line) for line in (folder / "server-1.spans").read_bytes().split(b"\n")[:-1]]
    assert found[0]["role"] == "server" and [span[4]["number"] for span in found[1:]] == list(range(len(found) - 1))
    assert len(found) > 2


def test_a_child_records_nothing_of_its_parent(folder: pathlib.Path) -> None:
    spans.open(str(folder), "worker", 0)
    spans.add(TRAINING, "forward", 1, 2)
    child = os.fork()
    if child == 0:  # pragma: no cover
        os._exit(10 + spans.on + 2 * bool(spans._pending))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 10
    assert spans.on


def test_there_is_a_limit_and_it_is_said(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "MAX_SPANS", 10)
    monkeypatch.setattr(spans, "CHUNK", 4)
    spans.open(str(folder), "worker", 0)
    for number in range(25):
        spans.add(TRAINING, str(number), 1, 2)
    assert spans._writer is not None
    with caplog.at_level(logging.WARNING):
        spans._writer._flush()
        assert not spans.on and spans._pending == []
        spans.close()
    _, *found, note = lines(folder / "worker-0.spans")
    assert [span[1] for span in found] == [str(number) for number in range(10)]
    assert "limit" in note["note"] and caplog.text.count("limit") == 1


def test_a_disk_that_takes_no_more_ends_the_trace_alone(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    spans.open(str(folder), "worker", 0)
    writer = spans._writer
    assert writer is not None
    writer._file.close()
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    spans.add(TRAINING, "forward", 1, 2)
    with caplog.at_level(logging.WARNING):
        writer._thread.join(10)
    assert not writer._thread.is_alive() and not spans.on
    assert caplog.text.count("cannot be written") == 1 and "training continues" in caplog.text


def test_where_nothing_can_be_written_a_warning_says_so(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        spans.open(str(folder / "file"), "worker", 0)
    assert not spans.on and "no trace of this process" in caplog.text


class Broken(Exception):
    pass


def test_stages_are_told_by_hooks(folder: pathlib.Path) -> None:
    spans.open(str(folder), "worker", 0)
    model, stages = torch.nn.Linear(3, 2), Stages()
    model.register_forward_pre_hook(stages.before_forward)
    model.register_forward_hook(stages.after_forward)

    def fail(_: torch.Tensor) -> None:
        raise Broken

    stages.fetch()
    stages.fetched()
    with pytest.raises(Broken):  # one that breaks off is none
        out = model(torch.ones(1, 3)).relu()
        out.register_hook(fail)
        middle = model(out.new_ones(1, 3))
        middle.register_hook(fail)
        (out.sum() + middle.sum()).backward()
    model(torch.ones(4, 3)).sum().backward()
    stages.before_step()
    stages.after_step(1, 0)
    with torch.no_grad():
        model(torch.ones(4, 3))
    spans.close()
    found = lines(folder / "worker-0.spans")[1:]
    names = ["data", "forward", "forward", "forward", "backward", "step", "evaluation"]
    assert [span[1] for span in found] == names
    assert found[5][4] == {"step": 1, "optimizer": 0}
    for one, other in itertools.pairwise(found):
        assert one[2] + one[3] <= other[2], "one after the other"


def test_a_model_inside_another_has_its_forward_inside(folder: pathlib.Path) -> None:
    spans.open(str(folder), "worker", 0)
    inner = torch.nn.Linear(2, 2)
    outer, stages = torch.nn.Sequential(inner, torch.nn.ReLU()), Stages()
    for model in (inner, outer):
        model.register_forward_pre_hook(stages.before_forward)
        model.register_forward_hook(stages.after_forward)
    outer(torch.ones(1, 2)).sum().backward()
    spans.close()
    within, around, backward = lines(folder / "worker-0.spans")[1:]
    assert around[2] <= within[2] and within[2] + within[3] <= around[2] + around[3]
    assert backward[1] == "backward"
