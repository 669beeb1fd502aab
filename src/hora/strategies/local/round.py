"""The rounds of Local SGD and DiLoCo as one worker counts them: phase, steps, samples, interval and fragments.

Pure bookkeeping, without tensors, clocks or communication.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence


class Phase(enum.Enum):
    CLOSED = "all workers have the same parameters, and this worker has taken no step since"
    LOCAL_STEPS = "this worker has taken steps that the others have not seen"
    DUE = "an exchange, or the first round, begins as soon as every optimizer has stepped"
    EXCHANGING = "an exchange is under way; with overlap this worker takes steps meanwhile"
    FAILED = "the last exchange was broken off, so workers do not close this round together"


class Round:
    """The round under way. Training thread only.

    CLOSED → LOCAL_STEPS → DUE → EXCHANGING → LOCAL_STEPS → … → CLOSED when all workers have left the training loop.
    During the warm-up, steps are taken with the mean gradient, and DUE means that the warm-up is over.
    """

    def __init__(self, num_fragments: int, warmup: int) -> None:
        self._warmup = warmup
        self.num_fragments = num_fragments
        self.num_completed = 0
        self.closed_loop = 0  # the training loop that all workers had left when the last round was closed
        self.interval = 1  # local steps of this worker in this round
        self.step_s = 0.0  # how long one of its steps takes
        self.restart(0)

    def restart(self, num_steps: int) -> None:
        """All workers have the same parameters after `num_steps` steps: those of rank 0, or of a checkpoint."""
        self.phase = Phase.CLOSED
        self.warming_up = num_steps < self._warmup
        self.num_steps = num_steps  # of the first optimizer, by this worker
        self.fragment = 0  # the one to exchange next
        self.pending_samples = 0.0  # of backward passes since the last step
        self.step_samples = 0.0  # what those were at an optimizer's step; for the steps of the other optimizers
        self._samples = [0.0] * self.num_fragments  # since each fragment was exchanged
        self.other_samples = [0.0] * self.num_fragments  # of the other optimizers, if the first has not stepped
        self._begin()

    def _begin(self) -> None:
        self.local_steps = 0
        self._busy_s = 0.0

    @property
    def samples(self) -> list[float]:
        """What this worker has trained on since each fragment was exchanged."""
        return [first or other for first, other in zip(self._samples, self.other_samples, strict=True)]

    def add_samples(self, samples: float, fresh: bool) -> None:
        """After a backward pass. `fresh`: earlier samples have had their step, or their gradients were cleared."""
        self.pending_samples = samples if fresh else self.pending_samples + samples

    def add_work(self, seconds: float) -> None:
        """This worker has computed for so long, in steps that were counted."""
        self._busy_s += seconds
        if self.local_steps:
            self.step_s = self._busy_s / self.local_steps

    def reopen(self) -> None:
        """A worker may have taken a step, this one or another."""
        if self.phase is Phase.CLOSED:
            self.phase = Phase.LOCAL_STEPS

    def count_step(self, shared: bool = False) -> None:
        """The first optimizer has stepped. `shared`: with the mean gradient of all workers."""
        self.num_steps += 1
        self.local_steps += 1
        self._samples = [0.0 if shared else seen + self.pending_samples for seen in self._samples]
        self.pending_samples = 0.0

    def count_other_step(self, samples: float) -> None:
        """Another optimizer has stepped."""
        self.other_samples = [samples] * self.num_fragments

    def check_due(self, shared: bool = False) -> None:
        """After a step of the first optimizer."""
        if self.warming_up:
            due = shared and self.num_steps >= self._warmup
        else:
            due = self.local_steps >= max(1, self.interval * (self.fragment + 1) // self.num_fragments)
        if due:
            self.phase = Phase.DUE

    def end_warmup(self) -> None:
        self.warming_up = False
        self._begin()

    def take_due(self) -> None:
        """What was due begins, or is given up because this worker leaves its loop."""
        if self.phase is Phase.DUE:
            self.phase = Phase.LOCAL_STEPS

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around an exchange that this worker waits for, or the wait for an overlapped one. If it succeeds, the phase
        is as before; one that had failed, or was overlapped, is over."""
        over = self.phase in (Phase.FAILED, Phase.EXCHANGING)
        after = Phase.LOCAL_STEPS if over else self.phase
        self.phase = Phase.EXCHANGING
        try:
            yield
        except BaseException:
            self.fail()
            raise
        self.phase = after

    def fail(self) -> None:
        self.phase = Phase.FAILED

    def begin_overlapped(self) -> None:
        """The next fragment is exchanged while steps go on."""
        self.phase = Phase.EXCHANGING
        self.count_exchange([self.fragment])

    def count_exchange(self, fragments: Sequence[int]) -> None:
        """Later samples belong to the next exchange of these fragments. After the last fragment a round begins."""
        for fragment in fragments:
            self._samples[fragment] = self.other_samples[fragment] = 0.0
            self.fragment = (fragment + 1) % self.num_fragments
        if fragments and not self.fragment:
            self._begin()

    def close(self, loop: int, everywhere: bool) -> None:
        """This worker has left `loop`. `everywhere`: so have all others, and none has entered a later one."""
        self.phase = Phase.CLOSED if everywhere else Phase.LOCAL_STEPS
        self.closed_loop = loop


class CountsRounds:
    """Shows a Round as Sync's attributes."""

    _round: Round

    @property
    def rounds(self) -> int:
        return self._round.num_completed

    @property
    def local_steps(self) -> int:
        return self._round.local_steps

    @property
    def warming_up(self) -> bool:
        return self._round.warming_up


def adapt_interval(rank: int, every: int, step_s: Sequence[float], fewest: int) -> int:
    """Local steps of this worker in a round of equal time for all, in which the workers take `every` steps on average.

    `step_s` is how long a step took each worker in the last round; 0 for one that had no samples yet. The round lasts
    a whole number of steps of the slowest worker, and at most twice as long as it should. Before any worker is
    measured, and at least, it has the `fewest` steps.
    """
    known = [each for each in step_s if each]
    if not known:
        return fewest
    slowest = max(known)
    length_s = every * len(known) / sum(1.0 / each for each in known)
    whole_s = slowest * max(fewest, round(length_s / slowest))
    return max(fewest, int(min(whole_s, 2 * length_s) / (step_s[rank] or slowest) + 1e-6))


def cut_fragments(indices: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """These parameters in `count` fragments of about the same size, in the model's order; none of them is divided."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    total, at = max(1, sum(sizes[index] for index in indices)), 0
    for index in indices:
        fragments[min(count - 1, at * count // total)].append(index)
        at += sizes[index]
    return fragments
