"""CallExecutor: plans and numbers the calls of a group and runs them in order, on the caller's thread or beside it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..coordinator import CoordinatorConnection
from ..errors import HoraError
from ..transport import RegisteredBuffer, Transfer, Transport
from ..transport.base import ARRIVED, COLLECTIVES, Combine
from ..transport.task_thread import TaskHandle, TaskThread
from .consistency import CallPlan, ConsistencyChecker, SubgroupChecker
from .deadlock import DeadlockDetector
from .tensors import TransferHandle

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # how long `close` waits for calls in progress
MAX_PLANS = 4096  # more come from names that change with every call


class CallExecutor:
    """The base of Group. With `parent`, the group is a part of that one and fails with it.

    `before_call` is called before each call. `describe_wait` says what the calls are for, as in "averaging gradients in
    step 57"; errors and warnings then say this instead of the call. `wait_scope` is the context for code that waits for
    the group outside of a call.
    """

    def __init__(
        self,
        transport: Transport,
        control: CoordinatorConnection,
        parent: CallExecutor | None,
        deadlocks: DeadlockDetector | None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.control = control
        self.before_call: Callable[[], None] | None = None
        self.describe_wait: Callable[[], str] | None = None
        self.deadlocks = deadlocks
        self.wait_scope: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        self.consistency: ConsistencyChecker
        if parent is None:
            self.consistency = ConsistencyChecker(transport, control)
        else:
            self.consistency = SubgroupChecker(transport, control, parent.consistency)
        self.consistency.describe = lambda: self.describe_wait() if self.describe_wait is not None else None
        if deadlocks is not None:
            self.consistency.on_long_wait = deadlocks.on_long_wait
            name, doing = transport.spec.name, self.consistency.doing
            self.wait_scope = deadlocks.scope(name, doing, lambda: transport.cause is not None)
        self._plans: dict[tuple[Any, ...], CallPlan] = {}
        self._in_call = threading.RLock()
        self._failed: list[TaskHandle] = []
        self._calls = TaskThread("hora-group", on_error=self._failed.append)
        self._transfers = TaskThread("hora-transfers")

    # -- calls of one part -------------------------------------------------------------------------------------------

    def _plan(self, key: tuple[Any, ...], text: str, run: Callable[[Any], Any], name: str | None = None) -> CallPlan:
        """The plan under `key`, which must determine the other arguments."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) > MAX_PLANS:
                self._plans.clear()
            text = f"{text} named {name!r}" if name is not None else text
            plan = self._plans[key] = CallPlan(self.transport.spec.name, text, run)
        return plan

    def _call(
        self, key: tuple[Any, ...], text: str, run: Callable[[Any], Any], name: str | None, argument: Any, wait: bool
    ) -> Any:
        return self._issue(self._plan(key, text, run, name), argument, wait)

    def _issue(self, plan: CallPlan, argument: Any, wait: bool) -> Any:
        """Makes the call: returns its result, or with `wait=False` a handle at once. Calls keep their order."""
        if self.before_call is not None:
            self.before_call()
        if not wait or self.size == 1:
            return self._dispatch(plan, argument, wait)
        with self.wait_scope:
            return self._dispatch(plan, argument, wait)

    def _dispatch(self, plan: CallPlan, argument: Any, wait: bool) -> Any:
        if wait and (self._calls.idle or self._calls.is_current):
            with self._in_call:
                return self._run(plan, argument)
        if isinstance(argument, torch.Tensor) and argument.is_cuda:
            torch.cuda.current_stream(argument.device).synchronize()  # the thread has a stream of its own
        inference = torch.is_inference_mode_enabled()
        handle = self._calls.submit(lambda: self._run_beside(plan, argument, inference), plan.text)
        return handle.wait() if wait else handle

    def _run_beside(self, plan: CallPlan, argument: Any, inference: bool) -> Any:
        """On the group's thread, while the caller computes."""
        with self._in_call, torch.inference_mode(inference):
            self.transport.background = True
            try:
                return self._run(plan, argument)
            finally:
                self.transport.background = False

    def _run(self, plan: CallPlan, argument: Any) -> Any:
        self.consistency.begin(plan)
        try:
            return plan.run(argument)
        except ValueError:
            raise  # the caller's mistake, refused by every rank before it sent a message
        except BaseException as error:
            self._abort_call(error)
            raise

    def _abort_call(self, error: BaseException) -> None:
        me, doing = self.transport.name_of(self.rank), self.consistency.doing()
        message = f"{me} failed {doing}: {type(error).__name__}: {error}"
        self.consistency.abort(error if isinstance(error, HoraError) else HoraError(message))

    # -- calls of many parts -----------------------------------------------------------------------------------------

    def begin_call(self, text: str) -> None:
        """Begins a call that is made of many parts; they carry its fingerprint, and it ends with the next call."""
        self.consistency.begin(self._plan(("begin_call", text), text, lambda _: None))

    @contextlib.contextmanager
    def part_of_call(self) -> Iterator[None]:
        """Around each part of such a call: an error inside aborts the group on every rank."""
        try:
            yield
        except BaseException as error:
            self._abort_call(error)
            raise

    # -- what the algorithms use -------------------------------------------------------------------------------------

    def send_chunk(self, peer: int, flat: torch.Tensor) -> Transfer:
        """Sends a piece of the call in progress."""
        return self.transport.send(peer, flat, COLLECTIVES, self.consistency.fingerprint)

    def recv_chunk(self, peer: int, flat: torch.Tensor, combine: Combine | None = None) -> Transfer:
        """Receives a piece of the call in progress; `combine` reduces it into `flat` instead of replacing it."""
        return self.transport.recv(peer, flat, COLLECTIVES, self.consistency.fingerprint, combine)

    def arrive_and_wait(self, buffer: RegisteredBuffer, epoch: int) -> None:
        """Signals that this rank has arrived in the epoch, waits for all, and compares the fingerprints."""
        fingerprint, value = self.consistency.fingerprint, 4 * epoch + ARRIVED
        buffer.signal(value, fingerprint)
        buffer.await_all(value)
        for peer in self.others:
            if buffer.fingerprint_of(peer, value) != fingerprint:
                raise self.consistency.mismatch(peer, COLLECTIVES)

    # -- point-to-point transfers ------------------------------------------------------------------------------------

    def _finish_transfer(
        self, transfer: Transfer, tensor: torch.Tensor, finish: Callable[[], None] | None, wait: bool
    ) -> Any:
        handle = TransferHandle(transfer, tensor, finish)
        if wait:
            return handle.wait()
        if not transfer.done:  # it goes on while the caller does something else, for example a collective
            self._transfers.submit(transfer.wait)
        return handle

    def _close_executor(self) -> None:
        self._calls.close(CLOSE_S)
        self._transfers.close()
        for handle in self._failed:
            if not handle.waited_for:
                log.error("%s failed, and its handle was never waited for: %s", handle.name, handle.error)
        self._plans.clear()
