"""One exchange of Local SGD or DiLoCo: what all workers do together, also those that have left their training loop.

statuses      gathered from every worker; all conclude from them what this exchange is about
gradients     in the warm-up: they become their mean
parameters    of the next fragment, or of all fragments when every worker has left its loop
buffers       and the optimizers' state, at the end of a round
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...errors import HoraError
from ...monitor import spans
from ...parameters.registry import ParameterRegistry
from ...transport.task_thread import TaskHandle, TaskThread
from ..common import nonfinite
from ..common.hooks import TrainingHooks
from ..common.step_status import StepStatus
from .averager import Averager, average_gradients
from .buffer_sync import NONFINITE, BufferSync
from .counted_all_reduce import CountedAllReduce
from .round import Phase, Round, cut_fragments

if TYPE_CHECKING:
    from .config import RoundStrategy

log = logging.getLogger(__name__)

ENDED = 2.0
PARAMETERS = -1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundStatus(StepStatus):
    """One worker's status. A worker that has left its loop (`leaving`) takes part in what the others do."""

    tail: ClassVar[str] = "samples"

    warming_up: float = 0.0  # in the steps before the first round
    optimizer: float = PARAMETERS  # it brings the gradients of this optimizer, or parameters
    found_inf: float = 0.0  # its GradScaler has found an infinity in the gradients
    fragment: float = 0.0  # it brings this fragment
    broke: float = 0.0  # it left its loop before the end; ENDED: its script ended inside the loop
    missed_batch: float = 0.0  # it had no samples in a batch, so its loop has not stepped its schedulers there
    step_s: float = 0.0  # seconds of one of its steps
    trained: float = 0.0  # checksum of the parameters that it trains
    samples: Sequence[float] = ()  # trained on since each fragment was exchanged


def sample_shares(statuses: Sequence[RoundStatus], fragment: int) -> list[float] | None:
    """The weight of each worker in a mean: by its samples. None if no worker has trained on any."""
    total = sum(status.samples[fragment] for status in statuses)
    return [status.samples[fragment] / total for status in statuses] if total else None


@dataclasses.dataclass
class Exchange:
    """What this worker contributes, and the results, which `Exchanger.run` fills in."""

    status: RoundStatus  # this worker's
    fragments: list[list[int]]  # indices of parameters
    vectors: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)  # by fragment
    results: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: torch.Tensor | None = None
    mean_buffers: torch.Tensor | None = None
    statuses: list[RoundStatus] = dataclasses.field(default_factory=list)  # of all workers
    exchanged: list[int] = dataclasses.field(default_factory=list)  # fragments

    @property
    def active(self) -> list[RoundStatus]:
        """Of the workers that are in their training loop."""
        return [status for status in self.statuses if not status.leaving]

    @property
    def in_warmup(self) -> bool:
        return any(status.warming_up for status in self.statuses)

    @property
    def found_inf(self) -> bool:
        return any(status.found_inf for status in self.statuses)

    def broke(self, leased: bool) -> list[int]:
        """The ranks that have left a loop in which others stay. Where samples are `leased`, workers take different
        numbers of steps; else one that broke after as many steps as the others has left with them."""
        steps = [status.step for status in self.statuses if not status.broke]  # of workers in their loop or at its end
        early = bool(self.active) or (leased and bool(steps))
        furthest = max(steps, default=0)
        return [rank for rank, each in enumerate(self.statuses) if each.broke and (early or furthest > each.step)]

    @property
    def ends_round(self) -> bool:
        return len(self.fragments) - 1 in self.exchanged


