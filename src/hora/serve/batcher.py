"""Batcher: one thread that turns queued requests into batches and runs the model on them.

    submit    any thread: check the request and queue it; returns a Future at once, never blocks, never raises
    gather    the oldest request and those behind it of the same kind, up to `max_batch` rows
    refresh   the source loads the newest parameters: a batch has one version, which every prediction carries
    run       one forward; if it fails, one per request, so that a bad request fails alone. A request of more than
              `max_batch` rows takes several forwards, all with one version
    resolve   every Future gets its own rows, or an HttpError

While the queue is empty the thread waits for more requests up to `max_wait_ms`, but only until the batch has as many as
the last one: a single client does not wait for others.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec
from torch import nn

from ..http.errors import HttpError
from .batch import Predict, concatenate, is_finite, kind_of, largest_magnitude, run_model, slice_rows
from .signature import Signature, check_inputs, count_rows
from .snapshot_buffer import ParameterVersion
from .sources import ParameterSource
from .tensor_codec import Value

log = logging.getLogger(__name__)

MAX_QUEUED = 1024  # requests
LARGE = 1e15  # for inputs beyond it, overflow is the request's fault: a product of two sums overflows float32
CLOSE_S = 2.0  # how long `close` waits for queued requests


class NotReady(HttpError):
    """No parameters have been published yet."""

    def __init__(self) -> None:
        super().__init__("no parameters have been published yet", 503)


class Prediction(msgspec.Struct, frozen=True):
    """The outputs for one request's rows, and the version of the parameters that gave them."""

    outputs: dict[str, Value]
    version: ParameterVersion


@dataclasses.dataclass(eq=False)
class _Request:
    """Without inputs, and with 0 rows, it asks for the version only."""

    inputs: Mapping[str, Value]
    rows: int
    deadline: float
    future: Future[Any]

    def __post_init__(self) -> None:
        self.kind = kind_of(self.inputs)


