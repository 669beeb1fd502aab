"""Answerer: one thread that turns waiting requests into batches, and batches into answers.

    submit   any thread: checks the request and queues it; a Future at once, never blocks, never raises
    gather   the oldest request, and those behind it of the same kind, up to `max_batch` rows
    refresh  the source loads the newest parameters: the whole batch is of one moment, and each answer carries it
    call     one forward; if that fails, each request by itself, so that a bad one fails alone. A request with more
             than `max_batch` rows takes several, all of one moment
    settle   every Future gets its own rows, or a Refusal

If nobody else waits, the thread waits for company up to `max_wait_ms`, but no longer than until as many have come as
the last time: a lone client is never kept waiting for others that do not exist.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

import msgspec
from torch import nn

from ..http.errors import HttpError
from .batch import Predict, call, check_rows, cut, is_finite, joined, kind_of, magnitude, rows_of
from .signature import Signature, check
from .source import ParameterSource, ParameterVersion
from .tensor_codec import Value

log = logging.getLogger(__name__)

MAX_WAITING = 1024  # requests; more are sent away at once
LARGE = 1e15  # inputs beyond it are no model's to answer: a product of two sums overflows
CLOSE_S = 2.0  # how long `close` lets the thread answer what is queued


class NotReady(HttpError):
    """No parameters have been published yet."""

    def __init__(self) -> None:
        super().__init__("no parameters have been published yet", 503)


class Prediction(msgspec.Struct, frozen=True):
    """One request's rows of the outputs, and the moment of the parameters that they were computed with."""

    outputs: dict[str, Value]
    stamp: ParameterVersion


class _Waiting:
    """A request in the queue."""

    __slots__ = ("deadline", "future", "inputs", "kind", "rows")

    def __init__(self, inputs: Mapping[str, Value], rows: int, deadline: float, future: Future[Prediction]) -> None:
        self.inputs = inputs
        self.rows = rows
        self.kind = kind_of(inputs)
        self.deadline = deadline
        self.future = future


