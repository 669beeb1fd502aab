"""Schedules: which rank sends what to which, step by step, as plain data. Nothing here blocks or imports torch.

The algorithms in star.py, ring.py, tree.py and halving.py follow these schedules, and their docstrings draw them. A
test compares what they really send with what is said here, and `hora explain` shows it.

A vector is cut into `parts` contiguous chunks by `bounds`. A `ScheduledTransfer` is one message with the chunks
[start, stop); the transfers of one `ScheduleStep` happen at the same time, all reading what was there before the step.
n is the number of ranks, p the largest power of two ≤ n.

    schedule        steps       messages             sent by a rank, in vectors
    star            2(n−1)      2(n−1)               root n−1, others 1
    ring            2(n−1)      2n(n−1)              2(n−1)/n
    tree            2⌈log2 n⌉   2(n−1)               1 (root 0) + one per child; at most ⌈log2 n⌉ for n > 1
    halving         2⌈log2 n⌉   2p·log2(p) + 2(n−p)  2(p−1)/p; ranks that fold another in: +1, folded ranks: 1
    reduce-serial   n−1         n−1                  root 0, others 1
    reduce-tree     ⌈log2 n⌉    n−1                  root 0, others 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

State = tuple[tuple[frozenset[int], ...], ...]
"""state[rank][chunk] is the set of ranks whose contribution is summed there."""


def bounds(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut numel elements into contiguous (start, stop) pieces; the first `numel % parts` are one element larger."""
    if numel < 0 or parts < 1:
        raise ValueError(f"bounds got numel={numel}, parts={parts}; numel must be at least 0 and parts at least 1")
    size, larger = divmod(numel, parts)
    edges = [i * size + min(i, larger) for i in range(parts + 1)]
    return list(pairwise(edges))


def ceil_log2(n: int) -> int:
    """How many doublings reach n: 0 for 1, 1 for 2, 2 for 3 and 4, 3 for 5 to 8."""
    return (n - 1).bit_length()


