"""Sync: a strategy at work on one worker's models and optimizers.

The seam between the training loop, as PyTorch's hooks see it, and the architecture. Verbs, in the order of a step:

    bind(group)                   collective: everybody has rank 0's parameters; from now on the verbs below are called
    before_forward()              a prepared model is called
    bucket_ready(bucket)          these gradients are complete; others are still being computed
    after_backward()              the outermost backward has ended
    before_step(optimizer)        the user called optimizer.step(): what backward left undone is done; is there a step?
    open_step(optimizer)          the optimizer is about to write
    after_step(optimizer)         the optimizer is done
    absent_step()                 the others have a backward that synchronises, this worker has no samples for it
    enter_loop(), leave_loop()    the user's code begins or ends to iterate a training loader
    snapshot()                    collective: complete parameters, buffers and optimizer state of one step
    unbind(), close()

All are called on the training thread, all but before_forward may block, and a lost peer raises PeerLost out of any of
them. The one commit point of a step is open_step: until then no parameter has changed.
A worker that leaves its loop ends the others' exchange with Halt: the step under way is then dropped on every worker.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.buckets import Bucket
from ...parameters.registry import ParameterRegistry
from ...rendezvous.context import RunContext


@dataclasses.dataclass
class CommStats:
    """What communication cost since the last `reset`."""

    comm_s: float = 0.0  # seconds spent on it, whoever did it
    exposed_s: float = 0.0  # of these, what the training thread itself did or waited
    sent_bytes: int = 0  # what this worker gave to others
    num_exchanges: int = 0

    def spend(self, begin: float) -> None:
        """The training thread itself has communicated, or waited for it, since `begin` of time.perf_counter."""
        seconds = time.perf_counter() - begin
        self.comm_s += seconds
        self.exposed_s += seconds

    def reset(self) -> None:
        self.comm_s = self.exposed_s = 0.0
        self.sent_bytes = self.num_exchanges = 0


@dataclasses.dataclass
class Snapshot:
    """Everything of one step, whole. Optimizer state is by parameter name, for each optimizer."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    states: list[dict[str, dict[str, Any]]]
    extra: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # what else the strategy needs to go on


@dataclasses.dataclass
class StepOutcome:
    """What the workers learned together from one exchange."""

    stop: bool = False  # somebody wants to stop after this step
    skipped: str = ""  # why this step is not taken, if it is not
    reason: str = ""  # of the stop, where nobody asked for it


def ended_inside(left: str) -> str:
    """What is said of a worker that did not only leave its loop: its script has ended there."""
    return f"{left}, because its script ended inside the loop; job.stop(reason) ends all workers after the same step"


class ExchangeCancelled(HoraError):
    """This exchange will not take place: a worker has left its loop. Never seen by users."""


