"""TensorBoard event files: logged values as scalars and histograms by step, and the run's samples per second.

Only the `tensorboard` package is needed, neither torch nor TensorFlow. Where several workers log a name, the values of
the lowest live rank are written: TensorBoard has one value per scalar and step.
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
    """The writer of one file in `directory`; ValueError if the package is missing or the directory cannot be created.

    The constructor imports nothing. The rest is for one thread. A disk that fails ends it: `warn` is called once.
    """

    def __init__(self, directory: str, warn: Callable[[str], None]) -> None:
        if not _installed():
            raise ValueError("--tensorboard needs a package that is not installed: pip install 'hora[tensorboard]'")
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            cause = error.strerror or error
            raise ValueError(f"--tensorboard {directory} cannot be created: {cause}; give another directory") from None
        self._warn = warn
        self._began = time.time()
        name = f"events.out.tfevents.{int(self._began)}.{socket.gethostname()}.{os.getpid()}.hora"
        self.path = os.path.join(directory, name)
        self._file: Any = None
        self._records: Any = None
        self._event_pb2: Any = None
        self._summary_pb2: Any = None
        self._failed = False
        self._histogram = 0

    def write(self, rows: Iterable[LoggedRow], run_state: RunState, status: RunStatus) -> None:
        """The rows, the histograms since the last call, and the speed."""
        if self._failed:
            return
        try:
            if self._records is None:
                self._open()
            self._write(rows, run_state, status)
            self._records.flush()
        except (OSError, ImportError) as error:
            self.close()
            self._failed = True
            cause = (error.strerror if isinstance(error, OSError) else None) or error
            self._warn(f"{self.path} cannot be written: {cause}; the run continues without it")

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file, self._failed = None, True

    def _open(self) -> None:
        self._event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary_pb2 = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        record_writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._file = open(self.path, "xb")  # noqa: SIM115
        self._records = record_writer.RecordWriter(self._file)
        version = self._event_pb2.Event(wall_time=self._began, file_version="brain.Event:2")
        self._records.write(version.SerializeToString())

    def _write(self, rows: Iterable[LoggedRow], run_state: RunState, status: RunStatus) -> None:
        for row in rows:
            values = {name: value for name, value in row.values.items() if run_state.metrics.is_leader(name, row.rank)}
            self._add(row.at, row.step, [{"tag": name, "simple_value": value} for name, value in values.items()])
        self._histogram, histograms = run_state.metrics.histograms(self._histogram)
        for histogram in histograms:
            proto = self._summary_pb2.HistogramProto(**_fields(histogram))
            self._add(histogram.at, histogram.step, [{"tag": histogram.name, "histo": proto}])
        if status.state == "running" and any(worker.state == "alive" for worker in status.workers):
            self._add(status.seconds, status.step, [{"tag": SPEED, "simple_value": status.samples_per_s}])

    def _add(self, at: float, step: int, values: list[dict[str, Any]]) -> None:
        if values:
            summary = self._summary_pb2.Summary(value=[self._summary_pb2.Summary.Value(**value) for value in values])
            event = self._event_pb2.Event(wall_time=self._began + at, step=step, summary=summary)
            self._records.write(event.SerializeToString())


def _installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _fields(histogram: HistogramReport) -> dict[str, Any]:
    """Of a HistogramProto; its sums are computed from the middles of the bins."""
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
