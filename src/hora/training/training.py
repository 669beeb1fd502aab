"""Training: what `job.prepare` sets up, and how a training stops and goes on.

TrainingHooks (strategies/common/hooks.py)      what a Sync reads, and its calls back
  TrainingSteps (steps.py)                      PyTorch's hooks: forward, backward, step
    TrainingLoops (loops.py)                    the loaders' callbacks
      Training                                  epochs, stopping, the end
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..data import Shard, unwinding
from ..strategies.common.sync import LoopEvent
from .join import RUN
from .loops import TrainingLoops

log = logging.getLogger(__name__)

REASON_S = 1.0  # how long the reason of a stop may take to arrive


class Training(TrainingLoops):
    """One worker's training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_steps: int | None = None
        self.stop_reason: Callable[[], str | None] = lambda: None  # as the coordinator sent it
        self.signature = b""  # of the first model's forward, once it is known, as the inference protocol encodes it
        self._first_epoch = 0
        self._num_runs = 0
        self._reason_logged = False

    @property
    def leased(self) -> bool:
        """Whether each worker takes samples of its own, so that `num_samples` are this one's."""
        return self._strategy.leased

    # -- epochs ------------------------------------------------------------------------------------------------------

    def epoch(self) -> int | None:
        return self.progress.epoch

    def last_epoch(self) -> bool:
        """Whether no other comes after this one, as far as is known."""
        return self.progress.is_last

    def begin_at(self, epoch: int) -> None:
        """`epochs` goes on from there."""
        self._first_epoch = epoch

    def epochs(self, count: int) -> Iterator[int]:
        self.go_on()
        if self._first_epoch >= count and self._first_epoch and self.sync is not None:
            self._hints.nothing_left(self._first_epoch, count)
        self.progress.begin(count)
        self._num_runs += 1
        run = self.run = self._num_runs
        finished = raised = False
        try:
            for number in range(self._first_epoch, count):
                self.go_on()
                if self._unfinished is not None:
                    self._early_exit.await_others(self._unfinished)
                    self._unfinished = None
                if self.stopped():
                    break
                self.progress.epoch = number
                yield number
            finished = True
            if not self._stopping:
                self.progress.finish()
        except GeneratorExit as closing:
            raised = unwinding.by_exception(closing)
            raise
        finally:
            self.progress.epoch = None
            self._first_epoch = self.run = 0
            if not raised and not finished:  # an exception is no break; see `leave`
                if self._together and not self._stopping:
                    with self._early_exit.update() as state:
                        state.tell((RUN, run))
                elif self.sync is not None:
                    self.sync.join(LoopEvent.QUIT)

    def next_epoch(self) -> int:
        """Where `epochs` would go on if the run were restored from here: where the loader that trains stands."""
        if self._leader is not None:
            return int(self._leader.state()["epoch"])
        return self.progress.epoch or 0

    def resume(self, saved: list[dict[str, Any]], epoch: int) -> None:
        """The run was restored."""
        self.resume_shards(saved)
        self._first_epoch = epoch
        self._stopping = self._reason_logged = False

    # -- stopping ----------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """All workers leave their loops after the same step: the next one that they exchange gradients for."""
        self._control.stop(reason)
        if self.sync is None or self.size == 1 or not self.sync.unison:
            self._stopping = True
        else:
            self.stop_wanted = True

    def stopped(self, loader: Shard | None = None) -> bool:
        self._check_lost()
        if loader is not None and self.sync is not None and not self.training(loader):
            return False  # an evaluation runs to its end
        if self.max_steps is not None and self.step >= self.max_steps and not self._stopping:
            self._stopping = True
            self._control.stop(f"--max-steps {self.max_steps} reached")
        if self.sync is not None:
            self._early_exit.announce_halt()
            alone = not self.sync.unison and self.stop_reason() is not None  # each after a step of its own
            self._stopping |= bool(self.halted) or self.sync.outcome.stop or alone
        if self._stopping:
            self._log_reason()
        return self._stopping or self._broke

    def _log_reason(self) -> None:
        """Once, by rank 0: after which step, and why."""
        if self._reason_logged or self.rank:
            return
        self._reason_logged = True
        known = self.sync.outcome.reason if self.sync is not None else ""
        deadline = time.monotonic() + REASON_S
        while not known and self.stop_reason() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        log.warning("stopped after step %d: %s", self.step, known or self.stop_reason() or "no reason was given")

    # -- the end -----------------------------------------------------------------------------------------------------

    def depart(self, for_good: bool = False) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        self.go_on()
        if self._together:
            with self._early_exit.update() as state:
                state.meet()
        elif self.sync is not None:
            self.sync.join(LoopEvent.DEPARTED if for_good else LoopEvent.PAUSED)

    def conclude(self, logged: bool) -> None:
        """The script has ended: warns of what it may not have noticed."""
        if self.sync is None:
            if self.size > 1 and logged and self.rank == 0:
                log.warning("job.prepare(model, optimizer) was never called: each worker trained by itself")
            return
        if self._num_in_vain:
            log.warning(
                "the last step of rank %d had no effect: %s. Ranks must take the same number of steps: let "
                "job.shard(loader) deal the batches", self.rank, self.halted
            )  # fmt: skip
        elif self.halted or self._stopping:
            self._log_reason()
        if self.max_steps is not None and self.step > self.max_steps and self.rank == 0:
            log.warning(
                "--max-steps %d was passed: loops over job.shard(…) and job.epochs(…) end by themselves, in others ask "
                "job.stopped", self.max_steps
            )  # fmt: skip

    def stay(self) -> None:
        """After this worker has left the run: logs the summary, and stays while others need something of it."""
        if self.sync is not None:
            if self.rank == 0 and (summary := self.sync.describe().summary):
                log.warning("%s", summary)
            self.sync.join(LoopEvent.CLOSED)
