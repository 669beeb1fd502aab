"""Training: what `job.prepare` sets up. PyTorch's hooks lead from the user's untouched loop to the strategy's Sync.

It is also the seat of the job's loaders (data/loader.py): they tell it which samples a backward stands for, when this
worker has none, and when the user's code leaves a loop.

Workers without samples follow rank 0's orders (orders.py). What a worker that leaves its loop does to the others is in
farewell.py.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from ..collectives import objects
from ..collectives.group import Group
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..data import BatchSlice, Shard, unwinding
from ..errors import HoraError, PeerLost
from ..monitor import spans
from ..parameters import allocator
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from ..server.embedding import server_embeddings
from ..strategies import Strategy
from ..strategies.common.sync import ExchangeCancelled, Sync
from .epoch_progress import EpochProgress
from .hints import Hints
from .hooks import Hook
from .join import EarlyExit
from .shadow_step import ShadowSteps, is_enabled
from .stages import Stages

if TYPE_CHECKING:
    from .recorder import Recorder

log = logging.getLogger(__name__)

NOTE_S = 0.05
REASON_S = 1.0  # how long the reason of a stop may take to arrive

Optimizer = torch.optim.Optimizer


class OpenBatch(NamedTuple):
    """A batch under way. `followed`: workers without samples wait in it for rank 0's orders, in one batch at a time."""

    loader: Shard
    portion: BatchSlice
    followed: bool


