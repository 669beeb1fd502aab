"""Sync: a strategy at work on one worker's models and optimizers.

The seam between the training loop, as PyTorch's hooks see it, and the architecture. The verbs, in the order of a step:

    bind(group)                   collective: the verbs below may be called; the first time all get rank 0's parameters
    before_forward()              a prepared model is called
    bucket_ready(bucket)          these gradients are complete; others are still being computed
    after_backward(shadow)        the outermost backward has ended; shadow: of the others, this worker has no samples
    unscaled(optimizer, found)    a GradScaler has unscaled the gradients and looked for infinities
    clip(parameters, ...)         hora.clip_grad_norm_
    step(optimizer)               the user called optimizer.step(); None if the step is not taken, else what commits it
    join(event)                   the worker enters or leaves a training loop
    abort(cause)                  ends every wait of an exchange; thread-safe
    snapshot(), restore()         collective: complete parameters, buffers and optimizer state of one step
    describe()                    figures for job.log, the dashboard and the summary
    unbind()                      leaves the group; `bind` may follow

All but `abort` and `describe` are called on the training thread. All but `before_forward` may block, and a lost peer
raises PeerLost out of any of them. `bind` and `unbind` may be called at any step boundary, by all workers; what
parameter servers hold, and a worker's connections to them, last until `join(CLOSED)`. The commit point of a step is the
return of `step`: until then no parameter has changed. Under `ps` it has, by then: `step` pulls the update."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import enum
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.buckets import BackwardHooks, Bucket
from ...parameters.optimizer_state import OptimizerStates
from ...parameters.registry import ParameterRegistry
from ...rendezvous.context import RunContext
from .hooks import TrainingHooks

Commit = Callable[[], None]


class LoopEvent(enum.Enum):
    """Where a worker goes. `join` may block for each of them."""

    ENTERED = "it begins to train"
    FINISHED = "it has come to the end of its loop"
    BROKE = "it has left its loop before the end"
    QUIT = "it has left job.epochs before the end"
    PAUSED = "it writes a checkpoint together with the others"
    DEPARTED = "it takes no more steps in this run"
    CLOSED = "it has left the run, and stays while others need something of it"


@dataclasses.dataclass
class CommStats:
    """What communication cost since the last `reset`."""

    comm_s: float = 0.0  # on any thread
    exposed_s: float = 0.0  # of these, on the training thread
    sent_bytes: int = 0
    num_exchanges: int = 0

    def spend(self, begin: float) -> None:
        """The training thread has communicated, or waited for it, since `begin` of time.perf_counter."""
        seconds = time.perf_counter() - begin
        self.comm_s += seconds
        self.exposed_s += seconds

    @contextlib.contextmanager
    def timed(self, sent_bytes: Callable[[], int]) -> Iterator[None]:
        """One exchange on the training thread; `sent_bytes` counts what was sent so far."""
        begin, before = time.perf_counter(), sent_bytes()
        yield
        self.spend(begin)
        self.num_exchanges += 1
        self.sent_bytes += sent_bytes() - before

    def reset(self) -> None:
        self.comm_s = self.exposed_s = 0.0
        self.sent_bytes = self.num_exchanges = 0


@dataclasses.dataclass
class Snapshot:
    """The complete state of one step. Optimizer state is by parameter name, for each optimizer."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    states: OptimizerStates
    extra: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # what else the strategy needs to go on


@dataclasses.dataclass
class StepOutcome:
    """What the workers concluded together from the last StepStatus."""

    stop: bool = False  # all stop after this step
    skipped: str = ""  # why this step is not taken, if it is not
    reason: str = ""  # of the stop, where no worker asked for it


@dataclasses.dataclass(frozen=True)
class SyncReport:
    """Figures of a Sync, as `job.log`, the dashboard and the last line of a run show them."""

    figures: dict[str, float] = dataclasses.field(default_factory=dict)  # newest, or of the whole run so far
    sent_to: dict[int, int] = dataclasses.field(default_factory=dict)  # bytes by worker; in shared memory: read by it
    summary: str = ""


def ended_inside(left: str) -> str:
    """The message about a worker whose script has ended inside its training loop."""
    return f"{left}, because its script ended inside the loop; job.stop(reason) ends all workers after the same step"


