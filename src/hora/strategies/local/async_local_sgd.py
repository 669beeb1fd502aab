"""Reporting: a worker that trains alone and reports to the servers, which keep the model, after its own H steps.

It pushes its drift from what it read last; the servers add that to the model by the worker's share of the samples of a
round, and the worker goes on from the result. When all have reported from the same point, that is their mean; nobody
waits for anybody, so workers may be slow, lost or new.
"""

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
from ..common.sync import Snapshot
from ..ps.worker import ParameterServerSync
from . import comm_summary

if TYPE_CHECKING:
    from .config import LocalSGD


class AsyncLocalSync(ParameterServerSync):
    def __init__(self, roster: ParameterRegistry, strategy: LocalSGD) -> None:
        super().__init__(
            roster, strategy.servers(), ParameterRegistry(roster.models, strategy.served(roster.optimizers))
        )
        self._rounds = strategy
        self.rounds = 0
        self.local_steps = 0
        self._samples = 0.0  # since the last step, and since the last report
        self._seen = 0.0
        self._brought = 0.0  # what they were as an optimizer came to its step; those of later ones are the same
        self._rest = 0.0  # of other optimizers' steps since the last report, if there were no more
        self._unit = 1.0
        self._num_steps = 0  # up to the last report
        self._interval = strategy.interval(0)  # steps from that to the next
        self._full = 0.0  # the largest batch so far, which an average one is taken to be
        self._points: dict[int, torch.Tensor] = {}

    def begin_batch(self, loop: int, batch: int, present: int, unit: float) -> None:
        super().begin_batch(loop, batch, present, unit)
        self._unit = unit

    def after_backward(self) -> None:
        if not self._pile:  # what was before has had its step, or was given up
            self._samples = 0.0
        self._samples += self._pile.weight * self._unit
        super().after_backward()

    def open_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The step is this worker's own."""
        mine = self._own(optimizer)
        if self._pile or self._absent:
            self._brought = self._samples
            self._full = max(self._full, self._samples)
        self._even_out(mine)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._pile.clear()
        if optimizer is not self.roster.optimizers[0]:
            self._rest = max(self._rest, self._brought)
            return
        self._absent = False
        self.local_steps += 1
        self._full = max(self._full, self._samples)
        self._seen += self._samples
        self._samples = 0.0
        if self.local_steps >= self._interval:
            self._report()

    def _report(self) -> None:
        self._check_finite()
        with self._timed():
            self.push_pull(0, self._drift)
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
            self.roster.names[i] for i in self._points if not nonfinite.is_finite(self.roster.parameters[i].detach())
        ]
        if named:
            more = " and others" if len(named) > nonfinite.MOST_NAMED else ""
            raise HoraError(
                f"the value of {', '.join(named[: nonfinite.MOST_NAMED])}{more} on {self.access.name} is not finite: "
                "it is not reported. Lower the learning rate, or look at that worker's batches"
            )

    def _begin(self, number: int) -> BeginStep:
        """By its share of the samples: those that it saw, and those of the others, who are taken to see full rounds."""
        live = sum(member.role == "worker" for member in self.access.control.members())
        mine = self._seen or self._rest
        whole = mine + max(0, live - 1) * self._interval * self._full
        return BeginStep(self._step, 0, 0, scale=mine / whole if whole else 0.0, place=self._place)

    def _drift(self, block: ParameterBlock) -> torch.Tensor:
        point, here = flat_view(self._points[block.index]), flat_view(self.roster.parameters[block.index])
        return point - here if block.whole else point[block.start : block.stop] - here[block.start : block.stop]

    def _pulled(self) -> None:
        """What was read is what the next drift is measured from."""
        for index in self._client.layout.served:
            parameter = self.roster.parameters[index].detach()
            if index in self._points:
                self._points[index].copy_(parameter)
            else:
                self._points[index] = parameter.clone()

    def leave_loop(self, finished: bool = True) -> None:
        if self.local_steps or self._rest:
            self._report()
        super().leave_loop(finished)

    def depart(self, for_good: bool) -> None:
        """Before others read the model, in a checkpoint perhaps, this worker's part is in it."""
        if self.local_steps:
            self._report()

    def notes(self) -> dict[str, float]:
        return {**super().notes(), "round": float(self.rounds or 0)}

    def summary(self) -> str:
        """What it reads comes on top, as it does for every worker of a parameter server."""
        served = [self.roster.parameters[index] for index in self._client.layout.served]
        sent, size = self._client.pushed_bytes, self.access.size
        return comm_summary.sentence(self._rounds.spell(), self.rounds or 0, self._num_steps, sent, served, size)

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def snapshot(self, complete: bool = True) -> Snapshot:
        """The servers' model, and the state of this worker's own optimizers: there is no other."""
        if self.local_steps or self._rest:
            self._report()
        self._refresh()
        self.roster.refresh_buffers()
        parameters = {name: p.detach() for name, p in zip(self.roster.names, self.roster.parameters, strict=True)}
        return Snapshot(parameters, dict(self.roster.buffers), collect(self.roster))

    def load_states(self, kept: OptimizerStates) -> None:
        load(self.roster, kept, lambda index, state: state)

    def reload(
        self, parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], extra: dict[str, torch.Tensor]
    ) -> None:
        super().reload(parameters, buffers, extra)
        self._num_steps = self.steps
        self._samples = 0.0
        self._begin_round()
