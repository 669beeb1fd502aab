"""LeaseManager: which worker computes which block of samples, where workers do not step together. No clock, no sockets.

An epoch of a loader is cut into blocks; its ledger says of each whether it is pending, leased to a worker, or done:

    blocks     0 1 2 3 4 5 6 7 8 9
    ledger     # # # # 0 # 1 1 . .       # done, digits: the rank that holds it, . pending
                       |   | |
                   begun   | not begun: taken ahead by a loader that prefetches; an idle worker may take it over
                       begun

A worker that asks gets the first of these: a block that an earlier epoch of the same loader still owes, because its
holder died after other workers were told that the epoch is over; the next pending block of its own epoch; a block that
another worker has taken but not begun. Otherwise the epoch is over for it. In the last epoch it waits instead until all
leases are done, since no later epoch would compute the blocks of a worker that dies.

Each block is done once as long as no worker dies: a lease has one holder, and only the holder can finish it. A ledger
that is done is dropped, except for its counts. Cost: one small request per block; memory grows with the open leases,
not with blocks or epochs.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from .intervals import IntervalSet, Range
from .messages import (
    BeginBlock,
    BlockGrant,
    BlockName,
    CoordinatorReply,
    DoneBlocks,
    EpochCut,
    LeaseRequest,
    TakeBlock,
)

MAX_LINE = 80  # an epoch of up to this many blocks is shown block by block
MAX_SHOWN = 20  # loaders in a view, the newest: some scripts make one for every epoch
COLUMNS = 100
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Key = tuple[int, int]  # epoch, and which loop over the loader in that epoch


@dataclasses.dataclass
class _Lease:
    holder: int
    begun: bool


class _Ledger:
    """One epoch. Blocks below `_fresh` are leased, returned or done; those above are pending or in `_skipped`."""

    def __init__(self, cut: EpochCut, founder: int, before: IntervalSet) -> None:
        self.cut = cut
        self.founder = founder  # the rank that asked first
        self.phase = 0  # see _Loader
        self.leases: dict[int, _Lease] = {}  # the oldest first
        self.inside: set[int] = set()  # workers that take from it
        self.ended = False  # a worker was told that it is over: blocks that come back are owed to later epochs
        self.done_by: collections.Counter[int] = collections.Counter()
        self.num_done = before.count()
        self.samples_done = sum(cut.samples(start, end) for start, end in before)
        self._fresh = 0
        self._skipped = before
        self._returned: list[int] = []  # a heap

    @property
    def complete(self) -> bool:
        return self.num_done == self.cut.num_blocks

    def lease(self, holder: int, begun: bool) -> int | None:
        """The first pending block, now leased; None if there is none."""
        if self._returned:
            block = heapq.heappop(self._returned)
        else:
            block = self._skipped.end(self._fresh)
            if block >= self.cut.num_blocks:
                self._fresh = self.cut.num_blocks
                return None
            self._fresh = block + 1
        self.leases[block] = _Lease(holder, begun)
        return block

    def done(self, block: int, holder: int) -> None:
        lease = self.leases.get(block)
        if lease is not None and lease.holder == holder:
            del self.leases[block]
            self.num_done += 1
            self.samples_done += self.cut.samples(block, block + 1)
            self.done_by[holder] += 1

    def release(self, holder: int) -> None:
        for block in [block for block, lease in self.leases.items() if lease.holder == holder]:
            del self.leases[block]
            heapq.heappush(self._returned, block)
        self.inside.discard(holder)

    def done_ranges(self) -> list[Range]:
        found, start = [], 0
        for block in sorted([*self.leases, *self._returned]):
            found.append((start, block))
            start = block + 1
        found.append((start, self._fresh))
        return list(IntervalSet([*found, *((max(a, self._fresh), b) for a, b in self._skipped)]))

    def _line(self) -> str:
        """One character per block, as in the module's docstring."""
        signs = ["."] * self.cut.num_blocks
        for start, end in self.done_ranges():
            signs[start:end] = "#" * (end - start)
        for block, lease in self.leases.items():
            signs[block] = _DIGITS[lease.holder] if lease.holder < len(_DIGITS) else "+"
        return "".join(signs)

    def view(self, key: Key) -> dict[str, Any]:
        held: dict[int, list[Any]] = {rank: [] for rank in {*self.inside, *self.done_by}}
        for block, lease in self.leases.items():
            held.setdefault(lease.holder, []).append([block, lease.begun])
        return {
            "epoch": key[0],
            "loop": key[1],
            "ended": self.ended,
            "cut": list(self.cut),
            "done": [list(each) for each in self.done_ranges()],
            "num_blocks": self.cut.num_blocks,
            "num_done": self.num_done,
            "num_leased": len(self.leases),
            "num_pending": self.cut.num_blocks - self.num_done - len(self.leases),
            "samples_done": self.samples_done,
            "num_samples": min(self.cut.num_samples, self.cut.num_blocks * self.cut.block_samples),
            "line": self._line() if self.cut.num_blocks <= MAX_LINE else "",
            "workers": [
                {"rank": rank, "num_done": self.done_by[rank], "holds": blocks} for rank, blocks in sorted(held.items())
            ],
        }


