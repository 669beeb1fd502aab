"""Replicated: after backward every worker holds the mean gradient and updates all parameters by itself.

One exchange, traced: as backward completes buckets, each is handed to the courier; at its end the rest follows, the
courier is waited for, sparse gradients are gathered, and the workers take a *census*: one small sum that says which
gradients anybody had, what everybody's samples weighed, whether somebody met a NaN, wants to stop, or has new buffers.

Weights. A worker's gradient is the mean over its own samples; in the mean over all it counts by their number. `weigh`
gives 1 to a worker with an average share, so an even deal scales nothing. Several backwards may pile up before an
exchange, each with its own weight: the pile is kept in units of the newest weight, so each counts by its own. When the
weights do not add up to what the deal promised (`job.weight` was used), the census corrects the result.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch

from ...collectives.group import Group
from ...compression.compressed_sum import CompressionSavings
from ...compression.compressor import Compressor
from ...errors import HoraError
from ...monitor import spans
from ...parameters.buckets import BackwardHooks, Bucket
from ...parameters.optimizer_state import collect, load
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import balanced_shards, flatten, is_sole_owner
from ..common import compression, nonfinite, sparse
from ..common.accumulation import Accumulation
from ..common.backward_hooks import WatchesBackward
from ..common.step_status import StepStatus
from ..common.sync import ExchangeCancelled, Snapshot, StepOutcome, Sync
from . import make_reducer
from .reducers import Culprits, Reducer

if TYPE_CHECKING:
    from .config import AllReduce

log = logging.getLogger(__name__)

ARMED = 4  # for so many sets of trained parameters buckets are kept: models that take turns freeze each other


@dataclasses.dataclass(frozen=True)
class _Armed:
    """What was agreed upon in the first backward over one set of parameters."""

    courier: Reducer
    eager: bool
    sparse: list[int]
    late: set[int]


class ReplicatedSync(WatchesBackward, Sync):
    keep = True

    def __init__(self, roster: ParameterRegistry, strategy: AllReduce) -> None:
        Sync.__init__(self, roster)
        self.strategy = strategy
        self._backward = BackwardHooks(roster.parameters, roster.names, self)
        self._courier: Reducer | None = None
        self._sparse: list[int] = []
        self._flats: dict[int, torch.Tensor] = {}
        self._lent: set[int] = set()  # gradients that only others have: zeros stand in for ours
        self._apart: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # whose memory others read, and what travels
        self._launched = -1  # buckets on their way, -1 outside of an exchange
        self._pile = Accumulation()
        self._buffer_versions: list[tuple[int, int]] = []
        self._factor = 1.0  # by which the last exchange was corrected
        self._armed: dict[tuple[int, ...], _Armed] = {}  # by the parameters that are trained, the newest last
        self._shown: dict[int, int] = {}  # by peer: what couriers that are gone have shown it
        self._stepped: set[int] = set()  # optimizers (by id) that have stepped since the last exchange
        self._unfrozen: list[int] = []  # what this exchange carries besides its buckets
        self._culprits: Culprits = []
        self._num_steps = 0  # of all optimizers
        self._verdict = StepOutcome()
        self._eager = strategy.overlap  # buckets leave while backward goes on
        self._tally = CompressionSavings()

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        compression.warn_of_one_host(self.strategy.wire, group)
        if group.size == 1:
            return  # a group without peers binds no buckets
        self.roster.agree(group)
        self.home = group
        self.group = group.clone()
        self.group.describe_wait = lambda: f"the exchange of gradients of step {self.steps + 1}"
        self._buffer_versions = self.roster.signature()
        self._backward.hook()

    def unbind(self) -> None:
        self._backward.unhook()
        self._backward.disarm()
        self._courier = None
        for armed in self._armed.values():
            armed.courier.close()
        self._armed.clear()
        if self.group is not None:
            self.group.close()
            self.group = None

    @property
    def verdict(self) -> StepOutcome:
        return self._verdict

    def peers(self) -> dict[int, int]:
        group, couriers = self.group, [armed.courier for armed in list(self._armed.values())]
        if group is None:
            return {}
        sent = group.sent_bytes
        return {p: sent[p] + self._shown.get(p, 0) + sum(each.shown(p) for each in couriers) for p in group.others}

    def summary(self) -> str:
        """What compression saved."""
        return self._tally.describe(self.strategy.wire, self.num_exchanges, "step")

    # -- the step ----------------------------------------------------------------------------------------------------

    def weigh(self, weight: float, expected: float) -> None:
        factor = self._pile.weigh(weight, expected)
        if factor != 1.0:
            self._multiply(self._trained(), factor)

    def before_forward(self) -> None:
        if self.group is None or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # the last: a checkpoint computes again, inside of a backward
        if self._backward.running:  # the last one was broken off by an exception that the user caught
            if self._launched > 0:
                raise HoraError(
                    "the last backward() broke off half-way; the other workers still wait for its gradients"
                )
            self._backward.forget()
            self._launched = -1
        self._pile.forget_cleared()
        self.roster.check_unchanged()
        self._watch()

    def _watch(self) -> None:
        """Hooks for parameters that were unfrozen; none for frozen ones, unless their gradients are still to go."""
        if self._backward.hook(keep=bool(self._pile)):
            self._disarm()

    def after_forward(self, output: Any) -> None:
        if self.group is not None:
            super().after_forward(output)

    def _begin_backward(self, _: torch.Tensor) -> None:
        if self.group is not None:
            self._backward.expect_end()

    def bucket_ready(self, bucket: Bucket) -> None:
        if self._eager and not self.halted:
            try:
                self._begin()
                self._launch(bucket)
            except ExchangeCancelled as halt:
                self.halted = str(halt)

    def after_backward(self) -> None:
        if self.group is None:
            return
        if self.silent:
            self._pile.add()
            self._pile.mark(self.roster.parameters[index] for index in self._backward.watched)
        else:
            self._exchange()

    def absent_step(self) -> None:
        if not self._pile:
            for parameter in self.roster.parameters:
                parameter.grad = None  # the last step's, which the user's loop would clear only now
        self._exchange(absent=True)

    def _exchange(self, absent: bool = False, piled: bool = False) -> None:
        """Everything that is still to be done until `p.grad` is the mean. `piled`: no backward of now comes on top."""
        try:
            if not self.halted:
                if not absent and not piled:
                    self._pile.add()
                self._carry_out()
        except ExchangeCancelled as halt:
            self.halted = str(halt)
        if self.halted:
            self.drop()

    def _carry_out(self) -> None:
        self._unfrozen = self._backward.unwatched
        if self._unfrozen and self._launched < 0:
            self._watch()
            self._unfrozen = []
        self._begin()
        assert self._courier is not None
        for bucket in self._backward.buckets[self._launched :]:
            self._launch(bucket)
        self._courier.finish()
        self._rejoin()
        for index in self._sparse:
            self._exchange_sparse(index)
        self._culprits = [(rank, index) for rank, index in self._courier.culprits() if not self._is_finite(index)]
        self._exchange_unfrozen()
        self._take_census()

    def _is_finite(self, index: int) -> bool:
        """A courier may suspect a sum that is merely large; its elements tell."""
        grad = self.roster.parameters[index].grad
        return grad is None or bool(torch.isfinite(grad).all())

    def _exchange_late(self) -> None:
        """Only what was unfrozen since: the rest has been exchanged, and perhaps clipped."""
        self._unfrozen, self._culprits = self._backward.unwatched, []
        try:
            self.num_exchanges += 1
            self.exchanging = True
            self.before_exchange()
            self._lent.clear()
            self._exchange_unfrozen()
            self._multiply(self._unfrozen, self._factor)
            self._take_census()
        except ExchangeCancelled as halt:
            self.halted = str(halt)
            self.drop()

    def _exchange_unfrozen(self) -> None:
        """Parameters that nobody watched when they got their gradient: they were unfrozen after the forward."""
        for index in self._unfrozen:
            flat = self._flat(index)
            if not bool(torch.isfinite(flat).all()):
                self._culprits.append((self._group.rank, index))
            if self._pile.weight != 1.0:
                flat.mul_(self._pile.weight)
            name = f"gradient of {self.roster.names[index]}"
            self._group.all_reduce(flat, "mean", self.strategy.algorithm, name=name)
        self._rejoin()

    def _rejoin(self) -> None:
        """Backward is over: what travelled in a copy comes back. Gradients that lie in one place part for good, since
        what is done to one, as a correction of weights, would be done to the other."""
        places = collections.Counter(grad.data_ptr() for grad, _ in self._apart.values())
        with torch.no_grad():
            for index, (grad, copy) in self._apart.items():
                if places[grad.data_ptr()] == 1:
                    grad.copy_(copy)
                else:
                    self.roster.parameters[index].grad = copy
        self._apart.clear()

    def _take_census(self) -> None:
        mine = self._census()
        begin = time.perf_counter()
        census = mine.sum(self._group, f"census {self._backward.signet}")
        self.traffic.spend(begin)
        self.traffic.num_exchanges += 1
        if spans.on:
            spans.add(spans.TRAINING, "waiting", spans.since(begin), what="census")
        self._conclude(census)

    def _begin(self) -> None:
        if self._launched < 0:
            with self._group.part_of_call():
                self._enter()
            self.num_exchanges += 1
            self.exchanging = True
            self.before_exchange()
            self._launched = 0
            self._flats.clear()
            self._apart.clear()
            self._lent.clear()
            if self._courier is None:
                self._arm()
            assert self._courier is not None
            self._courier.open()

    def _enter(self) -> None:
        """Hook for what must hold before gradients leave."""

    def _launch(self, bucket: Bucket) -> None:
        assert self._courier is not None
        views = [self._flat(segment.index)[segment.start : segment.stop] for segment in bucket.segments]
        self._courier.launch(bucket, views, self._pile.weight / self._group.size)
        self._launched = bucket.number + 1

    def _flat(self, index: int) -> torch.Tensor:
        """The gradient as a vector, in the order in which its parameter lies in memory."""
        flat = self._flats.get(index)
        if flat is None:
            parameter = self.roster.parameters[index]
            grad = parameter.grad
            if grad is None:
                self._lent.add(index)
                grad = parameter.grad = torch.zeros_like(parameter)
            elif grad.layout is not torch.strided:
                raise HoraError(
                    f"the gradient of {self.roster.names[index]} is sparse now, and was dense in the first backward(): "
                    "every worker's must be of one kind"
                )
            elif grad.stride() != parameter.stride():
                with torch.no_grad():
                    grad = parameter.grad = torch.empty_like(parameter).copy_(grad)
            elif not is_sole_owner(grad):
                copy = torch.empty_like(grad).copy_(grad.detach())
                self._apart[index] = (grad, copy)
                grad = copy
            flat = self._flats[index] = flatten(grad.detach())
        return flat

    def _census(self) -> StepStatus:
        self.roster.refresh_buffers()
        changed = self.roster.signature() != self._buffer_versions
        return StepStatus(
            weight=self._pile.total,
            expected=self._pile.total_expected,
            loop=self.loop,
            steps=self._num_steps,
            stop=self.stop_wanted,
            nonfinite=self._count_nonfinite(),
            buffers=changed and (self.strategy.sync_buffers == "mean" or self._group.rank == 0),
            holders=[float(index not in self._lent) for index in self._counted],
        )

    @property
    def _counted(self) -> list[int]:
        return self._backward.watched + self._unfrozen

    def _count_nonfinite(self) -> float:
        for index in self._sparse:
            grad = self.roster.parameters[index].grad
            if grad is not None and not bool(torch.isfinite(grad._values()).all()):
                self._culprits.append((self._group.rank, index))
        return float(len(self._culprits))

    def _conclude(self, census: StepStatus) -> None:
        """All workers draw the same conclusions from the same numbers."""
        size, parameters = self._group.size, self.roster.parameters
        for index, count in zip(self._counted, census.holders, strict=True):
            if not count and index in self._lent:
                parameters[index].grad = None
        self._launched = -1
        self._flats.clear()
        self._pile.clear()
        self._stepped.clear()
        self._backward.passed = False
        self._backward.running = False
        self.exchanging = False
        self._verdict = StepOutcome(stop=bool(census.stop))
        if self._courier is not None:
            self._courier.settle(counts=not census.nonfinite)
        if census.loop != self.loop * size:
            raise ExchangeCancelled(
                self._out_of_step(self.loop, "loops have begun", "did one leave its loop or skip a backward()?")
            )
        if census.steps != self._num_steps * size:
            way_out = "every worker must call optimizer.step() after the same backward()"
            raise HoraError(self._out_of_step(self._num_steps, "steps were taken", way_out))
        settled = self._unfrozen
        if census.weight:  # not where only the unfrozen went
            settled, self._factor = self._counted, census.expected / census.weight
            if census.weight != census.expected:
                self._correct(self._factor)
        if self._unfrozen:
            self._unfrozen = []
            self._watch()
        if census.nonfinite:
            self._lament()
        if census.buffers:
            self._share_buffers()
        self._settle(settled)

    def _out_of_step(self, mine: int, what: str, way_out: str) -> str:
        """Collective: who counts differently than rank 0, in words."""
        group = self._group
        counts = [int(part.item()) for part in group.all_gather(torch.tensor([mine]), name="counts")]
        rank = next((rank for rank, count in enumerate(counts) if count != counts[0]), 0)
        theirs, first = group.transport.name_of(rank), group.transport.name_of(0)
        return f"on {theirs} {counts[rank]} {what}, on {first} {counts[0]}: {way_out}"

    def _correct(self, factor: float) -> None:
        self._multiply(self._counted, factor)

    def _multiply(self, indices: Iterable[int], factor: float) -> None:
        """These gradients times `factor`."""
        grads = [p.grad for p in map(self.roster.parameters.__getitem__, indices) if p.grad is not None]
        with torch.no_grad():
            dense = [grad for grad in grads if grad.layout is torch.strided]
            if dense:
                torch._foreach_mul_(dense, factor)
            for grad in grads:
                if grad.layout is not torch.strided:
                    grad.mul_(factor)

    def _trained(self) -> list[int]:
        return self._backward.watched + self._backward.unwatched

    def _settle(self, indices: Iterable[int]) -> None:
        """Hook: these gradients are what they will be."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.group is None:
            return True
        self.roster.check_optimizer(optimizer)
        if self.halted:
            self.drop()
            return False
        idle = id(optimizer) in self._stepped or not self.num_exchanges  # nothing came since its last step
        if self._backward.running:  # its end was not seen: all of it ran inside of reentrant checkpoints
            self._exchange()
        elif self._pile:
            self._exchange(piled=True)
        elif idle and (self._backward.passed or self._backward.unwatched):
            self._exchange()  # gradients by torch.autograd.grad, or only of parameters unfrozen after the forward
        elif idle:
            raise HoraError(
                f"{type(optimizer).__name__}.step() without a backward() since the last one: there is no gradient to "
                "apply. Call loss.backward() first, or leave the step out on every worker"
            )
        elif self._backward.unwatched and not self._verdict.skipped:
            self._exchange_late()
        self._stepped.add(id(optimizer))
        return not self.halted and not self._verdict.skipped

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps += 1

    def drop(self) -> None:
        for parameter in self.roster.parameters:
            parameter.grad = None
        if self.on_nonfinite == "poison":  # a scaler wants to see gradients, and skips a step with these
            for optimizer in self.roster.optimizers:
                first = next((p for group in optimizer.param_groups for p in group["params"] if p.requires_grad), None)
                if first is not None:
                    first.grad = torch.full_like(first, float("inf"))
        self._launched = -1
        self._pile.clear()
        self._backward.running = False
        self.exchanging = False

    def share_gradients(self) -> None:
        trained = [p for p in self.roster.parameters if p.requires_grad]
        there = torch.tensor([float(p.grad is not None) for p in trained])
        self._group.broadcast(there, name="gradients there")
        for parameter, has in zip(trained, there.tolist(), strict=True):
            if not has:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in trained if p.grad is not None]
        ParameterRegistry.broadcast([grad.detach() for grad in grads if grad.layout is torch.strided], self._group)

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    # -- arming: buckets by rank 0's first backward --------------------------------------------------------------------

    def _arm(self) -> None:
        """Collective: everybody cuts the buckets as rank 0's backward produced them."""
        watched = self._backward.watched
        order, late, self._sparse = make_reducer.agree(self._group, self.roster, self._backward)
        dense = [index for index in order if index not in self._sparse]
        self._backward.late = late
        self._courier, self._eager = make_reducer.make_reducer(
            self._group, self.roster, self.strategy, dense, self._lanes(), self.keep, self.traffic
        )
        wire = Compressor(self.strategy.wire, self.strategy.topk, self.strategy.rank, self._tally)
        self._courier.compress(wire, lambda bucket: compression.matrices(bucket, self.roster.parameters))
        self._backward.arm(list(self._courier.buckets))
        self._armed[tuple(watched)] = _Armed(self._courier, self._eager, self._sparse, late)
        if len(self._armed) > ARMED:
            oldest = next(iter(self._armed))
            for peer in self._group.others:
                self._shown[peer] = self._shown.get(peer, 0) + self._armed[oldest].courier.shown(peer)
            self._armed.pop(oldest).courier.close()

    def _disarm(self) -> None:
        """What is trained has changed: buckets as they were the last time that it was this, or else none."""
        self._backward.disarm()
        self._courier = None
        known = self._armed.pop(tuple(self._backward.watched), None)
        if known is not None:
            self._armed[tuple(self._backward.watched)] = known  # the newest again
            self._courier, self._eager, self._sparse = known.courier, known.eager, known.sparse
            self._backward.late = set(known.late)
            self._backward.arm(list(known.courier.buckets))

    def _lanes(self) -> Any:
        return balanced_shards(self.roster.parameters, self._group.size)

    # -- what is rare --------------------------------------------------------------------------------------------------

    def _exchange_sparse(self, index: int) -> None:
        parameter, name = self.roster.parameters[index], self.roster.names[index]
        if parameter.grad is None:
            self._lent.add(index)
        parameter.grad = sparse.mean(self._group, parameter, name, self._pile.weight)

    def _lament(self) -> None:
        """A gradient was not finite somewhere: who and which is told to all, and the step is not taken."""
        text = nonfinite.sentence(self._group, self.roster, self._culprits)
        if self.on_nonfinite == "raise":
            raise HoraError(f"{text} {nonfinite.ADVICE}")
        if self.on_nonfinite == "poison":
            nonfinite.poison(self.roster.optimizers)
            log.debug("%s; the scaler skips this step", text)
            return
        self._verdict.skipped = text
        if self._group.rank == 0:
            log.warning("%s: this step is not taken", text)

    def _share_buffers(self) -> None:
        buffers = list(self.roster.buffers.values())
        if self.strategy.sync_buffers == "mean":
            floats = [buffer for buffer in buffers if buffer.is_floating_point()]
            if floats:
                flat = torch.cat([buffer.reshape(-1).double() for buffer in floats])
                self._group.all_reduce(flat, "mean", name="buffers")
                for buffer, part in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
                    buffer.copy_(part.view(buffer.shape))
            buffers = [buffer for buffer in buffers if not buffer.is_floating_point()]
        ParameterRegistry.broadcast(buffers, self._group)
        self._buffer_versions = self.roster.signature()

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        roster = self.roster
        roster.refresh_buffers()
        parameters = {name: p.detach() for name, p in zip(roster.names, roster.parameters, strict=True)}
        return Snapshot(parameters, dict(roster.buffers), collect(roster))

    def load_states(self, states: list[dict[str, dict[str, Any]]]) -> None:
        load(self.roster, states, self._fitting)

    def _fitting(self, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state as this worker holds it."""
        return state

    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        with torch.no_grad():
            for name, parameter in zip(self.roster.names, self.roster.parameters, strict=True):
                parameter.copy_(parameters[name])
            for name, buffer in self.roster.buffers.items():
                buffer.copy_(buffers[name])
        for armed in self._armed.values():
            armed.courier.forget()
        self._buffer_versions = self.roster.signature()

    @property
    def _group(self) -> Group:
        return cast(Group, self.group)
