"""Desk: what a job's loaders ask of the run: leases, and samples that lie with another rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..coordinator import CoordinatorConnection
from ..coordinator.messages import BeginBlock, BlockGrant, DoneBlocks, TakeBlock
from .remote_dataset import SampleExchange

Name = tuple[int, int, int]  # of a block: epoch, loop over the loader in that epoch, number


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
        cut: tuple[int, int, int],
        done: Sequence[Name],
        before: Sequence[tuple[int, tuple[tuple[int, int], ...]]],
        ahead: bool,
    ) -> BlockGrant:
        num_samples, block_samples, num_blocks = cut
        return self.control.take_block(
            TakeBlock(
                loader=self.number,
                epoch=epoch,
                loop=loop,
                num_samples=num_samples,
                block_samples=block_samples,
                num_blocks=num_blocks,
                done=tuple(done),
                before=tuple(before),
                ahead=ahead,
                last=self.last(),
            )
        )

    def begin(self, name: Name, done: Sequence[Name]) -> bool:
        epoch, loop, block = name
        return self.control.begin_block(
            BeginBlock(loader=self.number, epoch=epoch, loop=loop, block=block, done=tuple(done))
        )

    def done(self, done: Sequence[Name], release: bool) -> None:
        self.control.done_blocks(DoneBlocks(loader=self.number, done=tuple(done), release=release))

    def account(self) -> dict[str, Any]:
        return self.control.account(self.number)


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