class _Loader:
    """The ledgers of one loader: the open ones, and which are closed.

    A ledger is newer than another if it was founded later, not if its key is larger: a second `job.epochs` counts from
    0 again. So every ledger has a phase, which goes up when a smaller key than the newest is founded:

        founded    (0, 0) (1, 0) (2, 0) | (0, 1) (1, 1) (2, 1)
        phase         0      0      0   |    1      1      1
    """

    def __init__(self) -> None:
        self.open: dict[Key, _Ledger] = {}  # in the order in which they were founded
        self.closed: dict[tuple[int, int], IntervalSet] = {}  # by phase and loop: the epochs
        self.newest: Key | None = None
        self._phase = 0
        self._last_at: tuple[int, Key] | None = None
        self.last: dict[str, Any] | None = None  # the final view of the newest closed ledger
        self.blocks_done = 0

    def is_closed(self, key: Key) -> bool:
        return any(loop == key[1] and key[0] in epochs for (_, loop), epochs in self.closed.items())

    def found(self, key: Key, ledger: _Ledger) -> None:
        if self.newest is not None and key < self.newest:
            self._phase += 1
        ledger.phase = self._phase
        self.open[key] = ledger
        self.newest = key
        self.close_done()

    def founded_at(self, key: Key) -> tuple[int, Key]:
        """Compares as the order in which ledgers, open or closed, were founded."""
        if key in self.open:
            return self.open[key].phase, key
        return next(phase for (phase, loop), epochs in self.closed.items() if loop == key[1] and key[0] in epochs), key

    def close_done(self) -> None:
        """Closes the ledgers that are done, and those that all workers left before their end for a newer one."""
        for key, ledger in list(self.open.items()):
            left = key != self.newest and not ledger.ended and not ledger.inside and not ledger.leases
            if ledger.complete or left:
                at = self.founded_at(key)
                del self.open[key]
                self.closed.setdefault((ledger.phase, key[1]), IntervalSet()).add(key[0])
                self.blocks_done += ledger.num_done
                if self._last_at is None or self._last_at <= at:
                    self.last, self._last_at = ledger.view(key), at

    def reachable(self, key: Key) -> list[tuple[Key, _Ledger]]:
        """The ledgers from which a worker in the epoch `key` takes: older epochs that owe blocks come first."""
        at = self.founded_at(key)
        return [(k, each) for k, each in self.open.items() if k == key or (each.ended and self.founded_at(k) < at)]