@dataclass(frozen=True)
class ScheduledTransfer:
    """One message: chunks [start, stop) from source to target, added to what is there (`reduce`) or replacing it."""

    source: int
    target: int
    start: int
    stop: int
    reduce: bool

    @property
    def chunks(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class ScheduleStep:
    """Transfers that happen at the same time, ordered by source rank."""

    phase: str
    transfers: tuple[ScheduledTransfer, ...]


@dataclass(frozen=True)
class Schedule:
    """A collective on `ranks` ranks, over a vector cut into `parts` chunks.

    `root` is the only rank that ends with the result; None means that all do.
    """

    name: str
    ranks: int
    parts: int
    steps: tuple[ScheduleStep, ...]
    root: int | None = None

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    @property
    def num_messages(self) -> int:
        return sum(len(step.transfers) for step in self.steps)

    @property
    def transfers(self) -> tuple[ScheduledTransfer, ...]:
        """All messages, in the order of the steps."""
        return tuple(transfer for step in self.steps for transfer in step.transfers)

    def sends(self, rank: int) -> tuple[ScheduledTransfer, ...]:
        """What this rank sends, in order."""
        return tuple(transfer for transfer in self.transfers if transfer.source == rank)

    def receives(self, rank: int) -> tuple[ScheduledTransfer, ...]:
        """What this rank receives, in order."""
        return tuple(transfer for transfer in self.transfers if transfer.target == rank)

    def peers(self, rank: int) -> frozenset[int]:
        """The ranks with which this one exchanges a message."""
        return frozenset(t.target for t in self.sends(rank)) | frozenset(t.source for t in self.receives(rank))

    def chunks_sent(self, rank: int) -> int:
        return sum(len(transfer.chunks) for transfer in self.sends(rank))

    def chunks_received(self, rank: int) -> int:
        return sum(len(transfer.chunks) for transfer in self.receives(rank))

    def chunks_added(self, rank: int) -> int:
        """How many chunks this rank adds to its own: its arithmetic."""
        return sum(len(transfer.chunks) for transfer in self.receives(rank) if transfer.reduce)

    def share_sent(self, rank: int) -> Fraction:
        """What this rank sends, in vectors; exact when the number of elements is a multiple of `parts`."""
        return Fraction(self.chunks_sent(rank), self.parts)

    def elements_sent(self, rank: int, numel: int) -> int:
        """What this rank sends of a vector of numel elements, exact for any numel."""
        cut = bounds(numel, self.parts)
        return sum(cut[t.stop - 1][1] - cut[t.start][0] for t in self.sends(rank))


def star(n: int) -> Schedule:
    """All ranks to rank 0, which adds in rank order and then answers each: the baseline.

    The root takes one message at a time, so a step is one message."""
    _check(n)
    others = range(1, n)
    inward = tuple(ScheduleStep("reduce at the root", (ScheduledTransfer(r, 0, 0, 1, reduce=True),)) for r in others)
    outward = tuple(ScheduleStep("send back", (ScheduledTransfer(0, r, 0, 1, reduce=False),)) for r in others)
    return Schedule("star", n, 1, inward + outward)


def ring(n: int) -> Schedule:
    """Ring all-reduce: in n chunks, every link busy in every step.

    In elements rank j sends exactly 2·numel − size(chunk j+1) − size(chunk j+2): it leaves out one chunk in each phase.
    """
    _check(n)

    def step(phase: str, first: int, i: int, reduce: bool) -> ScheduleStep:
        sent = [(j + first - i) % n for j in range(n)]
        return ScheduleStep(
            phase, tuple(ScheduledTransfer(j, (j + 1) % n, sent[j], sent[j] + 1, reduce) for j in range(n))
        )

    scatter_reduce = tuple(step("scatter-reduce", 0, i, reduce=True) for i in range(n - 1))
    all_gather = tuple(step("all-gather", 1, i, reduce=False) for i in range(n - 1))
    return Schedule("ring", n, n, scatter_reduce + all_gather)


def tree(n: int) -> Schedule:
    """Up a binomial tree rooted at rank 0, and down again: few steps, each of the whole vector.

    A rank r > 0 sends one vector up and one down to each child r + 2^k < n, 2^k being less than r's lowest set bit. The
    root has ⌈log2 n⌉ children: it receives, adds and sends that many vectors.
    """
    _check(n)
    up = _up(n)
    down = tuple(
        ScheduleStep(
            "broadcast down",
            tuple(sorted((ScheduledTransfer(t.target, t.source, 0, 1, False) for t in s.transfers), key=_by)),
        )
        for s in reversed(up)
    )
    return Schedule("tree", n, 1, up + down)


def halving(n: int) -> Schedule:
    """Recursive halving, then doubling, in p chunks; what n has beyond p is folded in before and out after.

    Only for n = p a rank sends 2(n−1)/n of the data. Otherwise the busiest rank sends 3 − 2/p vectors, the ring's
    2 − 2/n: about half as much again.
    """
    _check(n)
    p = 1 << (n.bit_length() - 1)
    e = n - p
    participants = [r for r in range(n) if r >= 2 * e or r % 2 == 0]
    fold_in = tuple(ScheduledTransfer(2 * i + 1, 2 * i, 0, p, reduce=True) for i in range(e))
    fold_out = tuple(ScheduledTransfer(2 * i, 2 * i + 1, 0, p, reduce=False) for i in range(e))

    def exchange(phase: str, half: int, reduce: bool) -> ScheduleStep:
        transfers = []
        for v, rank in enumerate(participants):
            partner = v ^ half
            # The half of the shared range on v's own side starts at v with the lower bits cleared. Halving sends the
            # partner the partner's side; doubling sends it one's own.
            start = (partner if reduce else v) & -half
            transfers.append(ScheduledTransfer(rank, participants[partner], start, start + half, reduce))
        return ScheduleStep(phase, tuple(transfers))

    halves = [p >> (k + 1) for k in range(p.bit_length() - 1)]
    steps = [exchange("halving", half, reduce=True) for half in halves]
    steps += [exchange("doubling", half, reduce=False) for half in reversed(halves)]
    if e:
        steps = [ScheduleStep("fold in", fold_in), *steps, ScheduleStep("fold out", fold_out)]
    return Schedule("halving", n, p, tuple(steps))


def reduce_serial(n: int) -> Schedule:
    """All send to rank 0, one after the other: n−1 steps, and the root receives and adds n−1 vectors."""
    _check(n)
    steps = tuple(
        ScheduleStep("reduce at the root", (ScheduledTransfer(r, 0, 0, 1, reduce=True),)) for r in range(1, n)
    )
    return Schedule("reduce-serial", n, 1, steps, root=0)


def reduce_tree(n: int) -> Schedule:
    """The way up of `tree`: ⌈log2 n⌉ steps, n−1 messages; the root receives and adds only ⌈log2 n⌉ vectors."""
    _check(n)
    return Schedule("reduce-tree", n, 1, _up(n), root=0)


SCHEDULES: dict[str, Callable[[int], Schedule]] = {
    "star": star,
    "ring": ring,
    "tree": tree,
    "halving": halving,
    "reduce-serial": reduce_serial,
    "reduce-tree": reduce_tree,
}


def initial(schedule: Schedule) -> State:
    """Before the first step every rank holds its own contribution in every chunk, and nothing else."""
    return tuple((frozenset({rank}),) * schedule.parts for rank in range(schedule.ranks))


def simulate(schedule: Schedule) -> Iterator[State]:
    """Run the schedule on sets of contributing ranks and yield the state after each step.

    Asserts what makes a schedule correct on the way: nothing is added twice, no chunk of a rank is written twice in
    one step, and nothing is replaced by less than it was.
    """
    state = initial(schedule)
    for number, step in enumerate(schedule.steps):
        where = f"{schedule.name} on {schedule.ranks} ranks, step {number} ({step.phase})"
        after = [list(row) for row in state]
        written: set[tuple[int, int]] = set()
        for t in step.transfers:
            assert t.source != t.target, f"{where}: rank {t.source} sends to itself"
            for chunk in t.chunks:
                assert (t.target, chunk) not in written, f"{where}: chunk {chunk} of rank {t.target} is written twice"
                written.add((t.target, chunk))
                new, old = state[t.source][chunk], state[t.target][chunk]
                if t.reduce:
                    twice = sorted(new & old)
                    assert not twice, f"{where}: chunk {chunk} of rank {t.target} would hold ranks {twice} twice"
                    new |= old
                assert new >= old, f"{where}: chunk {chunk} of rank {t.target} would lose {sorted(old - new)}"
                after[t.target][chunk] = new
        state = tuple(tuple(row) for row in after)
        yield state


def _up(n: int) -> tuple[ScheduleStep, ...]:
    rounds = [1 << k for k in range(ceil_log2(n))]
    return tuple(
        ScheduleStep(
            "reduce up", tuple(ScheduledTransfer(r, r - bit, 0, 1, reduce=True) for r in range(bit, n, 2 * bit))
        )
        for bit in rounds
    )


def _by(transfer: ScheduledTransfer) -> int:
    return transfer.source


def _check(n: int) -> None:
    if n < 1:
        raise ValueError(f"a schedule needs at least 1 rank, got {n}")
