"""Book: who computes which block of samples when nobody waits for anybody. A pure state machine: no clock, no sockets.

An epoch of a loader is cut into blocks; its ledger says of each pending, leased to a worker, or done:

    blocks     0 1 2 3 4 5 6 7 8 9
    ledger     # # # # 0 # 1 1 . .       # done, digits: the rank that holds it, . pending
                       |   | |
                   begun   | not begun: taken ahead by a loader that prefetches; who has nothing left takes it over
                       begun

A worker that asks is given, in this order: a block that an earlier epoch of the same loader still owes, because its
holder died after others were told that the epoch is over; the next pending block of its own epoch; a block that another
has taken but not begun. Then it is told that the epoch is over; in the last epoch, where nobody would come for what a
dying worker leaves, it is told to wait instead until all leases are done.

Each block is done once as long as nobody dies: a lease has one holder, and only what its holder says of it counts. A
ledger that is done is forgotten, except for its counts. Cost: one small request per block; memory grows with the open
leases, not with blocks or epochs.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import heapq
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from .messages import BeginBlock, BlockGrant, CoordinatorReply, DoneBlocks, ShowData, TakeBlock

MAX_LINE = 80  # an epoch of up to this many blocks is shown block by block
MAX_SHOWN = 20  # loaders in a view, the newest: some scripts make one for every epoch
COLUMNS = 100
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

Key = tuple[int, int]  # epoch, and which loop over the loader it is in that epoch
Range = tuple[int, int]  # from, to


class EpochCut(NamedTuple):
    """How an epoch is cut: all workers must mean the same."""

    num_samples: int
    block_samples: int
    num_blocks: int

    def samples(self, start: int, end: int) -> int:
        """How many samples the blocks from `start` to `end` have."""
        return min(end * self.block_samples, self.num_samples) - start * self.block_samples


class IntervalSet:
    """Whole numbers as sorted ranges that do not touch: memory grows with the gaps."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if start >= end:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, number: int) -> bool:
        return self.end(number) > number

    def end(self, number: int) -> int:
        """Where the range that holds `number` ends; `number` itself if none does."""
        place = bisect.bisect_right(self._starts, number) - 1
        return max(number, self._ends[place]) if place >= 0 else number

    def count(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, number: int) -> None:
        if number in self:
            return
        place = bisect.bisect_right(self._starts, number)
        joins_left = place > 0 and self._ends[place - 1] == number
        joins_right = place < len(self._starts) and self._starts[place] == number + 1
        if joins_left and joins_right:
            self._ends[place - 1] = self._ends.pop(place)
            del self._starts[place]
        elif joins_left:
            self._ends[place - 1] = number + 1
        elif joins_right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._ends.insert(place, number + 1)


@dataclasses.dataclass
class _Lease:
    holder: int
    begun: bool


