"""ServerAverager: the mean of a round through parameter servers, which keep the model (via=ps).

A worker pushes its pseudo-gradient, weighted by its share, as if it were a gradient. The servers take an SGD step of
rate 1 with the sum, which makes their parameters the mean of the workers' parameters, and the workers pull them. To
remote servers the workers of one host push one sum, and pull once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...collectives.group import Group
from ...errors import HoraError
from ...parameters.registry import ParameterRegistry
from ...rendezvous.context import RunContext
from ...server.layout import ParameterBlock
from ...server.messages import BeginStep
from ..common.nonfinite import is_finite
from ..ps.connections import ServerConnections
from .averager import Averager, pack, pieces, pseudo_gradient, unpack
from .counted_all_reduce import CountedAllReduce

if TYPE_CHECKING:
    from .config import LocalSGD


class ServerAverager(Averager):
    """`reduce` writes the pulled parameters into the model."""

    def __init__(
        self, registry: ParameterRegistry, all_reduce: CountedAllReduce, strategy: LocalSGD, context: RunContext
    ) -> None:
        super().__init__(registry, all_reduce)
        self._context = context
        self._anchors: dict[int, torch.Tensor] = {}
        self._num_rounds = 0
        served = ParameterRegistry(registry.models, strategy.served(registry.optimizers))
        rules = strategy.rules()
        self._connections = ServerConnections(context, served, rules, strategy.block_bytes, self._check)

    @property
    def _group(self) -> Group:
        return self._all_reduce.group

    def _check(self) -> None:
        self._group.transport.check()

    def enter_group(self) -> None:
        self._connections.gather_local_ranks(self._group)

    def set_anchors(self, indices: Sequence[int]) -> None:
        self._group.barrier("before the servers get the parameters")
        if self._group.rank == 0:
            self._connections.client.fill_parameters(self._connections.flat_parameters.values)
        self._group.barrier("the servers have the parameters")
        self._connections.client.refresh()
        self._anchors = {}
        self.add_anchors(indices)

    def add_anchors(self, indices: Sequence[int]) -> None:
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            if index not in self._connections.client.layout.served:
                raise HoraError(
                    f"{self._registry.names[index]} is in no optimizer that job.prepare() got, so no server has it: "
                    "complete the optimizer first, then prepare it"
                )
            self._anchors[index] = parameter.clone()

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return pseudo_gradient([self._anchors[index] for index in indices], self._parameters(indices))

    def reduce(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        """Returns NaN if a worker's pseudo-gradient is not finite: the parameters are then as they were."""
        gradients = dict(zip(indices, (piece for _, piece in pieces(self._parameters(indices), vector)), strict=True))
        share = shares[self._group.rank]

        def gradient(block: ParameterBlock) -> torch.Tensor | None:
            whole = gradients.get(block.index) if share else None
            return whole if whole is None or block.whole else whole[block.start : block.stop]

        begin = BeginStep(
            self._num_rounds,
            0,
            0,
            weight=share,
            total=share,
            count=1 if share else 0,
            nonfinite="" if not share or is_finite(vector) else self._context.name,
            present=self._group.size,
        )
        client = self._connections.client
        pushed_bytes = client.pushed_bytes
        client.push(begin, gradient)
        readies = client.pull()
        self._connections.flat_parameters.scatter()
        self._num_rounds += 1
        self._all_reduce.count(client.pushed_bytes - pushed_bytes)
        failed = any(ready.skipped for ready in readies)
        if failed:
            unpack(pack([self._anchors[index] for index in indices]) - vector, self._parameters(indices))
        return torch.full((1,), float("nan" if failed else "0"))

    def apply(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            self._anchors[index].copy_(parameter)

    def leave_group(self) -> None:
        self._connections.leave_group()

    def stay(self) -> None:
        self._connections.stay()
