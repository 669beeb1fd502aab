"""DeviceSync: ReplicatedSync where all parameters lie on one GPU. The host waits for nothing between the start of
backward and the end of the optimizer's step; what the workers conclude is read a step late.

    backward     DeviceReducer averages buckets on a side stream, then the status, and leaves a verdict on the device
    step()       a fused optimizer gets the verdict as `found_inf`: with 1 it changes nothing. Any other waits for it
    next forward the status and the verdict of the step before the last are read; a step that was not taken is an error

A worker waits at once where it must know at once: its gradient of a parameter is missing, or `job.weight` was used, or
buffers have changed, or a worker has no samples. A watchdog says where the GPU waits for a peer, so that ranks compare
their calls; an abort releases the GPU, and the verdict is 1.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from typing import TYPE_CHECKING

import torch

from ...collectives.deadlock import WaitScope
from ...collectives.device import DeviceComm, open_comm
from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.buckets import Bucket
from ...parameters.registry import ParameterRegistry
from ...transport.base import LONG_WAIT_S, BoundedWait
from ..common import nonfinite
from ..common.hooks import TrainingHooks
from ..common.step_status import StepStatus
from ..common.sync import ExchangeCancelled, LoopEvent, Snapshot, StepOutcome
from .device_reducer import DeviceReducer, Record
from .replicated import ReplicatedSync, check_together

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)

WATCH_S = 0.05
CLOSE_S = 2.0
LATE = 2  # exchanges after which every worker has read a status


@dataclasses.dataclass
class _Unread:
    """An exchange whose outcome was not read yet."""

    record: Record
    mine: StepStatus
    exchange: int
    step: int = 0  # that was counted after it; 0: none was
    bad: bool | None = None  # the verdict, if it was read before the step


class DeviceSync(ReplicatedSync):
    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: AllReduce) -> None:
        super().__init__(registry, hooks, strategy)
        self._comm: DeviceComm | None = None
        self._unread: collections.deque[_Unread] = collections.deque()
        self._newest: _Unread | None = None
        self._stop_at = 0  # the exchange after which all stop, 0: none
        self._marked: list[torch.optim.Optimizer] = []  # they have the verdict as found_inf
        self._closing = threading.Event()
        self._watching: threading.Thread | None = None

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        super().bind(group)
        if self.group is None or self.strategy.wire != "fp32":
            return
        self._comm = self._plans.comm = open_comm(
            self._group, self.registry.parameters[0].device, self.strategy.algorithm
        )
        if self._comm is not None:
            self._watching = threading.Thread(target=self._watch, name="hora-gpu-watch", daemon=True)
            self._watching.start()
            self._group.on_close.append(self._end_watch)

    def unbind(self) -> None:
        if self._comm is not None:
            self._end_watch()
            self._unread.clear()
            self._newest = None
            self._backward.unhook()
            self._plans.close()
            self._comm.close()
            self._comm = self._plans.comm = None
        super().unbind()

    def _end_watch(self) -> None:
        """A thread that is inside of CUDA when Python ends would abort the process."""
        self._closing.set()
        if self._watching is not None:
            self._watching.join(CLOSE_S)
            self._watching = None

    def _watch(self) -> None:
        """On a thread of its own: tells the other ranks where the GPU waits, if it does so for long."""
        group, closing, wait, watched = self._group, self._closing, None, None
        while not closing.wait(WATCH_S):
            newest = self._newest
            if newest is None or newest.record.arrived:
                wait = None
            elif newest is not watched or wait is None:
                wait, watched = BoundedWait(group.transport, tuple(group.others)), newest
            if group.deadlocks is not None:
                late = wait is not None and time.monotonic() - wait.started > LONG_WAIT_S
                scope = group.wait_scope
                group.deadlocks.beside = scope if late and isinstance(scope, WaitScope) else None
            if wait is not None:
                try:
                    wait.check()
                except HoraError as error:
                    group.consistency.abort(error)
                    return

    # -- backward ----------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        super().before_forward()
        if len(self._unread) > 1 and torch.is_grad_enabled():
            try:
                self._read(keep=1)
            except ExchangeCancelled as cancelled:
                self.halt(str(cancelled))

    def _launch(self, bucket: Bucket) -> None:
        reducer = self._plans.reducer
        if not isinstance(reducer, DeviceReducer):
            super()._launch(bucket)
            return
        parameters = [self.registry.parameters[segment.index] for segment in bucket.segments]
        grads = [parameter.grad for parameter in parameters]
        reducer.launch(bucket, grads, self._accumulation.weight / self._group.size)
        for segment, parameter, grad, view in zip(
            bucket.segments, parameters, grads, reducer.views(bucket), strict=True
        ):
            if grad is None:
                self._grads.missing.add(segment.index)
            parameter.grad = view
        self._launched = bucket.number + 1

    # -- the status --------------------------------------------------------------------------------------------------

    def _exchange_status(self) -> None:
        reducer = self._plans.reducer
        if not isinstance(reducer, DeviceReducer):
            super()._exchange_status()
            return
        mine = self._status()
        if not self._buffers_by_host:
            mine = dataclasses.replace(mine, buffers=0.0)
            reducer.broadcast(list(self.registry.buffers.values()))
        unread = self._newest = _Unread(reducer.conclude(mine.row()), mine, self.hooks.num_exchanges)
        self.traffic.num_exchanges += 1
        if (
            self._grads.missing
            or self._unfrozen
            or mine.weight != mine.expected
            or self._buffers_by_host
            or 0 < self.hooks.batch.present < self._group.size
        ):
            self._read()
            status, unread.bad = self._take(unread)
            self._note_stop(status, unread)
            self._conclude(dataclasses.replace(status, stop=0.0))
        else:
            self._unread.append(unread)
            self._close_exchange()
            self.outcome = StepOutcome()
        self.outcome.stop = 0 < self._stop_at <= self.hooks.num_exchanges

    @property
    def _buffers_by_host(self) -> bool:
        """Else rank 0's buffers are sent with every exchange, as DDP sends them."""
        buffers, device = self.registry.buffers.values(), self.registry.parameters[0].device
        return self.strategy.sync_buffers != "rank0" or any(buffer.device != device for buffer in buffers)

    def _take(self, unread: _Unread) -> tuple[StepStatus, bool]:
        """Blocks until the outcome of an exchange is here: the sum of all workers' status, and the verdict."""
        begin = time.perf_counter()
        row, bad = unread.record.read(self._group.transport.check)
        self._group.transport.check()
        self.traffic.exposed_s += unread.record.exposed_s()
        self.traffic.comm_s += time.perf_counter() - begin
        return StepStatus.of(row), bad

    def _read(self, keep: int = 0) -> None:
        """Reads the outcome of all exchanges but the `keep` newest."""
        while len(self._unread) > keep:
            unread = self._unread[0]
            status, bad = self._take(unread)
            check_together(self._group, status, unread.mine)
            self._unread.popleft()
            if abs(status.weight - status.expected) > 1e-6 * status.expected:
                raise HoraError(
                    f"job.weight() changed the weight of step {unread.step} on some workers only: on GPUs every worker "
                    "calls it in the same steps"
                )
            self._note_stop(status, unread)
            if bad and unread.bad is None and self.hooks.on_nonfinite != "poison":
                self.hooks.step -= bool(unread.step)
                self._refuse(unread.step or self.hooks.step + 1, late=True)

    def _note_stop(self, status: StepStatus, unread: _Unread) -> None:
        """Workers may read it at different times, and stop after the same step: when all have read it."""
        if status.stop and not self._stop_at:
            self._stop_at = unread.exchange + LATE

    # -- the step ----------------------------------------------------------------------------------------------------

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        newest = self._newest
        if newest is None:
            return
        record = newest.record
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if newest.bad is None and not fused:
            newest.bad = record.read(self._group.transport.check)[1]
        if newest.bad:
            self._refuse(self.hooks.step + 1)
        elif fused:
            found = getattr(optimizer, "found_inf", None)  # a scaler's
            if found is None:
                self._marked.append(optimizer)
            verdict = record.verdict if found is None else torch.maximum(record.verdict, found)
            optimizer.found_inf = verdict  # type: ignore[attr-defined]

    def _refuse(self, step: int, late: bool = False) -> None:
        """The optimizer must not take this step; `late`: it did not, and gradients are those of the next one."""
        self._group.transport.check()  # an aborted exchange has its cause
        names = [
            self.registry.names[index] for index in self._backward.watched
            if not late and (grad := self.registry.parameters[index].grad) is not None and not nonfinite.is_finite(grad)
        ]  # fmt: skip
        what = f"the mean gradient of {nonfinite.listed(names)}" if names else "a gradient"
        text = f"{what} in step {step} is not finite"
        if self.hooks.on_nonfinite == "raise":
            raise HoraError(f"{text} {nonfinite.ADVICE}")
        if not late:
            self.outcome.skipped = text
        self.hooks.on_skipped(text)
        if self._group.rank == 0:
            log.warning("%s: this step is not taken", text)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._after_step(optimizer)
        if optimizer in self._marked:
            self._marked.remove(optimizer)
            del optimizer.found_inf  # type: ignore[attr-defined]
        if self._unread and optimizer is self.registry.optimizers[0]:
            self._unread[-1].step = self.hooks.step + 1

    def _drop(self) -> None:
        """Steps that were counted and changed nothing, since their exchange was broken off, do not count."""
        until = time.monotonic() + LONG_WAIT_S
        while self._unread:
            unread = self._unread.popleft()
            while not unread.record.arrived and time.monotonic() < until:
                time.sleep(WATCH_S / 10)
            if not unread.record.arrived and self._comm is not None:
                self._comm.abort(HoraError(self.hooks.halted))
            self.hooks.step -= bool(unread.step) and unread.record.read(lambda: None)[1]
        super()._drop()

    # -- loops -------------------------------------------------------------------------------------------------------

    def join(self, event: LoopEvent) -> None:
        super().join(event)
        if event is LoopEvent.ENTERED:
            self._stop_at = 0  # a run that was restored goes on
        elif event is not LoopEvent.CLOSED:
            self._read_all()

    def _read_all(self) -> None:
        if self.group is not None and not self.hooks.halted:
            self._read()
            self.outcome.stop |= bool(self._stop_at)

    def snapshot(self, complete: bool = True) -> Snapshot:
        self._read_all()
        return super().snapshot(complete)
