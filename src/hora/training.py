"""Training: what `job.prepare` sets up. PyTorch's hooks lead from the user's untouched loop to the strategy's Sync.

It is also the seat of the job's loaders (data/loader.py): they tell it which samples a backward stands for, when this
worker has none, and when the user's code leaves a loop.

**Workers without samples.** Who has samples in a batch is known to all. In a batch where somebody has none, rank 0,
which then has some, says aloud what it does before it does it (an exchange, a clipping, a step, the end of the batch),
and the absent follow from inside their loader: weight 0, rank 0's gradients and hyper-parameters.

**Leaving a loop.** An exchange needs every worker, so one that leaves its loop ends the others': it tells them how many
exchanges it has taken part in. A worker that has left the same loop after as many ignores it; one that waits in a later
exchange drops that step and stops. All then hold the parameters of the same step.

One may leave between an exchange and its step. Where a step needs everybody (shares, absent workers) it is then taken
by all or by none. Elsewhere the others may have taken it already: who leaves asks them, and takes it too if one has.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch

from . import checkpoint, letters, memory
from .collectives.base import Group
from .coordinator import Control, Event
from .data import Portion, Shard
from .errors import HoraError
from .roster import Roster
from .strategies import Strategy
from .strategies.sync import Halt, Sync

log = logging.getLogger(__name__)

TOPIC = "training"
CATCH_UP_S = 30.0  # how long one that leaves before its step waits to hear whether others took it
REASON_S = 1.0  # how long the reason of a stop may take to arrive

Optimizer = torch.optim.Optimizer


class Word(msgspec.Struct, array_like=True):
    """`left`: this rank has left loop `loop` after `num_exchanges`. `halt`: there will be none beyond that number.

    `open`: it has left before the step of the last of them; has anybody taken that? The answers are `took`, `passed`.
    `quit`: it has left the `job.epochs` of number `loop`. `meet`: it has come to meeting `loop` outside of all loops.
    """

    kind: str
    loop: int
    num_exchanges: int
    step: int


class Held(NamedTuple):
    """A batch under way. `followed`: workers without samples wait in it for rank 0's orders, in one batch at a time."""

    loader: Shard
    portion: Portion
    followed: bool


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
        self.infinite: set[str] = set()  # buffers that were so from the start, a mask of -inf perhaps
        self.current_epoch: int | None = None
        self._group = group
        self._control = control
        self._strategy = strategy
        self._on_nonfinite = on_nonfinite
        self._first_epoch = 0
        self._standing: list[dict[str, Any]] = []  # of restored loaders that are still to be made
        self._stopping = False
        self._said = False
        self._held: dict[int, Held] = {}  # the batches under way, by loader's id
        self._leader: Shard | None = None  # the loader that trained last
        self._applied = 0  # the exchange whose step was taken last
        self._broke = False  # rank 0 has left the loop in a batch where this worker had no samples
        self._mourned = False
        self._taken = False
        self._stepping = False  # this worker waits for all to come to a step
        self._following = False  # this worker has no samples now and does as rank 0 says
        self._run = 0  # which `job.epochs` is under way, 0 outside
        self._num_runs = 0
        self._num_meetings = 0
        self._loops: dict[int, int] = {}  # loops of this worker that are open: by loader's id
        self._ended: dict[int, int] = {}  # loops that are over, with the number of exchanges then
        self._words: list[tuple[Word, str]] = []
        self._answers: dict[int, set[int]] = {}  # by exchange: whose answer to an `open` word has come
        self._taken_by_others: set[int] = set()  # exchanges whose step somebody took
        self._answered: set[int] = set()
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
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
        if self.size > 1:
            self._control.listen(self._hear)  # before all can go on: somebody may leave a loop before we are in one
        sync.bind(self._group)
        self.sync = sync
        self.infinite = {name for name, buffer in roster.buffers.items() if not bool(torch.isfinite(buffer).all())}
        memory.keep()
        if self.size > 1:
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
            except Halt as halt:
                self._taken = False
                self._halt(halt)
        self._mourn()
        if not self._taken:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # then the optimizer has nothing to do
        return changed

    def _open_step(self, optimizer: Optimizer) -> None:
        """The step will be taken, by all workers or by none; Halt if by none."""
        assert self.sync is not None
        self._promote()
        self._order("step", optimizer=self.optimizers.index(optimizer), groups=self._hyper())
        if self._attended():
            self.sync.share_gradients()
        with self._lock:
            self._stepping = self.sync.together
            halt = self._judge() if self._stepping else None
            if not self._stepping:
                self._applied = self.sync.num_exchanges
        try:
            if halt is not None:
                raise halt
            self._answer()
            self.sync.open_step(optimizer)
        finally:
            self._stepping = False
        self._applied = self.sync.num_exchanges

    def _halt(self, halt: Halt) -> None:
        assert self.sync is not None
        self.sync.halted = self.sync.halted or str(halt)
        self.sync.drop()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.sync is not None
        if not self._taken:
            return
        self.sync.after_step(optimizer)
        if optimizer is self.optimizers[0]:
            self.step += 1
            for loader, portion, _ in self._held.values():  # now, so that a checkpoint after this does not repeat them
                if loader.ledger is not None:
                    loader.ledger.done(portion)

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
        per_worker = portion.total / self.size if portion is not None else 1.0
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
                self._order("clip", indices=indices, max_norm=max_norm, norm_type=norm_type)
                return self.sync.clip(those, max_norm, norm_type)
        except Halt as halt:
            self._halt(halt)
        return torch.zeros(())  # no step will be taken any more

    # -- the loaders' seat -------------------------------------------------------------------------------------------

    def epoch(self) -> int | None:
        return self.current_epoch

    def training(self, loader: Shard | None = None) -> bool:
        """Whether this loop trains; without a loader, whether one that begins now would."""
        if loader is not None:
            return id(loader) in self._loops
        return self.sync is not None and torch.is_grad_enabled() and any(model.training for model in self.models)

    def stopped(self, loader: Shard | None = None) -> bool:
        if loader is not None and self.sync is not None and not self.training(loader):
            return False  # an evaluation runs to its end
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
            self._train(loader)

    def _train(self, loader: Shard) -> None:
        assert self.sync is not None
        self.sync.loop += 1
        self._loops[id(loader)] = self.sync.loop
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

    def begin(self, loader: Shard, portion: Portion) -> None:
        if self.sync is None or not torch.is_grad_enabled() or (self._loops and not self.training(loader)):
            return  # an evaluation, perhaps inside of a training loop
        self._held.pop(id(loader), None)
        followed = self.training(loader) and not portion.whole and not self._attended()
        self._held[id(loader)] = Held(loader, portion, followed)  # the newest last
        self.num_samples += portion.total
        weight = portion.mine * self.size / portion.total
        self.sync.weigh(weight, weight)

    def finish(self, loader: Shard, portion: Portion) -> None:
        if id(loader) in self._held and self._held[id(loader)].followed:
            try:
                self._order("end", **self._standing_after())
            except Halt as halt:
                self._halt(halt)
        self._held.pop(id(loader), None)

    def absent(self, loader: Shard, portion: Portion) -> None:
        """Does as rank 0 says until the end of the batch."""
        assert self.sync is not None
        self._held[id(loader)], self._following = Held(loader, portion, True), True
        try:
            while not self.sync.halted and self._follow(self._say_order(None)):
                pass
        except Halt as halt:
            self._halt(halt)
        finally:
            self._held.pop(id(loader), None)
            self._following = False

    def leave(self, loader: Shard, finished: bool) -> None:
        held = self._held.get(id(loader))
        if not finished and held is not None and held.followed:
            self._take_leave()
        loop = self._loops.pop(id(loader), None)
        self._held.pop(id(loader), None)
        self._broke = False
        if loop is None or self.size == 1:
            return
        assert self.sync is not None
        with self._lock:
            num_exchanges = self.sync.num_exchanges
            unstepped = self._applied < num_exchanges and not self.sync.exchanging
            is_open = unstepped and not finished and not self.sync.halted
            self._ended[loop] = num_exchanges
        self._answer()
        if not finished and not self._stopping:
            if not is_open:
                self._tell(Word("left", loop, num_exchanges, self.step))
            else:
                self._tell(Word("open", loop, num_exchanges, self.step))
                if held is not None and not held.followed and not self.sync.together:
                    self._catch_up(num_exchanges)
        self._mourn()

    def _take_leave(self) -> None:
        """Says that this worker leaves in the middle of a batch, where workers are absent; as rank 0 it ends theirs.

        If rank 0 goes on instead, what it does until its step is done here too."""
        assert self.sync is not None
        if self.sync.halted:
            return
        self._following = True
        try:
            order = self._say_order({"kind": "leave"})
            while order["kind"] in ("clip", "step") and self._applied < self.sync.num_exchanges:
                self._follow(order)
                order = self._say_order({"kind": "leave"})
        except Halt as halt:
            self._halt(halt)
        finally:
            self._following = False

    def _catch_up(self, exchange: int) -> None:
        """Takes the step of this exchange if another worker has; waits until all have said."""
        deadline = time.monotonic() + min(CATCH_UP_S, self._group.transport.circle.timeout_s)
        others = set(self._group.others)
        with self._news:
            while not others <= self._answers.get(exchange, set()) | self._group.transport.gone.keys():
                if self._group.transport.cause is not None:
                    return
                if time.monotonic() > deadline:
                    log.warning("rank %d left before its step, and does not know if others took it", self.rank)
                    return
                self._news.wait(0.05)
            took = exchange in self._taken_by_others
        if took:
            for optimizer in self.optimizers:
                if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                    optimizer.step()
                    optimizer.zero_grad()

    def _answer(self) -> None:
        """Tells those who left before a step whether it was taken here, as soon as that is certain."""
        assert self.sync is not None
        with self._lock:
            answers = []
            for word, _ in self._words:
                exchange = word.num_exchanges
                if word.kind != "open" or exchange in self._answered:
                    continue
                if self._applied >= exchange:
                    answers.append(Word("took", word.loop, exchange, self.step))
                elif word.loop in self._ended or self.sync.num_exchanges > exchange or self.sync.halted:
                    answers.append(Word("passed", word.loop, exchange, self.step))
            self._answered |= {answer.num_exchanges for answer in answers}
        for answer in answers:
            self._tell(answer)

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
        return any(held.followed for held in self._held.values())

    def _order(self, kind: str, **what: Any) -> None:
        """Says what comes next, where somebody follows. Those who follow know already."""
        assert self.sync is not None
        if self._attended() and not self._following and not self.sync.halted:
            said = self._say_order({"kind": kind, **what})["kind"]
            if said != kind:
                raise Halt(f"rank 0 has left its loop after step {self.step}, the others have not")

    def _say_order(self, order: dict[str, Any] | None) -> dict[str, Any]:
        """Collective: rank 0's order."""
        assert self.sync is not None and self.sync.group is not None
        return dict(letters.tell(self.sync.group, order, "order"))

    def _follow(self, order: dict[str, Any]) -> bool:
        """Does what rank 0 said; False at the end of the batch."""
        assert self.sync is not None
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
            self._stand_as(order)
            return False
        return True

    def _standing_after(self) -> dict[str, Any]:
        """What a batch has left behind on this worker, for those who had no samples in it."""
        assert self.sync is not None
        return {
            "groups": self._hyper(),
            "schedulers": [_spelled(scheduler.state_dict()) for scheduler in self.schedulers],
            "scaler": self._scaler_state(),
            "modes": [model.training for model in self.models],
            "cleared": all(_is_clear(parameter.grad) for parameter in self.sync.roster.parameters),
        }

    def _stand_as(self, order: dict[str, Any]) -> None:
        assert self.sync is not None
        self._adopt(order["groups"])
        for scheduler, (plain, tensors) in zip(self.schedulers, order["schedulers"], strict=True):
            named = {name: torch.tensor(values) for name, values in tensors.items()}
            scheduler.load_state_dict(checkpoint.decode(plain, named))
        if order["scaler"] and _enabled(self.scaler):
            self.scaler.load_state_dict(order["scaler"])
        for model, mode in zip(self.models, order["modes"], strict=True):
            if model.training != mode:
                model.train(mode)
        if order["cleared"]:
            for parameter in self.sync.roster.parameters:
                parameter.grad = None

    def _hyper(self) -> list[list[dict[str, Any]]]:
        """The hyper-parameters of all groups of all optimizers: numbers and pairs of them."""
        if not self._attended() or self._following:
            return []  # nobody would read them
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
        self._num_runs += 1
        run = self._run = self._num_runs
        finished = False
        try:
            for number in range(self._first_epoch, count):
                if self.stopped():
                    break
                self.current_epoch = number
                yield number
            finished = True
        finally:
            self.current_epoch = None
            self._first_epoch = self._run = 0
            if not finished and not self._stopping and self.size > 1 and self.sync is not None:
                self._tell(Word("quit", run, self.sync.num_exchanges, self.step))

    def next_epoch(self) -> int:
        """Where `epochs` would go on if the run were restored from here: where the loader that trains stands."""
        if self._leader is not None:
            return int(self._leader.state()["epoch"])
        return self.current_epoch or 0

    def depart(self) -> None:
        """This worker exchanges no gradients until the others have come here too, out of their loops."""
        if self.sync is not None and self.size > 1:
            with self._lock:
                self._num_meetings += 1
            self._tell(Word("meet", self._num_meetings, self.sync.num_exchanges, self.step))

    def adopt(self, shard: Shard) -> Shard:
        """A loader of this job; if the run was restored, it goes on where its like stood."""
        self.shards.append(shard)
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
        self._promote()
        self._answer()
        self._order("exchange")
        with self._lock:
            halt = self._judge()
        if halt is not None:
            raise halt

    def _judge(self) -> Halt | None:
        """Whether somebody will not come to the exchange under way. Called under the lock."""
        assert self.sync is not None
        for word, who in self._words:
            if word.kind in ("took", "passed"):
                continue
            waits = self._following and word.kind == "halt"  # for the next order, which will not come
            waits = waits or (self._stepping and word.kind == "open")  # for all to come to the step
            if self.sync.num_exchanges + waits <= word.num_exchanges:
                continue
            if word.kind == "quit" and word.loop != self._run:
                continue
            if word.kind == "meet" and word.loop <= self._num_meetings:
                continue
            if word.kind in ("left", "open") and (word.loop in self._ended or word.loop > self.sync.loop):
                continue
            return Halt(f"{who} left its loop after step {word.step}")
        return None

    def _hear(self, event: Event) -> None:
        """On the line's thread."""
        if event.kind != "told" or event.topic != TOPIC or event.member is None:
            return
        word = msgspec.msgpack.decode(event.body, type=Word)
        with self._news:
            self._words.append((word, str(event.member)))
            if word.kind in ("took", "passed", "open"):
                self._answers.setdefault(word.num_exchanges, set()).add(event.member.rank)
            if word.kind == "took":
                self._taken_by_others.add(word.num_exchanges)
            halt = self._judge() if self.sync is not None else None
            self._news.notify_all()
        if self.sync is not None:
            self._answer()
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


def _spelled(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A scheduler's state as plain values, and its tensors by name."""
    plain, tensors = checkpoint.encode(state)
    return plain, {name: tensor.tolist() for name, tensor in tensors.items()}


def _is_clear(grad: torch.Tensor | None) -> bool:
    if grad is None:
        return True
    return grad._nnz() == 0 if grad.layout is torch.sparse_coo else not bool(grad.any())


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