class _Ledger:
    """One epoch. Blocks below `_fresh` are leased, returned or done; those above are pending, or were `_skipped`."""

    def __init__(self, cut: EpochCut, founder: int, before: IntervalSet) -> None:
        self.cut = cut
        self.founder = founder
        self.phase = 0  # see _Loader
        self.leases: dict[int, _Lease] = {}  # the oldest first
        self.inside: set[int] = set()  # workers that take from it
        self.ended = False  # somebody was told that it is over: what comes back is owed to those in later epochs
        self.done_by: collections.Counter[int] = collections.Counter()
        self.num_done = before.count()
        self.samples_done = sum(cut.samples(start, end) for start, end in before)
        self._fresh = 0
        self._skipped = before
        self._returned: list[int] = []  # a heap

    @property
    def num_pending(self) -> int:
        return self.cut.num_blocks - self.num_done - len(self.leases)

    @property
    def complete(self) -> bool:
        return self.num_done == self.cut.num_blocks

    def lend(self, holder: int, begun: bool) -> int | None:
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

    def give_back(self, holder: int) -> None:
        for block in [block for block, lease in self.leases.items() if lease.holder == holder]:
            del self.leases[block]
            heapq.heappush(self._returned, block)
        self.inside.discard(holder)

    def done_ranges(self) -> list[Range]:
        found, start = [], 0
        for block in sorted([*self.leases, *self._returned]):
            if start < block:
                found.append((start, block))
            start = block + 1
        found.append((start, self._fresh))
        return list(IntervalSet([*found, *((max(a, self._fresh), b) for a, b in self._skipped)]))

    def line(self) -> str:
        """A sign for every block."""
        signs = ["."] * self.cut.num_blocks
        for start, end in self.done_ranges():
            signs[start:end] = "#" * (end - start)
        for block, lease in self.leases.items():
            signs[block] = _DIGITS[lease.holder] if lease.holder < len(_DIGITS) else "+"
        return "".join(signs)

    def view(self, key: Key) -> dict[str, Any]:
        holders = sorted({*self.inside, *self.done_by, *(lease.holder for lease in self.leases.values())})
        return {
            "epoch": key[0],
            "loop": key[1],
            "num_blocks": self.cut.num_blocks,
            "num_done": self.num_done,
            "num_leased": len(self.leases),
            "num_pending": self.num_pending,
            "samples_done": self.samples_done,
            "num_samples": min(self.cut.num_samples, self.cut.num_blocks * self.cut.block_samples),
            "line": self.line() if self.cut.num_blocks <= MAX_LINE else "",
            "workers": [
                {
                    "rank": rank,
                    "num_done": self.done_by[rank],
                    "holds": [[block, lease.begun] for block, lease in self.leases.items() if lease.holder == rank],
                }
                for rank in holders
            ],
        }


class _Loader:
    """The ledgers of one loader: those that are open, and which are closed.

    What is newer is what was founded later, not what has the larger key: a second `job.epochs` counts from 0 again. So
    every ledger has a phase, which goes up when a smaller key than the newest is founded:

        founded    (0, 0) (1, 0) (2, 0) | (0, 1) (1, 1) (2, 1)
        phase         0      0      0   |    1      1      1
    """

    def __init__(self) -> None:
        self.open: dict[Key, _Ledger] = {}  # in the order in which they were founded
        self.closed: dict[tuple[int, int], IntervalSet] = {}  # by phase and loop: the epochs
        self.newest: Key | None = None
        self._phase = 0
        self._last_at: tuple[int, Key] | None = None
        self.last: dict[str, Any] | None = None  # how the newest of the closed ledgers ended
        self.blocks_done = 0
        self.samples_done = 0

    def is_closed(self, key: Key) -> bool:
        return any(loop == key[1] and key[0] in epochs for (_, loop), epochs in self.closed.items())

    def found(self, key: Key, ledger: _Ledger) -> None:
        if self.newest is not None and key < self.newest:
            self._phase += 1
        ledger.phase = self._phase
        self.open[key] = ledger
        self.newest = key
        self.settle()

    def founded_at(self, key: Key) -> tuple[int, Key]:
        """Compares as the order in which ledgers, open or closed, were founded."""
        if key in self.open:
            return self.open[key].phase, key
        return next(phase for (phase, loop), epochs in self.closed.items() if loop == key[1] and key[0] in epochs), key

    def settle(self) -> None:
        """Closes what is done, and what everybody has left before its end, once they have begun something newer."""
        for key, ledger in list(self.open.items()):
            left = key != self.newest and not ledger.ended and not ledger.inside and not ledger.leases
            if ledger.complete or left:
                at = self.founded_at(key)
                del self.open[key]
                self.closed.setdefault((ledger.phase, key[1]), IntervalSet()).add(key[0])
                self.blocks_done += ledger.num_done
                self.samples_done += ledger.samples_done
                if self._last_at is None or self._last_at <= at:
                    self.last, self._last_at = ledger.view(key), at

    def reach(self, key: Key) -> list[tuple[Key, _Ledger]]:
        """The ledgers that somebody in the epoch `key` takes from: what older ones owe comes first."""
        at = self.founded_at(key)
        return [(k, each) for k, each in self.open.items() if k == key or (each.ended and self.founded_at(k) < at)]


