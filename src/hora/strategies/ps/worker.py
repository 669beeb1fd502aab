"""ParameterServerSync: a worker whose parameters are the servers'. At a step it pushes its gradients and pulls the
result.

    backward        as in plain PyTorch: `p.grad` is this worker's own, to be clipped or inspected
    _open_step      push: the gradients go to the servers, chunk by chunk; pull: the parameters come back
    step()          finds its parameter groups empty: the update and the optimizer's state are the servers'
    _after_step     the groups hold the parameters again

In plain sync the workers step together (`lockstep`), as in the all-reduce family. Otherwise each worker goes its own
way: it tells the servers when it begins and ends to train, so that no worker waits for one that does not.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters import hyperparameters
from ...parameters.optimizer_state import OptimizerStates
from ...parameters.registry import ParameterRegistry
from ...server.client import ServerClient
from ...server.embedding import server_embeddings
from ...server.layout import ParameterBlock
from ...server.messages import BeginStep, ChunkReady
from ..common import nonfinite
from ..common.hooks import TrainingHooks
from ..common.local_gradients import LocalGradients
from ..common.sync import ExchangeCancelled, LoopEvent, Snapshot, StepOutcome, SyncReport
from .connections import ServerConnections
from .flat_parameters import FlatParameters
from .server_state import ServerStateArchive
from .unserved_state import UnservedState

if TYPE_CHECKING:
    from .config import PS

log = logging.getLogger(__name__)

CATCH_UPS = 20  # pulls of a worker that was left behind, until all servers are at one step


class ParameterServerSync(LocalGradients):
    def __init__(
        self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: PS, served: ParameterRegistry | None = None
    ) -> None:
        """`served`: the model with the optimizers that the servers use, where these are not the user's."""
        super().__init__(registry, hooks)
        self._served = served or registry
        self.strategy = strategy
        self.lockstep = self.together = strategy.mode == "sync" and not strategy.backup
        self.unison = strategy.mode == "sync"
        self.num_dropped = 0
        self._lag: float | None = None  # mean over the chunks of the newest step
        self._group_sizes = {id(each): _group_sizes(each) for each in registry.optimizers}
        self._spent: tuple[float, float, int] | None = None  # the accumulation at an optimizer's step, for the others'
        self._connected = False
        self._connections: ServerConnections
        self._client: ServerClient
        self._flat_parameters: FlatParameters
        self._archive: ServerStateArchive
        self._unserved: UnservedState
        self._tables = {registry.index[id(table.rows)]: table for table in server_embeddings(registry.models)}
        _check_options(strategy, len(registry.optimizers), self.context.size, bool(self._tables))
        self._step = 0  # as the servers count
        self._sent_hyper: hyperparameters.Hyper | None = None  # the hyper-parameters that the servers know
        self._pushed = False  # a step was pushed whose result was not pulled yet
        self._eligible = True
        self._num_pushes = 0
        self._swapped: list[list[torch.Tensor]] = []
        self._buffer_versions: list[tuple[int, int]] = []
        self._nonfinite_text, self._scale = "", 1.0
        self._step_wait: contextlib.AbstractContextManager[None] = contextlib.nullcontext()  # around a step

    # -- binding -----------------------------------------------------------------------------------------------------

    def bind(self, group: Group) -> None:
        """The first time rank 0 gives the servers their parameters. Later the connections, and with them all that the
        servers hold, go on as they were."""
        first, self.home = not self._connected, group
        if first and not self.context.joined:
            self.registry.agree(group)
        if self.lockstep and group.size > 1:
            self.group = group.clone()
            self.group.describe_wait = self._doing
        if first:
            self._connect()
        if self.lockstep:
            self._step_wait = self._connections.watch(group, self._doing, self._is_aborted, lambda: self._num_pushes)
            self._connections.gather_local_ranks(group)
        if first:
            self._fill_servers(group)
        self._backward.hook()
        self._connections.attach_tables(self._backward.join_in)

    def _connect(self) -> None:
        self._connections = ServerConnections(
            self.context, self._served, self.strategy.rules(), self.strategy.block_bytes, self._check, self._tables
        )
        self._client, self._flat_parameters = self._connections.client, self._connections.flat_parameters
        self._archive = ServerStateArchive(self.registry, self._client)
        self._unserved = UnservedState(self.registry, self._client, self.hooks)
        self._connected = True

    def _fill_servers(self, group: Group) -> None:
        """Collective, but for a worker that has joined the run: the servers have rank 0's parameters."""
        rank, joined = self.context.rank, self.context.joined
        if rank == 0:
            self._client.fill_parameters(self._flat_parameters.values)
        self._unserved.start(rank, joined, self.strategy.elastic)
        if not joined:
            group.barrier("the servers have rank 0's parameters")
        if rank == 0:
            self.context.control.put("bound", b"yes")  # from now on the run survives the loss of a worker
        self._refresh()
        self._buffer_versions = self.registry.signature()

    def _check(self) -> None:
        """Called while this worker waits for a server: raises if the wait is in vain."""
        if self.group is not None:
            (self.home if self.hooks.halted else self.group).transport.check()  # a halt ends steps, and nothing else

    def _is_aborted(self) -> bool:
        return self.group is None or self.group.transport.cause is not None

    def unbind(self) -> None:
        """The connections stay, for the next `bind`, until this worker has left the run."""
        self._backward.unhook()
        self._connections.leave_group()
        if self.group is not None:
            self.group.close()
            self.group = None

    def abort(self, cause: HoraError) -> None:
        super().abort(cause)
        self._connections.abort(cause)

    # -- backward ------------------------------------------------------------------------------------------------------

    def after_backward(self, shadow: bool = False) -> None:
        self._spent = None
        if not shadow:
            for table in self._tables.values():
                table.gather()
        super().after_backward(shadow)

    def unscaled(self, optimizer: torch.optim.Optimizer, found: Iterable[torch.Tensor]) -> None:
        """An infinity that one worker's scaler found counts for all that step with it."""
        if self.group is not None:
            for each in found:
                host = each.detach().cpu().clone()
                self.group.all_reduce(host, "max", name="found_inf")
                each.copy_(host)

    # -- the step ------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        self.registry.check_optimizer(optimizer)
        if _group_sizes(optimizer) != self._group_sizes[id(optimizer)]:
            raise HoraError(
                f"{type(optimizer).__name__} has got a parameter since job.prepare(), and the servers have none of it: "
                "complete the optimizer first, then prepare it"
            )
        if self.hooks.halted:
            self._drop()
            return False
        found = getattr(optimizer, "found_inf", None)  # set by a scaler for a fused optimizer
        if found is not None and bool(found):
            self._accumulation.clear()
            return False
        scale = getattr(optimizer, "grad_scale", None)
        self._scale = 1.0 / float(scale) if scale is not None else 1.0
        mine = self._parameters_of(optimizer)
        self.outcome = StepOutcome(stop=self.outcome.stop and not self.lockstep)
        self._nonfinite_text = self._nonfinite(mine, self.context.name)
        if self._nonfinite_text and not self.lockstep:
            return self._report_nonfinite(self._nonfinite_text)
        if not self.lockstep:
            return True
        try:
            self.hooks.num_exchanges += 1
            self.hooks.exchanging = True
            self.hooks.before_exchange()
            self.hooks.exchanging = False
        except ExchangeCancelled as cancelled:
            self.hooks.halted = str(cancelled)
            self._drop()
            return False
        return True

    def _report_nonfinite(self, text: str) -> bool:
        self._accumulation.clear()
        self.outcome.skipped = text
        if self.hooks.on_nonfinite == "raise":
            raise HoraError(f"{text} {nonfinite.ADVICE}")
        if self.context.rank == 0 or not self.lockstep:
            log.warning("%s: this step is not taken", text)
        return False

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        with self.traffic.timed(lambda: self._client.pushed_bytes):
            self._flat_parameters.collect(optimizer)
            self.push_pull(self.registry.optimizers.index(optimizer), self._flat_parameters.gradient)
            self._flat_parameters.clear()
        self._accumulation.clear()
        self._shadow = False
        if self.outcome.skipped:
            return
        for group in optimizer.param_groups:
            self._swapped.append(group["params"])
            group["params"] = []

    def push_pull(self, number: int, gradient: Callable[[ParameterBlock], torch.Tensor | None]) -> None:
        """One step of optimizer `number`: every block's gradient to its server, every block's parameters back."""
        if self._pushed:
            self._client.freeze_base_versions()
            self._conclude(self._client.pull())
        self._num_pushes += 1
        self._pushed = True  # in part, if it is broken off
        with self._step_wait:
            self._client.push(self._begin(number), gradient, defer=self.strategy.prefetch)
            if not self.strategy.prefetch:
                self._conclude(self._client.pull())

    def _doing(self) -> str:
        return f"updating parameters on the servers in step {self.hooks.step + 1}"

    def _begin(self, number: int) -> BeginStep:
        settings = hyperparameters.read(self.registry.optimizers)
        sent, self._sent_hyper = self._sent_hyper, settings
        accumulation, strategy = self._accumulation, self.strategy
        if accumulation:
            self._spent = (accumulation.total, accumulation.total_expected, accumulation.count)
        total, expected, count = self._spent or (accumulation.weight, accumulation.weight, 1)
        weight, scale = accumulation.weight, self._scale
        if self._shadow and not accumulation:
            weight = total = 0.0
            count = 0
        if strategy.mode != "sync":
            scale *= total / expected if expected else 1.0
            if strategy.clip_norm is not None:  # in sync the servers clip, which have the gradient of all workers
                scale *= min(1.0, strategy.clip_norm / (self._flat_parameters.norm() * self._scale + 1e-6))
        self.registry.refresh_buffers()
        changed = self.context.rank == 0 and self.registry.signature() != self._buffer_versions
        return BeginStep(
            self._step,
            number,
            0,
            weight=weight,
            total=total,
            count=count,
            scale=scale,
            hyper=None if settings == sent else settings,
            nonfinite=self._nonfinite_text,
            stop=self.hooks.stop_wanted,
            buffers=changed and self.group is not None,
            present=self.hooks.batch.present or self.context.size,
            place=(self.hooks.batch.loop, self.hooks.batch.batch),
            eligible=self._eligible,
            reaches=self.hooks.step + (number == 0),
        )

    def _conclude(self, readies: list[ChunkReady]) -> None:
        """The step's result is here: what the servers said of it."""
        self._pushed = False
        self._flat_parameters.scatter()
        self._pulled()
        self._step += 1
        lags = self._client.lags
        if lags and self.strategy.mode != "sync":
            self._lag = sum(lags) / len(lags)
        if self.strategy.sync_every:
            self._client.acknowledge(self._step)
        if self.strategy.mode == "sync":
            self._conclude_sync(readies)

    def _conclude_sync(self, readies: list[ChunkReady]) -> None:
        skipped = next((ready.skipped for ready in readies if ready.skipped), "")
        if self.strategy.backup:
            if any(ready.dropped for ready in readies) and not self._shadow:
                self.num_dropped += 1
                _warn_of_drop(self.context.name, self._step - 1, self.num_dropped)
            readies = self._catch_up(readies)
        self.outcome.stop = any(ready.stop for ready in readies)
        if any(ready.buffers for ready in readies) and self.group is not None:
            ParameterRegistry.broadcast(list(self.registry.buffers.values()), self.group)
            self._buffer_versions = self.registry.signature()
        if skipped:
            self._report_nonfinite(skipped)

    def _catch_up(self, readies: list[ChunkReady]) -> list[ChunkReady]:
        """Other workers may be further: this one goes on where they are. What the servers said last."""
        for _ in range(CATCH_UPS):
            if len({ready.now for ready in readies}) <= 1:
                break
            readies = self._client.refresh()
            self._flat_parameters.scatter()
        now = max(ready.now for ready in readies)
        self._eligible = all(ready.now == now for ready in readies)
        self.jumped += now - self._step
        self._step = now
        self.passed_batch = max([self.passed_batch, *(ready.place for ready in readies)])
        return readies

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._swapped, strict=True):
            group["params"] = parameters
        self._swapped = []

    def _drop(self) -> None:
        if self._pushed:
            self._pushed = False
            with contextlib.suppress(HoraError):
                self._client.drop_step(self._step)
        self._flat_parameters.clear()
        super()._drop()

    # -- loops ---------------------------------------------------------------------------------------------------------

    def join(self, event: LoopEvent) -> None:
        """Waits for what is under way; where workers go their own ways, a worker that leaves takes the newest model."""
        if event is LoopEvent.CLOSED:
            self._connections.stay()
        elif event is LoopEvent.ENTERED and not self.lockstep:
            self._client.enter_loop()
        elif event in (LoopEvent.FINISHED, LoopEvent.BROKE):
            if self._pushed:
                self._conclude(self._client.pull())
            if not self.lockstep:
                self._client.leave_loop()
                self._refresh()
                self._unserved.share(self.context.rank, self.strategy.elastic)

    def _pulled(self) -> None:
        """The parameters are those of the servers."""

    def _refresh(self) -> None:
        readies = self._client.refresh()
        self._flat_parameters.scatter()
        self._pulled()
        if self.strategy.backup:
            self.outcome.stop = any(ready.stop for ready in self._catch_up(readies))
        elif self.strategy.mode == "sync":
            self._step = max(ready.now for ready in readies)

    def describe(self) -> SyncReport:
        figures = {"lag": self._lag} if self._lag is not None else {}
        if self.num_dropped:
            figures["dropped"] = float(self.num_dropped)
        return SyncReport(figures=figures, summary=self._summary())

    def stats(self) -> list[bytes]:
        return [self._client.get_blob(server.number, "stats") for server in self._client.connections]

    def _summary(self) -> str:
        return _compression_summary(self.strategy.wire, self._num_pushes, self._client)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """In sync of one step; otherwise each server's blocks and optimizer state are of one moment of that server."""
        if self._pushed:
            self._conclude(self._client.pull())
        if self.lockstep:
            self.home.barrier("all are here to take a snapshot")
        self._refresh()
        parameters = self.registry.parameter_dict()
        states: OptimizerStates = [{} for _ in self.registry.optimizers]
        if complete:
            parameters = {name: p.clone() for name, p in parameters.items()}
            states = self._archive.fetch(parameters)
        if self.lockstep:
            self.home.barrier("snapshot taken")
        return Snapshot(parameters, self.registry.buffer_dict(), states)

    def restore(self, snapshot: Snapshot) -> None:
        self.registry.load(snapshot.parameters, snapshot.buffers)
        self.home.barrier("before the servers' parameters are restored")
        if self.home.rank == 0:
            self._client.fill_parameters(self._flat_parameters.values, self.hooks.step)
            self._unserved.publish()
        self.home.barrier("the servers' parameters are restored")
        self._client.reset_error_feedback()
        self._refresh()
        self._buffer_versions = self.registry.signature()
        self._restore_states(snapshot.states)

    def _restore_states(self, states: OptimizerStates) -> None:
        if self.home.rank == 0:
            self._archive.put(states)
        self.home.barrier("optimizer state restored")


