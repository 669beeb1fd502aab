"""Leased: the ledger of an epoch whose blocks the coordinator leases to the workers, one at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..coordinator import CoordinatorConnection
from ..coordinator.messages import BeginBlock, BlockGrant, BlockName, DoneBlocks, EpochCut, ShowData, TakeBlock
from ..errors import HoraError, Timeout
from .ledger import BatchSlice, Ledger, LedgerView, num_batches

log = logging.getLogger(__name__)

POLL_S = 0.02  # between two requests of a worker that waits for the others' blocks
SLOW_S = 10.0  # a longer wait is logged


@dataclasses.dataclass(frozen=True)
class LeasedBlock(BatchSlice):
    """A block that this worker has leased: a batch of its own."""

    epoch: int
    loop: int  # which loop over the loader in that epoch
    num_samples: int  # of the epoch

    @property
    def name(self) -> BlockName:
        return self.epoch, self.loop, self.batch


@dataclasses.dataclass(frozen=True)
class LeaseClient:
    """One loader's requests to the coordinator's LeaseManager. None of them waits for another worker."""

    control: CoordinatorConnection
    number: int  # of the loader
    last: Callable[[], bool]  # see DataService
    idle: Callable[[bool], None]
    timeout_s: float

    def take(self, **request: Any) -> BlockGrant:
        return self.control.lease_request(TakeBlock(loader=self.number, last=self.last(), **request), BlockGrant)

    def begin(self, block: BlockName, done: Sequence[BlockName]) -> bool:
        return self.control.lease_request(BeginBlock(loader=self.number, block=block, done=tuple(done)), bool)

    def done(self, done: Sequence[BlockName], release: bool) -> None:
        self.control.lease_request(DoneBlocks(loader=self.number, done=tuple(done), release=release), object)

    def account(self) -> dict[str, Any]:
        return self.control.lease_request(ShowData(loader=self.number), dict)


class Leased(Ledger):
    """Blocks of `block_samples` samples, leased by the coordinator: workers do not step together.

    Every block is done once, and again only if its holder dies. `take` is one request, which also reports the blocks
    done since the last. It returns None when no block is left to take, while other workers may still compute theirs; in
    the last epoch it waits for them, since one of them may die: Timeout after `timeout_s`, or None when `stopped` says
    so. With `take_ahead` (prefetching) a block is taken before it is begun: until `begin`, an idle worker may take it
    over.

    `before`: by epoch, the ranges of samples that a restored run has done, of this epoch and of earlier ones that owe
    the rest.
    """

    def __init__(
        self,
        client: LeaseClient,
        num_samples: int,
        block_samples: int,
        *,
        epoch: int = 0,
        loop: int = 0,
        rank: int = 0,
        size: int = 1,
        drop_last: bool = False,
        before: Mapping[int, Sequence[tuple[int, int]]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.over = False  # the coordinator has answered that no block is left
        self._client = client
        self._cut = EpochCut(num_samples, block_samples, num_batches(num_samples, block_samples, drop_last))
        self._epoch = epoch
        self._loop = loop
        self._rank = rank
        self._size = size
        self._before = [(each, self._blocks(each, samples)) for each, samples in sorted((before or {}).items())]
        self._stopped = stopped
        self._held: dict[BlockName, LeasedBlock] = {}
        self._unreported: list[BlockName] = []  # done blocks
        self._ahead: set[BlockName] = set()
        self._inside = False

    def _blocks(self, epoch: int, samples: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """The blocks that lie within these ranges of samples."""
        num_samples, size, num_blocks = self._cut
        found = []
        for start, end in samples:
            if end > num_samples:
                raise ValueError(
                    f"the state lists sample {end - 1} of epoch {epoch} as done, but the dataset has only "
                    f"{num_samples}: restore with the dataset that the state was saved with"
                )
            last = num_blocks if end == num_samples else min(num_blocks, end // size)
            found.append((-(-start // size), last))
        return tuple((start, end) for start, end in found if start < end)

    def take(self) -> LeasedBlock | None:
        got = self._request(ahead=False)
        if got and not isinstance(got, LeasedBlock):
            self._client.idle(True)
            try:
                got = self._wait(got)
            finally:
                self._client.idle(False)
        if isinstance(got, LeasedBlock):
            return got
        self.over = not got
        self._inside = not self.over
        return None

    def _wait(self, holders: tuple[int, ...]) -> LeasedBlock | tuple[int, ...]:
        """Asks again until a block comes back, or none is left to wait for, or the run stops."""
        started, next_warning = time.monotonic(), SLOW_S
        while not self._stopped():
            waited = time.monotonic() - started
            text = (
                f"rank {self._rank} has waited {waited:.0f} s at the end of epoch {self._epoch} for the blocks of "
                f"rank{'s' if len(holders) > 1 else ''} {', '.join(map(str, holders))}"
            )
            if waited >= self._client.timeout_s:
                raise Timeout(text)
            if waited >= next_warning:
                log.warning("%s", text)
                next_warning *= 2
            time.sleep(POLL_S)
            got = self._request(ahead=False)
            if isinstance(got, LeasedBlock) or not got:
                return got
            holders = got
        return holders

    def take_ahead(self) -> LeasedBlock | None:
        """A block to be begun later; None if there is none for now. Does not wait for other workers."""
        block = self._request(ahead=True)
        if not isinstance(block, LeasedBlock):
            return None
        self._ahead.add(block.name)
        return block

    def _request(self, ahead: bool) -> LeasedBlock | tuple[int, ...]:
        """A block; or the ranks whose blocks are to be waited for, none of them at the end."""
        self._inside = True
        grant = self._client.take(
            epoch=self._epoch, loop=self._loop, cut=self._cut,
            done=tuple(self._unreported), before=tuple(self._before), ahead=ahead,
        )  # fmt: skip
        self._unreported.clear()
        self._before = []  # only the first request needs it
        if grant.kind != "block":
            return grant.holders
        start, total = grant.block * grant.cut.block_samples, grant.cut.samples(grant.block, grant.block + 1)
        block = LeasedBlock(grant.block, start, total, total, 0, 1, grant.epoch, grant.loop, grant.cut.num_samples)
        self._held[block.name] = block
        return block

    def begin(self, batch_slice: BatchSlice) -> bool:
        assert isinstance(batch_slice, LeasedBlock)
        if batch_slice.name not in self._ahead:
            return True
        self._ahead.discard(batch_slice.name)
        still = self._client.begin(batch_slice.name, self._unreported)
        self._unreported.clear()
        if not still:
            self._held.pop(batch_slice.name, None)
        return still

    def done(self, batch_slice: BatchSlice) -> None:
        assert isinstance(batch_slice, LeasedBlock)
        if self._held.pop(batch_slice.name, None) is not None:
            self._unreported.append(batch_slice.name)

    def flush(self) -> None:
        """Reports the done blocks now, not with the next request."""
        if self._unreported:
            self._client.done(self._unreported, release=False)
            self._unreported.clear()

    def release(self) -> None:
        if self._inside or self._held or self._unreported:
            with contextlib.suppress(HoraError):  # without a connection this worker's leases end anyway
                self._client.done(self._unreported, release=True)
        self._inside = False
        self._unreported.clear()
        self._held.clear()
        self._ahead.clear()

    def account(self) -> list[dict[str, Any]]:
        """The open ledgers of this loader, of all epochs, as the coordinator has them."""
        self.flush()
        return self._client.account()["open"]

    def view(self) -> LedgerView:
        self.flush()
        cut = self._cut
        total = cut.samples(0, cut.num_blocks)
        account = self._client.account()
        key = [self._epoch, self._loop]
        known = [each for each in [*account["open"], account["last"]] if each and [each["epoch"], each["loop"]] == key]
        if known:
            done, leased, samples = (known[0][name] for name in ("num_done", "num_leased", "samples_done"))
        elif account["newest"] is not None and account["newest"] >= key:
            done, leased, samples = cut.num_blocks, 0, total
        else:
            ranges = dict(self._before).get(self._epoch, ())
            done, leased = sum(end - start for start, end in ranges), 0
            samples = sum(cut.samples(start, end) for start, end in ranges)
        return LedgerView(
            rank=self._rank,
            size=self._size,
            num_done=done,
            num_leased=leased,
            num_pending=cut.num_blocks - done - leased,
            samples_done=samples,
            num_samples=total,
            held=tuple(self._held.values()),
        )
