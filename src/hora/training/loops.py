"""TrainingLoops: the callbacks of the job's loaders (data/loader.py).

A loader tells which samples a backward stands for, when this worker has none, and when the user's code leaves a loop.
Workers without samples follow rank 0 (shadow_step.py). What a worker that leaves its loop does to the others is in
join.py.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch

from ..collectives import objects
from ..data import BatchSlice, Shard
from ..errors import HoraError, PeerLost
from ..strategies.common.hooks import BatchPosition
from ..strategies.common.sync import ExchangeCancelled, LoopEvent
from .epoch_progress import EpochProgress
from .shadow_step import EXCHANGE, LEAVE
from .steps import OpenBatch, Optimizer, TrainingSteps


class TrainingLoops(TrainingSteps):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_samples = 0
        self.own_samples = 0  # of these, this worker's
        self.progress = EpochProgress()
        self._leader: Shard | None = None  # the loader that trained last
        self._newest: Shard | None = None  # kept, so that its ledger can be inspected after its loop
        self._shards: list[weakref.ref[Shard]] = []
        self._saved_shards: list[dict[str, Any]] = []  # state of restored loaders that are still to be made
        self._raised: list[Shard] = []  # loops that an exception took this worker out of
        self._unfinished: int | None = None  # a loop that this worker left before its end
        self._broke = False  # rank 0 has left the loop in a batch where this worker had no samples
        self._group.before_call = self.go_on

    # -- loaders -----------------------------------------------------------------------------------------------------

    @property
    def shards(self) -> list[Shard]:
        """The loaders that are in use, in the order in which they were made."""
        return [shard for known in self._shards if (shard := known()) is not None]

    def adopt(self, shard: Shard) -> Shard:
        """Registers a loader of this job; if the run was restored, it goes on where its counterpart stood."""
        self._newest = shard
        self._shards = [known for known in self._shards if known() is not None] + [weakref.ref(shard)]
        if self._saved_shards:
            _resume(shard, self._saved_shards.pop(0))
        return shard

    def resume_shards(self, saved: list[dict[str, Any]]) -> None:
        """The run was restored: loaders, those that exist and those to come, go on where they stood."""
        self._saved_shards = list(saved)
        for shard in self.shards:
            if self._saved_shards:
                _resume(shard, self._saved_shards.pop(0))

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return indices
        return torch.tensor(objects.broadcast_object(self._group, indices.tolist(), "order drawn"), dtype=torch.int64)

    def training(self, loader: Shard | None = None) -> bool:
        """Whether this loop trains; without a loader, whether one that begins now would."""
        if loader is not None:
            return id(loader) in self._loops
        return self.sync is not None and torch.is_grad_enabled() and any(model.training for model in self.models)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def enter(self, loader: Shard) -> None:
        self.go_on()
        self._broke = False
        if self.training():
            self._train(loader)
        self._stages.fetch()

    def _train(self, loader: Shard) -> None:
        self.loop += 1
        if not self._loops:
            self._prepared.join(LoopEvent.ENTERED)
        self._loops[id(loader)] = self.loop
        with self._early_exit.update() as state:
            state.enter(self.loop)
        if self.recorder is not None:
            self.recorder.begin()
        self._leader = loader

    def begin(self, loader: Shard, batch: BatchSlice) -> None:
        self._stages.fetched()
        if self.sync is None or not torch.is_grad_enabled() or (self._loops and not self.training(loader)):
            return  # an evaluation, perhaps inside of a training loop
        if self._unshown is not None:
            self._show()
        self._open.pop(id(loader), None)
        followed = self.training(loader) and self._together and not batch.whole and not self._is_followed()
        self._open[id(loader)] = OpenBatch(loader, batch, followed)
        if self.training(loader):
            self._count(loader, batch)
        self.accumulation.weigh(batch.weight, batch.weight, self.sync.registry.parameters)
        self.batch = self._position(batch)

    def _position(self, batch: BatchSlice) -> BatchPosition:
        return BatchPosition(self.loop, batch.batch, batch.present, batch.total / batch.size)

    def weight(self, count: float) -> None:
        """The backward passes of this batch stand for `count` samples (or tokens)."""
        if not count >= 0:
            raise ValueError(f"job.weight takes a number of samples, 0 or more, not {count}")
        if self.sync is None:
            raise HoraError("job.weight() comes after job.prepare()")
        batch = next((opened.batch for opened in reversed(self._open.values())), None)
        per_worker = batch.total / batch.size if batch is not None else 1.0
        expected = batch.mine / per_worker if batch is not None else 1.0
        self.accumulation.weigh(count / per_worker, expected, self.sync.registry.parameters)

    def _promote(self) -> None:
        """A loop that began as an evaluation trains: the model was put into train() only inside of it."""
        for loader, batch, _ in list(self._open.values()):
            if not self.training(loader):
                if not batch.whole:
                    raise HoraError(
                        f"a backward() in a batch of {batch.total} samples for {self.size} workers, in a loop that "
                        "began as an evaluation, so that those without samples do not take part: call model.train() "
                        "before the loop"
                    )
                self._train(loader)
                self._count(loader, batch)

    def _count(self, loader: Shard, batch: BatchSlice) -> None:
        self.num_samples += batch.total
        self.own_samples += batch.mine
        self.progress.note(loader, batch, self.size)

    def passes(self, loader: Shard, batch: BatchSlice) -> bool:
        """Whether the others are past this batch, so that this worker, which was late, leaves it out."""
        return self.sync is not None and self.training(loader) and self.sync.passed_batch >= (self.loop, batch.batch)

    def finish(self, loader: Shard, batch: BatchSlice) -> None:
        if id(loader) in self._open and self._open[id(loader)].followed:
            try:
                self._announce(self._shadow.end())
            except ExchangeCancelled as cancelled:
                self._prepared.halt(str(cancelled))
        self._open.pop(id(loader), None)
        self._stages.fetch()

    # -- workers without samples -------------------------------------------------------------------------------------

    def absent(self, loader: Shard, batch: BatchSlice) -> None:
        """Follows rank 0 until the end of the batch; where workers do not step together it steps by itself."""
        self._stages.fetched()
        if self._prepared.lockstep:
            self._follow(loader, batch)
        else:
            self._step_alone(batch)
        self._stages.fetch()

    def _step_alone(self, batch: BatchSlice) -> None:
        self.batch = self._position(batch)
        for optimizer in self.optimizers:
            self._prepared.after_backward(shadow=True)
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(lambda: torch.zeros(()))
            else:
                optimizer.step()
            optimizer.zero_grad()

    def _follow(self, loader: Shard, batch: BatchSlice) -> None:
        sync = self._prepared
        self._open[id(loader)], self._early_exit.state.following = OpenBatch(loader, batch, True), True
        try:
            while not self.halted:
                self._early_exit.check()
                begin = time.perf_counter()
                action = self._shadow.broadcast(sync, None)
                sync.traffic.spend(begin)
                self._broke = action["kind"] == "leave"
                if not self._shadow.follow(sync, action):
                    break
        except ExchangeCancelled as cancelled:
            sync.halt(str(cancelled))
        finally:
            self._open.pop(id(loader), None)
            self._early_exit.state.following = False

    # -- the Sync's calls back ---------------------------------------------------------------------------------------

    def before_exchange(self) -> None:
        self._promote()
        self._early_exit.check()  # a notice that came earlier wakes no later wait
        self._announce(EXCHANGE)
        self._early_exit.check()

    def announce_step(self, optimizer: Optimizer) -> bool:
        self._promote()
        followed = self._is_followed()
        if followed:
            self._announce(self._shadow.step(optimizer))
        return followed

    def opening_step(self) -> contextlib.AbstractContextManager[None]:
        return self._early_exit.opening()

    # -- leaving -----------------------------------------------------------------------------------------------------

    def idle(self, waiting: bool) -> None:
        """This worker waits for samples that others may give back, or has them; meanwhile no step counts on it.

        It first reports its done samples of all loaders: in zip(a, b) another may wait at b for a block that was done
        here, while this worker waits at a for one of its."""
        if waiting:
            for shard in self.shards:
                shard.settle()
        if self._loops:
            self._prepared.join(LoopEvent.FINISHED if waiting else LoopEvent.ENTERED)
            if waiting:
                self._show(True)

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        """An exception is not a `break`: it may end the script, and then that is what the others must be told. So they
        are told that this worker has left its loop only when its script is known to go on."""
        if raised and self.training(loader) and self.size > 1:
            self._raised.append(loader)
        else:
            self._leave(loader, finished)

    def go_on(self) -> None:
        """The script has done something else since an exception took it out of a loop: it was caught."""
        while self._raised:
            self._leave(self._raised.pop(0), finished=False)

    def end_inside(self) -> str:
        """The script has ended. Returns the error if an exception, SystemExit perhaps, took it out of a loop that the
        others have not left; empty if they have, or where each worker may leave by itself."""
        if not self._raised or self.sync is None or self.halted:
            return ""
        if self._strategy.elastic:
            self.go_on()
            return ""
        loop = self._loops.get(id(self._raised[0]), 0)
        self.ended = True
        try:
            self.go_on()
            alone = self._together and not self._early_exit.await_others(loop)
        except PeerLost:
            alone = True
        text = f"its script ended inside its training loop, after step {self.step}, which the others had not left"
        return text if alone else ""

    def _leave(self, loader: Shard, finished: bool) -> None:
        opened = self._open.get(id(loader))
        if not finished and opened is not None and opened.followed:
            self._leave_followed()
        loop = self._loops.pop(id(loader), None)
        self._open.pop(id(loader), None)
        self._broke = False
        if loop is None:
            return
        sync = self._prepared
        if not self._loops:
            try:
                sync.join(LoopEvent.FINISHED if finished and not self._stopping else LoopEvent.BROKE)
            except ExchangeCancelled as cancelled:  # another left before what was under way had arrived
                sync.halt(str(cancelled))
            self._count_missed()
            self._show(True)
        if self._together:
            alone = opened is not None and not opened.followed
            if not finished and not self._stopping:
                self._unfinished = loop
            if self._early_exit.leave(loop, finished or self._stopping, alone):
                self._catch_up()
            self._early_exit.announce_halt()

    def _leave_followed(self) -> None:
        """Announces that this worker leaves in the middle of a batch that workers follow; as rank 0 it ends theirs.

        If rank 0 goes on instead, what it does until its step is done here too."""
        sync = self._prepared
        if self.halted:
            return
        self._early_exit.state.following = True
        try:
            action = self._shadow.broadcast(sync, LEAVE)
            while action["kind"] in ("clip", "step") and self._early_exit.state.applied < self.num_exchanges:
                self._shadow.follow(sync, action)
                action = self._shadow.broadcast(sync, LEAVE)
        except ExchangeCancelled as cancelled:
            sync.halt(str(cancelled))
        finally:
            self._early_exit.state.following = False

    def _catch_up(self) -> None:
        """Takes the step of the last exchange, as others have."""
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
                optimizer.zero_grad()


def _resume(shard: Shard, saved: dict[str, Any]) -> None:
    state = dict(saved)
    shard.resize(state.pop("global_batch"))
    shard.load(state)
