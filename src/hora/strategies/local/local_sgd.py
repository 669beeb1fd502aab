"""LocalSync: Local SGD and DiLoCo. A worker trains alone for a number of local steps, then all average, in rounds.

    local steps     each worker by itself, on its own gradients
    exchange        statuses: samples of each worker, whether it leaves its loop, whether it wants to stop
                    mean: parameters (or pseudo-gradients), buffers, optimizer state, weighted by each worker's samples
    local steps     all workers from the same parameters again

A worker that leaves its training loop closes the round: it takes part in the others' exchanges until they have left
that loop too, so that uneven numbers of steps cannot hang. One that leaves before the loop's end takes all others out
of it after that round. With `fragments` a round has several exchanges, each of a part of the model. With `overlap` an
exchange runs on a thread of its own while the next steps are taken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ...collectives import objects
from ...collectives.group import Group
from ...errors import HoraError, PeerLost
from ...parameters.optimizer_state import collect, load
from ...parameters.registry import ParameterRegistry
from ...server.embedding import server_embeddings
from ..common import compression, nonfinite
from ..common.accumulation import scale_gradients
from ..common.hooks import TrainingHooks
from ..common.local_gradients import LocalGradients
from ..common.sync import LoopEvent, Snapshot, StepOutcome, SyncReport, ended_inside
from .averager import Averager, OuterAverager
from .counted_all_reduce import CountedAllReduce, summarize
from .exchange import ENDED, Exchange, Exchanger, RoundStatus
from .round import CountsRounds, Phase, Round, adapt_interval

if TYPE_CHECKING:
    from .config import LocalSGD, RoundStrategy

log = logging.getLogger(__name__)

STEPS = "steps"  # in a checkpoint: steps as rounds count them, including those that a GradScaler skipped
NO_LOOP = 1 << 40  # the loop of a worker that has left all of them


class LocalSync(CountsRounds, LocalGradients):  # type: ignore[misc, override]
    lockstep = False

    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: RoundStrategy) -> None:
        super().__init__(registry, hooks)
        self.strategy = strategy
        if server_embeddings(registry.models):
            raise ValueError("servers update the rows of a ServerEmbedding at every step: use --strategy ps")
        if strategy.warmup and any(isinstance(each, torch.optim.LBFGS) for each in registry.optimizers):
            raise ValueError("warmup averages the gradient of a step, and LBFGS computes several: leave warmup out")
        self._round = Round(strategy.fragments, strategy.warmup)
        self._was_bound = False
        self._all_reduce: CountedAllReduce
        self._exchanger: Exchanger
        self._averager: Averager
        self._stepped: set[int] = set()  # the optimizers that have stepped since the last backward
        self._step_shared = True  # all workers took part in the last step of the warm-up
        self._missed_batch = False  # this worker's loop did not run for a batch in which it had no samples
        self._break_undecided = False  # others broke out in such a batch: whether this worker goes on is asked later
        self._first_step = 0  # steps that a checkpoint had
        self._mean_steps = 0.0  # steps at the last exchange, mean over the workers

    @property
    def _group(self) -> Group:
        return cast(Group, self.group)

    def _name_of(self, rank: int) -> str:
        return self._group.transport.name_of(rank)

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        self.home = group
        compression.warn_of_one_host(self.strategy.wire, group)
        self.registry.agree(group)
        self.group = group.clone()
        self.group.describe_wait = lambda: f"averaging parameters after step {self.hooks.step}"
        if not self._was_bound:
            self._was_bound = True
            self._all_reduce = CountedAllReduce(self.group, self.strategy.algorithm, self.traffic)
            self._averager = self._make_averager()
        self._all_reduce.group = self.group
        self._averager.enter_group()
        self._exchanger = Exchanger(
            self.registry, self.hooks, self.strategy, self._round, self._all_reduce, self._averager
        )
        self._backward.hook()
        self._exchanger.update_trained(same=True)
        self._plan_interval([])
        self._exchanger.resume()

    def _make_averager(self) -> Averager:
        if self.strategy.via == "ps":
            from .server_averager import ServerAverager

            return ServerAverager(self.registry, self._all_reduce, cast("LocalSGD", self.strategy), self.context)
        if self.strategy.averages_differences:
            return OuterAverager(self.registry, self._all_reduce, self.strategy)
        return Averager(self.registry, self._all_reduce)

    def unbind(self) -> None:
        self._backward.unhook()
        self._exchanger.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    # -- the step ----------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        if self._round.phase is Phase.DUE and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._begin_due()
        super().before_forward()

    def after_backward(self, shadow: bool = False) -> None:
        if shadow:
            self._missed_batch = True
        else:
            self._stepped.clear()
            samples = self._accumulation.weight * self.hooks.batch.unit
            self._round.add_samples(samples, fresh=not self._accumulation)
        super().after_backward(shadow)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.registry.check_optimizer(optimizer)
        mine = self._parameters_of(optimizer)
        if self._accumulation or self._shadow:
            self._round.step_samples = self._round.pending_samples
        self._exchanger.update_trained()
        found = getattr(optimizer, "found_inf", None)  # set by a GradScaler for a fused optimizer
        if found is not None and bool(found):
            self._skip_step(optimizer)
            return False
        self._average_accumulated(mine)
        problem = self._nonfinite(mine, self._name_of(self._group.rank))
        if problem:
            if self.hooks.on_nonfinite == "raise":
                raise HoraError(f"{problem} {nonfinite.ADVICE}")
            log.warning("%s: this worker's step is not taken", problem)
            self.hooks.on_skipped(problem)
            self._round.step_samples = 0.0
            if optimizer is self.registry.optimizers[0]:
                self._round.pending_samples = 0.0
            for parameter in mine:
                parameter.grad = None
        if self.warming_up and not self._share_gradient(optimizer):
            self._skip_step(optimizer, announced=True)
            return False
        return True

    def unscaled(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """A GradScaler that has found an infinity leaves out this worker's step, which counts all the same."""
        steps_anyway = getattr(optimizer, "_step_supports_amp_scaling", False)  # a fused optimizer: see _before_step
        if not steps_anyway and any(bool(each) for each in found):
            self._skip_step(optimizer)

    def _skip_step(self, optimizer: torch.optim.Optimizer, announced: bool = False) -> None:
        """Counts a step that this worker does not take. In the warm-up no worker takes it."""
        if self.warming_up and not announced:
            self._share_gradient(optimizer, found_inf=True)
        if optimizer is self.registry.optimizers[0]:
            self._round.pending_samples = 0.0
        self._after_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._accumulation.clear()
        self._round.reopen()
        self._stepped.add(id(optimizer))
        if optimizer is self.registry.optimizers[0]:
            self._count_step()
        elif not (self.warming_up and self._step_shared):
            self._round.count_other_step(self._round.step_samples)
        if self._round.phase is Phase.DUE and len(self._stepped) == len(self.registry.optimizers):
            self._begin_due()

    def _count_step(self) -> None:
        """The first optimizer has stepped."""
        if self._round.phase is Phase.DUE:  # since its last step, for which another optimizer's was awaited
            self._begin_due()
        self._shadow = False
        shared = self.warming_up and self._step_shared
        self._round.count_step(shared)
        in_flight = self._exchanger.in_flight
        if in_flight is not None and self._round.num_steps >= in_flight.status.step + self.strategy.overlap:
            self._finish_in_flight()
        self._round.check_due(shared)

    def _begin_due(self) -> None:
        self._round.take_due()
        if self.warming_up:
            self._end_warmup()
        else:
            self._exchange_fragment()

    def _end_warmup(self) -> None:
        """All workers have the same parameters."""
        self._round.end_warmup()
        self._exchanger.update_trained(same=True)
        self._plan_interval([])

    def _share_gradient(self, optimizer: torch.optim.Optimizer, found_inf: bool = False) -> bool:
        """Collective, in the warm-up: gradients become their mean. False if a worker's GradScaler found an infinity."""
        exchange = self._exchanger.open(
            optimizer=self.registry.optimizers.index(optimizer),
            found_inf=found_inf,
            samples=[self._round.step_samples] * self.strategy.fragments,
        )
        scale = getattr(optimizer, "grad_scale", None)  # the gradients of a fused optimizer are still scaled
        factor = 1.0 if scale is None else float(scale)
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        scale_gradients(mine, 1.0 / factor)
        self._exchanger.run(exchange)
        scale_gradients(mine, factor)
        self._conclude_statuses(exchange)
        self._step_shared = len(exchange.active) == self._group.size
        return not exchange.found_inf

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _exchange_fragment(self) -> None:
        """Collective: the next fragment. With overlap the result is applied some steps later."""
        self._finish_in_flight()
        exchange = self._exchanger.open(fragment=self._round.fragment)
        if self.strategy.overlap:
            self._exchanger.start(exchange, self._round.fragment)
        else:
            self._exchanger.run(exchange)
            self._apply(exchange)
        self._exchanger.resume()

    def _finish_in_flight(self) -> None:
        """Waits for the exchange in flight, if there is one, and applies its result."""
        if self._exchanger.in_flight is not None:
            self._apply(self._exchanger.finish())

    def _apply(self, exchange: Exchange) -> None:
        """Writes the results into the model, and concludes from the statuses what comes next."""
        self._exchanger.apply(exchange)
        self._mean_steps = sum(status.step for status in exchange.statuses) / len(exchange.statuses)
        if exchange.status.leaving or not self.strategy.overlap:
            self._round.count_exchange(exchange.exchanged)
        if exchange.in_warmup and exchange.results:
            self._exchanger.update_trained(same=True)
        if exchange.ends_round:
            self._round.num_completed += bool(exchange.results)
            self._plan_interval(exchange.statuses)
        self._conclude_statuses(exchange)

    def _conclude_statuses(self, exchange: Exchange) -> None:
        """Whether all stop. PeerLost if a worker's script ended inside its loop."""
        broke = exchange.broke(self.strategy.leased)
        if ended := [rank for rank in broke if exchange.statuses[rank].broke == ENDED]:
            self._round.fail()
            text = ended_inside(self._left_its_loop(ended[0], exchange))
            raise PeerLost(f"{self._name_of(self._group.rank)}: {text}", (ended[0],), secondary=True)
        if broke or any(status.stop for status in exchange.statuses):
            self._stop(self._left_its_loop(broke[0], exchange) if broke else "")

    def _left_its_loop(self, rank: int, exchange: Exchange) -> str:
        return f"{self._name_of(rank)} left its loop after step {exchange.statuses[rank].step:.0f}"

    def _stop(self, reason: str) -> None:
        if not self.outcome.stop:
            self.outcome = StepOutcome(stop=True, reason=reason)

    def _plan_interval(self, statuses: Sequence[RoundStatus]) -> None:
        """How many steps this worker takes in the next round."""
        every = self.strategy.interval(max([int(status.step) for status in statuses], default=self._round.num_steps))
        if self.strategy.pace == "time":
            step_s = [status.step_s for status in statuses]
            every = adapt_interval(self._group.rank, every, step_s, self.strategy.fragments)
        self._round.interval = every

    # -- training loops ------------------------------------------------------------------------------------------------

    def join(self, event: LoopEvent) -> None:
        """A worker that leaves its loop closes the round."""
        if event is LoopEvent.ENTERED:
            self._decide_break(quits=False)
            if self.strategy.leased and self.hooks.loop != self._round.closed_loop:
                self._round.reopen()  # others may get samples, and take steps, where this worker gets none
            self._exchanger.resume()
        elif event in (LoopEvent.FINISHED, LoopEvent.BROKE):
            self._close_round(self.hooks.loop, broke=event is LoopEvent.BROKE)
        elif event is LoopEvent.CLOSED:
            self._averager.stay()
        else:
            self._decide_break(quits=True)
            if event is LoopEvent.DEPARTED:
                self._round.reopen()  # others may have taken steps
            if event is not LoopEvent.QUIT:
                self._close_round(NO_LOOP)

    def _close_round(self, loop: int, broke: bool = False) -> None:
        """Collective: this worker takes no steps, and takes part in exchanges until all others have left `loop` too."""
        if self._exchanger.failed:
            return
        self._finish_in_flight()
        if self._round.phase is Phase.CLOSED and (not broke or self.outcome.stop):
            return
        self._round.take_due()
        others_left = False
        while not others_left:
            exchange = self._exchanger.open(
                leaving=True,
                broke=ENDED if self.hooks.ended else broke,
                loop=loop,
                missed_batch=self._missed_batch,
            )
            self._exchanger.run(exchange)
            self._apply(exchange)
            statuses = exchange.statuses
            others_left = all(status.loop > loop or (status.leaving and status.loop == loop) for status in statuses)
            if not exchange.active and any(status.missed_batch for status in statuses):
                self._break_undecided = any(status.broke for status in statuses)
                self._share_loop_state()
            if self.warming_up and not exchange.active:
                self._round.num_steps = max(int(status.step) for status in statuses)
                if self._round.num_steps >= self.strategy.warmup:
                    self._end_warmup()
            self._exchanger.resume()
        self._round.close(loop, everywhere=all(status.leaving and status.loop == loop for status in statuses))

    def _decide_break(self, quits: bool) -> None:
        """Collective: workers that had no samples when others broke out of a loop stop if the others do."""
        if self._break_undecided and not self._exchanger.failed:
            exchange = self._exchanger.open(leaving=True, broke=quits)
            self._exchanger.run(exchange)
            gone = [rank for rank, status in enumerate(exchange.statuses) if status.broke]
            self._break_undecided = len(gone) == self._group.size  # asked again later
            if gone and not self._break_undecided:
                self._stop(self._left_its_loop(gone[0], exchange))

    def _share_loop_state(self) -> None:
        """Collective: workers whose loop did not run for a batch take over rank 0's schedulers and scaler."""
        mine = self.hooks.loop_state() if self._group.rank == 0 else None
        state = objects.broadcast_object(self._group, mine, "rank 0's schedulers")
        if self._missed_batch:
            self.hooks.load_loop_state(state)
        self._missed_batch = False

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def agreed_parameters(self) -> list[torch.Tensor]:
        return [self._averager.agreed(index) for index in range(len(self.registry.parameters))]

    def snapshot(self, complete: bool = True) -> Snapshot:
        """Closes the round. All workers go on with what is saved, so that a restored run goes on as this one does:
        rank 0's schedulers and scaler, and with state=keep the mean of the optimizers' states."""
        self._close_round(self.hooks.loop)
        if self.strategy.state == "keep":
            with torch.no_grad():
                self._exchanger.buffer_sync.average_states([1.0 / self._group.size] * self._group.size)
        self._missed_batch = True
        self._share_loop_state()
        extra = {**self._averager.state(), STEPS: torch.tensor(self._round.num_steps)}
        return Snapshot(self.registry.parameter_dict(), self.registry.buffer_dict(), collect(self.registry), extra)

    def restore(self, snapshot: Snapshot) -> None:
        self._finish_in_flight()
        extra = snapshot.extra
        self._first_step = int(extra[STEPS]) if STEPS in extra else self.hooks.step
        self._mean_steps = float(self._first_step)
        self._round.restart(self._first_step)
        self.outcome = StepOutcome()
        self.registry.load(snapshot.parameters, snapshot.buffers)
        self._exchanger.update_trained(same=True)
        with torch.no_grad():
            self._averager.load(extra)
        self._exchanger.buffer_sync.mark_shared()
        self._plan_interval([])
        load(self.registry, snapshot.states, lambda index, state: state)

    def describe(self) -> SyncReport:
        trained = [self.registry.parameters[index] for index in self._exchanger.trained]
        steps, sent = round(self._mean_steps) - self._first_step, self._all_reduce.sent_bytes
        text = summarize(self.strategy.spell(), self.rounds, steps, sent, trained, self._group.size)
        summary = "; ".join(filter(None, [text, self._averager.describe_savings(self.rounds)]))
        return SyncReport(sent_to=self._all_reduce.sent_to(), summary=summary)
