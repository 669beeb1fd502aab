"""TensorBoard's event files: what is logged as scalars and histograms by step, and the run's samples per second.

The `tensorboard` package knows the format; neither torch nor TensorFlow is needed. Where several workers log a name,
the lowest live rank's values are written: a scalar has one value at a step there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from .messages import HistogramReport
from .metrics_log import LoggedRow
from .run_state import RunState
from .status import RunStatus

SPEED = "hora/samples_per_s"


class TensorBoard:
    """The writer of one file in `directory`; ValueError if the package is missing or the directory cannot be made.

    The constructor imports nothing. Everything else is for one thread. A disk that fails ends it: `warn` is told once.
    """

    def __init__(self, directory: str, warn: Callable[[str], None]) -> None:
        if not _installed():
            raise ValueError("--tensorboard needs a package that is not installed: pip install 'hora[tensorboard]'")
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as problem:
            why = problem.strerror or problem
            raise ValueError(f"--tensorboard {directory} cannot be made: {why}; give another directory") from None
        self._warn = warn
        self._began = time.time()
        name = f"events.out.tfevents.{int(self._began)}.{socket.gethostname()}.{os.getpid()}.hora"
        self.path = os.path.join(directory, name)
        self._file: Any = None
        self._records: Any = None
        self._formats: Any = None
        self._summaries: Any = None
        self._failed = False
        self._histogram = 0

    def write(self, rows: Iterable[LoggedRow], board: RunState, now: RunStatus) -> None:
        """The rows, the histograms that the board has got since the last time, and the speed."""
        if self._failed:
            return
        try:
            if self._records is None:
                self._open()
            self._write(rows, board, now)
            self._records.flush()
        except (OSError, ImportError) as problem:
            self._give_up(problem)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file, self._failed = None, True

    def _open(self) -> None:
        self._formats = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        framing = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._file = open(self.path, "xb")  # noqa: SIM115
        self._records = framing.RecordWriter(self._file)
        self._records.write(
            self._formats.Event(wall_time=self._began, file_version="brain.Event:2").SerializeToString()
        )

    def _write(self, rows: Iterable[LoggedRow], board: RunState, now: RunStatus) -> None:
        for row in rows:
            led = {name: value for name, value in row.values.items() if board.is_leader(name, row.rank)}
            self._add(row.at, row.step, [{"tag": name, "simple_value": value} for name, value in led.items()])
        self._histogram, histograms = board.histograms(self._histogram)
        for histogram in histograms:
            proto = self._summaries.HistogramProto(**_fields(histogram))
            self._add(histogram.at, histogram.step, [{"tag": histogram.name, "histo": proto}])
        if now.state == "running" and any(worker.state == "alive" for worker in now.workers):
            self._add(now.seconds, now.step, [{"tag": SPEED, "simple_value": now.samples_per_s}])

    def _add(self, at: float, step: int, values: list[dict[str, Any]]) -> None:
        if values:
            summary = self._summaries.Summary(value=[self._summaries.Summary.Value(**value) for value in values])
            event = self._formats.Event(wall_time=self._began + at, step=step, summary=summary)
            self._records.write(event.SerializeToString())

    def _give_up(self, problem: Exception) -> None:
        self.close()
        self._failed = True
        why = (problem.strerror if isinstance(problem, OSError) else None) or problem
        self._warn(f"{self.path} cannot be written: {why}; the run continues without it")


def _installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _fields(histogram: HistogramReport) -> dict[str, Any]:
    """Sums are taken from the middles of the bins."""
    low, counts = histogram.low, histogram.counts
    width = (histogram.high - low) / len(counts)
    middles = [low + (index + 0.5) * width for index in range(len(counts))]
    return {
        "min": low,
        "max": histogram.high,
        "num": sum(counts),
        "sum": sum(middle * count for middle, count in zip(middles, counts, strict=True)),
        "sum_squares": sum(middle * middle * count for middle, count in zip(middles, counts, strict=True)),
        "bucket_limit": [low + (index + 1) * width for index in range(len(counts))],
        "bucket": counts,
    }
