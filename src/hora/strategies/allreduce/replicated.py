"""ReplicatedSync: after backward every worker holds the mean gradient and updates all parameters by itself (as DDP).

One exchange:

    launch      as backward completes buckets, each is handed to the reducer; at the end of backward the rest follows
    finish      the reducer is waited for; sparse gradients are gathered
    status      one small sum (StepStatus): which gradients any worker had, the weights of all samples, whether a
                gradient is not finite, whether a worker wants to stop or has new buffers
    conclude    all workers draw the same conclusions from it

When the weights do not add up to what the deal of samples promised (`job.weight` was used), `conclude` corrects the
mean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...monitor import spans
from ...parameters.buckets import Bucket
from ...parameters.optimizer_state import collect, load
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import balanced_shards
from ..common import compression, nonfinite, sparse
from ..common.accumulation import scale_gradients
from ..common.hooks import TrainingHooks
from ..common.step_status import StepStatus, difference
from ..common.sync import ExchangeCancelled, Snapshot, StepOutcome, Sync, SyncReport
from .bucket_plans import BucketPlans, Shards
from .buffers import BufferBroadcast
from .flat_gradients import FlatGradients, broadcast_gradients
from .reducers import NonfiniteGrads, Reducer

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)


class ReplicatedSync(Sync):
    keep = True  # every worker gets all of the mean, not only its own shard
    binds_alone = False  # a single worker goes the whole way too; for benchmarks

    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: AllReduce) -> None:
        super().__init__(registry, hooks)
        self.strategy = strategy
        self._accumulation = hooks.accumulation
        self._plans = BucketPlans(registry, self._backward, strategy, self.keep, self.traffic)
        self._grads = FlatGradients(registry)
        self._launched = -1  # buckets on their way, -1 outside of an exchange
        self._unfrozen: list[int] = []  # what this exchange carries besides its buckets
        self._nonfinite_grads: NonfiniteGrads = []
        self._factor = 1.0  # by which the last exchange was corrected
        self._stepped: set[int] = set()  # optimizers (by id) that have stepped since the last exchange
        self._num_steps = 0  # of all optimizers
        self._buffers = BufferBroadcast(registry, strategy.sync_buffers)

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        compression.warn_of_one_host(self.strategy.wire, group)
        if group.size == 1 and not self.binds_alone:
            return  # a group without peers binds no buckets
        self.registry.agree(group)
        self.home = group
        self.group = group.clone()
        self.group.describe_wait = lambda: f"averaging gradients in step {self.hooks.step + 1}"
        self._buffers.remember()
        self._backward.hook()

    def unbind(self) -> None:
        self._backward.unhook()
        self._plans.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    def describe(self) -> SyncReport:
        group, sent_to = self.group, {}
        if group is not None:
            sent = group.sent_bytes
            sent_to = {peer: sent[peer] + self._plans.read_by(peer) for peer in group.others}
        summary = self._plans.savings.describe(self.strategy.wire, self.hooks.num_exchanges, "step")
        return SyncReport(sent_to=sent_to, summary=summary)

    # -- backward ----------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        if self.group is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # the last: an activation checkpoint recomputes inside a backward
        if self._backward.running:  # the last one was broken off by an exception that the user caught
            if self._launched > 0:
                raise HoraError(
                    "the last backward() broke off half-way; the other workers still wait for its gradients"
                )
            self._backward.forget()
            self._launched = -1
        self._accumulation.forget_cleared()
        self.registry.check_unchanged()
        self._hook_trained()

    def _hook_trained(self) -> None:
        """Hooks for parameters that were unfrozen; none for frozen ones, unless their gradients are still to go."""
        if self._backward.hook(keep=bool(self._accumulation)):
            self._plans.switch()

    def after_forward(self, output: Any) -> None:
        if self.group is not None:
            super().after_forward(output)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self.group is not None:
            self._backward.expect_end()

    def bucket_ready(self, bucket: Bucket) -> None:
        if self._plans.eager and not self.hooks.halted:
            try:
                self._begin()
                self._launch(bucket)
            except ExchangeCancelled as cancelled:
                self.hooks.halted = str(cancelled)

    def after_backward(self, shadow: bool = False) -> None:
        if self.group is None:
            return
        if shadow:
            if not self._accumulation:
                for parameter in self.registry.parameters:
                    parameter.grad = None  # the last step's, which the user's loop would clear only now
            self._exchange(new_backward=False)
        elif self.silent:
            self._accumulation.add()
            self._accumulation.mark(self.registry.parameters[index] for index in self._backward.watched)
        else:
            self._exchange()

    # -- the exchange ------------------------------------------------------------------------------------------------

    def _exchange(self, new_backward: bool = True) -> None:
        """Does what is left until `p.grad` is the mean. `new_backward`: one has ended that is not accumulated yet."""
        try:
            if not self.hooks.halted:
                if new_backward:
                    self._accumulation.add()
                self._reduce_all()
        except ExchangeCancelled as cancelled:
            self.hooks.halted = str(cancelled)
        if self.hooks.halted:
            self._drop()

    def _reduce_all(self) -> None:
        self._unfrozen = self._backward.unwatched
        if self._unfrozen and self._launched < 0:
            self._hook_trained()
            self._unfrozen = []
        self._begin()
        for bucket in self._backward.buckets[self._launched :]:
            self._launch(bucket)
        self._reducer.finish()
        self._grads.write_back()
        for index in self._plans.sparse:
            self._reduce_sparse(index)
        self._nonfinite_grads = [
            (rank, index) for rank, index in self._reducer.nonfinite_grads() if not self._is_finite(index)
        ]
        self._reduce_unfrozen()
        self._exchange_status()

    def _is_finite(self, index: int) -> bool:
        """A reducer may suspect a sum that is merely large; its elements decide."""
        grad = self.registry.parameters[index].grad
        return grad is None or bool(torch.isfinite(grad).all())

    def _begin(self) -> None:
        if self._launched < 0:
            with self._group.part_of_call():
                self._check_gradients()
            self._count_exchange()
            self._launched = 0
            self._grads.clear()
            self._grads.missing.clear()
            (self._plans.reducer or self._plans.make(self._group, self._shards())).open()

    def _check_gradients(self) -> None: ...

    def _count_exchange(self) -> None:
        self.hooks.num_exchanges += 1
        self.hooks.exchanging = True
        self.hooks.before_exchange()

    def _launch(self, bucket: Bucket) -> None:
        views = [self._grad(segment.index)[segment.start : segment.stop] for segment in bucket.segments]
        self._reducer.launch(bucket, views, self._accumulation.weight / self._group.size)
        self._launched = bucket.number + 1

    def _grad(self, index: int) -> torch.Tensor:
        return self._grads[index]

    def _reduce_sparse(self, index: int) -> None:
        parameter, name = self.registry.parameters[index], self.registry.names[index]
        if parameter.grad is None:
            self._grads.missing.add(index)
        parameter.grad = sparse.mean(self._group, parameter, name, self._accumulation.weight)

    def _reduce_late(self) -> None:
        """Only parameters that were unfrozen since: the rest has been reduced, and perhaps clipped."""
        self._unfrozen, self._nonfinite_grads = self._backward.unwatched, []
        try:
            self._count_exchange()
            self._grads.missing.clear()
            self._reduce_unfrozen()
            scale_gradients(self._parameters(self._unfrozen), self._factor)
            self._exchange_status()
        except ExchangeCancelled as cancelled:
            self.halt(str(cancelled))

    def _reduce_unfrozen(self) -> None:
        """Parameters without a hook when they got their gradient: they were unfrozen after the forward."""
        for index in self._unfrozen:
            flat = self._grad(index)
            if not bool(torch.isfinite(flat).all()):
                self._nonfinite_grads.append((self._group.rank, index))
            if self._accumulation.weight != 1.0:
                flat.mul_(self._accumulation.weight)
            name = f"gradient of {self.registry.names[index]}"
            self._group.all_reduce(flat, "mean", self.strategy.algorithm, name=name)
        self._grads.write_back()

    # -- the status --------------------------------------------------------------------------------------------------

    def _exchange_status(self) -> None:
        mine = self._status()
        begin = time.perf_counter()
        pending = mine.post(self._group, f"status {self._backward.fingerprint}")
        status = pending.read()
        self.traffic.spend(begin)
        self.traffic.num_exchanges += 1
        if spans.on:
            spans.add(spans.TRAINING, "waiting", spans.since(begin), what="step status")
        self._conclude(status)

    def _status(self) -> StepStatus:
        for index in self._plans.sparse:
            grad = self.registry.parameters[index].grad
            if grad is not None and not bool(torch.isfinite(grad._values()).all()):
                self._nonfinite_grads.append((self._group.rank, index))
        return StepStatus(
            generation=self._group.generation,
            loop=self.hooks.loop,
            step=self._num_steps,
            weight=self._accumulation.total,
            expected=self._accumulation.total_expected,
            stop=self.hooks.stop_wanted,
            nonfinite=len(self._nonfinite_grads),
            buffers=self._buffers.must_share(self._group.rank),
            holders=[float(index not in self._grads.missing) for index in self._counted],
        )

    @property
    def _counted(self) -> list[int]:
        return self._backward.watched + self._unfrozen

    def _conclude(self, status: StepStatus) -> None:
        """All workers draw the same conclusions from the same numbers."""
        for index, count in zip(self._counted, status.holders, strict=True):
            if not count:
                self._grads.drop_missing(index)
        self._close_exchange()
        self.outcome = StepOutcome(stop=bool(status.stop))
        if self._plans.reducer is not None:
            self._plans.reducer.settle(counts=not status.nonfinite)
        check_together(self._group, status, StepStatus(loop=self.hooks.loop, step=self._num_steps))
        settled = self._unfrozen
        if status.weight:  # not where only unfrozen parameters were reduced
            settled, self._factor = self._counted, status.expected / status.weight
            if status.weight != status.expected:
                self._correct(self._factor)
        if self._unfrozen:
            self._unfrozen = []
            self._hook_trained()
        if status.nonfinite:
            self._report_nonfinite()
        if status.buffers:
            self._buffers.share(self._group)
        self._settle(settled)

    def _close_exchange(self) -> None:
        """This worker's part in the exchange is over."""
        self._launched = -1
        self._grads.clear()
        self._accumulation.clear()
        self._stepped.clear()
        self._backward.passed = False
        self._backward.running = False
        self.hooks.exchanging = False

    def _correct(self, factor: float) -> None:
        scale_gradients(self._parameters(self._counted), factor)

    def _parameters(self, indices: Iterable[int]) -> list[torch.nn.Parameter]:
        return [self.registry.parameters[index] for index in indices]

    def _settle(self, indices: Iterable[int]) -> None: ...

    def _report_nonfinite(self) -> None:
        """Collective: names the worker and the gradient; the step is not taken."""
        text = nonfinite.sentence(self._group, self.registry, self._nonfinite_grads)
        if self.hooks.on_nonfinite == "raise":
            raise HoraError(f"{text} {nonfinite.ADVICE}")
        if self.hooks.on_nonfinite == "poison":
            nonfinite.poison(self.registry.optimizers)
            log.debug("%s; the scaler skips this step", text)
            return
        self.outcome.skipped = text
        if self._group.rank == 0:
            log.warning("%s: this step is not taken", text)

    # -- the step ----------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.group is None:
            return True
        self.registry.check_optimizer(optimizer)
        if self.hooks.halted:
            self._drop()
            return False
        idle = id(optimizer) in self._stepped or not self.hooks.num_exchanges  # no exchange since its last step
        if self._backward.running:  # its end was not seen: all of it ran inside reentrant activation checkpoints
            self._exchange()
        elif self._accumulation:
            self._exchange(new_backward=False)
        elif idle and (self._backward.passed or self._backward.unwatched):
            self._exchange()  # gradients by torch.autograd.grad, or only of parameters unfrozen after the forward
        elif idle:
            raise HoraError(
                f"{type(optimizer).__name__}.step() without a backward() since the last one: there is no gradient to "
                "apply. Call loss.backward() first, or leave the step out on every worker"
            )
        elif self._backward.unwatched and not self.outcome.skipped:
            self._reduce_late()
        self._stepped.add(id(optimizer))
        return not self.hooks.halted and not self.outcome.skipped

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps += 1

    def _drop(self) -> None:
        for parameter in self.registry.parameters:
            parameter.grad = None
        if self.hooks.on_nonfinite == "poison":  # a scaler wants to see gradients, and skips a step with these
            for optimizer in self.registry.optimizers:
                first = next((p for group in optimizer.param_groups for p in group["params"] if p.requires_grad), None)
                if first is not None:
                    first.grad = torch.full_like(first, float("inf"))
        self._launched = -1
        self._accumulation.clear()
        self._backward.running = False
        self.hooks.exchanging = False

    def _share_gradients(self) -> None:
        broadcast_gradients(self.registry, self._group)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        return Snapshot(self.registry.parameter_dict(), self.registry.buffer_dict(), collect(self.registry))

    def restore(self, snapshot: Snapshot) -> None:
        self.registry.load(snapshot.parameters, snapshot.buffers)
        self._plans.forget()
        self._buffers.remember()
        load(self.registry, snapshot.states, self._fitting)

    def _fitting(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's optimizer state as this worker holds it."""
        return state

    def _shards(self) -> Shards:
        return balanced_shards(self.registry.parameters, self._group.size)

    @property
    def _reducer(self) -> Reducer:
        return cast(Reducer, self._plans.reducer)

    @property
    def _group(self) -> Group:
        return cast(Group, self.group)


def check_together(group: Group, status: StepStatus, mine: StepStatus) -> None:
    """Raises if the sum of all workers' status says that one of them was elsewhere than `mine`."""
    if status.loop != mine.loop * group.size:
        way_out = "did one leave its loop or skip a backward()?"
        raise ExchangeCancelled(difference(group, int(mine.loop), "loops have begun", way_out))
    if status.step != mine.step * group.size:
        way_out = "every worker must call optimizer.step() after the same backward()"
        raise HoraError(difference(group, int(mine.step), "steps were taken", way_out))