class Batcher:
    """Answers with `models`, whose parameters `source` keeps new; both are touched by its thread alone, until `close`.
    The source stays its maker's to close. `signature` says what the model takes as soon as that is known; it is not
    asked where `predict` stands before the model. `timeout_s`: what has waited that long is sent away."""

    def __init__(
        self, models: Sequence[nn.Module], source: ParameterSource, *, predict: Predict | None = None,
        signature: Callable[[], Signature | None], max_batch: int = 64, max_wait_ms: float = 2.0,
        timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        if max_batch < 1 or not max_wait_ms >= 0:
            raise ValueError(f"max_batch={max_batch}, max_wait_ms={max_wait_ms}: expected at least 1 row and 0 ms")
        self.timeout_s = timeout_s
        self.stamp: ParameterVersion | None = None  # of the last batch
        self._models = models
        self._source = source
        self._predict = predict
        self._signature = signature
        self._max_batch = max_batch
        self._max_wait_s = max_wait_ms / 1000
        self._changed = threading.Condition()
        self._queue: collections.deque[_Waiting] = collections.deque()
        self._curious: list[Future[ParameterVersion | None]] = []
        self._under_way: list[_Waiting] = []
        self._usual = MAX_WAITING  # how many requests the last batch had
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="hora-predictor", daemon=True)
        self._thread.start()

    @property
    def expected(self) -> Signature | None:
        """What a request has to look like, where that is known."""
        return None if self._predict is not None else self._signature()

    def submit(self, inputs: Mapping[str, Value]) -> Future[Prediction]:
        """The answer to come, or a Refusal. All values have the same first dimension: the rows. Thread-safe."""
        future: Future[Prediction] = Future()
        try:
            rows = rows_of(inputs, texts=self._predict is not None)
            expected = self.expected
            if expected is not None:
                check(expected, inputs)
            waiting = _Waiting(inputs, rows, time.monotonic() + self.timeout_s, future)
            with self._changed:
                if self._closing:
                    raise _closing()
                if len(self._queue) >= MAX_WAITING:
                    raise HttpError(f"{MAX_WAITING} requests are waiting already", 503)
                self._queue.append(waiting)
                self._changed.notify()
        except HttpError as refusal:
            _fail(future, refusal)
        return future

    def moment(self) -> Future[ParameterVersion | None]:
        """The newest parameters' moment, once they have been loaded; None if there are none yet. Thread-safe."""
        future: Future[ParameterVersion | None] = Future()
        with self._changed:
            if self._closing:
                future.set_result(self.stamp)
            else:
                self._curious.append(future)
                self._changed.notify()
        return future

    def close(self) -> None:
        """Answer what is queued, for CLOSE_S at most; what is left then is refused. Blocks no longer than that."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        with self._changed:
            left = [*self._under_way, *self._queue]
            curious, self._curious = self._curious, []
            self._queue.clear()
        for waiting in left:
            _fail(waiting.future, _closing())
        for future in curious:
            _settle(future, self.stamp)

    def _run(self) -> None:
        while (curious := self._gather()) is not None:
            try:
                self._answer(curious)
            except BaseException as error:  # nothing that a user's code does may end the thread
                log.exception("a batch of %d requests could not be answered", len(self._under_way))
                unanswered: list[Future[Any]] = [*curious, *(waiting.future for waiting in self._under_way)]
                for future in unanswered:
                    _fail(
                        future, HttpError(f"the predictor failed with {type(error).__name__}; its log says more", 500)
                    )
            self._under_way = []

    def _gather(self) -> list[Future[ParameterVersion | None]] | None:
        """Wait for work: those who only ask for the moment, and in `_under_way` a batch from the queue, which may be
        empty. None when all is done and nothing more will come."""
        with self._changed:
            while not self._queue and not self._curious:
                if self._closing:
                    return None
                self._changed.wait()
            if self._queue:
                self._take_batch(self._queue.popleft())
            curious, self._curious = self._curious, []
            return curious

    def _take_batch(self, first: _Waiting) -> None:
        self._under_way = batch = [first]
        rows = first.rows
        until = time.monotonic() + (0.0 if self._queue else self._max_wait_s)
        while True:
            while self._queue and self._queue[0].kind == first.kind and rows + self._queue[0].rows <= self._max_batch:
                batch.append(self._queue.popleft())
                rows += batch[-1].rows
            patience_s = until - time.monotonic()
            enough = self._queue or rows >= self._max_batch or len(batch) >= self._usual
            if enough or self._closing or patience_s <= 0:
                break
            self._changed.wait(patience_s)
        self._usual = len(batch)

    def _answer(self, curious: Sequence[Future[ParameterVersion | None]]) -> None:
        self.stamp = stamp = self._source.refresh()
        for future in curious:
            _settle(future, stamp)
        batch = [waiting for waiting in self._under_way if self._still_wanted(waiting)]
        if stamp is None:
            for waiting in batch:
                _fail(waiting.future, NotReady())
        elif len(batch) < 2 or not self._answer_together(batch, stamp):
            for waiting in batch:
                self._answer_together([waiting], stamp)

    def _still_wanted(self, waiting: _Waiting) -> bool:
        if not waiting.future.set_running_or_notify_cancel():
            return False
        if time.monotonic() > waiting.deadline:
            _fail(waiting.future, HttpError(f"the request has waited for more than {self.timeout_s:g} s", 503))
            return False
        return True

    def _answer_together(self, batch: Sequence[_Waiting], stamp: ParameterVersion) -> bool:
        """Whether one forward has answered them all; a single request is answered in any case, if by a Refusal."""
        rows = sum(waiting.rows for waiting in batch)
        try:
            outputs = self._call(joined([waiting.inputs for waiting in batch]), rows)
        except Exception as error:
            if len(batch) > 1:
                return False
            if not isinstance(error, HttpError):
                log.exception("a request could not be answered")
                error = HttpError(f"the model failed with {type(error).__name__}; the predictor's log says more", 500)
            log.debug("a request was refused", exc_info=True)
            _fail(batch[0].future, error)
            return True
        finite = all(map(is_finite, outputs.values()))
        start = 0
        for waiting in batch:
            own = cut(outputs, start, start + waiting.rows)
            start += waiting.rows
            broken = [] if finite else [name for name, value in own.items() if not is_finite(value)]
            if broken:
                _fail(waiting.future, _overflow(broken[0], waiting.inputs, stamp))
            else:
                _settle(waiting.future, Prediction(own, stamp))
        return True

    def _call(self, inputs: dict[str, Value], rows: int) -> dict[str, Value]:
        """At most `max_batch` rows at a time, so that a large request takes no more memory than a full batch."""
        parts = []
        for start in range(0, rows, self._max_batch):
            stop = min(rows, start + self._max_batch)
            outputs = call(self._models, self._predict, cut(inputs, start, stop) if rows > self._max_batch else inputs)
            check_rows(outputs, stop - start, self._predict)
            parts.append(outputs)
        if len({kind_of(part) for part in parts}) > 1:
            raise HttpError(
                "the outputs for some of the rows differ in shape from those for others; ask for fewer", 500
            )
        return joined(parts)


def _overflow(output: str, inputs: Mapping[str, Value], stamp: ParameterVersion) -> HttpError:
    """An output that is not finite is the model's fault, unless the inputs are so large that any model would fail."""
    sentence = f"output {output!r} holds NaN or infinity, with the parameters of step {stamp.step}"
    largest = max(map(magnitude, inputs.values()), default=0.0)
    if largest < LARGE:
        return HttpError(sentence, 500)
    return HttpError(f"{sentence}: the inputs go up to {largest:.3g}; scale them as the training does", 400)


def _closing() -> HttpError:
    return HttpError("the predictor is closing", 503)


def _settle(future: Future[Any], result: Any) -> None:
    try:
        future.set_result(result)
    except InvalidStateError:  # refused by `close`, or cancelled, in the meantime
        return


def _fail(future: Future[Any], error: Exception) -> None:
    # Its frames know the future and the inputs: a circle that would keep a large request until the garbage collector.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    try:
        future.set_exception(error)
    except InvalidStateError:
        return
