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
import logging
import time
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from .. import letters
from ..collectives.base import Group
from ..errors import HoraError
from ..roster import Roster
from ..server.embedding import tables_of
from . import nonfinite, savings
from .apart import Apart
from .couriers import Errand
from .extras import Extras
from .local import DiLoCo, LocalSGD
from .means import Mean, Outer, Plain
from .states import States, collect, load
from .sync import Snapshot, Verdict
from .warmup import mean_gradients
from .words import Word, shares

log = logging.getLogger(__name__)

FAR = 1 << 40  # the loop of a worker that has left all of them


@dataclasses.dataclass
class _Meeting:
    """One exchange: what this worker brings, and what came of it. `due`: the step at which the result is taken over."""

    word: Word
    due: int
    cut: list[list[int]]  # the fragments, as they were when it began
    vectors: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)  # by fragment
    results: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: torch.Tensor | None = None
    mean_buffers: torch.Tensor | None = None
    words: list[Word] = dataclasses.field(default_factory=list)
    fragments: list[int] = dataclasses.field(default_factory=list)  # those that were exchanged

    @property
    def going(self) -> list[Word]:
        return [word for word in self.words if not word.leaving]

    @property
    def warm(self) -> bool:
        return any(word.warm for word in self.words)

    @property
    def missed(self) -> bool:
        return any(word.missed for word in self.words)


def _furthest(meeting: _Meeting) -> int:
    """How many steps the worker has behind it that has most."""
    return max(int(word.step) for word in meeting.words)