class LeaseManager:
    """All ledgers of a run, by loader. Holders are ranks. Not thread-safe: its caller owns the order of events.

    ValueError says what a worker asked for that cannot be, and changes nothing.
    """

    def __init__(self) -> None:
        self._loaders: dict[int, _Loader] = {}

    # -- what workers ask --------------------------------------------------------------------------------------------

    def take(
        self,
        loader: int,
        key: Key,
        cut: EpochCut,
        holder: int,
        *,
        done: Sequence[tuple[int, int, int]] = (),
        before: Sequence[tuple[int, Sequence[Range]]] = (),
        ahead: bool = False,
        last: bool = True,
    ) -> BlockGrant:
        """The next block for `holder`, which is in the epoch `key`; `done` is what it has finished since.

        The first to come founds the ledger; `before` says which blocks a restored run has done already, by epoch: of
        this one, and of earlier ones that owe the rest. `ahead` asks for a block that will be begun later.
        """
        known = self._loaders.setdefault(loader, _Loader())
        self._found(known, key, cut, holder, before)
        self.done(loader, holder, done)
        own = known.open.get(key)
        if own is not None:
            own.inside.add(holder)
        ledgers = known.reach(key)
        for of, ledger in ledgers:
            block = ledger.lend(holder, begun=not ahead)
            if block is not None:
                return _granted(of, ledger, block)
        taken = self._take_over(ledgers, holder)
        if taken is not None:
            return taken
        if ahead:
            return BlockGrant(kind="end")  # for now: it comes back once it has done what it holds
        others = {lease.holder for _, ledger in ledgers for lease in ledger.leases.values()} - {holder}
        if last and others:
            return BlockGrant(kind="wait", holders=tuple(sorted(others)))
        if own is not None:
            own.ended = True
            own.inside.discard(holder)
        return BlockGrant(kind="end")

    def begin(self, loader: int, key: Key, block: int, holder: int) -> bool:
        """Whether `holder` still has this block; then nobody takes it over any more."""
        ledger = self._loaders[loader].open.get(key) if loader in self._loaders else None
        lease = ledger.leases.get(block) if ledger else None
        if lease is None or lease.holder != holder:
            return False
        lease.begun = True
        return True

    def done(self, loader: int, holder: int, blocks: Sequence[tuple[int, int, int]]) -> None:
        """`holder` has done these (epoch, loop, block). What it does not hold, or has said before, changes nothing."""
        known = self._loaders.get(loader)
        if known is None or not blocks:
            return
        for epoch, loop, block in blocks:
            if (epoch, loop) in known.open:
                known.open[epoch, loop].done(block, holder)
        known.settle()

    def release(self, loader: int, holder: int) -> None:
        """What `holder` took from this loader and did not do is pending again; it takes no more for now."""
        known = self._loaders.get(loader)
        if known is not None:
            for ledger in known.open.values():
                ledger.give_back(holder)
            known.settle()

    def gone(self, holder: int) -> None:
        """`holder` has died or left."""
        for loader in self._loaders:
            self.release(loader, holder)

    # -- what is shown -----------------------------------------------------------------------------------------------

    def views(self) -> list[dict[str, Any]]:
        """Where each loader's newest epoch stands, as plain values; `describe` puts them into words."""
        shown = []
        for number, known in sorted(self._loaders.items())[-MAX_SHOWN:]:
            if known.newest is None:
                continue
            ledger = known.open.get(known.newest)
            view = ledger.view(known.newest) if ledger is not None else known.last
            assert view is not None
            earlier = [(key, other) for key, other in known.open.items() if key != known.newest]
            shown.append({**view, "loader": number, "earlier": [other.view(key) for key, other in earlier]})
        return shown

    def account(self, loader: int) -> dict[str, Any]:
        """One loader's open ledgers with their done blocks as ranges; and how the newest closed one ended."""
        known = self._loaders.get(loader) or _Loader()
        ledgers = [
            {
                "epoch": key[0],
                "loop": key[1],
                "ended": ledger.ended,
                "cut": list(ledger.cut),
                "done": [list(each) for each in ledger.done_ranges()],
                "num_done": ledger.num_done,
                "num_leased": len(ledger.leases),
                "samples_done": ledger.samples_done,
            }
            for key, ledger in known.open.items()
        ]
        return {"open": ledgers, "newest": list(known.newest) if known.newest else None, "last": known.last}

    def answer(self, rank: int, request: TakeBlock | BeginBlock | DoneBlocks | ShowData) -> CoordinatorReply:
        """What the worker `rank` asked for, as a reply."""
        try:
            return CoordinatorReply(id=request.id, value=msgspec.msgpack.encode(self._answer(rank, request)))
        except ValueError as problem:
            return CoordinatorReply(id=request.id, error=str(problem))

    def _answer(self, rank: int, request: TakeBlock | BeginBlock | DoneBlocks | ShowData) -> Any:
        if isinstance(request, TakeBlock):
            return self.take(
                request.loader,
                (request.epoch, request.loop),
                EpochCut(request.num_samples, request.block_samples, request.num_blocks),
                rank,
                done=request.done,
                before=request.before,
                ahead=request.ahead,
                last=request.last,
            )
        if isinstance(request, BeginBlock):
            self.done(request.loader, rank, request.done)
            return self.begin(request.loader, (request.epoch, request.loop), request.block, rank)
        if isinstance(request, DoneBlocks):
            self.done(request.loader, rank, request.done)
            if request.release:
                self.release(request.loader, rank)
            return None
        return self.views() if request.loader is None else self.account(request.loader)

    # -- inside ------------------------------------------------------------------------------------------------------

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
                raise ValueError(f"epoch {epoch} has only {cut.num_blocks} blocks, and later ones are said to be done")
        for epoch in sorted(done.keys() - {key[0]}):
            older = (epoch, key[1])
            if older not in known.open and not known.is_closed(older):
                ledger = _Ledger(cut, holder, done[epoch])
                ledger.ended = True
                known.found(older, ledger)
        ledger = _Ledger(cut, holder, done.get(key[0], IntervalSet()))
        ledger.inside.add(holder)  # before it is looked at: one that nobody is in may be closed
        known.found(key, ledger)

    @staticmethod
    def _take_over(ledgers: list[tuple[Key, _Ledger]], holder: int) -> BlockGrant | None:
        """Of the worker with the most blocks that it has not begun, the one that it would come to last.

        It counts as begun, so that two workers do not take it from each other for ever; and nobody ends up with more
        than the other keeps."""
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