def _check_options(strategy: PS, num_optimizers: int, size: int, has_embeddings: bool) -> None:
    """ValueError for options that do not go with these models, optimizers or workers."""
    for option in ("sync_every", "backup"):
        if getattr(strategy, option) and num_optimizers > 1:
            raise ValueError(f"{option} counts the steps of one optimizer, and job.prepare() got several")
    if strategy.backup >= size > 1:
        raise ValueError(f"backup={strategy.backup} of {size} workers leaves no worker to step with")
    if has_embeddings and (strategy.backup or strategy.correct == "dc"):
        option = "backup" if strategy.backup else "correct=dc"
        raise ValueError(
            f"{option} needs a copy of the parameters that a worker has pulled, and there is none of a "
            "ServerEmbedding: leave one of them out"
        )


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _compression_summary(wire: str, num_pushes: int, client: ServerClient) -> str:
    if wire == "fp32" or not num_pushes:
        return ""
    if not any(connection.encodes for connection in client.connections):
        return f"wire={wire} had no effect: all servers are on this host, where gradients do not travel"
    sent, plain = (num / num_pushes / 1e6 for num in (client.pushed_bytes, client.plain_bytes))
    return f"wire={wire}: pushes {sent:.1f} MB instead of {plain:.1f} MB per step"


def _warn_of_drop(worker: str, step: int, number: int) -> None:
    """Warns of the first, the second, the fourth, … gradient that was dropped."""
    if number & (number - 1) == 0:
        nth = {1: "first", 2: "second"}.get(number, f"{number}th")
        log.warning("%s came late to step %d: its gradient was dropped, the %s", worker, step, nth)
