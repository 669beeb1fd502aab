"""TrainingSteps: PyTorch's hooks on the prepared models and optimizers lead from the user's untouched loop to the Sync.

forward pre-hook        Sync.before_forward
forward hook            Sync.after_forward: the end of the next backward is noticed
optimizer pre-hook      Sync.step: what backward left undone; is the step taken?
optimizer post-hook     the step is committed, counted and shown
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..collectives.group import Group
from ..coordinator import CoordinatorConnection, CoordinatorEvent
from ..data import BatchSlice, Shard
from ..errors import HoraError, PeerLost
from ..monitor import spans
from ..parameters import allocator
from ..parameters.registry import ParameterRegistry
from ..rendezvous.context import RunContext
from ..server.embedding import server_embeddings
from ..strategies import Strategy
from ..strategies.common.hooks import TrainingHooks
from ..strategies.common.sync import Commit, ExchangeCancelled, Sync
from .early_exit import EarlyExit
from .hints import Hints
from .hooks import Hook
from .shadow_step import Action, ShadowSteps, is_enabled
from .stages import Stages

if TYPE_CHECKING:
    from .recorder import Recorder

NOTE_S = 0.05

Optimizer = torch.optim.Optimizer


class OpenBatch(NamedTuple):
    """A batch under way. `followed`: workers without samples follow rank 0 in it; at most one batch at a time is."""

    loader: Shard
    batch: BatchSlice
    followed: bool


class TrainingSteps(TrainingHooks):
    """`prepare` may be called once."""

    def __init__(
        self,
        group: Group,
        control: CoordinatorConnection,
        strategy: Strategy,
        on_nonfinite: str | None = None,
        context: RunContext | None = None,
    ) -> None:
        """`context` is given where the strategy uses servers; it also knows the rank of a worker that joined later,
        whose group is itself alone."""
        super().__init__(context)
        self.rank = context.rank if context is not None else group.rank
        self.size = context.size if context is not None else group.size
        self.show: Callable[[bool], None] = lambda at_once: None  # called when parameters are whole: may publish them
        self.recorder: Recorder | None = None  # where the run is monitored
        self.sync: Sync | None = None
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self.infinite: set[str] = set()  # buffers that were infinite from the start, as a mask of -inf
        self._group = group
        self._control = control
        self._strategy = strategy
        self._on_nonfinite = on_nonfinite
        self._together = False  # the workers step together, so that one that leaves is missed
        self._open: dict[int, OpenBatch] = {}  # the batches under way, by loader's id, the newest last
        self._loops: dict[int, int] = {}  # training loops that are open, by loader's id
        self._stopping = False  # this worker has been told to stop
        self._commit: Commit | None = None  # of the step under way; None: it is not taken
        self._unshown: set[int] | None = None  # optimizers that took the step counted last, until it is shown
        self._shown_round: int | None = None
        self._num_in_vain = 0  # steps outside of a loader's loop that had no effect
        self._noted_at = 0.0
        self._lost: CoordinatorEvent | None = None  # the end of another worker without which this one cannot go on
        self._handles: list[Any] = []
        self._stages = Stages()
        self._hints: Hints
        self._shadow: ShadowSteps
        self._early_exit: EarlyExit

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> None:
        if self.sync is not None:
            raise HoraError("job.prepare() was called before: call it once, with lists where there are several")
        self.models = as_list("model", model, torch.nn.Module)
        self.optimizers = as_list("optimizer", optimizer, Optimizer)
        self.schedulers = as_list("scheduler", scheduler, object) if scheduler is not None else []
        self.scaler = scaler
        if server_embeddings(self.models) and not self._strategy.uses_servers:
            raise ValueError("a ServerEmbedding needs servers, which have its rows: say --strategy ps")
        self.on_nonfinite = self._on_nonfinite or "raise"
        if is_enabled(scaler) and self._on_nonfinite in (None, "skip"):
            self.on_nonfinite = "poison"
        registry = ParameterRegistry(self.models, self.optimizers)
        self._shadow = ShadowSteps(registry, self.schedulers, scaler)
        sync = self._strategy.sync(registry, self)
        self._early_exit = EarlyExit(self._group, self._control, self, sync)
        self._control.subscribe(self._on_lost_worker)
        self._together = self.size > 1 and sync.lockstep
        if self._together:
            self._control.subscribe(self._early_exit.hear)  # now: another may leave a loop before this one enters it
        sync.bind(self._group)
        self.sync = sync
        self.infinite = {name for name, buffer in registry.buffers.items() if not bool(torch.isfinite(buffer).all())}
        self._hints = Hints(self._control, self.rank, self.size)
        allocator.keep()
        self._register(sync)

    def _register(self, sync: Sync) -> None:
        """PyTorch's hooks, in the order in which they run."""
        synchronises = self.size > 1 or self._strategy.uses_servers or sync.rounds is not None
        before: list[Callable[..., None]] = []
        after: list[Callable[..., None]] = []
        if synchronises:
            before.append(lambda *_: sync.before_forward())
            after.append(lambda _model, _inputs, output: sync.after_forward(output))
            if is_enabled(self.scaler):
                self._wrap_unscale(self.scaler, sync)
        if self.size > 1:
            before.append(self._hint)
            if any(isinstance(each, torch.nn.parallel.DistributedDataParallel) for each in self.models):
                self._hints.wrapped()
        if len(self.optimizers) > 1 or sync.rounds is not None:
            # Behind the strategy's, which may close a round; so may a step that a scaler leaves out.
            before.append(self._show_before_forward)
        if spans.on:  # behind the strategy's, whose work at the end of a backward belongs to it
            before.append(self._stages.before_forward)
            after.append(self._stages.after_forward)
        for model in self.models:
            self._handles += [model.register_forward_pre_hook(Hook(work)) for work in before]
            self._handles += [model.register_forward_hook(Hook(work)) for work in after]
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _hint(self, model: torch.nn.Module, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._hints.before_forward(inputs, sharded=bool(self._loops))

    def _wrap_unscale(self, scaler: Any, sync: Sync) -> None:
        """A GradScaler writes gradients between backward and step: the Sync is told, so that it is no script's
        write."""
        unscale = scaler._unscale_grads_

        def unscale_and_report(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            found = unscale(optimizer, *args, **kwargs)
            sync.unscaled(optimizer, found.values())
            fused = getattr(optimizer, "_step_supports_amp_scaling", False)  # it finds out by itself, on the device
            reports = self.rank == 0 or not sync.lockstep or sync.rounds is not None  # else all find the same
            if self.recorder is not None and reports and not fused and any(bool(each) for each in found.values()):
                self.on_skipped("the scaler has found an infinity in the gradients")
            return found

        scaler._unscale_grads_ = unscale_and_report

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.sync is not None:
            self.sync.unbind()

    def _on_lost_worker(self, event: CoordinatorEvent) -> None:
        """On the coordinator connection's thread. Elastic strategies survive a killed worker, none a failed script."""
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
        sync = self._prepared
        self._check_lost()
        self._stages.before_step()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args begin with the optimizer
        changed = None
        if callable(closure) and not isinstance(optimizer, torch.optim.LBFGS):
            with torch.enable_grad():
                loss = closure()  # here and now: inside the step the groups may hold shards
            changed = (args[:1], {**kwargs, "closure": lambda: loss})
        elif callable(closure):
            if self._is_followed():
                raise HoraError(
                    "LBFGS in a batch in which a worker has no samples: give the loader drop_last=True, or batches of "
                    f"{self.size} samples and more"
                )
            self._commit = sync.commit(optimizer)
            return None  # it evaluates as often as it likes, and each backward synchronises
        self._commit = sync.step(optimizer)
        self._early_exit.announce_halt()
        if self.halted and not self._loops and not self._stopping:
            self._step_in_vain()
        if self._commit is None:
            skipped = sync.outcome.skipped
            if skipped and (self.rank == 0 or not sync.lockstep):
                self.on_skipped(skipped)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # then the optimizer has nothing to do
        return changed

    def _step_in_vain(self) -> None:
        """A step in a loop that Hora cannot end, after the others have left theirs. The first is a warning at the end
        of the run, since the script may ask job.stopped only after it."""
        self._num_in_vain += 1
        if self._num_in_vain > 1:
            raise HoraError(
                f"rank {self.rank}: step {self.step + self._num_in_vain} cannot be taken: {self.halted}. Ranks must "
                "take the same number of steps: let job.shard(loader) deal the batches, or leave the loop when "
                "job.stopped is true"
            )

    def on_skipped(self, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.notice("skipped", reason)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._commit is None:
            return
        self._commit()
        found_inf = getattr(optimizer, "found_inf", None)  # set by a scaler for a fused optimizer, which then skips
        if optimizer is self.optimizers[0] and not (found_inf is not None and bool(found_inf)):
            self.step += 1
            self._count_missed()
            self._note_step()
            if self.recorder is not None:
                self.recorder.stepped()
            for loader, batch, _ in self._open.values():  # now, so that a checkpoint after this does not repeat them
                if loader.ledger is not None:
                    loader.ledger.done(batch)
            self._unshown = set()
        if self._unshown is not None:
            self._unshown.add(id(optimizer))
            if len(self._unshown) == len(self.optimizers):
                self._show()
        self._stages.after_step(self.step, self.optimizers.index(optimizer))

    def _show(self, at_once: bool = False) -> None:
        """All optimizers have done their part of the step counted last."""
        self._unshown = None
        self._shown_round = self._prepared.rounds
        self.show(at_once)

    def _show_before_forward(self, *_: Any) -> None:
        """Which optimizers a step has is not known: one that has not stepped by now is not part of it."""
        if torch.is_grad_enabled() and (self._unshown is not None or self._prepared.rounds != self._shown_round):
            self._show()

    def _count_missed(self) -> None:
        """Steps that the others have taken without this worker count for it too."""
        sync = self._prepared
        self.step += sync.jumped
        sync.jumped = 0

    def _note_step(self) -> None:
        """Now and then, so that the report of this worker's end can say how far it came."""
        now = time.monotonic()
        if now - self._noted_at >= NOTE_S and self._strategy.elastic:
            self._noted_at = now
            self._control.put_nowait(f"step/{self.rank}", str(self.step).encode())

    # -- gradients ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside synchronise nothing; their gradients count with the next one outside."""
        if self.sync is None:
            raise HoraError("job.accumulate() comes after job.prepare()")
        before = self.silent
        self.silent = True
        try:
            yield
        finally:
            self.silent = before

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        those = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.sync is None:
            return torch.nn.utils.clip_grad_norm_(those, max_norm, norm_type)
        known = self.sync.registry.index
        indices = [known[id(parameter)] for parameter in those if id(parameter) in known]
        try:
            if not self.halted:
                self._announce({"kind": "clip", "indices": indices, "max_norm": max_norm, "norm_type": norm_type})
                return self.sync.clip(those, max_norm, norm_type)
        except ExchangeCancelled as cancelled:
            self.sync.halt(str(cancelled))
        return torch.zeros(())  # no step will be taken any more

    # -- workers without samples -------------------------------------------------------------------------------------

    def _is_followed(self) -> bool:
        """Whether workers without samples follow what this worker does, in the batch under way."""
        return any(opened.followed for opened in self._open.values())

    def _announce(self, action: Action) -> None:
        """Broadcasts what comes next, where workers follow. ExchangeCancelled if rank 0 does something else."""
        if not self._is_followed() or self._early_exit.state.following or self.halted:
            return
        if self._shadow.broadcast(self._prepared, action)["kind"] != action["kind"]:
            raise ExchangeCancelled(f"rank 0 has left its loop after step {self.step}, the others have not")

    def loop_state(self) -> dict[str, Any]:
        return self._shadow.end()

    def load_loop_state(self, state: dict[str, Any]) -> None:
        self._shadow.load(state)

    @property
    def _prepared(self) -> Sync:
        assert self.sync is not None
        return self.sync


def as_list(what: str, given: Any, kind: type) -> list[Any]:
    those = list(given) if isinstance(given, list | tuple) else [given]
    for each in those:
        if not isinstance(each, kind):
            wanted = "a torch.nn.Module" if kind is torch.nn.Module else "a torch.optim.Optimizer"
            raise ValueError(f"job.prepare: {what} must be {wanted}, or a list of them, not {type(each).__name__}")
    if not those:
        raise ValueError(f"job.prepare: the list of {what}s is empty")
    return those