class Batcher:
    """Predicts with `models`, whose parameters `source` keeps new; only its own thread touches both, until `close`. The
    caller closes the source. `signature()` is the model's signature once it is known; it is not used with `predict`. A
    request that waits longer than `timeout_s` fails."""

    def __init__(
        self, models: Sequence[nn.Module], source: ParameterSource, *, predict: Predict | None = None,
        signature: Callable[[], Signature | None], max_batch: int = 64, max_wait_ms: float = 2.0,
        timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        if max_batch < 1 or not max_wait_ms >= 0:
            raise ValueError(f"max_batch={max_batch}, max_wait_ms={max_wait_ms}: expected at least 1 row and 0 ms")
        self.timeout_s = timeout_s
        self.version: ParameterVersion | None = None  # of the last batch
        self._models = models
        self._source = source
        self._predict = predict
        self._signature = signature
        self._max_batch = max_batch
        self._max_wait_s = max_wait_ms / 1000
        self._changed = threading.Condition()
        self._queue: collections.deque[_Request] = collections.deque()
        self._batch: list[_Request] = []  # in progress
        self._last_batch_size = MAX_QUEUED  # requests
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hora-predictor", daemon=True)
        self._thread.start()

    @property
    def signature(self) -> Signature | None:
        """What requests are checked against; None if it is not known, or with `predict`."""
        return None if self._predict is not None else self._signature()

    def submit(self, inputs: Mapping[str, Value]) -> Future[Prediction]:
        """A Prediction or an HttpError. All inputs have the same number of rows. Thread-safe."""
        future: Future[Prediction] = Future()
        try:
            rows = count_rows(inputs, allow_text=self._predict is not None)
            signature = self.signature
            if signature is not None:
                check_inputs(signature, inputs)
            request = _Request(inputs, rows, time.monotonic() + self.timeout_s, future)
            with self._changed:
                if self._closing:
                    raise _closing_error()
                if len(self._queue) >= MAX_QUEUED:
                    raise HttpError(f"{MAX_QUEUED} requests are already queued", 503)
                self._queue.append(request)
                self._changed.notify()
        except HttpError as error:
            _fail(future, error)
        return future

    def newest_version(self) -> Future[ParameterVersion | None]:
        """Refresh the parameters; their version, or None if there are none yet. Thread-safe."""
        future: Future[ParameterVersion | None] = Future()
        with self._changed:
            if self._closing:
                future.set_result(self.version)
            else:
                self._queue.appendleft(_Request({}, 0, float("inf"), future))
                self._changed.notify()
        return future

    def close(self) -> None:
        """Finish queued requests, for at most CLOSE_S; the rest fail."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        with self._changed:
            left = [*self._batch, *self._queue]
            self._queue.clear()
        for request in left:
            if request.rows:
                _fail(request.future, _closing_error())
            else:
                _resolve(request.future, self.version)

    def _run(self) -> None:
        while self._gather():
            try:
                self._answer()
            except BaseException as error:  # user code must not end the thread
                log.exception("a batch of %d requests failed", len(self._batch))
                for request in self._batch:
                    name = type(error).__name__
                    _fail(request.future, HttpError(f"the predictor failed with {name}; see its log", 500))
            self._batch = []

    def _gather(self) -> bool:
        """Wait for requests, and fill `_batch`; False after `close`."""
        with self._changed:
            while not self._queue:
                if self._closing:
                    return False
                self._changed.wait()
            while self._queue and not self._queue[0].rows:
                self._batch.append(self._queue.popleft())
            if self._queue:
                self._fill_batch(self._queue.popleft())
            return True

    def _fill_batch(self, first: _Request) -> None:
        queue, batch, rows = self._queue, [first], first.rows
        deadline = time.monotonic() + (0.0 if queue else self._max_wait_s)
        while True:
            while queue and queue[0].kind == first.kind and rows + queue[0].rows <= self._max_batch:
                batch.append(queue.popleft())
                rows += batch[-1].rows
            left_s = deadline - time.monotonic()
            full = queue or rows >= self._max_batch or len(batch) >= self._last_batch_size
            if full or self._closing or left_s <= 0:
                break
            self._changed.wait(left_s)
        self._batch += batch
        self._last_batch_size = len(batch)

    def _answer(self) -> None:
        self.version = version = self._source.refresh()
        batch = []
        for request in filter(self._is_wanted, self._batch):
            if not request.rows:
                _resolve(request.future, version)
            elif version is None:
                _fail(request.future, NotReady())
            else:
                batch.append(request)
        if version is not None and (len(batch) < 2 or not self._predict_batch(batch, version)):
            for request in batch:
                self._predict_batch([request], version)

    def _is_wanted(self, request: _Request) -> bool:
        if not request.future.set_running_or_notify_cancel():
            return False
        if time.monotonic() > request.deadline:
            _fail(request.future, HttpError(f"the request waited for more than {self.timeout_s:g} s", 503))
            return False
        return True

    def _predict_batch(self, batch: Sequence[_Request], version: ParameterVersion) -> bool:
        """Whether all futures are resolved. False only for several requests that failed together."""
        try:
            inputs = concatenate([request.inputs for request in batch])
            outputs = self._run_slices(inputs, sum(request.rows for request in batch))
        except Exception as error:
            if len(batch) > 1:
                return False
            if not isinstance(error, HttpError):
                log.exception("a request failed")
                error = HttpError(f"the model failed with {type(error).__name__}; see the predictor's log", 500)
            log.debug("a request was rejected", exc_info=True)
            _fail(batch[0].future, error)
            return True
        finite = all(map(is_finite, outputs.values()))
        start = 0
        for request in batch:
            own = slice_rows(outputs, start, start + request.rows)
            start += request.rows
            nonfinite = [] if finite else [name for name, value in own.items() if not is_finite(value)]
            if nonfinite:
                _fail(request.future, _nonfinite_error(nonfinite[0], request.inputs, version))
            else:
                _resolve(request.future, Prediction(own, version))
        return True

    def _run_slices(self, inputs: dict[str, Value], rows: int) -> dict[str, Value]:
        """At most `max_batch` rows at a time, so that a large request needs no more memory than a full batch."""
        parts = []
        for start in range(0, rows, self._max_batch):
            stop = min(rows, start + self._max_batch)
            part = slice_rows(inputs, start, stop) if rows > self._max_batch else inputs
            parts.append(run_model(self._models, self._predict, part, stop - start))
        if len({kind_of(part) for part in parts}) > 1:
            raise HttpError("the outputs of different rows differ in shape; send fewer rows at a time", 500)
        return concatenate(parts)


def _nonfinite_error(output: str, inputs: Mapping[str, Value], version: ParameterVersion) -> HttpError:
    """500 for the model's fault; 400 if the inputs are so large that any model would overflow."""
    message = f"output {output!r} has NaN or infinite values with the parameters of step {version.step}"
    largest = largest_magnitude(inputs)
    if largest < LARGE:
        return HttpError(message, 500)
    return HttpError(f"{message}: the inputs go up to {largest:.3g}; scale them as in training", 400)


def _closing_error() -> HttpError:
    return HttpError("the predictor is closing", 503)


def _resolve(future: Future[Any], result: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # cancelled, or failed by `close`, meanwhile
        future.set_result(result)


def _fail(future: Future[Any], error: Exception) -> None:
    # Its frames refer to the future and the inputs: a cycle that would keep a large request until the next collection.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