class ExchangeCancelled(HoraError):
    """The exchange will not take place: a worker has left its loop. Never seen by users."""


class Sync(abc.ABC):
    """One worker's side."""

    together = False  # a step is taken by all workers or by none
    lockstep = True  # workers take the same steps; else each goes its own way
    unison = True  # a wish to stop travels with the steps, so that all stop after the same one
    rounds: int | None = None  # closed so far, where workers train alone between them
    local_steps = 0  # of this worker since the last round
    warming_up = False  # before the first round every step is taken by all together
    jumped = 0  # steps of the others that this worker has missed; Training counts and clears them
    passed_batch = (-1, -1)  # loop and number of the batch up to which the others went on without this worker

    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks) -> None:
        self.registry = registry
        self.hooks = hooks
        self.group: Group | None = None  # for gradients alone; aborted when a worker leaves its loop
        self.home: Group  # the job's group, which outlives it
        self.traffic = CommStats()
        self.outcome = StepOutcome()
        self._backward = BackwardHooks(registry.parameters, registry.names, self)

    @property
    def context(self) -> RunContext:
        assert self.hooks.context is not None
        return self.hooks.context

    @property
    def silent(self) -> bool:
        return self.hooks.silent

    @abc.abstractmethod
    def bind(self, group: Group) -> None: ...

    @abc.abstractmethod
    def unbind(self) -> None: ...

    @abc.abstractmethod
    def before_forward(self) -> None: ...

    def after_forward(self, output: Any) -> None:
        """Hooks the model's output: where the hook fires, a backward has begun, whose end is then noticed."""
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        self._backward.expect_end()

    @abc.abstractmethod
    def bucket_ready(self, bucket: Bucket) -> None: ...

    @abc.abstractmethod
    def after_backward(self, shadow: bool = False) -> None: ...

    def unscaled(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """`found`: by device, whether the scaler found an infinity. Nothing to do where gradients are means already."""

    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def step(self, optimizer: torch.optim.Optimizer) -> Commit | None:
        """Called before the optimizer's own step. Returns what is to be called after it, or None: it is not taken."""
        if not self._before_step(optimizer):
            return None
        try:
            if self.hooks.announce_step(optimizer):
                self._share_gradients()
            with self.hooks.opening_step():
                self._open_step(optimizer)
        except ExchangeCancelled as cancelled:
            self.halt(str(cancelled))
            return None
        return None if self.outcome.skipped else self.commit(optimizer)

    def commit(self, optimizer: torch.optim.Optimizer) -> Commit:
        """What is to be called after a step of `optimizer`."""
        return lambda: self._after_step(optimizer)

    @abc.abstractmethod
    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does what backward has left undone; False if the step is not taken."""

    def _share_gradients(self) -> None:
        """Collective, before a step in which workers have no samples: these get what rank 0 is about to apply."""

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective where workers write shared memory: the optimizer is about to write."""

    @abc.abstractmethod
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    def join(self, event: LoopEvent) -> None:
        """Nothing to do where Training alone handles loops (training/join.py)."""

    def halt(self, reason: str) -> None:
        """No exchange will take place any more: the step under way is dropped."""
        self.hooks.halted = self.hooks.halted or reason
        self._drop()

    @abc.abstractmethod
    def _drop(self) -> None:
        """Forgets the gradients of the step under way."""

    def abort(self, cause: HoraError) -> None:
        if self.group is not None:
            self.group.transport.abort(cause)

    def agreed_parameters(self) -> list[torch.Tensor]:
        """The parameters that the workers have agreed upon last, in the registry's order; after a step."""
        return [parameter.detach() for parameter in self.registry.parameters]

    def describe(self) -> SyncReport:
        """Thread-safe."""
        return SyncReport()

    @abc.abstractmethod
    def snapshot(self, complete: bool = True) -> Snapshot:
        """Where this worker's need not be `complete`, it may lack the optimizers' state."""

    @abc.abstractmethod
    def restore(self, snapshot: Snapshot) -> None:
        """Of `snapshot.extra`, which may be another strategy's, it takes what it knows."""


def tensors_in(output: Any) -> Iterable[torch.Tensor]:
    """The tensors of a model's output."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for value in output.values() if isinstance(output, dict) else output:
            yield from tensors_in(value)