class Sync(abc.ABC):
    """One worker's side. `weigh` and the attributes below are the training loop's words to it."""

    together = False  # whether a step needs every worker, so that it is taken by all or by none
    lockstep = True  # whether workers take the same steps; else each goes its own way
    unison = True  # whether a wish to stop travels with the steps, so that all stop after the same one
    jumped = 0  # steps of the others that this worker has missed, since the training loop has last counted them
    rounds: int | None = None  # how many rounds were closed, where workers train alone between them
    local_steps = 0  # of this worker since the last of them
    warm = False  # there are rounds, but not yet: every step is taken by all together
    steps = 0  # as the training loop counts them
    ended = False  # this worker's script has ended inside its loop

    def __init__(self, roster: ParameterRegistry) -> None:
        self.roster = roster
        self.group: Group | None = None  # the gradients' own; ended early when a worker leaves its loop
        self.home: Group  # the job's, which outlives it
        self.access: RunContext  # to the servers, where the strategy has any
        self.traffic = CommStats()
        self.silent = False  # inside job.accumulate()
        self.stop_wanted = False
        self.on_nonfinite = "raise"
        self.loop = 0  # which of the user's loops this worker is in; all must agree
        self.num_exchanges = 0
        self.before_exchange: Callable[[], None] = lambda: None  # may raise Halt
        self.left_out: Callable[[str], None] = lambda why: None  # this worker's step is not taken, the others' are
        self.stand: Callable[[], dict[str, Any]] = dict  # what the user's loop has made of schedulers and the like
        self.stand_as: Callable[[dict[str, Any]], None] = lambda standing: None  # takes another worker's over
        self.exchanging = False  # an exchange has begun and was not concluded
        self.halted = ""  # why there will be no exchange any more

    @abc.abstractmethod
    def bind(self, group: Group) -> None: ...

    @abc.abstractmethod
    def unbind(self) -> None: ...

    @abc.abstractmethod
    def weigh(self, weight: float, expected: float) -> None:
        """The next backwards count `weight`, where an even deal would make it `expected`; 1 is an average worker."""

    @abc.abstractmethod
    def before_forward(self) -> None: ...

    def after_forward(self, output: Any) -> None:
        """The model's output, on which a backward will begin."""

    @abc.abstractmethod
    def bucket_ready(self, bucket: Bucket) -> None: ...

    @abc.abstractmethod
    def after_backward(self) -> None: ...

    @abc.abstractmethod
    def before_step(self, optimizer: torch.optim.Optimizer) -> bool: ...

    def open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing to do where every worker writes its own memory."""

    def rescaled(self) -> None:
        """A scaler has changed the gradients, as it should."""

    def combine(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """A scaler has looked for infinities in the gradients of an optimizer, device by device. Nothing to do where
        gradients are means already."""

    def begin_batch(self, loop: int, batch: int, present: int, unit: float) -> None:
        """The next backwards are of this batch, in which so many workers have samples; `unit` samples weigh 1."""

    def is_past(self, loop: int, batch: int) -> bool:
        """Whether the others have gone on from this batch without this worker."""
        return False

    def enter_loop(self) -> None:
        """This worker begins to train."""

    def leave_loop(self, finished: bool = True) -> None:
        """It has left its loop; not `finished`: before its end. May block, to wait for what is still on its way."""

    def quit(self) -> None:
        """It has left `job.epochs` before its end. May block."""

    def depart(self, for_good: bool) -> None:
        """It goes where others cannot reach it: to write a checkpoint together, or out of the run. May block."""

    def common(self) -> list[torch.Tensor]:
        """The parameters that the workers have agreed upon last, in the order of the roster; after a step."""
        return [parameter.detach() for parameter in self.roster.parameters]

    def post(self, what: str, words: bytes) -> None:
        """Leaves words where a worker that joins later finds them; where nobody joins: nowhere."""

    def read(self, what: str) -> bytes:
        """What was posted under this name; nothing if nothing was."""
        return b""

    def notes(self) -> dict[str, float]:
        """What `job.log` shows of the synchronisation since it was asked last."""
        return {}

    def facts(self) -> dict[str, float]:
        """The same without forgetting any: the newest, or of the whole run so far. Thread-safe."""
        return {}

    def peers(self) -> dict[int, int]:
        """How many bytes each other worker has had from this one so far; where servers have them: nothing. Thread-safe.

        Where memory is shared, these are the bytes that the other reads of what this one wrote."""
        return {}

    def summary(self) -> str:
        """What there is to say at the end of the run, in a sentence; by rank 0."""
        return ""

    def linger(self) -> None:
        """After this worker has left the run: it stays as long as others need something of it."""

    @abc.abstractmethod
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...

    @abc.abstractmethod
    def absent_step(self) -> None: ...

    @abc.abstractmethod
    def share_gradients(self) -> None:
        """Collective, before a step in which workers are absent: these get what rank 0 is about to apply."""

    @abc.abstractmethod
    def clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor: ...

    @abc.abstractmethod
    def snapshot(self, complete: bool = True) -> Snapshot:
        """Where this worker's is not to be `complete`, it may lack the optimizers' state."""

    @abc.abstractmethod
    def load_states(self, states: list[dict[str, dict[str, Any]]]) -> None:
        """The optimizers' states as a snapshot holds them."""

    @abc.abstractmethod
    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        """Everything of a snapshot but the optimizers' states. Of `extra`, which may be another strategy's, it takes
        what it knows."""

    @abc.abstractmethod
    def drop(self) -> None:
        """The step under way is not taken: its gradients are forgotten."""

    @property
    @abc.abstractmethod
    def verdict(self) -> StepOutcome: ...

    def abort(self, cause: HoraError) -> None:
        """Ends every wait of an exchange with `cause`. Thread-safe."""
        if self.group is not None:
            self.group.transport.abort(cause)

    def close(self) -> None:
        self.unbind()
