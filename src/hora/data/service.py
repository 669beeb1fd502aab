"""Desk: what a job's loaders ask of the run: leases, and samples that lie with another rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..coordinator import CoordinatorConnection
from ..coordinator.messages import BeginBlock, BlockGrant, BlockName, DoneBlocks, EpochCut, ShowData, TakeBlock
from .remote_dataset import SampleExchange


def _yes() -> bool:
    return True


def _nothing(waiting: bool) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaseClient:
    """One loader's line to the coordinator's book. `take` and `begin` also say which blocks are done since.

    Called by the loop's thread only. Every verb is one small request and its answer; none of them waits for a worker.
    """

    control: CoordinatorConnection
    number: int  # of the loader: all workers make the same ones in the same order
    last: Callable[[], bool] = _yes  # whether this is the last epoch, as far as anybody knows
    idle: Callable[[bool], None] = _nothing  # this worker begins, or ends, to wait for what others still hold
    timeout_s: float = 1800.0

    def take(
        self,
        epoch: int,
        loop: int,
        cut: EpochCut,
        done: Sequence[BlockName],
        before: Sequence[tuple[int, tuple[tuple[int, int], ...]]],
        ahead: bool,
    ) -> BlockGrant:
        request = TakeBlock(
            loader=self.number, epoch=epoch, loop=loop, cut=cut,
            done=tuple(done), before=tuple(before), ahead=ahead, last=self.last(),
        )  # fmt: skip
        return self.control.lease_request(request, BlockGrant)

    def begin(self, name: BlockName, done: Sequence[BlockName]) -> bool:
        return self.control.lease_request(BeginBlock(loader=self.number, block=name, done=tuple(done)), bool)

    def done(self, done: Sequence[BlockName], release: bool) -> None:
        self.control.lease_request(DoneBlocks(loader=self.number, done=tuple(done), release=release), object)

    def account(self) -> dict[str, Any]:
        return self.control.lease_request(ShowData(loader=self.number), dict)


@dataclasses.dataclass(kw_only=True)
class DataService:
    """One per job. Without it loaders deal their samples evenly and read them where they are.

    With `leased`, loops that train take leases from the coordinator. `last` and `idle` are Training's (see Lender).
    """

    control: CoordinatorConnection
    rank: int
    token: bytes
    bind: str = "127.0.0.1"
    leased: bool = False
    last: Callable[[], bool] = _yes
    idle: Callable[[bool], None] = _nothing
    timeout_s: float = 1800.0
    _num_loaders: int = dataclasses.field(default=0, init=False)
    _handout: SampleExchange | None = dataclasses.field(default=None, init=False)

    def register(self) -> int:
        """The number of the next loader."""
        self._num_loaders += 1
        return self._num_loaders - 1

    def lender(self, number: int) -> LeaseClient | None:
        if not self.leased:
            return None
        return LeaseClient(
            control=self.control, number=number, last=self.last, idle=self.idle, timeout_s=self.timeout_s
        )

    @property
    def handout(self) -> SampleExchange:
        if self._handout is None:
            self._handout = SampleExchange(self.control, self.rank, self.token, self.bind, self.timeout_s)
        return self._handout

    def close(self, linger_s: float | None = None) -> None:
        """The job ends. A worker that hands out samples stays until those who read from it have ended theirs."""
        if self._handout is not None:
            self._handout.close(self.timeout_s if linger_s is None else linger_s)
