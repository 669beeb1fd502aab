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

if TYPE_CHECKING:
    from .config import LocalSGD


class AsyncLocalSync(ParameterServerSync):
    def __init__(self, registry: ParameterRegistry, hooks: TrainingHooks, strategy: LocalSGD) -> None:
        served = ParameterRegistry(registry.models, strategy.served(registry.optimizers))
        super().__init__(registry, hooks, strategy.servers(), served)
        self._rounds = strategy
        self.rounds = 0
        self.local_steps = 0
        self._samples = 0.0  # since the last step, and since the last report
        self._seen = 0.0
        self._brought = 0.0  # what they were as an optimizer came to its step; those of later ones are the same
        self._rest = 0.0  # of other optimizers' steps since the last report, if there were no more
        self._num_steps = 0  # up to the last report
        self._interval = strategy.interval(0)  # steps from that to the next
        self._full = 0.0  # the largest batch so far, which an average one is taken to be
        self._anchors: dict[int, torch.Tensor] = {}

    def after_backward(self, shadow: bool = False) -> None:
        if not shadow:
            if not self._accumulation:  # what was before has had its step, or was given up
                self._samples = 0.0
            self._samples += self._accumulation.weight * self.hooks.batch.unit
        super().after_backward(shadow)

    def _open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is this worker's own."""
        mine = self._parameters_of(optimizer)
        if self._accumulation or self._shadow:
            self._brought = self._samples
            self._full = max(self._full, self._samples)
        self._average_accumulated(mine)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._accumulation.clear()
        if optimizer is not self.registry.optimizers[0]:
            self._rest = max(self._rest, self._brought)
            return
        self._shadow = False
        self.local_steps += 1
        self._full = max(self._full, self._samples)
        self._seen += self._samples
        self._samples = 0.0
        if self.local_steps >= self._interval:
            self._push_round()

    def _push_round(self) -> None:
        self._check_finite()
        with self.traffic.timed(lambda: self._client.pushed_bytes):
            self.push_pull(0, self._pseudo_gradient)
        self._num_steps += self.local_steps
        self.rounds = (self.rounds or 0) + 1
        self._begin_round()

    def _begin_round(self) -> None:
        self._interval = self._rounds.interval(self._num_steps)
        self.local_steps = 0
        self._seen = self._rest = 0.0

    def _check_finite(self) -> None:
        """HoraError, before the others get any of it."""
        named = [
            self.registry.names[i]
            for i in self._anchors
            if not nonfinite.is_finite(self.registry.parameters[i].detach())
        ]
        if named:
            raise HoraError(
                f"the value of {nonfinite.listed(named)} on {self.context.name} is not finite: it is not pushed. Lower "
                "the learning rate, or look at that worker's batches"
            )

    def _begin(self, number: int) -> BeginStep:
        """By its share of the samples: those that it saw, and those of the others, who are taken to see full rounds."""
        live = sum(member.role == "worker" for member in self.context.control.members())
        mine = self._seen or self._rest
        whole = mine + max(0, live - 1) * self._interval * self._full
        return BeginStep(
            self._step,
            0,
            0,
            scale=mine / whole if whole else 0.0,
            place=(self.hooks.batch.loop, self.hooks.batch.batch),
        )

    def _pseudo_gradient(self, block: ParameterBlock) -> torch.Tensor:
        point, here = flat_view(self._anchors[block.index]), flat_view(self.registry.parameters[block.index])
        return point - here if block.whole else point[block.start : block.stop] - here[block.start : block.stop]

    def _pulled(self) -> None:
        """What was pulled is the anchor of the next pseudo-gradient."""
        for index in self._client.layout.served:
            parameter = self.registry.parameters[index].detach()
            if index in self._anchors:
                self._anchors[index].copy_(parameter)
            else:
                self._anchors[index] = parameter.clone()

    def join(self, event: LoopEvent) -> None:
        """Before others read the model, in a checkpoint perhaps, this worker's part is in it."""
        leaves = event in (LoopEvent.FINISHED, LoopEvent.BROKE)
        departs = event in (LoopEvent.PAUSED, LoopEvent.DEPARTED)
        if (leaves and (self.local_steps or self._rest)) or (departs and self.local_steps):
            self._push_round()
        super().join(event)

    def _summary(self) -> str:
        """Without the parameters pulled, which every worker of a parameter server pulls."""
        served = [self.registry.parameters[index] for index in self._client.layout.served]
        sent, size = self._client.pushed_bytes, self.context.size
        return summarize(self._rounds.spell(), self.rounds or 0, self._num_steps, sent, served, size)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """The servers' model, and the state of this worker's own optimizers: there is no other."""
        if self.local_steps or self._rest:
            self._push_round()
        self._refresh()
        return Snapshot(self.registry.parameter_dict(), self.registry.buffer_dict(), collect(self.registry))

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._num_steps = self.hooks.step
        self._samples = 0.0
        self._begin_round()

    def _restore_states(self, states: OptimizerStates) -> None:
        load(self.registry, states, lambda index, state: state)