class Averaging(Apart):
    lockstep = False

    def __init__(self, roster: Roster, strategy: LocalSGD | DiLoCo) -> None:
        super().__init__(roster)
        self.strategy = strategy
        self.rounds = 0
        self.local_steps = 0
        if tables_of(roster.models):
            raise ValueError("a ServerEmbedding's rows are updated by the servers at every step: say --strategy ps")
        if strategy.warmup and any(isinstance(each, torch.optim.LBFGS) for each in roster.optimizers):
            raise ValueError("warmup shares the gradient of a step, and LBFGS computes several in one: leave it out")
        self._num_fragments = strategy.fragments if isinstance(strategy, DiLoCo) else 1
        self._overlap = strategy.overlap if isinstance(strategy, DiLoCo) else 0
        self._mean: Mean
        self._plain: Plain
        self._extras: Extras
        self._trained: list[int] = []  # the parameters that rounds are about, held by an optimizer
        self._cut: list[list[int]] = []  # which of them belong to which fragment
        self._next = 0  # the fragment that is exchanged next
        self._num_steps = 0
        self._interval = 1  # this worker's steps in the round under way
        self._warm = strategy.warmup > 0
        self._samples = 0.0  # since the last step
        self._brought = 0.0  # what they were as an optimizer came to its step; those of later ones are the same
        self._unit = 1.0  # how many samples weigh 1
        self._seen = [0.0] * self._num_fragments  # samples since each fragment was exchanged
        self._rest = [0.0] * self._num_fragments  # those of other optimizers' steps since then, if there were no more
        self._stepped: set[int] = set()  # the optimizers that have stepped since the last backward
        self._due = False  # it is time for an exchange, once all have
        self._closed = True  # no step was taken since all were at one point
        self._left = 0  # the loop that they had left then
        self._behind = False  # this worker's loop was not run for a batch in which it had no samples
        self._failed = False  # a meeting broke off: there will be no other
        self._lacking = False  # a worker took no part in the last step of the warm-up
        self._sent_bytes = 0
        self._underway: _Meeting | None = None
        self._errand: Errand | None = None
        self._resumed_s = 0.0  # when this worker went on after the last exchange
        self._busy_s = 0.0  # what it has worked since the round began
        self._step_s = 0.0  # what one of its steps took in the last round

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        self.home = group
        self.roster.agree(group)
        kind = group.transport.kind
        self.group = group.new_group(range(group.size), "auto" if kind == "shm" else kind)
        self._plain = Plain(self.roster, self._group, self.strategy.algorithm)
        self._mean = self._make_mean()
        self._extras = Extras(self.roster, self._group, self.strategy.algorithm)
        if self._overlap:
            self._errand = Errand(self._meet, lambda: None)
        self._backward.hook()
        self._recut(anew=True)
        self._interval = self._plan([])

    def _make_mean(self) -> Mean:
        if isinstance(self.strategy, DiLoCo):
            return Outer(self.roster, self._group, self.strategy)
        if self.strategy.via == "ps":
            from .kept import Kept

            return Kept(self.roster, self._group, self.strategy, self.access)
        return self._plain

    def unbind(self) -> None:
        self._backward.unhook()
        if self._errand is not None:
            self._errand.close()
        self._mean.close()
        if self.group is not None:
            self.group.close()
            self.group = None

    def linger(self) -> None:
        self._mean.linger()

    # -- the step ----------------------------------------------------------------------------------------------------

    def begin_batch(self, loop: int, batch: int, present: int, unit: float) -> None:
        self._unit = unit

    def before_forward(self) -> None:
        if self._due and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._proceed()
        super().before_forward()

    def after_backward(self) -> None:
        self._stepped.clear()
        if not self._pile:  # what was before has had its step, or was given up
            self._samples = 0.0
        self._samples += self._pile.weight * self._unit
        super().after_backward()

    def absent_step(self) -> None:
        super().absent_step()
        self._behind = True

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.roster.check_optimizer(optimizer)
        mine = self._own(optimizer)
        if self._pile or self._absent:
            self._brought = self._samples
        self._recut()
        found = getattr(optimizer, "found_inf", None)  # a scaler's words to a fused optimizer
        if found is not None and bool(found):
            self._miss(optimizer)
            return False
        self._even_out(mine)
        culprit = self._nonfinite(mine, self._name)
        if culprit:
            if self.on_nonfinite == "raise":
                raise HoraError(f"{culprit} {nonfinite.ADVICE}")
            log.warning("%s: this worker's step is not taken", culprit)
            self._brought = 0.0
            if optimizer is self.roster.optimizers[0]:
                self._samples = 0.0
            for parameter in mine:
                parameter.grad = None
        if self._warm and not self._share(optimizer):
            self._skip(optimizer)
            return False
        return True

    def combine(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """A scaler that has found an infinity leaves this worker's step out; it counts all the same."""
        comes_all_the_same = getattr(optimizer, "_step_supports_amp_scaling", False)  # a fused one, to before_step
        if not comes_all_the_same and any(bool(each) for each in found):
            self._miss(optimizer)

    def _miss(self, optimizer: torch.optim.Optimizer) -> None:
        """A step that is not taken, but that the others count on; in the warm-up nobody takes it."""
        if self._warm:
            self._share(optimizer, missed=True)
        self._skip(optimizer)

    def _skip(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is self.roster.optimizers[0]:
            self._samples = 0.0
        self.after_step(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._pile.clear()
        self._closed = False
        self._stepped.add(id(optimizer))
        if optimizer is self.roster.optimizers[0]:
            self._count()
        elif not self._warm or self._lacking:
            self._rest = [self._brought] * self._num_fragments
        if self._due and len(self._stepped) == len(self.roster.optimizers):
            self._proceed()

    def _count(self) -> None:
        """A step of the first optimizer was taken."""
        if self._due:  # the last one's, for which another optimizer was awaited
            self._proceed()
        self._absent = False
        self._num_steps += 1
        self.local_steps += 1
        self._seen = [seen + self._samples for seen in self._seen]
        self._samples = 0.0
        if self._warm:
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
        if self._warm:
            self._begin_rounds()
        else:
            self._exchange()

    def _begin_rounds(self) -> None:
        """After the warm-up all are at one point."""
        self._warm = False
        self._recut(anew=True)
        self._begin_round()
        self._interval = self._plan([])

    # -- a round -----------------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """The next fragment's turn."""
        self._wait()
        meeting = self._open(fragment=float(self._next))
        meeting.vectors[self._next] = self._pack(meeting.cut[self._next])
        if self._next == self._num_fragments - 1 and self._overlap:
            meeting.buffers = self._extras.pack()
        if self._errand is not None:
            self._underway = meeting
            self._errand.give(meeting)
            self._pass([self._next])
        else:
            self._meet(meeting)
            self._conclude(meeting)
        self._resumed_s = time.perf_counter()

    def _share(self, optimizer: torch.optim.Optimizer, missed: bool = False) -> bool:
        """Of the warm-up: everybody's gradients become their mean. False if a scaler, anybody's, refused its own."""
        number = self.roster.optimizers.index(optimizer)
        samples = [self._brought] * self._num_fragments
        meeting = self._open(gradients=1.0, number=float(number), missed=float(missed), samples=samples)
        scale = getattr(optimizer, "grad_scale", None)  # a fused one's gradients are still multiplied by its scaler's
        factor = 1.0 if scale is None else float(scale)
        mine = [p for group in optimizer.param_groups for p in group["params"]]
        self._multiply(1.0 / factor, mine)
        self._meet(meeting)
        self._multiply(factor, mine)
        self._hear(meeting)
        self._num_steps = _furthest(meeting)
        self._lacking = bool(self._group.size - len(meeting.going))
        self._resumed_s = time.perf_counter()
        return not meeting.missed

    def _close(self, loop: int, broke: bool = False) -> None:
        """This worker takes no step for now: it does as the others do until they have come as far."""
        if self._failed:
            return
        self._wait()
        if self._closed and not broke:
            return
        others_left = self._due = False
        while not others_left:
            meeting = self._open(leaving=1.0, broke=float(broke), loop=float(loop))
            self._meet(meeting)
            self._conclude(meeting)
            others_left = all(word.loop > loop or (word.leaving and word.loop == loop) for word in meeting.words)
            if not meeting.going and any(word.behind for word in meeting.words):
                self._catch_up()
            if self._warm and not meeting.going:
                self._num_steps = _furthest(meeting)
                if self._num_steps >= self.strategy.warmup:
                    self._begin_rounds()
        self._closed = all(word.leaving and word.loop == loop for word in meeting.words)
        self._left = loop
        self._resumed_s = time.perf_counter()

    def _catch_up(self) -> None:
        """Collective: who was without samples takes over what the others' loops did to schedulers meanwhile."""
        standing = letters.tell(self._group, self.stand() if self._group.rank == 0 else None, "rank 0's schedulers")
        if self._behind:
            self.stand_as(standing)
        self._behind = False

    def _open(self, **given: Any) -> _Meeting:
        """What this worker says as it comes to a meeting."""
        self._busy_s += time.perf_counter() - self._resumed_s
        self._resumed_s = time.perf_counter()
        if self.local_steps:
            self._step_s = self._busy_s / self.local_steps
        word = Word(
            warm=float(self._warm),
            loop=float(self.loop),
            stop=float(self.stop_wanted),
            behind=float(self._behind),
            step=float(self._num_steps),
            step_s=self._step_s,
            outline=float(zlib.crc32(repr(self._trained).encode())),
            buffers=float(self._extras.changed),
            samples=[seen or rest for seen, rest in zip(self._seen, self._rest, strict=True)],
        )
        return _Meeting(dataclasses.replace(word, **given), self._num_steps + self._overlap, self._cut)

    def _meet(self, meeting: _Meeting) -> None:
        """Collective. On the errand's thread, where there is one and this worker has not left its loop."""
        try:
            self._take_part(meeting)
        except BaseException:
            self._failed = True
            raise

    def _take_part(self, meeting: _Meeting) -> None:
        group, begin = self._group, time.perf_counter()
        meeting.words = words = meeting.word.gather(group)
        self._check(words)
        sent = sum(group.transport.sent_bytes) + self._mean.given_bytes
        num_bytes = 0
        if meeting.missed:
            pass  # a step that nobody takes
        elif meeting.going and meeting.going[0].gradients:
            optimizer = self.roster.optimizers[int(meeting.going[0].number)]
            num_bytes = mean_gradients(group, self.roster, optimizer, shares(words, 0), self.strategy.algorithm,
                                       leaving=bool(meeting.word.leaving))  # fmt: skip
        else:
            num_bytes = self._exchange_parameters(meeting)
        sent = sum(group.transport.sent_bytes) + self._mean.given_bytes - sent
        self._account(sent, num_bytes, time.perf_counter() - begin)

    def _exchange_parameters(self, meeting: _Meeting) -> int:
        words, going = meeting.words, meeting.going
        mean = self._plain if meeting.warm else self._mean
        meeting.fragments = [int(going[0].fragment)] if going else list(range(self._num_fragments))
        num_bytes = 0
        for fragment in meeting.fragments:
            portions = shares(words, fragment)
            if portions is None:
                continue
            vector = meeting.vectors.get(fragment)
            if vector is None or meeting.warm:
                vector = meeting.vectors[fragment] = self._pack(meeting.cut[fragment], mean)
            with torch.no_grad():
                meeting.results[fragment] = mean.travel(meeting.cut[fragment], vector, portions)
            num_bytes += vector.numel() * vector.element_size()
            self._check_finite(meeting, fragment)
        portions = shares(words, meeting.fragments[-1])
        if portions is not None and self._ends_round(meeting):
            self._exchange_extras(meeting, portions)
        return num_bytes

    def _ends_round(self, meeting: _Meeting) -> bool:
        return self._num_fragments - 1 in meeting.fragments

    def _exchange_extras(self, meeting: _Meeting, portions: Sequence[float]) -> None:
        at_once = not meeting.going or not self._overlap
        with torch.no_grad():
            if any(word.buffers for word in meeting.words) and self._extras.floats():
                if meeting.buffers is None:
                    meeting.buffers = self._extras.pack()
                meeting.mean_buffers = self._extras.travel(meeting.buffers, portions)
            if any(word.buffers for word in meeting.words) and at_once:
                self._extras.share_counts()
            if self.strategy.state == "average":
                self._extras.average_states(portions)
            elif self.strategy.state == "reset":
                self._extras.reset_states()

    def _check(self, words: Sequence[Word]) -> None:
        """HoraError, the same on every worker, if those who go on do not do the same."""
        going = [(rank, word) for rank, word in enumerate(words) if not word.leaving]
        name_of = self._group.transport.name_of
        for rank, word in going:
            first, other = going[0]
            if (word.gradients, word.number) != (other.gradients, other.number):
                raise HoraError(
                    f"{name_of(rank)} is at step {word.step:.0f}, {name_of(first)} at step {other.step:.0f}, one of "
                    f"them still in the first {self.strategy.warmup} (warmup): every worker must take the same steps"
                )
            if word.outline != other.outline or word.fragment != other.fragment:
                raise HoraError(
                    f"{name_of(rank)} at step {word.step:.0f} does not train the same parameters as {name_of(first)} "
                    f"at step {other.step:.0f}: freeze and unfreeze them on every worker at the same step"
                )

    def _check_finite(self, meeting: _Meeting, fragment: int) -> None:
        """HoraError, on every worker, names whose parameters have become NaN or infinite; they keep what they have."""
        if nonfinite.is_finite(meeting.results[fragment]):
            return
        parameters, indices = self.roster.parameters, meeting.cut[fragment]
        mine = [(self._group.rank, i) for i in indices if not nonfinite.is_finite(parameters[i].detach())]
        text = nonfinite.sentence(self._group, self.roster, mine, "value")
        raise HoraError(f"{text}: this round is not closed. Lower the learning rate, or look at that worker's batches")

    def _wait(self) -> None:
        """The exchange under way is over, and its result is taken over."""
        if self._underway is not None:
            self._arrive()

    def _arrive(self) -> None:
        assert self._errand is not None and self._underway is not None
        begin = time.perf_counter()
        self._errand.wait()
        self.traffic.exposed_s += time.perf_counter() - begin
        meeting, self._underway = self._underway, None
        self._conclude(meeting)

    def _conclude(self, meeting: _Meeting) -> None:
        """On the training thread: the parameters become what was agreed, and all know what comes next."""
        mean = self._plain if meeting.warm else self._mean
        late = self._num_steps > meeting.due - self._overlap
        with torch.no_grad():
            for fragment, result in meeting.results.items():
                mean.settle(meeting.cut[fragment], meeting.vectors[fragment], result, late)
            if meeting.mean_buffers is not None:
                assert meeting.buffers is not None
                self._extras.settle(meeting.buffers, meeting.mean_buffers, late)
        if meeting.word.leaving or self._errand is None:
            self._pass(meeting.fragments)
        if meeting.warm and meeting.results:
            self._recut(anew=True)
        if meeting.fragments and self._ends_round(meeting):
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

    def _hear(self, meeting: _Meeting) -> None:
        words = meeting.words
        stay = [word.step for word in words if not word.broke]  # of those who go on, or have come to the loop's end
        broke = [r for r, word in enumerate(words) if word.broke and (meeting.going or max(stay, default=0) > word.step)]
        stop = any(word.stop for word in words) or bool(broke)
        if stop and not self._verdict.stop:
            reason = ""
            if broke:
                rank = broke[0]
                reason = (
                    f"{self._group.transport.name_of(rank)} left its loop after step {meeting.words[rank].step:.0f}"
                )
            self._verdict = Verdict(stop=True, reason=reason)

    def _begin_round(self) -> None:
        self.local_steps = 0
        self._busy_s = 0.0

    def _plan(self, words: Sequence[Word]) -> int:
        """How many steps this worker takes in the next round.

        By time: as many as it can while all together take about `every` each on average. The slowest decides, since
        its steps are the longest: the round lasts a whole number of them, and the others fit in what they can. Nobody
        knows how long a step takes before the first one, so the first round has one. However slow one of them was in
        its last step, nobody takes more than twice as many as it should."""
        interval = self.strategy.interval(max([int(word.step) for word in words], default=self._num_steps))
        if self.strategy.pace == "steps":
            return interval
        seconds = [word.step_s for word in words]
        if not seconds or not all(seconds):
            return self._num_fragments
        slowest, mine = max(seconds), seconds[self._group.rank]
        length_s = interval * len(seconds) / sum(1.0 / each for each in seconds)
        whole_s = slowest * max(self._num_fragments, round(length_s / slowest))
        return max(self._num_fragments, int(min(whole_s, 2 * length_s) / mine + 1e-6))

    # -- what rounds are about -----------------------------------------------------------------------------------------

    def _recut(self, anew: bool = False) -> None:
        """What is trained now, or was before, is cut into fragments of about the same size, in the model's order.

        Before a step, so that what was unfrozen is still what all have. `anew`: so is everything else."""
        held = {id(p) for each in self.roster.optimizers for group in each.param_groups for p in group["params"]}
        now = {i for i, p in enumerate(self.roster.parameters) if id(p) in held and p.requires_grad}
        new = sorted(now.difference(self._trained))
        if new:
            self._trained = sorted(now.union(self._trained))
            self._cut = [[] for _ in range(self._num_fragments)]
            total = sum(self.roster.parameters[index].numel() for index in self._trained)
            at = 0
            for index in self._trained:
                self._cut[min(self._num_fragments - 1, at * self._num_fragments // max(1, total))].append(index)
                at += self.roster.parameters[index].numel()
        with torch.no_grad():
            if anew:
                self._mean.begin(self._trained)
            elif new:
                self._mean.extend(new)

    def _pack(self, indices: Sequence[int], mean: Mean | None = None) -> torch.Tensor:
        with torch.no_grad():
            return (mean or self._mean).pack(indices)

    # -- loops ---------------------------------------------------------------------------------------------------------

    def enter_loop(self) -> None:
        if self.strategy.leased and self.loop != self._left:
            self._closed = False  # the others may get samples, and take steps, where this worker gets none
        self._resumed_s = time.perf_counter()

    def leave_loop(self, finished: bool = True) -> None:
        self._close(self.loop, broke=not finished)

    def depart(self) -> None:
        self._close(FAR)

    # -- what it cost --------------------------------------------------------------------------------------------------

    def _account(self, sent: int, num_bytes: int, seconds: float) -> None:
        """Where memory is shared nothing is sent: then what a ring would have sent counts."""
        sent = sent or savings.by_ring(num_bytes, self._group.size)
        self._sent_bytes += sent
        self.traffic.sent_bytes += sent
        self.traffic.num_exchanges += 1
        self.traffic.comm_s += seconds
        if self._underway is None:
            self.traffic.exposed_s += seconds

    def notes(self) -> dict[str, float]:
        return {"round": float(cast(int, self.rounds))}

    def summary(self) -> str:
        trained = [self.roster.parameters[index] for index in self._trained]
        rounds = cast(int, self.rounds)
        size = self._group.size
        return savings.sentence(self.strategy.spell(), rounds, self._num_steps, self._sent_bytes, trained, size)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def common(self) -> list[torch.Tensor]:
        return [self._mean.common(index) for index in range(len(self.roster.parameters))]

    def snapshot(self, complete: bool = True) -> Snapshot:
        """The round is closed. With state=keep all workers go on with the mean of their states, which is what is saved:
        so a run that is restored goes on as this one does."""
        self._close(self.loop)
        if self.strategy.state == "keep":
            with torch.no_grad():
                self._extras.average_states([1.0 / self._group.size] * self._group.size)
        self.roster.refresh_buffers()
        parameters = {name: p.detach() for name, p in zip(self.roster.names, self.roster.parameters, strict=True)}
        return Snapshot(parameters, dict(self.roster.buffers), collect(self.roster), self._mean.state())

    def load_states(self, states: States) -> None:
        load(self.roster, states, lambda index, state: state)

    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        self._wait()
        self._num_steps = self.steps
        self._warm = self._num_steps < self.strategy.warmup
        with torch.no_grad():
            for name, parameter in zip(self.roster.names, self.roster.parameters, strict=True):
                parameter.copy_(parameters[name])
            for name, buffer in self.roster.buffers.items():
                buffer.copy_(buffers[name])
            self._recut(anew=True)
            self._mean.load(extra)
        self._extras.remember()
        self._seen, self._rest = [0.0] * self._num_fragments, [0.0] * self._num_fragments
        self._samples = 0.0
        self._due = False
        self._closed, self._next = True, 0
        self._verdict = Verdict()
        self._begin_round()
        self._interval = self._plan([])

    @property
    def _group(self) -> Group:
        return cast(Group, self.group)

    @property
    def _name(self) -> str:
        return self._group.transport.name_of(self._group.rank)
