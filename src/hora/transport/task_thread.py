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

    __slots__ = ("_result", "_running", "done", "ended", "error", "name", "seconds", "waited_for")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seconds = self.ended = 0.0
        self.error: BaseException | None = None
        self.waited_for = False  # whether an error was raised where the task is waited for
        self.done = False
        self._result: Any = None
        self._running = threading.Lock()  # held until it is done: an Event would cost several times as much
        self._running.acquire()

    def wait(self) -> Any:
        with self._running:
            self.waited_for = True
        if self.error is not None:
            raise self.error
        return self._result

    def wait_done(self, timeout_s: float = -1) -> bool:
        """Blocks for at most `timeout_s`, if that is given; tells whether the task is done. Raises nothing."""
        if self._running.acquire(timeout=timeout_s):
            self._running.release()
        return self.done

    def finish(self) -> None:
        """The task is done, with what was set before."""
        self.done = True
        self._running.release()


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
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._num_done = 0  # written by the thread alone
        self._seconds = 0.0
        self._error: BaseException | None = None

    @property
    def idle(self) -> bool:
        """Whether every task that was submitted is done."""
        return self._num_done == self._num_submitted

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Callable[[], Any], name: str = "") -> TaskHandle:
        """Queues `work`; does not block."""
        handle = TaskHandle(name)
        with self._lock:
            self._num_submitted += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put((handle, work))
        return handle

    def join(self) -> float:
        """Blocks until all tasks are done. Returns the seconds they took since the last `join`, or raises what
        stopped them."""
        if not self.idle:
            self.submit(lambda: None).wait_done()
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
        self._seconds += handle.seconds
        self._num_done += 1
        handle.finish()
