"""Meetings: what the workers do together in a round, whoever has left its loop included.

words           everybody's, from which all conclude what this meeting is about
gradients       of the warm-up: they become their mean
parameters      of the fragments that it is the turn of, or of all of them where nobody goes on
extras          at the end of a round: buffers, optimizer state
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import HoraError
from ...monitor import spans
from ...parameters.registry import ParameterRegistry
from ..common import nonfinite
from ..common.sync import CommStats
from .averager import Averager, PlainAverager
from .buffer_sync import BROKEN, BufferSync
from .counted_all_reduce import CountedAllReduce
from .round_status import RoundStatus, shares
from .warmup import mean_gradients

if TYPE_CHECKING:
    from .config import RoundStrategy

log = logging.getLogger(__name__)


@dataclasses.dataclass
class AveragingRound:
    """What this worker brings, and what came of it. `due`: the step at which the result is taken over."""

    word: RoundStatus
    due: int
    cut: list[list[int]]  # which parameters belong to which fragment
    vectors: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)  # by fragment
    results: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: torch.Tensor | None = None
    mean_buffers: torch.Tensor | None = None
    words: list[RoundStatus] = dataclasses.field(default_factory=list)
    fragments: list[int] = dataclasses.field(default_factory=list)  # those that were exchanged

    @property
    def going(self) -> list[RoundStatus]:
        return [word for word in self.words if not word.leaving]

    @property
    def warm(self) -> bool:
        return any(word.warming_up for word in self.words)

    @property
    def missed(self) -> bool:
        return any(word.missed for word in self.words)

    @property
    def furthest(self) -> int:
        """How many steps the worker has behind it that has most."""
        return max(int(word.step) for word in self.words)

    @property
    def ends_round(self) -> bool:
        return len(self.cut) - 1 in self.fragments


class RoundExecutor:
    """One worker's side of all of them. `mean` is what rounds do; before the first, and in it, it is the plain one."""

    def __init__(
        self,
        registry: ParameterRegistry,
        bulk: CountedAllReduce,
        strategy: RoundStrategy,
        mean: Averager | None,
        traffic: CommStats,
    ) -> None:
        self._registry = registry
        self._bulk = bulk
        self._group = bulk.group
        self._strategy = strategy
        self._plain = PlainAverager(registry, bulk)
        self._traffic = traffic
        self._at_once = not strategy.overlap  # results are taken over as they come
        self.mean = mean or self._plain
        self.extras = BufferSync(registry, bulk)

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        """What this worker gives of these parameters, as they are now."""
        with torch.no_grad():
            return self.mean.pack(indices)

    def hold(self, meeting: AveragingRound, exposed: bool) -> None:
        """Collective, on any thread. `exposed`: the training thread waits for it."""
        begin, sent = time.perf_counter(), self._bulk.sent_bytes
        meeting.words = words = meeting.word.gather(self._group, "status of a round")
        met = time.perf_counter()
        self._check(words)
        if meeting.missed:
            pass  # a step that nobody takes
        elif meeting.going and meeting.going[0].gradients:
            optimizer = self._registry.optimizers[int(meeting.going[0].number)]
            mean_gradients(self._bulk, self._registry, optimizer, shares(words, 0), bool(meeting.word.leaving))
        else:
            self._exchange_parameters(meeting)
        seconds = time.perf_counter() - begin
        self._traffic.num_exchanges += 1
        self._traffic.comm_s += seconds
        if exposed:
            self._traffic.exposed_s += seconds
        if spans.on:
            self._note(meeting, exposed, begin, met, self._bulk.sent_bytes - sent)

    @staticmethod
    def _note(meeting: AveragingRound, exposed: bool, begin: float, met: float, num_bytes: int) -> None:
        """For the trace: the words need everybody, so they take as long as the last one is late."""
        times, step = [spans.since(begin), spans.since(met), spans.clock()], int(meeting.word.step)
        work_us = [(end - start) / 1e3 for start, end in itertools.pairwise(times)]
        spans.add(spans.COMMUNICATION, "words", *times[:2], step=step, work_us=work_us[0])
        spans.add(spans.COMMUNICATION, "mean", *times[1:], step=step, bytes=num_bytes, work_us=work_us[1])
        if exposed:
            spans.add(spans.TRAINING, "waiting", *times[:2], what="words")
            spans.add(spans.TRAINING, "exchange", *times[1:], what="mean")

    def settle(self, meeting: AveragingRound, late: bool) -> None:
        """On the training thread: parameters and buffers become what was agreed; `late`: steps were taken meanwhile."""
        with torch.no_grad():
            for fragment, result in meeting.results.items():
                self._mean_of(meeting).settle(meeting.cut[fragment], meeting.vectors[fragment], result, late)
            if meeting.mean_buffers is not None:
                assert meeting.buffers is not None
                self.extras.settle(meeting.buffers, meeting.mean_buffers, late)

    def _mean_of(self, meeting: AveragingRound) -> Averager:
        return self._plain if meeting.warm else self.mean

    def _exchange_parameters(self, meeting: AveragingRound) -> None:
        words, going, mean = meeting.words, meeting.going, self._mean_of(meeting)
        meeting.fragments = [int(going[0].fragment)] if going else list(range(len(meeting.cut)))
        with torch.no_grad():
            for fragment in meeting.fragments:
                portions, indices = shares(words, fragment), meeting.cut[fragment]
                if portions is None:
                    continue
                vector = meeting.vectors.get(fragment)
                if vector is None or meeting.warm:
                    vector = meeting.vectors[fragment] = mean.pack(indices)
                meeting.results[fragment] = mean.travel(indices, vector, portions)
                self._check_finite(meeting, fragment)
            portions = shares(words, meeting.fragments[-1])
            if portions is not None and meeting.ends_round:
                self._exchange_extras(meeting, portions)

    def _exchange_extras(self, meeting: AveragingRound, portions: Sequence[float]) -> None:
        extras = self.extras
        if any(word.buffers for word in meeting.words):
            if meeting.buffers is None:
                meeting.buffers = extras.pack()
            sound = self._sound(meeting.words, portions)
            if meeting.buffers.numel() and sound is not None:
                meeting.mean_buffers = extras.travel(meeting.buffers, sound)
            if not meeting.going or self._at_once:
                extras.share_counts()
        if self._strategy.state == "average":
            extras.average_states(portions)
        elif self._strategy.state == "reset":
            extras.reset_states()

    def _sound(self, words: Sequence[RoundStatus], portions: Sequence[float]) -> list[float] | None:
        """The shares of those whose buffers are finite; the others get the mean of these. None if nobody's are."""
        bad = [rank for rank, word in enumerate(words) if word.buffers == BROKEN]
        if bad and self._group.rank == 0:
            log.warning("buffers of %s are not finite: they do not count", self._group.transport.name_of(bad[0]))
        left = [0.0 if rank in bad else share for rank, share in enumerate(portions)]
        return [share / sum(left) for share in left] if sum(left) else None

    def _check(self, words: Sequence[RoundStatus]) -> None:
        """HoraError, the same on every worker, if those who go on do not do the same."""
        going = [(rank, word) for rank, word in enumerate(words) if not word.leaving]
        name_of = self._group.transport.name_of
        for rank, word in going:
            first, other = going[0]
            if (word.gradients, word.number) != (other.gradients, other.number):
                raise HoraError(
                    f"{name_of(rank)} is at step {word.step:.0f}, {name_of(first)} at step {other.step:.0f}, and they "
                    f"do not do the same: in the first {self._strategy.warmup} steps (warmup) every worker must take "
                    "the same steps, of the same optimizers in the same order"
                )
            if word.fragment != other.fragment:
                raise HoraError(
                    f"{name_of(rank)} at step {word.step:.0f} is not in the same part of the round as {name_of(first)} "
                    f"at step {other.step:.0f}: every worker must take the same steps"
                )
            if word.trained != other.trained:
                raise HoraError(
                    f"{name_of(rank)} at step {word.step:.0f} does not train the same parameters as {name_of(first)} "
                    f"at step {other.step:.0f}: freeze and unfreeze them on every worker at the same step"
                )

    def _check_finite(self, meeting: AveragingRound, fragment: int) -> None:
        """HoraError, on every worker, names whose parameters have become NaN or infinite; they keep what they have."""
        if nonfinite.is_finite(meeting.results[fragment]):
            return
        parameters, indices = self._registry.parameters, meeting.cut[fragment]
        mine = [(self._group.rank, i) for i in indices if not nonfinite.is_finite(parameters[i].detach())]
        text = nonfinite.sentence(self._group, self._registry, mine, "value")
        raise HoraError(f"{text}: this round is not closed. Lower the learning rate, or look at that worker's batches")
