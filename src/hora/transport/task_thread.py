"""TaskThread: a daemon thread that runs tasks one after the other, and the handle that each task returns."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class TaskHandle:
    """A task on a TaskThread. `wait()` blocks until it is done and returns its result or raises its error.

    `seconds` is how long the task took and `ended` when it ended (time.perf_counter), once it is done.
    """

    __slots__ = ("_finished", "_result", "ended", "error", "name", "seconds", "waited_for")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seconds = self.ended = 0.0
        self.error: BaseException | None = None
        self.waited_for = False  # whether an error was raised where the task is waited for
        self._finished = threading.Event()
        self._result: Any = None

    @property
    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> Any:
        self._finished.wait()
        self.waited_for = True
        if self.error is not None:
            raise self.error
        return self._result

    def wait_done(self, timeout_s: float) -> bool:
        """Blocks for at most `timeout_s`; tells whether the task is done. Raises nothing."""
        return self._finished.wait(timeout_s)


class TaskThread:
    """Runs tasks in the order in which they were submitted, by any thread. The thread starts with the first task.

    `on_idle` is called after a task when no other is queued, as a part of it: its error is the task's. `on_error` gets
    the handle of a task that failed. With `stop_on_error` the tasks after it are skipped until `join` has raised the
    error.
    """

    def __init__(
        self,
        name: str,
        *,
        on_idle: Callable[[], None] | None = None,
        on_error: Callable[[TaskHandle], None] | None = None,
        stop_on_error: bool = False,
    ) -> None:
        self._name = name
        self._on_idle = on_idle
        self._on_error = on_error
        self._stop_on_error = stop_on_error
        self._tasks: queue.SimpleQueue[tuple[TaskHandle, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_open = 0
        self._changed = threading.Condition()
        self._seconds = 0.0
        self._error: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether every task that was submitted is done."""
        return not self._num_open

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], Any], name: str = "") -> TaskHandle:
        """Queues `work`; does not block."""
        handle = TaskHandle(name)
        with self._changed:
            self._num_open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put((handle, work))
        return handle

    def join(self) -> float:
        """Blocks until all tasks are done. Returns the seconds they took since the last `join`, or raises what
        stopped them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open)
            seconds, self._seconds = self._seconds, 0.0
            error, self._error = self._error, None
        if error is not None:
            raise error
        return seconds

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the thread after the tasks that are queued; waits at most `timeout_s` for that."""
        self._tasks.put(None)
        if self._thread is not None and timeout_s > 0 and not self.is_current:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._do(*task)
            del task  # its tensors must not stay until the next one comes

    def _do(self, handle: TaskHandle, work: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        try:
            if self._error is None:
                handle._result = work()
                if self._on_idle is not None and self._tasks.empty():
                    self._on_idle()
        except BaseException as error:
            handle.error = error
            if self._stop_on_error:
                self._error = error
        handle.ended = time.perf_counter()
        handle.seconds = handle.ended - begin
        if handle.error is not None and self._on_error is not None:
            self._on_error(handle)
        with self._changed:
            self._seconds += handle.seconds
            self._num_open -= 1
            self._changed.notify_all()
        handle._finished.set()
