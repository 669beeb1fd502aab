"""Averaging: a worker that trains alone and, in rounds, agrees with the others. Local SGD and DiLoCo at work.

    step … step      each worker by itself, on its own gradients
    round            words: who saw how many samples, who leaves its loop, who wants to stop
                     mean: parameters (or their drift), buffers, optimizer state, each worker's by its samples
    step … step      all from the same point again

A round needs every worker, and nothing else does. A worker that leaves its loop closes the round: it takes part in the
others' rounds until they have left that loop too, so that uneven numbers of steps cannot hang. One that leaves before
the loop's end takes all others out of it after that round.

With `fragments` a round is made of several exchanges, each of a part of the model. With `overlap` an exchange goes on,
on a thread of its own, while the next steps are taken.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ...collectives import objects
from ...collectives.group import Group
from ...errors import HoraError, PeerLost
from ...monitor import spans
from ...parameters.optimizer_state import collect, load
from ...parameters.registry import ParameterRegistry
from ...server.embedding import server_embeddings
from ...transport.task_thread import TaskThread
from ..common import compression, nonfinite
from ..common.accumulation import scale_gradients
from ..common.hooks import TrainingHooks
from ..common.local_gradients import LocalGradients
from ..common.sync import LoopEvent, Snapshot, StepOutcome, SyncReport, ended_inside
from . import comm_summary
from .adaptive_interval import steps_for
from .averager import Averager, OuterAverager
from .buffer_sync import BufferSync
from .counted_all_reduce import CountedAllReduce
from .fragments import cut
from .round import AveragingRound, RoundExecutor
from .round_status import ENDED, RoundStatus

if TYPE_CHECKING:
    from .config import LocalSGD, RoundStrategy

log = logging.getLogger(__name__)

STEPS = "steps"  # in a checkpoint: those of rounds, of which a scaler may have refused some
FAR = 1 << 40  # the loop of a worker that has left all of them


class LocalSync(LocalGradients):
    lockstep = False

    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: RoundStrategy) -> None:
        super().__init__(registry, hooks)
        self.strategy = strategy
        self.rounds = 0
        self.local_steps = 0
        if server_embeddings(registry.models):
            raise ValueError("a ServerEmbedding's rows are updated by the servers at every step: say --strategy ps")
        if strategy.warmup and any(isinstance(each, torch.optim.LBFGS) for each in registry.optimizers):
            raise ValueError("warmup shares the gradient of a step, and LBFGS computes several in one: leave it out")
        self._num_fragments = strategy.fragments
        self._overlap = strategy.overlap
        self._bulk: CountedAllReduce
        self._meetings: RoundExecutor
        self._mean: Averager
        self._extras: BufferSync
        self._trained: list[int] = []  # the parameters that rounds are about, held by an optimizer
        self._cut: list[list[int]] = []  # which of them belong to which fragment
        self._next = 0  # the fragment that is exchanged next
        self._num_steps = 0
        self._first = 0  # those that a checkpoint had behind it
        self._mean_steps = 0.0  # of all workers, when they met last
        self._interval = 1  # this worker's steps in the round under way
        self.warming_up = strategy.warmup > 0
        self._samples = 0.0  # since the last step
        self._brought = 0.0  # what they were as an optimizer came to its step; those of later ones are the same
        self._seen = [0.0] * self._num_fragments  # samples since each fragment was exchanged
        self._rest = [0.0] * self._num_fragments  # those of other optimizers' steps since then, if there were no more
        self._stepped: set[int] = set()  # the optimizers that have stepped since the last backward
        self._due = False  # it is time for an exchange, once all have
        self._closed = True  # no step was taken since all were at one point
        self._left = 0  # the loop that they had left then
        self._behind = False  # this worker's loop was not run for a batch in which it had no samples
        self._doubt = False  # others broke out of a loop in a batch in which one had no samples: is it to go on?
        self._failed = False  # a meeting broke off: there will be no other
        self._lacking = False  # a worker took no part in the last step of the warm-up
        self._underway: AveragingRound | None = None
        self._task_thread: TaskThread | None = None
        self._resumed_s = 0.0  # when this worker went on after the last exchange
        self._busy_s = 0.0  # what it has worked since the round began
        self._step_s = 0.0  # what one of its steps took in the last round

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        self.home = group
        compression.warn_of_one_host(self.strategy.wire, group)
        self.registry.agree(group)
        self.group = group.clone()
        self._group.describe_wait = lambda: f"the averaging of parameters after step {self.hooks.step}"
        self._bulk = CountedAllReduce(self._group, self.strategy.algorithm, self.traffic)
        self._meetings = RoundExecutor(self.registry, self._bulk, self.strategy, self._make_mean(), self.traffic)
        self._mean, self._extras = self._meetings.mean, self._meetings.extras
        if self._overlap:
            self._task_thread = TaskThread("hora-averaging", stop_on_error=True)
        self._backward.hook()
        self._recut(anew=True)
        self._interval = self._plan([])
        self._resumed_s = time.perf_counter()

    def _make_mean(self) -> Averager | None:
        if self.strategy.via == "ps":
            from .server_averager import ServerAverager

            return ServerAverager(self.registry, self._bulk, cast("LocalSGD", self.strategy), self.context)
        if self.strategy.averages_differences:
            return OuterAverager(self.registry, self._bulk, self.strategy)
        return None

    def unbind(self) -> None:
        self._backward.unhook()
        if self._task_thread is not None:
            self._task_thread.close()
        self._mean.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    # -- the step ----------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        if self._due and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._proceed()
        super().before_forward()

    def after_backward(self, shadow: bool = False) -> None:
        if shadow:
            self._behind = True
        else:
            self._stepped.clear()
            if not self._accumulation:  # what was before has had its step, or was given up
                self._samples = 0.0
            self._samples += self._accumulation.weight * self.hooks.batch.unit
        super().after_backward(shadow)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.registry.check_optimizer(optimizer)
        mine = self._parameters_of(optimizer)
        if self._accumulation or self._shadow:
            self._brought = self._samples
        self._recut()
        found = getattr(optimizer, "found_inf", None)  # a scaler's words to a fused optimizer
        if found is not None and bool(found):
            self._miss(optimizer)
            return False
        self._average_accumulated(mine)
        problem = self._nonfinite(mine, self._name)
        if problem:
            if self.hooks.on_nonfinite == "raise":
                raise HoraError(f"{problem} {nonfinite.ADVICE}")
            log.warning("%s: this worker's step is not taken", problem)
            self.hooks.on_skipped(problem)
            self._brought = 0.0
            if optimizer is self.registry.optimizers[0]:
                self._samples = 0.0
            for parameter in mine:
                parameter.grad = None
        if self.warming_up and not self._share(optimizer):
            self._skip(optimizer)
            return False
        return True

    def unscaled(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """A scaler that has found an infinity leaves this worker's step out; it counts all the same."""
        comes_all_the_same = getattr(optimizer, "_step_supports_amp_scaling", False)  # a fused one, to before_step
        if not comes_all_the_same and any(bool(each) for each in found):
            self._miss(optimizer)

    def _miss(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that is not taken, but that the others count on; in the warm-up nobody takes it."""
        if self.warming_up:
            self._share(optimizer, missed=True)
        self._skip(optimizer)

    def _skip(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self.registry.optimizers[0]:
            self._samples = 0.0
        self._after_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._accumulation.clear()
        self._closed = False
        self._stepped.add(id(optimizer))
        if optimizer is self.registry.optimizers[0]:
            self._count()
        elif not self.warming_up or self._lacking:
            self._rest = [self._brought] * self._num_fragments
        if self._due and len(self._stepped) == len(self.registry.optimizers):
            self._proceed()

    def _count(self) -> None:
        """A step of the first optimizer was taken."""
        if self._due:  # the last one's, for which another optimizer was awaited
            self._proceed()
        self._shadow = False
        self._num_steps += 1
        self.local_steps += 1
        self._seen = [seen + self._samples for seen in self._seen]
        self._samples = 0.0
        if self.warming_up:
            if not self._lacking:  # everybody has taken this step
                self._seen = [0.0] * self._num_fragments
                self._due = self._num_steps >= self.strategy.warmup
            return
        if self._underway is not None and self._num_steps >= self._underway.due:
            self._arrive()
        self._due = self.local_steps >= max(1, self._interval * (self._next + 1) // self._num_fragments)

    def _proceed(self) -> None:
        """What is due: an exchange, or the end of the warm-up."""
        self._due = False
        if self.warming_up:
            self._begin_rounds()
        else:
            self._exchange()

    def _begin_rounds(self) -> None:
        """After the warm-up all are at one point."""
        self.warming_up = False
        self._recut(anew=True)
        self._begin_round()
        self._interval = self._plan([])

    # -- a round -----------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """The next fragment's turn."""
        self._wait()
        meeting = self._open(fragment=float(self._next))
        meeting.vectors[self._next] = self._meetings.pack(meeting.cut[self._next])
        if self._next == self._num_fragments - 1 and self._overlap:
            meeting.buffers = self._extras.pack()
        if self._task_thread is not None:
            self._underway = meeting
            self._group.transport.background = True
            self._task_thread.submit(functools.partial(self._meet, meeting))
            self._pass([self._next])
        else:
            self._meet(meeting)
            self._conclude(meeting)
        self._resumed_s = time.perf_counter()

    def _share(self, optimizer: torch.optim.Optimizer, missed: bool = False) -> bool:
        """Of the warm-up: everybody's gradients become their mean. False if a scaler, anybody's, refused its own."""
        number = self.registry.optimizers.index(optimizer)
        samples = [self._brought] * self._num_fragments
        meeting = self._open(gradients=1.0, number=float(number), missed=float(missed), samples=samples)
        scale = getattr(optimizer, "grad_scale", None)  # a fused one's gradients are still multiplied by its scaler's
        factor = 1.0 if scale is None else float(scale)
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        scale_gradients(mine, 1.0 / factor)
        self._meet(meeting)
        scale_gradients(mine, factor)
        self._hear(meeting)
        self._lacking = bool(self._group.size - len(meeting.going))
        self._resumed_s = time.perf_counter()
        return not meeting.missed

    def _close(self, loop: int, broke: bool = False) -> None:
        """This worker takes no step for now: it does as the others do until they have come as far."""
        if self._failed:
            return
        self._wait()
        if self._closed and (not broke or self.outcome.stop):
            return
        others_left = self._due = False
        while not others_left:
            meeting = self._open(leaving=1.0, broke=ENDED if self.hooks.ended else float(broke), loop=float(loop))
            self._meet(meeting)
            self._conclude(meeting)
            self._resumed_s = time.perf_counter()
            others_left = all(word.loop > loop or (word.leaving and word.loop == loop) for word in meeting.words)
            if not meeting.going and any(word.behind for word in meeting.words):
                self._doubt = any(word.broke for word in meeting.words)
                self._catch_up()
            if self.warming_up and not meeting.going:
                self._num_steps = meeting.furthest
                if self._num_steps >= self.strategy.warmup:
                    self._begin_rounds()
        self._closed = all(word.leaving and word.loop == loop for word in meeting.words)
        self._left = loop
        self._resumed_s = time.perf_counter()

    def _settle_doubt(self, quits: bool) -> None:
        """Collective: those who were without samples go on if the others do, and stop if they do not."""
        if self._doubt and not self._failed:
            meeting = self._open(leaving=1.0, broke=float(quits), loop=float(self.hooks.loop))
            self._meet(meeting)
            gone = [rank for rank, word in enumerate(meeting.words) if word.broke]
            self._doubt = len(gone) == self._group.size  # there is another time to ask
            if gone and not self._doubt:
                self._stop(self._left_its_loop(gone[0], meeting))

    def _catch_up(self) -> None:
        """Collective: who was without samples takes over what the others' loops did to schedulers meanwhile."""
        standing = objects.broadcast_object(
            self._group, self.hooks.loop_state() if self._group.rank == 0 else None, "rank 0's schedulers"
        )
        if self._behind:
            self.hooks.load_loop_state(standing)
        self._behind = False

    def _open(self, **given: Any) -> AveragingRound:
        """What this worker says as it comes to a meeting."""
        self._busy_s += time.perf_counter() - self._resumed_s
        self._resumed_s = time.perf_counter()
        if self.local_steps:
            self._step_s = self._busy_s / self.local_steps
        word = RoundStatus(
            warming_up=float(self.warming_up),
            loop=float(self.hooks.loop),
            stop=float(self.hooks.stop_wanted),
            behind=float(self._behind),
            step=float(self._num_steps),
            step_s=self._step_s,
            trained=float(zlib.crc32(repr(self._trained).encode())),
            buffers=self._extras.news,
            samples=[seen or rest for seen, rest in zip(self._seen, self._rest, strict=True)],
        )
        return AveragingRound(dataclasses.replace(word, **given), self._num_steps + self._overlap, self._cut)

    def _meet(self, meeting: AveragingRound) -> None:
        """Collective. On the errand's thread, where there is one and this worker has not left its loop."""
        try:
            self._meetings.hold(meeting, exposed=meeting is not self._underway)
        except BaseException:
            self._failed = True
            raise

    def _wait(self) -> None:
        """The exchange under way is over, and its result is taken over."""
        if self._underway is not None:
            self._arrive()

    def _arrive(self) -> None:
        assert self._task_thread is not None and self._underway is not None
        begin = time.perf_counter()
        with self._group.wait_scope:
            self._task_thread.join()
        waited_s = time.perf_counter() - begin
        self._group.transport.background = False
        if spans.on:
            spans.add(spans.TRAINING, "waiting", spans.since(begin), what="the round under way")
        self.traffic.exposed_s += waited_s
        self._resumed_s += waited_s  # which is no work
        meeting, self._underway = self._underway, None
        self._conclude(meeting)

    def _conclude(self, meeting: AveragingRound) -> None:
        """On the training thread: the parameters become what was agreed, and all know what comes next."""
        begin = spans.clock() if spans.on else 0
        self._meetings.settle(meeting, late=self._num_steps > meeting.due - self._overlap)
        if spans.on:
            spans.add(spans.TRAINING, "settle", begin, round=cast(int, self.rounds) + 1)
        self._mean_steps = sum(word.step for word in meeting.words) / len(meeting.words)
        if meeting.word.leaving or self._task_thread is None:
            self._pass(meeting.fragments)
        if meeting.warm and meeting.results:
            self._recut(anew=True)
        if meeting.ends_round:
            self.rounds = cast(int, self.rounds) + bool(meeting.results)
            self._interval = self._plan(meeting.words)
        self._hear(meeting)

    def _pass(self, fragments: Sequence[int]) -> None:
        """These have been given away: what comes now counts for their next exchange."""
        for fragment in fragments:
            self._seen[fragment] = self._rest[fragment] = 0.0
            self._next = (fragment + 1) % self._num_fragments
        if fragments and not self._next:
            self._begin_round()

    def _hear(self, meeting: AveragingRound) -> None:
        words = meeting.words
        stay = [word.step for word in words if not word.broke]  # of those who go on, or have come to the loop's end
        lent = bool(stay) and self.strategy.leased  # then the numbers of steps say nothing of who left early
        broke = [
            rank
            for rank, word in enumerate(words)
            if word.broke and (meeting.going or lent or max(stay, default=0) > word.step)
        ]
        if ended := [rank for rank in broke if words[rank].broke == ENDED]:
            self._failed = True
            raise PeerLost(
                f"{self._name}: {ended_inside(self._left_its_loop(ended[0], meeting))}", (ended[0],), secondary=True
            )
        stop = any(word.stop for word in words) or bool(broke)
        if stop:
            self._stop(self._left_its_loop(broke[0], meeting) if broke else "")

    def _left_its_loop(self, rank: int, meeting: AveragingRound) -> str:
        return f"{self._group.transport.name_of(rank)} left its loop after step {meeting.words[rank].step:.0f}"

    def _stop(self, reason: str) -> None:
        if not self.outcome.stop:
            self.outcome = StepOutcome(stop=True, reason=reason)

    def _begin_round(self) -> None:
        self.local_steps = 0
        self._busy_s = 0.0

    def _plan(self, words: Sequence[RoundStatus]) -> int:
        """How many steps this worker takes in the next round."""
        every = self.strategy.interval(max([int(word.step) for word in words], default=self._num_steps))
        if self.strategy.pace == "steps":
            return every
        return steps_for(self._group.rank, every, [word.step_s for word in words], self._num_fragments)

    # -- what rounds are about -----------------------------------------------------------------------------------------

    def _recut(self, anew: bool = False) -> None:
        """What is trained now, or was before, is cut into fragments.

        Before a step, so that what was unfrozen is still what all have. `anew`: so is everything else."""
        held = {id(p) for each in self.registry.optimizers for group in each.param_groups for p in group["params"]}
        now = {i for i, p in enumerate(self.registry.parameters) if id(p) in held and p.requires_grad}
        new = sorted(now.difference(self._trained))
        if new:
            self._trained = sorted(now.union(self._trained))
            self._cut = cut(self._trained, [p.numel() for p in self.registry.parameters], self._num_fragments)
        with torch.no_grad():
            if anew:
                self._mean.begin(self._trained)
            elif new:
                self._mean.extend(new)

    # -- loops ---------------------------------------------------------------------------------------------------------

    def join(self, event: LoopEvent) -> None:
        """A worker that leaves its loop closes the round; see the head of this file."""
        if event is LoopEvent.ENTERED:
            self._settle_doubt(quits=False)
            if self.strategy.leased and self.hooks.loop != self._left:
                self._closed = False  # the others may get samples, and take steps, where this worker gets none
            self._resumed_s = time.perf_counter()
        elif event in (LoopEvent.FINISHED, LoopEvent.BROKE):
            self._close(self.hooks.loop, broke=event is LoopEvent.BROKE)
        elif event is LoopEvent.CLOSED:
            self._mean.stay()
        else:
            self._settle_doubt(quits=True)
            if event is not LoopEvent.QUIT:
                # Whether others have taken steps is not known here: a worker that departs meets them once more.
                self._closed = self._closed and event is not LoopEvent.DEPARTED
                self._close(FAR)

    # -- what it cost --------------------------------------------------------------------------------------------------

    def describe(self) -> SyncReport:
        return SyncReport(sent_to=self._bulk.peers(), summary=self._summary())

    def _summary(self) -> str:
        trained = [self.registry.parameters[index] for index in self._trained]
        text, sent, rounds = self.strategy.spell(), self._bulk.sent_bytes, cast(int, self.rounds)
        steps = round(self._mean_steps) - self._first
        told = comm_summary.sentence(text, rounds, steps, sent, trained, self._group.size)
        return "; ".join(filter(None, [told, self._mean.saved(rounds)]))

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def agreed_parameters(self) -> list[torch.Tensor]:
        return [self._mean.common(index) for index in range(len(self.registry.parameters))]

    def snapshot(self, complete: bool = True) -> Snapshot:
        """The round is closed. All workers go on with what is saved, so that a run that is restored goes on as this one
        does: rank 0's schedulers and scaler, and with state=keep the mean of the optimizers' states."""
        self._close(self.hooks.loop)
        if self.strategy.state == "keep":
            with torch.no_grad():
                self._extras.average_states([1.0 / self._group.size] * self._group.size)
        self._behind = True
        self._catch_up()
        extra = {**self._mean.state(), STEPS: torch.tensor(self._num_steps)}
        return Snapshot(self.registry.parameter_dict(), self.registry.buffer_dict(), collect(self.registry), extra)

    def restore(self, snapshot: Snapshot) -> None:
        self._wait()
        extra = snapshot.extra
        self._num_steps = self._first = int(extra[STEPS]) if STEPS in extra else self.hooks.step
        self._mean_steps = float(self._num_steps)
        self.warming_up = self._num_steps < self.strategy.warmup
        self.registry.load(snapshot.parameters, snapshot.buffers)
        with torch.no_grad():
            self._recut(anew=True)
            self._mean.load(extra)
        self._extras.remember()
        self._seen, self._rest = [0.0] * self._num_fragments, [0.0] * self._num_fragments
        self._samples = 0.0
        self._due = False
        self._closed, self._next = True, 0
        self.outcome = StepOutcome()
        self._begin_round()
        self._interval = self._plan([])
        load(self.registry, snapshot.states, lambda index, state: state)

    @property
    def _group(self) -> Group:
        return cast(Group, self.group)

    @property
    def _name(self) -> str:
        return self._group.transport.name_of(self._group.rank)