class LeaseManager:
    """All ledgers of a run, by loader. Holders are ranks. Not thread-safe.

    ValueError says what is wrong with a request; the request then changes nothing.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, _Loader] = {}

    def answer(self, rank: int, request: LeaseRequest) -> CoordinatorReply:
        """The reply to a request of the worker `rank`."""
        try:
            return CoordinatorReply(id=request.id, value=msgspec.msgpack.encode(self._answer(rank, request)))
        except ValueError as problem:
            return CoordinatorReply(id=request.id, error=str(problem))

    def _answer(self, rank: int, request: LeaseRequest) -> Any:
        if isinstance(request, TakeBlock):
            return self.take(
                request.loader, (request.epoch, request.loop), request.cut, rank,
                done=request.done, before=request.before, ahead=request.ahead, last=request.last,
            )  # fmt: skip
        if isinstance(request, BeginBlock):
            self.done(request.loader, rank, request.done)
            epoch, loop, block = request.block
            return self.begin(request.loader, (epoch, loop), block, rank)
        if isinstance(request, DoneBlocks):
            self.done(request.loader, rank, request.done)
            if request.release:
                self.release(request.loader, rank)
            return None
        return self.views() if request.loader is None else self.account(request.loader)

    # -- leases --------------------------------------------------------------------------------------------------------

    def take(
        self,
        loader: int,
        key: Key,
        cut: EpochCut,
        holder: int,
        *,
        done: Sequence[BlockName] = (),
        before: Sequence[tuple[int, Sequence[Range]]] = (),
        ahead: bool = False,
        last: bool = True,
    ) -> BlockGrant:
        """The next block for `holder`, which is in the epoch `key`. The other arguments are those of TakeBlock.

        The first request founds the ledger, and ledgers of the earlier epochs in `before`, which owe the rest."""
        known = self._loaders.setdefault(loader, _Loader())
        self._found(known, key, cut, holder, before)
        self.done(loader, holder, done)
        own = known.open.get(key)
        if own is not None:
            own.inside.add(holder)
        ledgers = known.reachable(key)
        for of, ledger in ledgers:
            block = ledger.lease(holder, begun=not ahead)
            if block is not None:
                return _granted(of, ledger, block)
        taken = self._take_over(ledgers, holder)
        if taken is not None:
            return taken
        if ahead:
            return BlockGrant(kind="end")  # for now: the worker asks again once it has done what it holds
        others = {lease.holder for _, ledger in ledgers for lease in ledger.leases.values()} - {holder}
        if last and others:
            return BlockGrant(kind="wait", holders=tuple(sorted(others)))
        if own is not None:
            own.ended = True
            own.inside.discard(holder)
        return BlockGrant(kind="end")

    @staticmethod
    def _found(
        known: _Loader, key: Key, cut: EpochCut, holder: int, before: Sequence[tuple[int, Sequence[Range]]]
    ) -> None:
        ledger = known.open.get(key)
        if ledger is not None and ledger.cut != cut:
            raise ValueError(
                f"rank {holder} cuts epoch {key[0]} into {_cut(cut)}, rank {ledger.founder} into {_cut(ledger.cut)}: "
                "do all workers have the same dataset?"
            )
        if ledger is not None or known.is_closed(key):
            return
        if min(*key, *cut) < 0 or cut.block_samples < 1 or cut.num_blocks > -(-cut.num_samples // cut.block_samples):
            raise ValueError(f"epoch {key[0]} cannot be cut into {_cut(cut)}")
        done = {epoch: IntervalSet((int(a), int(b)) for a, b in ranges) for epoch, ranges in before if epoch <= key[0]}
        for epoch, ranges in done.items():
            if any(start < 0 or end > cut.num_blocks for start, end in ranges):
                raise ValueError(f"epoch {epoch} has only {cut.num_blocks} blocks; the restored state lists later ones")
        for epoch in sorted(done.keys() - {key[0]}):
            older = (epoch, key[1])
            if older not in known.open and not known.is_closed(older):
                ledger = _Ledger(cut, holder, done[epoch])
                ledger.ended = True
                known.found(older, ledger)
        ledger = _Ledger(cut, holder, done.get(key[0], IntervalSet()))
        ledger.inside.add(holder)  # before `found`, which closes ledgers that no worker is in
        known.found(key, ledger)

    @staticmethod
    def _take_over(ledgers: list[tuple[Key, _Ledger]], holder: int) -> BlockGrant | None:
        """Takes the last block that another worker has not begun, of the worker with the most of them.

        It counts as begun, so that two workers do not take it from each other for ever; and the new holder never ends
        up with more blocks than the old one keeps."""
        mine = sum(lease.holder == holder for _, ledger in ledgers for lease in ledger.leases.values())
        waiting: dict[int, list[tuple[Key, _Ledger, int]]] = {}
        for key, ledger in ledgers:
            for block, lease in ledger.leases.items():
                if not lease.begun and lease.holder != holder:
                    waiting.setdefault(lease.holder, []).append((key, ledger, block))
        most = max(waiting.values(), key=len, default=[])
        if len(most) <= mine:
            return None
        key, ledger, block = most[-1]
        del ledger.leases[block]  # to become the newest
        ledger.leases[block] = _Lease(holder, begun=True)
        return _granted(key, ledger, block)

    def begin(self, loader: int, key: Key, block: int, holder: int) -> bool:
        """Whether `holder` still has this block; then no other worker can take it over any more."""
        ledger = self._loaders[loader].open.get(key) if loader in self._loaders else None
        lease = ledger.leases.get(block) if ledger else None
        if lease is None or lease.holder != holder:
            return False
        lease.begun = True
        return True

    def done(self, loader: int, holder: int, blocks: Sequence[BlockName]) -> None:
        """`holder` has done these blocks. Those that it does not hold are ignored."""
        known = self._loaders.get(loader)
        if known is None or not blocks:
            return
        for epoch, loop, block in blocks:
            if (epoch, loop) in known.open:
                known.open[epoch, loop].done(block, holder)
        known.close_done()

    def release(self, loader: int, holder: int) -> None:
        """The blocks of this loader that `holder` has taken and not done are pending again."""
        known = self._loaders.get(loader)
        if known is not None:
            for ledger in known.open.values():
                ledger.release(holder)
            known.close_done()

    def gone(self, holder: int) -> None:
        """`holder` has died or left."""
        for loader in self._loaders:
            self.release(loader, holder)

    # -- views ---------------------------------------------------------------------------------------------------------

    def views(self) -> list[dict[str, Any]]:
        """The state of each loader's newest epoch, as plain values; `describe` makes it a text."""
        shown = []
        for number, known in sorted(self._loaders.items())[-MAX_SHOWN:]:
            if known.newest is None:
                continue
            ledger = known.open.get(known.newest)
            view = ledger.view(known.newest) if ledger is not None else known.last
            assert view is not None
            earlier = [other.view(key) for key, other in known.open.items() if key != known.newest]
            shown.append({**view, "loader": number, "earlier": earlier})
        return shown

    def account(self, loader: int) -> dict[str, Any]:
        """The views of one loader's open ledgers, and the final view of the newest closed one."""
        known = self._loaders.get(loader) or _Loader()
        ledgers = [ledger.view(key) for key, ledger in known.open.items()]
        return {"open": ledgers, "newest": list(known.newest) if known.newest else None, "last": known.last}


