from __future__ import annotations

import importlib.util
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from hora.monitor import tensorboard
from hora.monitor.messages import HistogramReport
from hora.monitor.run_state import RunState
from hora.monitor.tensorboard import TensorBoard
from reports import row, worker, worker_report

needs_package = pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is missing")


def no_warning(text: str) -> None:
    raise AssertionError(text)


def read(path: str) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [Event.FromString(record) for record in RawEventFileLoader(path).Load()]


def write(run_state: RunState, files: TensorBoard) -> None:
    files.write(run_state.metrics.take_rows(), run_state, run_state.status(run_state.updated_at))


@needs_package
def test_scalars_histograms_and_speed_are_there_by_step(tmp_path: pathlib.Path) -> None:
    run_state, files = RunState(strategy="ring"), TensorBoard(str(tmp_path / "a" / "b"), no_warning)
    for step in (1, 2):
        for rank in (0, 1):
            shown = [HistogramReport("w", step, 1000.0, -1.0, 1.0, [1, 3])]
            rows = [row(step, loss=step / 2 + rank), row(step, **{f"only {rank}": 7.0})]
            run_state.on_report(worker(rank), worker_report(step, rows=rows, histograms=shown), step * 1.0)
        write(run_state, files)
    files.close()
    files.close()
    [name] = os.listdir(tmp_path / "a" / "b")
    assert ".tfevents." in name
    first, *events = read(files.path)
    assert first.file_version == "brain.Event:2"
    values = [(event.step, value) for event in events for value in event.summary.value]
    scalars = [(step, value.tag, value.simple_value) for step, value in values if value.HasField("simple_value")]
    assert [(step, number) for step, tag, number in scalars if tag == "loss"] == [(1, 0.5), (2, 1.0)]
    assert [step for step, tag, _ in scalars if tag == "only 1"] == [1, 2]
    assert [step for step, tag, _ in scalars if tag == "hora/samples_per_s"] == [1, 2]
    histograms = [(step, value.histo) for step, value in values if value.HasField("histo")]
    assert [step for step, _ in histograms] == [1, 2]
    histogram = histograms[0][1]
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (-1.0, 1.0, 4.0, 1.0)
    assert list(histogram.bucket) == [1.0, 3.0] and list(histogram.bucket_limit) == [0.0, 1.0]
    assert events[0].wall_time == pytest.approx(first.wall_time + 1.0)


@needs_package
def test_a_value_that_is_nan_is_written_as_such(tmp_path: pathlib.Path) -> None:
    run_state, files = RunState(), TensorBoard(str(tmp_path), no_warning)
    run_state.on_report(worker(0), worker_report(1, rows=[row(1, loss=math.nan)]), 1.0)
    write(run_state, files)
    assert math.isnan(read(files.path)[1].summary.value[0].simple_value)
    files.close()


@needs_package
def test_neither_torch_nor_tensorflow_is_imported(tmp_path: pathlib.Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from reports import row, worker_report, worker
from hora.monitor.run_state import RunState
from hora.monitor.tensorboard import TensorBoard
files = TensorBoard({str(tmp_path)!r}, print)
assert "tensorboard" not in sys.modules
run_state = RunState()
run_state.on_report(worker(0), worker_report(1, rows=[row(1, loss=1.0)]), 1.0)
files.write(run_state.metrics.take_rows(), run_state, run_state.status(1.0))
files.close()
assert "tensorboard" in sys.modules
print(sorted({{"torch", "tensorflow"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.stdout == "[]\n", done.stderr


def test_without_the_package_it_is_refused_with_the_way_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_installed", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'hora\[tensorboard\]'"):
        TensorBoard(str(tmp_path), no_warning)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_installed", lambda: True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be created: Not a directory; give another directory"):
        TensorBoard(str(tmp_path / "file" / "runs"), no_warning)


@needs_package
def test_a_disk_that_fails_is_told_once(tmp_path: pathlib.Path) -> None:
    warnings: list[str] = []
    run_state, files = RunState(), TensorBoard(str(tmp_path / "runs"), warnings.append)
    (tmp_path / "runs").rmdir()
    for step in (1, 2):
        run_state.on_report(worker(0), worker_report(step, rows=[row(step, loss=1.0)]), 1.0)
        write(run_state, files)
    assert len(warnings) == 1 and "the run continues without it" in warnings[0]


@needs_package
def test_the_speed_does_not_end_with_a_nothing_of_after_the_end(tmp_path: pathlib.Path) -> None:
    run_state, files = RunState(strategy="ring"), TensorBoard(str(tmp_path), no_warning)
    for step in (1, 2):
        run_state.on_report(worker(0), worker_report(step), step * 1.0)
        write(run_state, files)
    run_state.on_event("left", str(worker(0)), "", 2.5)
    write(run_state, files)
    run_state.on_event("end", "", "done", 2.6)
    write(run_state, files)
    files.close()
    values = [value for event in read(files.path) for value in event.summary.value]
    speeds = [value.simple_value for value in values if value.tag == tensorboard.SPEED]
    assert len(speeds) == 2 and min(speeds) > 0
