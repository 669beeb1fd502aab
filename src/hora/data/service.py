"""DataService: what a job's loaders need of the run: leases, and datasets that only one rank has."""

from __future__ import annotations

from collections.abc import Callable

from ..rendezvous.context import RunContext
from .leased import LeaseClient
from .remote_dataset import SampleExchange


class DataService:
    """One per job. Without it loaders deal their samples evenly and read them locally.

    With `leased`, loops that train take leases from the coordinator. `last` says whether no later epoch is expected;
    `idle` is called when a worker begins and ends to wait for blocks that others hold.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        leased: bool = False,
        last: Callable[[], bool] = lambda: True,
        idle: Callable[[bool], None] = lambda waiting: None,
    ) -> None:
        self._context = context
        self._leased = leased
        self._last = last
        self._idle = idle
        self._num_loaders = 0
        self._exchange: SampleExchange | None = None

    def register(self) -> int:
        """The number of the next loader: all workers make the same ones in the same order."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def lease_client(self, number: int) -> LeaseClient | None:
        if not self._leased:
            return None
        return LeaseClient(self._context.control, number, self._last, self._idle, self._context.timeout_s)

    @property
    def exchange(self) -> SampleExchange:
        if self._exchange is None:
            self._exchange = SampleExchange(self._context)
        return self._exchange

    def close(self, linger_s: float | None = None) -> None:
        """The job ends. A rank whose dataset others read stays until they have finished, at most `linger_s`."""
        if self._exchange is not None:
            self._exchange.close(self._context.timeout_s if linger_s is None else linger_s)