def describe(views: list[dict[str, Any]]) -> str:
    """The views as a text of 100 columns: each loader's epoch, and below it what each worker holds."""
    if not views:
        return "no samples are leased: no worker has begun an epoch, or samples are dealt evenly"
    lines = []
    for view in views:
        lines.append(
            f"loader {view['loader']}, {_epoch(view)}: {view['num_done']} of {view['num_blocks']} blocks done, "
            f"{view['num_leased']} leased, {view['num_pending']} pending; "
            f"{view['samples_done']} of {view['num_samples']} samples done"
        )
        if view["line"]:
            lines.append("  " + view["line"])
        for worker in view["workers"]:
            held = [f"{block}" if begun else f"{block} (not begun)" for block, begun in worker["holds"]]
            what = f"block{'s' if len(held) > 1 else ''} {', '.join(held)}" if held else "nothing"
            text = f"rank {worker['rank']} has done {worker['num_done']} and holds {what}"
            lines += textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="    ")
        for other in view["earlier"]:
            holders = ", ".join(f"rank {worker['rank']}" for worker in other["workers"] if worker["holds"])
            lines.append(
                f"  {_epoch(other)}: {other['num_leased']} blocks still leased{f' to {holders}' if holders else ''}, "
                f"{other['num_pending']} pending of {other['num_blocks']}"
            )
    return "\n".join(lines)


def _granted(key: Key, ledger: _Ledger, block: int) -> BlockGrant:
    return BlockGrant(kind="block", epoch=key[0], loop=key[1], block=block, cut=ledger.cut)


def _epoch(view: dict[str, Any]) -> str:
    return f"epoch {view['epoch']}" + (f", loop {view['loop']}" if view["loop"] else "")


def _cut(cut: EpochCut) -> str:
    return f"{cut.num_blocks} blocks ({cut.num_samples} samples)"
