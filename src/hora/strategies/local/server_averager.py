"""Kept: the mean of a round through servers, which keep the model.

A worker pushes its drift from the last common point, by its share, as if it were a gradient; the servers take a step of
rate 1 with the sum, which makes the point the mean of the workers' parameters; the workers pull it. To servers
elsewhere the workers of one host push one sum of their drifts, and pull once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import HoraError
from ...parameters.registry import ParameterRegistry
from ...rendezvous.context import RunContext
from ...server.layout import ParameterBlock
from ...server.messages import BeginStep
from ..common.nonfinite import is_finite
from ..ps.connections import ServerConnections
from .averager import Averager, pieces, pseudo_gradient, put, vector_of
from .counted_all_reduce import CountedAllReduce

if TYPE_CHECKING:
    from .config import LocalSGD


class ServerAverager(Averager):
    def __init__(
        self, registry: ParameterRegistry, bulk: CountedAllReduce, strategy: LocalSGD, access: RunContext
    ) -> None:
        super().__init__(registry, bulk)
        self._group = group = bulk.group
        self._access = access
        self._points: dict[int, torch.Tensor] = {}
        self._num_rounds = 0
        held = ParameterRegistry(registry.models, strategy.served(registry.optimizers))
        self._connections = ServerConnections(
            access, held, strategy.rules(), strategy.block_bytes, group.transport.check
        )
        self._connections.gather_local_ranks(group)

    def begin(self, indices: Sequence[int]) -> None:
        self._group.barrier("before the servers get the parameters")
        if self._group.rank == 0:
            self._connections.client.fill_parameters(self._connections.flat_parameters.values)
        self._group.barrier("the servers have the parameters")
        self._connections.client.refresh()
        self._points = {}
        self.extend(indices)

    def extend(self, indices: Sequence[int]) -> None:
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            if index not in self._connections.client.layout.served:
                raise HoraError(
                    f"{self._registry.names[index]} is in no optimizer that job.prepare() got, so no server has it: "
                    "complete the optimizer first, then prepare it"
                )
            self._points[index] = parameter.clone()

    def pack(self, indices: Sequence[int]) -> torch.Tensor:
        return pseudo_gradient([self._points[index] for index in indices], self._parameters(indices))

    def travel(self, indices: Sequence[int], vector: torch.Tensor, shares: Sequence[float]) -> torch.Tensor:
        drifts = dict(zip(indices, (place for _, place in pieces(self._parameters(indices), vector)), strict=True))

        share = shares[self._group.rank]

        def drift(block: ParameterBlock) -> torch.Tensor | None:
            whole = drifts.get(block.index) if share else None
            return whole if whole is None or block.whole else whole[block.start : block.stop]

        wrong = "" if not share or is_finite(vector) else self._access.name
        begin = BeginStep(
            self._num_rounds,
            0,
            0,
            weight=share,
            total=share,
            count=1 if share else 0,
            nonfinite=wrong,
            present=self._group.size,
        )
        client = self._connections.client
        pushed = client.pushed_bytes
        client.push(begin, drift)
        readies = client.pull()
        self._connections.flat_parameters.scatter()
        self._num_rounds += 1
        self._bulk.count(client.pushed_bytes - pushed)
        failed = any(ready.skipped for ready in readies)
        if failed:  # everybody keeps what it had, so that it can be named
            put(self._parameters(indices), vector_of([self._points[index] for index in indices]) - vector)
        return torch.full((1,), float("nan" if failed else "0"))

    def settle(self, indices: Sequence[int], vector: torch.Tensor, result: torch.Tensor, late: bool) -> None:
        """The parameters are there already."""
        for index, parameter in zip(indices, self._parameters(indices), strict=True):
            self._points[index].copy_(parameter)

    def close(self) -> None:
        self._connections.close()

    def stay(self) -> None:
        self._connections.stay()
