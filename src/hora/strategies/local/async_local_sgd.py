"""AsyncLocalSync: a worker that trains alone and pushes its pseudo-gradient to the servers after its own H steps.

The servers add it to the model by the worker's share of the samples of a round, and the worker goes on from the result.
When all workers have pushed from the same anchor parameters, that is their mean. No worker waits for another, so
workers may be slow, lost or new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...errors import HoraError
from ...parameters.optimizer_state import OptimizerStates, collect, load
from ...parameters.registry import ParameterRegistry
from ...parameters.shards import flat_view
from ...server.layout import ParameterBlock
from ...server.messages import BeginStep
from ..common import nonfinite
from ..common.hooks import TrainingHooks
from ..common.sync import LoopEvent, Snapshot
from ..ps.worker import ParameterServerSync
from .counted_all_reduce import summarize
from .round import CountsRounds, Round

if TYPE_CHECKING:
    from .config import LocalSGD


class AsyncLocalSync(CountsRounds, ParameterServerSync):  # type: ignore[misc, override]
    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: LocalSGD) -> None:
        served = ParameterRegistry(registry.models, strategy.served(registry.optimizers))
        super().__init__(registry, hooks, strategy.servers(), served)
        self._local_strategy = strategy
        self._round = Round(1, 0)
        self._round.interval = strategy.interval(0)
        self._largest_batch = 0.0  # of one step, so far
        self._anchors: dict[int, torch.Tensor] = {}

    def after_backward(self, shadow: bool = False) -> None:
        if not shadow:
            samples = self._accumulation.weight * self.hooks.batch.unit
            self._round.add_samples(samples, fresh=not self._accumulation)
        super().after_backward(shadow)

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is this worker's own."""
        mine = self._parameters_of(optimizer)
        if self._accumulation or self._shadow:
            self._round.step_samples = self._round.pending_samples
            self._largest_batch = max(self._largest_batch, self._round.pending_samples)
        self._average_accumulated(mine)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._accumulation.clear()
        if optimizer is not self.registry.optimizers[0]:
            self._round.count_other_step(max(self._round.other_samples[0], self._round.step_samples))
            return
        self._shadow = False
        self._largest_batch = max(self._largest_batch, self._round.pending_samples)
        self._round.count_step()
        if self.local_steps >= self._round.interval:
            self._push_round()

    def _push_round(self) -> None:
        self._check_finite()
        with self.traffic.timed(lambda: self._client.pushed_bytes):
            self.push_pull(0, self._pseudo_gradient)
        self._round.num_completed += 1
        self._round.count_exchange([0])
        self._round.interval = self._local_strategy.interval(self._round.num_steps)

    def _check_finite(self) -> None:
        """HoraError, before anything is pushed."""
        parameters, names = self.registry.parameters, self.registry.names
        wrong = [names[index] for index in self._anchors if not nonfinite.is_finite(parameters[index].detach())]
        if wrong:
            raise HoraError(
                f"the value of {nonfinite.listed(wrong)} on {self.context.name} is not finite: it is not pushed. Lower "
                "the learning rate, or look at that worker's batches"
            )

    def _begin(self, number: int) -> BeginStep:
        """Scaled by this worker's share of the samples; the others are taken to see a full batch in every step."""
        live = sum(member.role == "worker" for member in self.context.control.members())
        mine = self._round.samples[0]
        total = mine + max(0, live - 1) * self._round.interval * self._largest_batch
        position = (self.hooks.batch.loop, self.hooks.batch.batch)
        return BeginStep(self._step, 0, 0, scale=mine / total if total else 0.0, place=position)

    def _pseudo_gradient(self, block: ParameterBlock) -> torch.Tensor:
        anchor, parameter = flat_view(self._anchors[block.index]), flat_view(self.registry.parameters[block.index])
        return anchor[block.start : block.stop] - parameter[block.start : block.stop]

    def _pulled(self) -> None:
        """The pulled parameters are the anchors of the next pseudo-gradient."""
        for index in self._client.layout.served:
            parameter = self.registry.parameters[index].detach()
            if index in self._anchors:
                self._anchors[index].copy_(parameter)
            else:
                self._anchors[index] = parameter.clone()

    def join(self, event: LoopEvent) -> None:
        """Pushes what this worker has, so that a checkpoint has it."""
        leaves = event in (LoopEvent.FINISHED, LoopEvent.BROKE)
        departs = event in (LoopEvent.PAUSED, LoopEvent.DEPARTED)
        if (leaves and self._unpushed) or (departs and self.local_steps):
            self._push_round()
        super().join(event)

    @property
    def _unpushed(self) -> bool:
        return bool(self.local_steps or self._round.other_samples[0])

    def _summary(self) -> str:
        """Counts what is pushed; what is pulled is as with any parameter server."""
        served = [self.registry.parameters[index] for index in self._client.layout.served]
        sent, steps = self._client.pushed_bytes, self._round.num_steps - self.local_steps
        return summarize(self._local_strategy.spell(), self.rounds, steps, sent, served, self.context.size)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """The servers' model, and the state of this worker's own optimizers."""
        if self._unpushed:
            self._push_round()
        self._refresh()
        return Snapshot(self.registry.parameter_dict(), self.registry.buffer_dict(), collect(self.registry))

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._round.restart(self.hooks.step)
        self._round.interval = self._local_strategy.interval(self.hooks.step)

    def _restore_states(self, states: OptimizerStates) -> None:
        load(self.registry, states, lambda index, state: state)
