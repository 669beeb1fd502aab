"""Training: what `job.prepare` sets up. PyTorch's hooks lead from the user's untouched loop to the strategy's Sync.

It is also the seat of the job's loaders (data/loader.py): they tell it which samples a backward stands for, when this
worker has none, and when the user's code leaves a loop.

**Workers without samples.** Who has samples in a batch is known to all. In a batch where somebody has none, rank 0,
which then has some, says aloud what it does before it does it (an exchange, a clipping, a step, the end of the batch),
and the absent follow from inside their loader: weight 0, rank 0's gradients and hyper-parameters.

**Leaving a loop.** An exchange needs every worker, so one that leaves its loop ends the others': it tells them how many
exchanges it has taken part in. A worker that has left the same loop after as many ignores it; one that waits in a later
exchange drops that step and stops. All then hold the parameters of the same step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from . import letters, memory
from .collectives.base import Group
from .coordinator import Control, Event
from .data import Ledger, Portion, Shard
from .errors import HoraError
from .roster import Roster
from .strategies import Strategy
from .strategies.sync import Halt, Sync

log = logging.getLogger(__name__)

TOPIC = "training"
REASON_S = 1.0  # how long the reason of a stop may take to arrive

Optimizer = torch.optim.Optimizer


class Word(msgspec.Struct, array_like=True):
    """`left`: this rank has left loop `loop` after `num_exchanges`. `halt`: there will be none beyond that number."""

    kind: str
    loop: int
    num_exchanges: int
    step: int


class Training:
    """One worker's training: hooks, steps, samples, stopping. `prepare` may be called once."""

    def __init__(self, group: Group, control: Control, strategy: Strategy, on_nonfinite: str | None = None) -> None:
        self.rank = group.rank
        self.size = group.size
        self.step = 0
        self.num_samples = 0
        self.max_steps: int | None = None
        self.stop_reason: Callable[[], str | None] = lambda: None  # as the coordinator told it
        self.sync: Sync | None = None
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.scaler: Any = None
        self.shards: list[Shard] = []
        self.current_epoch: int | None = None
        self._group = group
        self._control = control
        self._strategy = strategy
        self._on_nonfinite = on_nonfinite
        self._first_epoch = 0
        self._standing: list[dict[str, Any]] = []  # of restored loaders that are still to be made
        self._stopping = False
        self._said = False
        self._portion: Portion | None = None
        self._ledger: Ledger | None = None
        self._broke = False  # rank 0 has left the loop in a batch where this worker had no samples
        self._mourned = False
        self._taken = False
        self._following = False  # this worker has no samples now and does as rank 0 says
        self._loops: dict[int, int] = {}  # loops of this worker that are open: by loader's id
        self._ended: dict[int, int] = {}  # loops that are over, with the number of exchanges then
        self._words: list[tuple[Word, str]] = []
        self._lock = threading.Lock()
        self._handles: list[Any] = []

    # -- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, model: Any, optimizer: Any, scheduler: Any = None, scaler: Any = None) -> None:
        if self.sync is not None:
            raise HoraError("job.prepare() was called before: call it once, with lists where there are several")
        self.models = _several("model", model, torch.nn.Module)
        self.optimizers = _several("optimizer", optimizer, Optimizer)
        self.schedulers = _several("scheduler", scheduler, object) if scheduler is not None else []
        self.scaler = scaler
        roster = Roster(self.models, self.optimizers)
        sync = self._strategy.sync(roster)
        sync.on_nonfinite = self._on_nonfinite or ("poison" if _enabled(scaler) else "raise")
        if sync.on_nonfinite == "skip" and _enabled(scaler):
            sync.on_nonfinite = "poison"
        sync.before_exchange = self._before_exchange
        sync.bind(self._group)
        self.sync = sync
        memory.keep()
        if self.size > 1:
            self._control.listen(self._hear)
            for each in self.models:
                self._handles.append(each.register_forward_pre_hook(_outside_compile(lambda *_: sync.before_forward())))
                self._handles.append(
                    each.register_forward_hook(_outside_compile(lambda _m, _i, output: sync.after_forward(output)))
                )
        for each_optimizer in self.optimizers:
            self._handles.append(each_optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(each_optimizer.register_step_post_hook(self._after_step))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.sync is not None:
            self.sync.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.sync is not None
        closure = kwargs.get("closure", args[0] if args else None)
        changed = None
        if callable(closure) and not isinstance(optimizer, torch.optim.LBFGS):
            with torch.enable_grad():
                loss = closure()  # here and now: inside the step the groups may hold shares
            changed = ((), {**kwargs, "closure": lambda: loss})
        elif callable(closure):
            self._taken = True
            return None  # it evaluates as often as it likes, and each backward synchronises
        self._taken = self.sync.before_step(optimizer)
        self._mourn()
        if self._taken:
            self._order("step", optimizer=self.optimizers.index(optimizer), groups=self._hyper())
            if self._attended():
                self.sync.share_gradients()
            self.sync.open_step(optimizer)
        else:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # then the optimizer has nothing to do
        return changed

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.sync is not None
        if not self._taken:
            return
        self.sync.after_step(optimizer)
        if optimizer is self.optimizers[0]:
            self.step += 1
            if self._portion is not None and self._ledger is not None:
                self._ledger.done(self._portion)  # now, so that a checkpoint after this step does not repeat it

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
        portion = self._portion
        per_worker = portion.total / self.size if portion is not None else 1.0
        expected = portion.mine / per_worker if portion is not None else 1.0
        self.sync.weigh(count / per_worker, expected)

    def clip(self, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        those = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.sync is None:
            return torch.nn.utils.clip_grad_norm_(those, max_norm, norm_type)
        known = self.sync.roster.index
        indices = [known[id(parameter)] for parameter in those if id(parameter) in known]
        self._order("clip", indices=indices, max_norm=max_norm, norm_type=norm_type)
        return self.sync.clip(those, max_norm, norm_type)

    # -- the loaders' seat -------------------------------------------------------------------------------------------

    def epoch(self) -> int | None:
        return self.current_epoch

    def training(self) -> bool:
        return self.sync is not None and torch.is_grad_enabled() and any(model.training for model in self.models)

    def stopped(self) -> bool:
        if self.max_steps is not None and self.step >= self.max_steps and not self._stopping:
            self._stopping = True
            self._control.stop(f"--max-steps {self.max_steps} reached")
        self._mourn()
        if self.sync is not None and (self.sync.halted or self.sync.verdict.stop):
            self._stopping = True
        if self._stopping:
            self._say()
        return self._stopping or self._broke

    def enter(self, loader: Shard) -> None:
        self._broke = False
        if self.training():
            assert self.sync is not None
            self.sync.loop += 1
            self._loops[id(loader)] = self.sync.loop

    def begin(self, portion: Portion, ledger: Ledger) -> None:
        if self.sync is not None and self.training():
            self._portion, self._ledger = portion, ledger
            self.num_samples += portion.total
            weight = portion.mine * self.size / portion.total
            self.sync.weigh(weight, weight)

    def finish(self, portion: Portion) -> None:
        if self._attended():
            self._order("end", groups=self._hyper(), schedulers=self._scheduler_states(), scaler=self._scaler_state())
        self._portion = None

    def absent(self, portion: Portion) -> None:
        """Does as rank 0 says until the end of the batch."""
        assert self.sync is not None
        self._portion, self._following = portion, True
        try:
            while not self.sync.halted and self._follow():
                pass
        except Halt as halt:
            self.sync.halted = str(halt)
        finally:
            self._portion, self._following = None, False

    def leave(self, loader: Shard, finished: bool) -> None:
        loop = self._loops.pop(id(loader), None)
        if loop is None or self.size == 1:
            self._portion = None
            return
        assert self.sync is not None
        if not finished and not self.sync.halted:
            with contextlib.suppress(Halt):
                self._order("leave")
        self._portion = None
        with self._lock:
            self._ended[loop] = self.sync.num_exchanges
        if not finished and not self._stopping:
            self._tell(Word("left", loop, self.sync.num_exchanges, self.step))
        self._mourn()

    def share_order(self, indices: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return indices
        length = torch.tensor([len(indices)])
        self._group.broadcast(length, name="samples drawn")
        drawn = indices if self.rank == 0 else torch.empty(int(length.item()), dtype=torch.int64)
        self._group.broadcast(drawn, name="order drawn")
        return drawn

    # -- absent workers ----------------------------------------------------------------------------------------------

    def _attended(self) -> bool:
        """Whether somebody follows what this worker does, in the batch under way."""
        portion = self._portion
        return portion is not None and not portion.whole and self.sync is not None and self.training()

    def _order(self, kind: str, **what: Any) -> None:
        """Says what comes next, where somebody follows. Those who follow know already."""
        if self._attended() and not self._following:
            said = self._say_order({"kind": kind, **what})["kind"]
            if said != kind:
                raise Halt(f"rank 0 has left its loop after step {self.step}, the others have not")

    def _say_order(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Collective: rank 0's order."""
        assert self.sync is not None and self.sync.group is not None
        return dict(letters.tell(self.sync.group, order, "order"))

    def _follow(self) -> bool:
        """One order of rank 0; False at the end of the batch."""
        assert self.sync is not None
        order = self._say_order(None)
        if order["kind"] == "exchange":
            self.sync.absent_step()
        elif order["kind"] == "clip":
            parameters = [self.sync.roster.parameters[index] for index in order["indices"]]
            self.sync.clip(parameters, order["max_norm"], order["norm_type"])
        elif order["kind"] == "step":
            self._adopt(order["groups"])
            optimizer = self.optimizers[order["optimizer"]]
            optimizer.step()
            optimizer.zero_grad()
        elif order["kind"] == "leave":
            self._broke = True
            return False
        else:
            self._adopt(order["groups"])
            for scheduler, state in zip(self.schedulers, order["schedulers"], strict=True):
                scheduler.__dict__.update(state)
            if order["scaler"] and _enabled(self.scaler):
                self.scaler.load_state_dict(order["scaler"])
            return False
        return True

    def _hyper(self) -> list[list[dict[str, Any]]]:
        """The hyper-parameters of all groups of all optimizers: numbers and pairs of them."""
        if not self._attended() or self._following:
            return []
        return [
            [
                {key: _plain(value) for key, value in group.items() if _is_plain(value)}
                for group in optimizer.param_groups
            ]
            for optimizer in self.optimizers
        ]

    def _adopt(self, groups: list[list[dict[str, Any]]]) -> None:
        for optimizer, theirs in zip(self.optimizers, groups, strict=True):
            for group, values in zip(optimizer.param_groups, theirs, strict=True):
                for key, value in values.items():
                    if isinstance(group.get(key), torch.Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(value, list) else value

    def _scheduler_states(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in scheduler.state_dict().items() if _is_plain(value) or _is_numbers(value)}
            for scheduler in self.schedulers
        ]

    def _scaler_state(self) -> dict[str, Any]:
        return self.scaler.state_dict() if _enabled(self.scaler) else {}

    # -- stopping ----------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """All workers leave their loops after the same step: the next one that they exchange gradients for."""
        self._control.stop(reason)
        if self.size == 1 or self.sync is None:
            self._stopping = True
        else:
            self.sync.stop_wanted = True

    def epochs(self, count: int) -> Iterator[int]:
        for number in range(self._first_epoch, count):
            if self.stopped():
                break
            self.current_epoch = number
            yield number
        self.current_epoch = None
        self._first_epoch = 0

    def adopt(self, shard: Shard) -> Shard:
        """A loader of this job; if the run was restored, it goes on where its like stood."""
        self.shards.append(shard)
        if self._standing:
            self._resume(shard, self._standing.pop(0))
        return shard

    def resume(self, standing: list[dict[str, Any]], epoch: int | None) -> None:
        """The run was restored: loaders, those that exist and those to come, go on where they stood."""
        self._standing = list(standing)
        for shard in self.shards:
            if self._standing:
                self._resume(shard, self._standing.pop(0))
        self._first_epoch = standing[0]["epoch"] if standing else epoch or 0
        self._stopping = self._said = False

    @staticmethod
    def _resume(shard: Shard, standing: dict[str, Any]) -> None:
        state = dict(standing)
        shard.resize(state.pop("global_batch"))
        shard.load(state)

    def _say(self) -> None:
        """Once, by rank 0: after which step, and why."""
        if self._said or self.rank:
            return
        self._said = True
        deadline = time.monotonic() + REASON_S
        while self.stop_reason() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        log.warning("stopped after step %d: %s", self.step, self.stop_reason() or "no reason was given")

    def _before_exchange(self) -> None:
        """Called for every exchange, before anything of it leaves; Halt if it will not take place."""
        self._order("exchange")
        with self._lock:
            halt = self._judge()
        if halt is not None:
            raise halt

    def _judge(self) -> Halt | None:
        """Whether somebody will not come to the exchange under way. Called under the lock."""
        assert self.sync is not None
        for word, who in self._words:
            if self.sync.num_exchanges + self._following <= word.num_exchanges:
                continue
            if word.kind == "left" and (word.loop in self._ended or word.loop > self.sync.loop):
                continue
            return Halt(f"{who} left its loop after step {word.step}")
        return None

    def _hear(self, event: Event) -> None:
        """On the line's thread."""
        if event.kind != "told" or event.topic != TOPIC or event.member is None or self.sync is None:
            return
        word = msgspec.msgpack.decode(event.body, type=Word)
        with self._lock:
            self._words.append((word, str(event.member)))
            halt = self._judge()
        if halt is not None:
            self.sync.abort(halt)

    def _mourn(self) -> None:
        """After an exchange that did not take place: everybody hears that there will be no more."""
        if self.sync is None or not self.sync.halted or self._mourned:
            return
        self._mourned = True
        self._tell(Word("halt", self.sync.loop, self.sync.num_exchanges - 1, self.step))
        self._control.stop(self.sync.halted)

    def _tell(self, word: Word) -> None:
        with contextlib.suppress(HoraError):
            self._control.tell(TOPIC, msgspec.msgpack.encode(word))


def _several(what: str, given: Any, kind: type) -> list[Any]:
    those = list(given) if isinstance(given, list | tuple) else [given]
    for each in those:
        if not isinstance(each, kind):
            wanted = "a torch.nn.Module" if kind is torch.nn.Module else "a torch.optim.Optimizer"
            raise ValueError(f"job.prepare: {what} must be {wanted}, or a list of them, not {type(each).__name__}")
    if not those:
        raise ValueError(f"job.prepare: the list of {what}s is empty")
    return those


def _enabled(scaler: Any) -> bool:
    return scaler is not None and scaler.is_enabled()


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, bool | int | float | str | type(None))
        or _is_numbers(value)
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    )


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(part, bool | int | float) for part in value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _outside_compile(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that torch.compile leaves alone."""

    def outside(*args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(*args)

    return outside