class Training:
    """One worker's training: hooks, steps, samples, stopping. `prepare` may be called once."""

    def __init__(
        self,
        group: Group,
        control: CoordinatorConnection,
        strategy: Strategy,
        on_nonfinite: str | None = None,
        access: RunContext | None = None,
    ) -> None:
        """`access` is to the servers, where the strategy uses any; it also knows who a worker is that has joined later,
        whose group is itself alone."""
        self.rank = access.rank if access is not None else group.rank
        self.size = access.size if access is not None else group.size
        self.step = 0
        self.num_samples = 0
        self.own_samples = 0  # of these, this worker's
        self.max_steps: int | None = None
        self.stop_reason: Callable[[], str | None] = lambda: None  # as the coordinator told it
        self.show: Callable[[bool], None] = lambda at_once: None  # parameters are whole: whoever publishes them may
        self._unshown: set[int] | None = None  # a step was counted and not shown; the optimizers that took it so far
        self._shown_round: int | None = None
        self.recorder: Recorder | None = None  # where somebody watches the run
        self.signature = b""  # of the first model's forward, once it is known, as serve.protocol writes it
        self.access = access
        self.sync: Sync | None = None
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self._shards: list[weakref.ref[Shard]] = []
        self._newest: Shard | None = None  # kept, so that its ledger can be looked at after its loop
        self.infinite: set[str] = set()  # buffers that were so from the start, a mask of -inf perhaps
        self.course = EpochProgress()
        self._group = group
        self._control = control
        self._strategy = strategy
        self._on_nonfinite = on_nonfinite
        self._first_epoch = 0
        self._standing: list[dict[str, Any]] = []  # of restored loaders that are still to be made
        self._stopping = False
        self._said = False
        self._held: dict[int, OpenBatch] = {}  # the batches under way, by loader's id
        self._leader: Shard | None = None  # the loader that trained last
        self._broke = False  # rank 0 has left the loop in a batch where this worker had no samples
        self._taken = False
        self._unfinished: int | None = None  # a loop that this worker left before its end
        self._raised: list[Shard] = []  # loops that an exception took this worker out of
        self._num_in_vain = 0  # steps outside of a loader's loop that had no effect
        self._hints: Hints
        self._lost: CoordinatorEvent | None = None  # the end of another worker without which this one cannot go on
        self._num_runs = 0
        self._noted_at = 0.0
        self._loops: dict[int, int] = {}  # loops of this worker that are open: by loader's id
        self._together = False  # whether the workers step together, so that one that leaves is missed
        self._farewell = EarlyExit(group, control)
        group.before_call = self.go_on
        self._orders: ShadowSteps | None = None
        self._handles: list[Any] = []
        self._stages = Stages()  # for the trace

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> None:
        if self.sync is not None:
            raise HoraError("job.prepare() was called before: call it once, with lists where there are several")
        self.models = several("model", model, torch.nn.Module)
        self.optimizers = several("optimizer", optimizer, Optimizer)
        self.schedulers = several("scheduler", scheduler, object) if scheduler is not None else []
        self.scaler = scaler
        if server_embeddings(self.models) and not self._strategy.uses_servers:
            raise ValueError("a ServerEmbedding needs servers, which have its rows: say --strategy ps")
        roster = ParameterRegistry(self.models, self.optimizers)
        sync = self._strategy.sync(roster)
        sync.on_nonfinite = self._on_nonfinite or ("poison" if is_enabled(scaler) else "raise")
        if sync.on_nonfinite == "skip" and is_enabled(scaler):
            sync.on_nonfinite = "poison"
        sync.before_exchange = self._before_exchange
        sync.left_out = self._note_skip
        if self.access is not None:
            sync.access = self.access
        self._control.subscribe(self._hear_of_loss)
        self._together = self.size > 1 and sync.lockstep
        if self._together:
            self._control.subscribe(self._farewell.hear)  # now: somebody may leave a loop before we are in one
        self._farewell.sync = sync
        sync.bind(self._group)
        self.sync = sync
        self._orders = ShadowSteps(sync, self.models, self.optimizers, self.schedulers, scaler)
        sync.stand, sync.stand_as = self._orders.end, self._orders.stand_as
        self._share_standing()
        self.infinite = {name for name, buffer in roster.buffers.items() if not bool(torch.isfinite(buffer).all())}
        watched = self.size > 1 or self._strategy.uses_servers or sync.rounds is not None
        if watched and is_enabled(scaler):
            self._heed(scaler, sync)
        allocator.keep()
        if watched:
            before, after = Hook(lambda *_: sync.before_forward()), Hook(lambda _m, _i, out: sync.after_forward(out))
            for each in self.models:
                self._handles += [each.register_forward_pre_hook(before), each.register_forward_hook(after)]
        self._hints = Hints(self._control, self.rank, self.size)
        if self.size > 1:
            self._handles += [each.register_forward_pre_hook(Hook(self._hint)) for each in self.models]
            if any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in self.models):
                self._hints.wrapped()
        if len(self.optimizers) > 1 or sync.rounds is not None:
            # Behind the one above, which may close a round; so may a step that a scaler leaves out.
            self._handles += [each.register_forward_pre_hook(Hook(self._before_forward)) for each in self.models]
        if spans.on:  # behind the strategy's, whose work at the end of a backward belongs to it
            begin, end = Hook(self._stages.before_forward), Hook(self._stages.after_forward)
            for each in self.models:
                self._handles += [each.register_forward_pre_hook(begin), each.register_forward_hook(end)]
        for each_optimizer in self.optimizers:
            self._handles.append(each_optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(each_optimizer.register_step_post_hook(self._after_step))

    def _hint(self, model: torch.nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._hints.before_forward(inputs, sharded=bool(self._loops))

    def _share_standing(self) -> None:
        """Where others may join, rank 0 leaves its hyper-parameters and schedulers for them; who joins takes them."""
        assert self.sync is not None
        if self.access is None or not self._strategy.elastic:
            return
        if self.rank == 0:
            self.sync.post("orders", msgspec.msgpack.encode(self._leading.end()))
        elif self.access.joined and (words := self.sync.read("orders")):
            self._leading.stand_as(msgspec.msgpack.decode(words))

    def _heed(self, scaler: Any, sync: Sync) -> None:
        """The scaler writes gradients between backward and step, which is its right: it is told apart from others."""
        unscale = scaler._unscale_grads_

        def unscale_and_tell(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = unscale(optimizer, *args, **kwargs)
            sync.combine(optimizer, found.values())
            sync.rescaled()
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)  # it finds out by itself, on the device
            tells = self.rank == 0 or not sync.lockstep or sync.rounds is not None  # elsewhere all find the same
            if self.recorder is not None and tells and not fused and any(bool(each) for each in found.values()):
                self._note_skip("the scaler has found an infinity in the gradients")
            return found

        scaler._unscale_grads_ = unscale_and_tell

    def conclude(self, logged: bool) -> None:
        """The script has ended: what it may not have noticed."""
        if self.sync is None:
            if self.size > 1 and logged and self.rank == 0:
                log.warning("job.prepare(model, optimizer) was never called: each worker trained by itself")
            return
        if self._num_in_vain:
            log.warning(
                "the last step of rank %d had no effect: %s. Ranks must take the same number of steps: let "
                "job.shard(loader) deal the batches", self.rank, self.sync.halted
            )  # fmt: skip
        elif self.sync.halted or self._stopping:
            self._tell_why()
        if self.max_steps is not None and self.step > self.max_steps and self.rank == 0:
            log.warning(
                "--max-steps %d was passed: loops over job.shard(…) and job.epochs(…) end by themselves, in others ask "
                "job.stopped", self.max_steps
            )  # fmt: skip

    @property
    def leased(self) -> bool:
        """Whether each worker takes samples of its own, so that `num_samples` are this one's."""
        return self._strategy.leased

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.sync is not None:
            self.sync.close()

    def _hear_of_loss(self, event: CoordinatorEvent) -> None:
        """On the line's thread. A worker that is killed is survived where the strategy can; one whose script fails,
        nowhere."""
        member = event.member
        if event.kind != "died" or member is None or member.role != "worker" or member.rank == self.rank:
            return
        if self._lost is None and (event.failed or not self._strategy.elastic):
            self._lost = event

    def _check_lost(self) -> None:
        if self._lost is not None and self._lost.member is not None:
            lost, me = self._lost.member, f"rank {self.rank}"
            raise PeerLost(f"{me}: lost {lost} after step {self.step}: {self._lost.text}", (lost.rank,), secondary=True)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.sync is not None
        self._check_lost()
        self._stages.before_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        changed = None
        if callable(closure) and not isinstance(optimizer, torch.optim.LBFGS):
            with torch.enable_grad():
                loss = closure()  # here and now: inside the step the groups may hold shares
            changed = (args[:1], {**kwargs, "closure": lambda: loss})
        elif callable(closure):
            if self._attended():
                raise HoraError(
                    "LBFGS in a batch in which a worker has no samples: give the loader drop_last=True, or batches of "
                    f"{self.size} samples and more"
                )
            self._taken = True
            return None  # it evaluates as often as it likes, and each backward synchronises
        self._taken = self.sync.before_step(optimizer)
        if self._taken:
            try:
                self._open_step(optimizer)
                self._taken = not self.sync.verdict.skipped
            except ExchangeCancelled as halt:
                self._taken = False
                self._halt(halt)
        self._farewell.mourn()
        if self.sync.halted and not self._loops and not self._stopping:
            self._step_in_vain()
        if not self._taken:
            skipped = self.sync.verdict.skipped
            if skipped and (self.rank == 0 or not self.sync.lockstep):
                self._note_skip(skipped)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # then the optimizer has nothing to do
        return changed

    def _step_in_vain(self) -> None:
        """A step in a loop that Hora cannot end, after the others have left theirs. The script has one to notice it by
        job.stopped; then it is told."""
        assert self.sync is not None
        self._num_in_vain += 1
        if self._num_in_vain > 1:
            raise HoraError(
                f"rank {self.rank}: step {self.step + self._num_in_vain} cannot be taken: {self.sync.halted}. Ranks "
                "must take the same number of steps: let job.shard(loader) deal the batches, or leave the loop when "
                "job.stopped is true"
            )

    def _note_skip(self, why: str) -> None:
        if self.recorder is not None:
            self.recorder.notice("skipped", why)

    def _open_step(self, optimizer: Optimizer) -> None:
        """The step will be taken, by all workers or by none; Halt if by none."""
        assert self.sync is not None
        self._promote()
        if self._attended():
            self._say(self._leading.step(optimizer))
            self.sync.share_gradients()
        with self._farewell.opening():
            self.sync.open_step(optimizer)

    def _halt(self, halt: ExchangeCancelled) -> None:
        assert self.sync is not None
        self.sync.halted = self.sync.halted or str(halt)
        self.sync.drop()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.sync is not None
        if not self._taken:
            return
        self.sync.after_step(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # a scaler's word to a fused optimizer, which then skips
        if optimizer is self.optimizers[0] and not (found_inf is not None and bool(found_inf)):
            self.step += 1
            self._jump()
            self._farewell.step = self.step
            self._note_step()
            if self.recorder is not None:
                self.recorder.stepped()
            for loader, portion, _ in self._held.values():  # now, so that a checkpoint after this does not repeat them
                if loader.ledger is not None:
                    loader.ledger.done(portion)
            self._unshown = set()
        if self._unshown is not None:
            self._unshown.add(id(optimizer))
            if len(self._unshown) == len(self.optimizers):
                self._show()
        self._stages.after_step(self.step, self.optimizers.index(optimizer))

    def _show(self, at_once: bool = False) -> None:
        """Every optimizer has done its part of the step counted last, as far as it will."""
        assert self.sync is not None
        self._unshown = None
        self._shown_round = self.sync.rounds
        self.show(at_once)

    def _before_forward(self, *_: Any) -> None:
        """Which optimizers a step has is not known: one that has not stepped by now is not of it."""
        assert self.sync is not None
        if torch.is_grad_enabled() and (self._unshown is not None or self.sync.rounds != self._shown_round):
            self._show()

    def _jump(self) -> None:
        """Steps that the others have taken without this worker are behind it too."""
        assert self.sync is not None
        self.step += self.sync.jumped
        self.sync.jumped = 0
        self.sync.steps = self.step

    def _note_step(self) -> None:
        """Now and then, so that whoever reports this worker's end can say how far it came."""
        now = time.monotonic()
        if now - self._noted_at >= NOTE_S and self._strategy.elastic:
            self._noted_at = now
            self._control.put_nowait(f"step/{self.rank}", str(self.step).encode())

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside synchronise nothing; their gradients count with the next one outside."""
        if self.sync is None:
            raise HoraError("job.accumulate() comes after job.prepare()")
        before = self.sync.silent
        self.sync.silent = True
        try:
            yield
        finally:
            self.sync.silent = before

    def weight(self, count: float) -> None:
        """The backwards of this batch stand for `count` samples (or tokens)."""
        if not count >= 0:
            raise ValueError(f"job.weight takes a number of samples, 0 or more, not {count}")
        if self.sync is None:
            raise HoraError("job.weight() comes after job.prepare()")
        portion = next((held.portion for held in reversed(self._held.values())), None)
        per_worker = portion.total / portion.size if portion is not None else 1.0
        expected = portion.mine / per_worker if portion is not None else 1.0
        self.sync.weigh(count / per_worker, expected)

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        those = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.sync is None:
            return torch.nn.utils.clip_grad_norm_(those, max_norm, norm_type)
        known = self.sync.roster.index
        indices = [known[id(parameter)] for parameter in those if id(parameter) in known]
        try:
            if not self.sync.halted:
                self._say(self._leading.clip(indices, max_norm, norm_type))
                return self.sync.clip(those, max_norm, norm_type)
        except ExchangeCancelled as halt:
            self._halt(halt)
        return torch.zeros(())  # no step will be taken any more

    # -- the loaders' seat -------------------------------------------------------------------------------------------

    def epoch(self) -> int | None:
        return self.course.epoch

    def last_epoch(self) -> bool:
        """Whether no other comes after this one, as far as is known."""
        return self.course.is_last

    def begin_at(self, epoch: int) -> None:
        """`epochs` goes on from there."""
        self._first_epoch = epoch

    def idle(self, waiting: bool) -> None:
        """This worker waits for samples that others may give back, or has them: meanwhile nobody counts on it.

        What it has done is said first, of all loaders: in zip(a, b) another may wait at b for a block that was done
        here, while this worker waits at a for one of its."""
        if waiting:
            for shard in self.shards:
                shard.settle()
        if self.sync is not None and self._loops:
            if waiting:
                self.sync.leave_loop()
                self._show(True)
            else:
                self.sync.enter_loop()

    def training(self, loader: Shard | None = None) -> bool:
        """Whether this loop trains; without a loader, whether one that begins now would."""
        if loader is not None:
            return id(loader) in self._loops
        return self.sync is not None and torch.is_grad_enabled() and any(model.training for model in self.models)

    def stopped(self, loader: Shard | None = None) -> bool:
        self._check_lost()
        if loader is not None and self.sync is not None and not self.training(loader):
            return False  # an evaluation runs to its end
        if self.max_steps is not None and self.step >= self.max_steps and not self._stopping:
            self._stopping = True
            self._control.stop(f"--max-steps {self.max_steps} reached")
        self._farewell.mourn()
        if self.sync is not None and (self.sync.halted or self.sync.verdict.stop):
            self._stopping = True
        if self.sync is not None and not self.sync.unison and self.stop_reason() is not None:
            self._stopping = True  # each after a step of its own: nobody waits for anybody
        if self._stopping:
            self._tell_why()
        return self._stopping or self._broke

    def enter(self, loader: Shard) -> None:
        self.go_on()
        self._broke = False
        if self.training():
            self._train(loader)
        self._stages.fetch()

    def _train(self, loader: Shard) -> None:
        assert self.sync is not None
        self.sync.loop += 1
        if not self._loops:
            self.sync.enter_loop()
        self._loops[id(loader)] = self.sync.loop
        if self.recorder is not None:
            self.recorder.begin()
        self._leader = loader

    def _promote(self) -> None:
        """Gradients in a loop that began as an evaluation: the model was put into train() only inside of it."""
        for loader, portion, _ in list(self._held.values()):
            if not self.training(loader):
                if not portion.whole:
                    raise HoraError(
                        f"a backward() in a batch of {portion.total} samples for {self.size} workers, in a loop that "
                        "began as an evaluation, so that those without samples do not take part: call model.train() "
                        "before the loop"
                    )
                self._train(loader)
                self._count(loader, portion)

    def _count(self, loader: Shard, portion: BatchSlice) -> None:
        self.num_samples += portion.total
        self.own_samples += portion.mine
        self.course.note(loader, portion, self.size)

    def begin(self, loader: Shard, portion: BatchSlice) -> None:
        self._stages.fetched()
        if self.sync is None or not torch.is_grad_enabled() or (self._loops and not self.training(loader)):
            return  # an evaluation, perhaps inside of a training loop
        if self._unshown is not None:
            self._show()
        self._held.pop(id(loader), None)
        followed = self.training(loader) and self._together and not portion.whole and not self._attended()
        self._held[id(loader)] = OpenBatch(loader, portion, followed)  # the newest last
        if self.training(loader):
            self._count(loader, portion)
        self.sync.weigh(portion.weight, portion.weight)
        self._begin_batch(portion)

    def _begin_batch(self, portion: BatchSlice) -> None:
        assert self.sync is not None
        self.sync.begin_batch(self.sync.loop, portion.batch, portion.present, portion.total / portion.size)

    def passes(self, loader: Shard, portion: BatchSlice) -> bool:
        """Whether the others are past this batch, so that this worker, which was late, leaves it out."""
        return self.sync is not None and self.training(loader) and self.sync.is_past(self.sync.loop, portion.batch)

    def finish(self, loader: Shard, portion: BatchSlice) -> None:
        if id(loader) in self._held and self._held[id(loader)].followed:
            try:
                self._say(self._leading.end())
            except ExchangeCancelled as halt:
                self._halt(halt)
        self._held.pop(id(loader), None)
        self._stages.fetch()

    def absent(self, loader: Shard, portion: BatchSlice) -> None:
        """Does as rank 0 says until the end of the batch; where workers do not step together it steps by itself."""
        self._stages.fetched()
        self._stand_in(loader, portion)
        self._stages.fetch()

    def _stand_in(self, loader: Shard, portion: BatchSlice) -> None:
        assert self.sync is not None
        if not self.sync.lockstep:
            self._begin_batch(portion)
            for optimizer in self.optimizers:
                self.sync.absent_step()
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(lambda: torch.zeros(()))
                else:
                    optimizer.step()
                optimizer.zero_grad()
            return
        self._held[id(loader)], self._farewell.following = OpenBatch(loader, portion, True), True
        try:
            while not self.sync.halted:
                self._farewell.check()
                begin = time.perf_counter()
                order = self._leading.say(None)
                self.sync.traffic.spend(begin)
                self._broke = order["kind"] == "leave"
                if not self._leading.follow(order):
                    break
        except ExchangeCancelled as halt:
            self._halt(halt)
        finally:
            self._held.pop(id(loader), None)
            self._farewell.following = False

    def leave(self, loader: Shard, finished: bool, raised: bool) -> None:
        """An exception is not a `break`: it may end the script, and what the others are to hear then is that. So they
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
        """The script has ended. What is wrong, if an exception, SystemExit perhaps, took it out of a loop in which the
        others still were; nothing if they have left it too. Where each may leave by itself, it has left."""
        if not self._raised or self.sync is None or self.sync.halted:
            return ""
        if self._strategy.elastic:
            self.go_on()
            return ""
        loader = self._raised[0]
        loop = self._loops.get(id(loader), 0)
        self.sync.ended = True
        try:
            self.go_on()
            alone = self._together and not self._farewell.await_others(loop)
        except PeerLost:
            alone = True
        return (
            f"its script ended inside its training loop, after step {self.step}, which the others had not left"
            if alone
            else ""
        )

    def _leave(self, loader: Shard, finished: bool) -> None:
        held = self._held.get(id(loader))
        if not finished and held is not None and held.followed:
            self._take_leave()
        loop = self._loops.pop(id(loader), None)
        self._held.pop(id(loader), None)
        self._broke = False
        if loop is not None and not self._loops:
            assert self.sync is not None
            try:
                self.sync.leave_loop(finished and not self._stopping)
            except ExchangeCancelled as halt:  # another left before what was under way had arrived
                self._halt(halt)
            self._jump()
            self._show(True)
            if self.rank == 0:
                self._share_standing()
        if loop is not None and self._together and self.sync is not None:
            alone = held is not None and not held.followed
            if not finished and not self._stopping:
                self._unfinished = loop
            if self._farewell.leave(loop, finished or self._stopping, alone, self.sync.ended):
                self._catch_up()
            self._farewell.mourn()

    def _take_leave(self) -> None:
        """Says that this worker leaves in the middle of a batch, where workers are absent; as rank 0 it ends theirs.

        If rank 0 goes on instead, what it does until its step is done here too."""
        assert self.sync is not None
        if self.sync.halted:
            return
        self._farewell.following = True
        try:
            order = self._leading.say(self._leading.leave())
            while order["kind"] in ("clip", "step") and not self._farewell.stepped:
                self._leading.follow(order)
                order = self._leading.say(self._leading.leave())
        except ExchangeCancelled as halt:
            self._halt(halt)
        finally:
            self._farewell.following = False

    def _catch_up(self) -> None:
        """Takes the step of the last exchange, as others have."""
        for optimizer in self.optimizers:
            if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                optimizer.step()
                optimizer.zero_grad()

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return indices
        return torch.tensor(objects.broadcast_object(self._group, indices.tolist(), "order drawn"), dtype=torch.int64)

    # -- absent workers ----------------------------------------------------------------------------------------------

    def _attended(self) -> bool:
        """Whether somebody follows what this worker does, in the batch under way."""
        return any(held.followed for held in self._held.values())

    def _say(self, order: dict[str, Any]) -> None:
        """Says what comes next, where somebody follows. Those who follow know already."""
        assert self.sync is not None
        if not self._attended() or self._farewell.following or self.sync.halted:
            return
        if self._leading.say(order)["kind"] != order["kind"]:
            raise ExchangeCancelled(f"rank 0 has left its loop after step {self.step}, the others have not")

    @property
    def _leading(self) -> ShadowSteps:
        assert self._orders is not None
        return self._orders

    # -- stopping ----------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """All workers leave their loops after the same step: the next one that they exchange gradients for."""
        self._control.stop(reason)
        if self.sync is None or self.size == 1 or not self.sync.unison:
            self._stopping = True
        else:
            self.sync.stop_wanted = True

    def epochs(self, count: int) -> Iterator[int]:
        self.go_on()
        if self._first_epoch >= count and self._first_epoch and self.sync is not None:
            self._hints.nothing_left(self._first_epoch, count)
        self.course.begin(count)
        self._num_runs += 1
        run = self._farewell.run = self._num_runs
        finished = raised = False
        try:
            for number in range(self._first_epoch, count):
                self.go_on()
                if self._unfinished is not None:
                    self._farewell.await_others(self._unfinished)
                    self._unfinished = None
                if self.stopped():
                    break
                self.course.epoch = number
                yield number
            finished = True
            if not self._stopping:
                self.course.finish()
        except GeneratorExit as closing:
            raised = unwinding.by_exception(closing)
            raise
        finally:
            self.course.epoch = None
            self._first_epoch = self._farewell.run = 0
            if raised:
                pass  # as in `leave`
            elif not finished and not self._stopping and self._together:
                self._farewell.quit(run)
            elif not finished and self.sync is not None:
                self.sync.quit()

    def next_epoch(self) -> int:
        """Where `epochs` would go on if the run were restored from here: where the loader that trains stands."""
        if self._leader is not None:
            return int(self._leader.state()["epoch"])
        return self.course.epoch or 0

    def depart(self, for_good: bool = False) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        self.go_on()
        if self._together:
            self._farewell.meet()
        elif self.sync is not None:
            self.sync.depart(for_good)

    def linger(self) -> None:
        """After this worker has left the run."""
        if self.sync is not None:
            if self.rank == 0 and (summary := self.sync.summary()):
                log.warning("%s", summary)
            self.sync.linger()

    @property
    def shards(self) -> list[Shard]:
        """The loaders that are in use, in the order in which they were made."""
        return [shard for known in self._shards if (shard := known()) is not None]

    def adopt(self, shard: Shard) -> Shard:
        """A loader of this job; if the run was restored, it goes on where its like stood."""
        self._newest = shard
        self._shards = [known for known in self._shards if known() is not None] + [weakref.ref(shard)]
        if self._standing:
            self._resume(shard, self._standing.pop(0))
        return shard

    def resume(self, standing: list[dict[str, Any]], epoch: int) -> None:
        """The run was restored: loaders, those that exist and those to come, go on where they stood."""
        self._standing = list(standing)
        for shard in self.shards:
            if self._standing:
                self._resume(shard, self._standing.pop(0))
        self._first_epoch = epoch
        self._stopping = self._said = False

    @staticmethod
    def _resume(shard: Shard, standing: dict[str, Any]) -> None:
        state = dict(standing)
        shard.resize(state.pop("global_batch"))
        shard.load(state)

    def _tell_why(self) -> None:
        """Once, by rank 0: after which step, and why."""
        if self._said or self.rank:
            return
        self._said = True
        known = self.sync.verdict.reason if self.sync is not None else ""
        deadline = time.monotonic() + REASON_S
        while not known and self.stop_reason() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        log.warning("stopped after step %d: %s", self.step, known or self.stop_reason() or "no reason was given")

    def _before_exchange(self) -> None:
        """Called for every exchange, before anything of it leaves; Halt if it will not take place."""
        self._promote()
        self._farewell.answer()
        self._farewell.check()  # a word that came earlier wakes nobody later
        self._say(self._leading.exchange())
        self._farewell.check()


def several(what: str, given: Any, kind: type) -> list[Any]:
    those = list(given) if isinstance(given, list | tuple) else [given]
    for each in those:
        if not isinstance(each, kind):
            wanted = "a torch.nn.Module" if kind is torch.nn.Module else "a torch.optim.Optimizer"
            raise ValueError(f"job.prepare: {what} must be {wanted}, or a list of them, not {type(each).__name__}")
    if not those:
        raise ValueError(f"job.prepare: the list of {what}s is empty")
    return those