class Exchanger:
    """Runs the exchanges of this worker's round, one at a time. Training thread only.

    `averager` is for parameters after the warm-up; until then they are averaged as they are."""

    def __init__(
        self,
        registry: ParameterRegistry,
        hooks: TrainingHooks,
        strategy: RoundStrategy,
        round: Round,
        all_reduce: CountedAllReduce,
        averager: Averager,
    ) -> None:
        self._registry = registry
        self._hooks = hooks
        self._strategy = strategy
        self._round = round
        self._all_reduce = all_reduce
        self._group = all_reduce.group
        self.averager = averager
        self.buffer_sync = BufferSync(registry, all_reduce)
        self.trained: list[int] = []  # parameters that an optimizer trains, now or before
        self._fragments: list[list[int]] = []  # the same, by fragment
        self._task_thread = TaskThread("hora-averaging")
        self._handle = TaskHandle()
        self.in_flight: Exchange | None = None  # with overlap
        self.resume()

    def resume(self) -> None:
        """From now on this worker computes."""
        self._resumed_s = time.perf_counter()

    def update_trained(self, same: bool = False) -> None:
        """Finds the parameters that are trained, also those unfrozen since the last step, which are still the same on
        all workers. `same`: so are all others, and become the anchors; then this is collective."""
        held = {id(p) for each in self._registry.optimizers for group in each.param_groups for p in group["params"]}
        now = {i for i, p in enumerate(self._registry.parameters) if id(p) in held and p.requires_grad}
        new = sorted(now.difference(self.trained))
        if new:
            self.trained = sorted(now.union(self.trained))
            sizes = [p.numel() for p in self._registry.parameters]
            self._fragments = cut_fragments(self.trained, sizes, self._strategy.fragments)
        with torch.no_grad():
            if same:
                self.averager.set_anchors(self.trained)
            elif new:
                self.averager.add_anchors(new)

    def open(self, **given: Any) -> Exchange:
        """An exchange with this worker's status."""
        self._round.add_work(time.perf_counter() - self._resumed_s)
        self.resume()
        status = RoundStatus(
            warming_up=self._round.warming_up,
            loop=self._hooks.loop,
            stop=self._hooks.stop_wanted,
            step=self._round.num_steps,
            step_s=self._round.step_s,
            trained=zlib.crc32(repr(self.trained).encode()),
            buffers=self.buffer_sync.status,
            samples=self._round.samples,
        )
        return Exchange(dataclasses.replace(status, **given), self._fragments)

    def start(self, exchange: Exchange, fragment: int) -> None:
        """Packs a fragment as it is now, and exchanges it on a thread. `finish` waits for the result."""
        with torch.no_grad():
            exchange.vectors[fragment] = self.averager.pack(exchange.fragments[fragment])
        if fragment == len(exchange.fragments) - 1:
            exchange.buffers = self.buffer_sync.pack()
        self._group.transport.background = True
        self.in_flight = exchange
        self._handle = self._task_thread.submit(lambda: self._exchange(exchange, exposed=False))
        self._round.begin_overlapped()

    def finish(self) -> Exchange:
        """Blocks until the exchange in flight is done, and returns it. Raises its error."""
        assert self.in_flight is not None
        exchange, begin = self.in_flight, time.perf_counter()
        with self._group.wait_scope, self._round.exchanging():
            self._handle.wait()
        self.in_flight = None
        self._group.transport.background = False
        if spans.on:
            spans.add(spans.TRAINING, "waiting", spans.since(begin), what="the round under way")
        waited_s = time.perf_counter() - begin
        self._all_reduce.traffic.exposed_s += waited_s
        self._resumed_s += waited_s
        return exchange

    @property
    def failed(self) -> bool:
        """Whether the last exchange was broken off."""
        in_flight_failed = self.in_flight is not None and self._handle.error is not None
        return in_flight_failed or self._round.phase is Phase.FAILED

    def close(self) -> None:
        self._task_thread.close()
        self.averager.leave_group()

    def run(self, exchange: Exchange) -> None:
        """Collective, blocks. HoraError, on every worker, if workers are not at the same point of a round, or if a
        result is not finite."""
        with self._round.exchanging():
            self._exchange(exchange, exposed=True)
        self.resume()

    def _exchange(self, exchange: Exchange, exposed: bool) -> None:
        """On any thread. `exposed`: the training thread waits for it."""
        begin, sent = time.perf_counter(), self._all_reduce.sent_bytes
        exchange.statuses = exchange.status.gather(self._group, "status of a round")
        gathered = time.perf_counter()
        self._check(exchange.statuses)
        active = exchange.active
        if exchange.found_inf:
            pass  # no worker takes this step
        elif active and active[0].optimizer != PARAMETERS:
            optimizer = self._registry.optimizers[int(active[0].optimizer)]
            shares = sample_shares(exchange.statuses, 0)
            average_gradients(self._all_reduce, self._registry, optimizer, shares, bool(exchange.status.leaving))
        else:
            self._average_parameters(exchange)
        seconds = time.perf_counter() - begin
        self._all_reduce.traffic.num_exchanges += 1
        self._all_reduce.traffic.comm_s += seconds
        if exposed:
            self._all_reduce.traffic.exposed_s += seconds
        if spans.on:
            self._trace(exchange, exposed, begin, gathered, self._all_reduce.sent_bytes - sent)

    @staticmethod
    def _trace(exchange: Exchange, exposed: bool, begin: float, gathered: float, num_bytes: int) -> None:
        """Gathering the statuses takes until the last worker has come."""
        times, step = [spans.since(begin), spans.since(gathered), spans.clock()], int(exchange.status.step)
        work_us = [(end - start) / 1e3 for start, end in itertools.pairwise(times)]
        spans.add(spans.COMMUNICATION, "status", *times[:2], step=step, work_us=work_us[0])
        spans.add(spans.COMMUNICATION, "mean", *times[1:], step=step, bytes=num_bytes, work_us=work_us[1])
        if exposed:
            spans.add(spans.TRAINING, "waiting", *times[:2], what="status")
            spans.add(spans.TRAINING, "exchange", *times[1:], what="mean")

    def apply(self, exchange: Exchange) -> None:
        """Writes the results into the model."""
        begin = spans.clock() if spans.on else 0
        late = self._round.num_steps > exchange.status.step  # steps were taken since it was packed
        with torch.no_grad():
            for fragment, result in exchange.results.items():
                indices, vector = exchange.fragments[fragment], exchange.vectors[fragment]
                self._averager_of(exchange).apply(indices, vector, result, late)
            if exchange.mean_buffers is not None:
                assert exchange.buffers is not None
                self.buffer_sync.apply(exchange.buffers, exchange.mean_buffers, late)
        if spans.on:
            spans.add(spans.TRAINING, "settle", begin, round=self._round.num_completed + 1)

    def _averager_of(self, exchange: Exchange) -> Averager:
        return Averager(self._registry, self._all_reduce) if exchange.in_warmup else self.averager

    def _average_parameters(self, exchange: Exchange) -> None:
        active, averager = exchange.active, self._averager_of(exchange)
        exchange.exchanged = [int(active[0].fragment)] if active else list(range(len(exchange.fragments)))
        with torch.no_grad():
            for fragment in exchange.exchanged:
                shares, indices = sample_shares(exchange.statuses, fragment), exchange.fragments[fragment]
                if shares is None:
                    continue
                vector = exchange.vectors.get(fragment)
                if vector is None or exchange.in_warmup:
                    vector = exchange.vectors[fragment] = averager.pack(indices)
                exchange.results[fragment] = averager.reduce(indices, vector, shares)
                self._check_finite(exchange, fragment)
            shares = sample_shares(exchange.statuses, exchange.exchanged[-1])
            if shares is not None and exchange.ends_round:
                self._average_buffers(exchange, shares)
                if self._strategy.state == "average":
                    self.buffer_sync.average_states(shares)
                elif self._strategy.state == "reset":
                    self.buffer_sync.reset_states()

    def _average_buffers(self, exchange: Exchange, shares: Sequence[float]) -> None:
        """Buffers that are not finite do not count: those workers get the mean of the others."""
        statuses, buffer_sync = exchange.statuses, self.buffer_sync
        if not any(status.buffers for status in statuses):
            return
        if exchange.buffers is None:
            exchange.buffers = buffer_sync.pack()
        excluded = [rank for rank, status in enumerate(statuses) if status.buffers == NONFINITE]
        if excluded and self._group.rank == 0:
            log.warning("buffers of %s are not finite: they do not count", self._group.transport.name_of(excluded[0]))
        kept = [0.0 if rank in excluded else share for rank, share in enumerate(shares)]
        total = sum(kept)
        if exchange.buffers.numel() and total:
            exchange.mean_buffers = buffer_sync.reduce(exchange.buffers, [share / total for share in kept])
        if not exchange.active or not self._strategy.overlap:
            buffer_sync.broadcast_integers()

    def _check(self, statuses: Sequence[RoundStatus]) -> None:
        """HoraError, the same on every worker, if the active workers do not do the same."""
        name_of = self._group.transport.name_of
        active = [(rank, status) for rank, status in enumerate(statuses) if not status.leaving]
        for rank, status in active:
            first, other = active[0]
            if status.optimizer != other.optimizer:
                problem = (
                    f"do not do the same: in the first {self._strategy.warmup} steps (warmup) every worker must take "
                    "the same steps, of the same optimizers in the same order"
                )
            elif status.fragment != other.fragment:
                problem = "exchange different fragments: every worker must take the same steps"
            elif status.trained != other.trained:
                problem = "do not train the same parameters: freeze and unfreeze them on every worker at the same step"
            else:
                continue
            raise HoraError(
                f"{name_of(rank)} is at step {status.step:.0f}, {name_of(first)} at step {other.step:.0f}, and they "
                f"{problem}"
            )

    def _check_finite(self, exchange: Exchange, fragment: int) -> None:
        """HoraError, on every worker, names the workers whose parameters are NaN or infinite; all keep their own."""
        if nonfinite.is_finite(exchange.results[fragment]):
            return
        parameters, indices = self._registry.parameters, exchange.fragments[fragment]
        mine = [(self._group.rank, i) for i in indices if not nonfinite.is_finite(parameters[i].detach())]
        text = nonfinite.sentence(self._group, self._registry, mine, "value")
        raise HoraError(f"{text}: this round is not closed. Lower the learning rate, or look at that worker's batches")