def describe(views: list[dict[str, Any]]) -> str:
    """The views in words, for a terminal of 100 columns: of all workers, and below it what each of them holds."""
    if not views:
        return "no samples are lent: nobody has begun an epoch, or the samples are dealt evenly"
    parts = []
    for view in views:
        lines = [
            f"loader {view['loader']}, {_epoch(view)}: {view['num_done']} of {view['num_blocks']} blocks done, "
            f"{view['num_leased']} leased, {view['num_pending']} pending; "
            f"{view['samples_done']} of {view['num_samples']} samples done"
        ]
        if view["line"]:
            lines.append("  " + view["line"])
        for worker in view["workers"]:
            held = [f"{block}" if begun else f"{block} (not begun)" for block, begun in worker["holds"]]
            what = f"block{'s' if len(held) > 1 else ''} {', '.join(held)}" if held else "nothing"
            words = f"rank {worker['rank']} has done {worker['num_done']} and holds {what}"
            lines += textwrap.wrap(words, COLUMNS, initial_indent="  ", subsequent_indent="    ")
        for other in view["earlier"]:
            holders = ", ".join(f"rank {worker['rank']}" for worker in other["workers"] if worker["holds"])
            lines.append(
                f"  {_epoch(other)}: {other['num_leased']} blocks still leased{f' to {holders}' if holders else ''}, "
                f"{other['num_pending']} pending of {other['num_blocks']}"
            )
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _granted(key: Key, ledger: _Ledger, block: int) -> BlockGrant:
    return BlockGrant(kind="block", epoch=key[0], loop=key[1], block=block, cut=tuple(ledger.cut))


def _epoch(view: dict[str, Any]) -> str:
    return f"epoch {view['epoch']}" + (f", loop {view['loop']}" if view["loop"] else "")


def _cut(cut: EpochCut) -> str:
    return f"{cut.num_blocks} blocks ({cut.num_samples} samples)"
