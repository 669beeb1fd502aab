"""LeaseManager leases every block to one worker at a time, leases again what is left behind, and never grows."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from hora.coordinator import InProcessCoordinator, Member
from hora.coordinator.intervals import IntervalSet
from hora.coordinator.lease_manager import LeaseManager, describe
from hora.coordinator.messages import BlockGrant, EpochCut, TakeBlock
from hora.errors import HoraError

KEY = (0, 0)


def cut(num_blocks: int, size: int = 10) -> EpochCut:
    return EpochCut(num_blocks * size, size, num_blocks)


def block(grant: BlockGrant) -> tuple[int, int]:
    assert grant.kind == "block", grant
    return grant.epoch, grant.block


def test_blocks_come_in_order_and_each_once() -> None:
    manager = LeaseManager()
    taken = []
    for holder in (0, 1, 1, 0):
        grant = manager.take(0, KEY, cut(4), holder, done=[(0, 0, b) for h, b in taken if h == holder])
        taken.append((holder, grant.block))
    assert [number for _, number in taken] == [0, 1, 2, 3]


def test_the_epoch_ends_at_once_while_others_are_at_work_and_later_ones_get_what_they_leave() -> None:
    manager = LeaseManager()
    assert block(manager.take(0, KEY, cut(2), 0, last=False)) == (0, 0)
    assert block(manager.take(0, KEY, cut(2), 1, last=False)) == (0, 1)
    assert manager.take(0, KEY, cut(2), 1, done=[(0, 0, 1)], last=False).kind == "end"
    assert block(manager.take(0, (1, 0), cut(2), 1, last=True)) == (1, 0)
    manager.gone(0)
    assert block(manager.take(0, (1, 0), cut(2), 1, done=[(1, 0, 0)])) == (0, 0)
    assert block(manager.take(0, (1, 0), cut(2), 1, done=[(0, 0, 0)])) == (1, 1)
    assert manager.take(0, (1, 0), cut(2), 1, done=[(1, 0, 1)]).kind == "end"
    assert manager.account(0)["open"] == []


def test_in_the_last_epoch_one_waits_for_what_others_hold_also_in_earlier_ones() -> None:
    manager = LeaseManager()
    manager.take(0, KEY, cut(2), 0, last=False)
    manager.take(0, KEY, cut(2), 1, last=False)
    assert manager.take(0, KEY, cut(2), 1, done=[(0, 0, 1)], last=False).kind == "end"
    assert block(manager.take(0, (1, 0), cut(1), 1)) == (1, 0)
    waiting = manager.take(0, (1, 0), cut(1), 1, done=[(1, 0, 0)])
    assert (waiting.kind, waiting.holders) == ("wait", (0,))
    manager.done(0, 0, [(0, 0, 0)])
    assert manager.take(0, (1, 0), cut(1), 1).kind == "end"


def test_what_is_taken_but_not_begun_goes_to_whoever_has_nothing_left() -> None:
    manager = LeaseManager()
    for _ in range(4):
        manager.take(0, KEY, cut(4), 0, ahead=True)
    assert manager.begin(0, KEY, 0, 0)
    assert block(manager.take(0, KEY, cut(4), 1)) == (0, 3)
    assert block(manager.take(0, KEY, cut(4), 1, done=[(0, 0, 3)])) == (0, 2)
    assert not manager.begin(0, KEY, 3, 0) and not manager.begin(0, KEY, 2, 0)
    assert manager.begin(0, KEY, 1, 0)
    assert manager.take(0, KEY, cut(4), 1, done=[(0, 0, 2)]).holders == (0,)
    manager.done(0, 0, [(0, 0, 3), (0, 0, 0), (0, 0, 1), (0, 0, 0)])
    assert manager.views()[0]["num_done"] == 4
    assert [(w["rank"], w["num_done"]) for w in manager.views()[0]["workers"]] == [(0, 2), (1, 2)]


def test_a_worker_that_prefetches_takes_over_no_more_than_it_leaves() -> None:
    manager = LeaseManager()
    for _ in range(4):
        manager.take(0, KEY, cut(4), 0, ahead=True)
    got = [manager.take(0, KEY, cut(4), 1, ahead=True).kind for _ in range(4)]
    assert got == ["block", "block", "end", "end"]


def test_a_block_taken_over_is_not_taken_back() -> None:
    manager = LeaseManager()
    manager.take(0, KEY, cut(1), 0, ahead=True)
    assert manager.take(0, KEY, cut(1), 1, ahead=True).kind == "block"
    assert manager.take(0, KEY, cut(1), 0).kind == "wait"
    assert not manager.begin(0, KEY, 0, 0) and manager.begin(0, KEY, 0, 1)


def test_what_nobody_holds_is_not_done_by_saying_so() -> None:
    manager = LeaseManager()
    manager.take(0, KEY, cut(3), 0)
    manager.done(0, 1, [(0, 0, 0), (0, 0, 2), (7, 0, 0)])
    manager.release(0, 0)
    manager.done(0, 0, [(0, 0, 0)])
    assert manager.views()[0]["num_done"] == 0
    assert block(manager.take(0, KEY, cut(3), 1)) == (0, 0)


def test_workers_that_cut_an_epoch_differently_are_both_named() -> None:
    manager = LeaseManager()
    manager.take(0, (3, 0), cut(25), 0)
    with pytest.raises(
        ValueError, match=r"rank 1 cuts epoch 3 into 20 blocks .* rank 0 into 25 blocks .* same dataset\?"
    ):
        manager.take(0, (3, 0), cut(20), 1)
    with pytest.raises(ValueError, match=r"249 samples.*250 samples"):
        manager.take(0, (3, 0), EpochCut(249, 10, 25), 1)


@pytest.mark.parametrize("bad", [EpochCut(10, 0, 1), EpochCut(10, 5, 3), EpochCut(-1, 5, 0), EpochCut(0, 5, 1)])
def test_a_cut_that_cannot_be_is_refused(bad: EpochCut) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        LeaseManager().take(0, KEY, bad, 0)


def test_a_restored_run_founds_its_ledger_with_what_is_done() -> None:
    manager = LeaseManager()
    before = [(1, [(0, 2), (3, 4)]), (2, [(0, 1), (2, 3)]), (3, [(0, 1)])]
    first = block(manager.take(0, (2, 0), cut(4), 0, before=before))
    assert first == (1, 2)
    rest = [block(manager.take(0, (2, 0), cut(4), 0, done=[(*first, 0)], before=before)) for _ in range(2)]
    assert rest == [(2, 1), (2, 3)]
    assert manager.account(0)["open"][-1]["done"] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="has only 4 blocks"):
        LeaseManager().take(0, KEY, cut(4), 0, before=[(0, [(3, 5)])])


def test_an_epoch_that_is_over_is_not_begun_again_by_a_latecomer() -> None:
    manager = LeaseManager()
    for number in range(2):
        manager.take(0, KEY, cut(2), 0, done=[(0, 0, number - 1)])
    manager.done(0, 0, [(0, 0, 1)])
    assert manager.take(0, KEY, cut(2), 1).kind == "end"
    assert block(manager.take(0, (0, 1), cut(2), 1)) == (0, 0)  # a second loop over the loader in that epoch
    assert block(manager.take(1, KEY, cut(2), 1)) == (0, 0)  # another loader


def test_an_epoch_that_all_have_left_is_over_once_they_are_in_the_next() -> None:
    manager = LeaseManager()
    for rank in (0, 1):
        manager.take(0, KEY, cut(9), rank, last=False)
    manager.release(0, 0)
    assert block(manager.take(0, (1, 0), cut(9), 0, last=False)) == (1, 0)
    assert len(manager.account(0)["open"]) == 2  # rank 1 is still in it
    manager.release(0, 1)
    assert [each["epoch"] for each in manager.account(0)["open"]] == [1]
    assert manager.take(0, KEY, cut(9), 2, last=False).kind == "end"


def test_a_second_phase_over_the_same_loader_is_lent_in_full() -> None:
    manager = LeaseManager()
    lent = []
    for phase in range(3):
        for epoch in range(3):
            said: list[tuple[int, int, int]] = []
            key = (epoch, phase)
            while (grant := manager.take(0, key, cut(2), 0, done=said, last=epoch == 2)).kind == "block":
                said = [(grant.epoch, grant.loop, grant.block)]
                lent.append((phase, epoch, grant.block))
            (view,) = manager.views()
            assert (view["epoch"], view["loop"], view["num_done"]) == (epoch, phase, 2)
    assert lent == [(phase, epoch, number) for phase in range(3) for epoch in range(3) for number in range(2)]
    assert manager.take(0, KEY, cut(2), 1).kind == "end"  # a latecomer, still in the first phase


def test_what_the_first_phase_owes_is_done_in_the_second_and_not_the_other_way_round() -> None:
    manager = LeaseManager()
    manager.take(0, (5, 0), cut(2), 0, last=False)
    manager.take(0, (5, 0), cut(2), 1, last=False)
    assert manager.take(0, (5, 0), cut(2), 1, done=[(5, 0, 1)], last=False).kind == "end"
    assert block(manager.take(0, (0, 1), cut(2), 1, last=False)) == (0, 0)
    manager.gone(0)
    assert block(manager.take(0, (0, 1), cut(2), 1, done=[(0, 1, 0)], last=False)) == (5, 0)
    assert block(manager.take(0, (0, 1), cut(2), 1, last=False)) == (0, 1)
    assert manager.take(0, (0, 1), cut(2), 2, last=False).kind == "end"  # rank 1 holds the rest, and may die
    manager.gone(1)
    assert block(manager.take(0, (5, 0), cut(2), 2, last=False)) == (5, 0)
    assert manager.take(0, (5, 0), cut(2), 2, done=[(5, 0, 0)], last=False).kind == "end"  # (0, 1) came later


def test_no_samples_are_an_epoch_without_blocks() -> None:
    assert LeaseManager().take(0, KEY, EpochCut(0, 5, 0), 0).kind == "end"


@pytest.mark.parametrize("seed", range(60))
def test_random_workers_do_every_block_once(seed: int) -> None:
    play(random.Random(seed), deaths=False)


@pytest.mark.parametrize("seed", range(60))
def test_random_workers_do_every_block_though_some_die(seed: int) -> None:
    play(random.Random(1000 + seed), deaths=True)


class Player:
    """One worker: takes, prefetches or not, begins, does, goes through the epochs; independent of LeaseManager."""

    def __init__(self, rank: int, depth: int, speed: float) -> None:
        self.rank, self.depth, self.speed = rank, depth, speed
        self.epoch = 0
        self.queue: list[tuple[int, int]] = []  # taken, in order
        self.current: tuple[int, int] | None = None
        self.unsaid: list[tuple[int, int, int]] = []
        self.finished = False


def play(draw: random.Random, deaths: bool) -> None:
    manager = LeaseManager()
    epochs, blocks = draw.randrange(1, 4), draw.randrange(0, 25)
    size = draw.randrange(1, 6)
    players = [Player(rank, draw.choice([0, 0, 1, 3]), draw.choice([0.05, 0.3, 1.0])) for rank in range(size)]
    done: Counter[tuple[int, int]] = Counter()
    working: dict[tuple[int, int], int] = {}  # what live workers compute right now
    idle = 0
    while live := [player for player in players if not player.finished]:
        idle += 1
        assert idle < 20_000, "somebody waits for ever"
        player = draw.choice(live)
        if draw.random() > player.speed:
            continue
        if deaths and len(live) > 1 and draw.random() < 0.02:
            players.remove(player)
            working.pop(player.current, None)  # type: ignore[arg-type]
            manager.gone(player.rank)
            if draw.random() < 0.5:  # somebody joins, where the newest epoch is
                newest = max((view["epoch"] for view in manager.views()), default=0)
                joiner = Player(size, player.depth, 1.0)
                joiner.epoch, size = newest, size + 1
                players.append(joiner)
            continue
        turn(manager, player, epochs, cut(blocks), draw, done, working)
    assert set(done) == {(epoch, number) for epoch in range(epochs) for number in range(blocks)}
    if not deaths:
        assert set(done.values()) <= {1}
    assert manager.account(0)["open"] == []


def turn(
    manager: LeaseManager,
    player: Player,
    epochs: int,
    how: EpochCut,
    draw: random.Random,
    done: Counter[Any],
    working: dict[Any, int],
) -> None:
    if player.current is not None:  # the step is over
        assert working.pop(player.current) == player.rank
        done[player.current] += 1
        player.unsaid.append((player.current[0], 0, player.current[1]))
        player.current = None
        return

    def ask(ahead: bool) -> BlockGrant:
        last = player.epoch == epochs - 1
        grant = manager.take(0, (player.epoch, 0), how, player.rank, done=player.unsaid, ahead=ahead, last=last)
        player.unsaid = []
        if grant.kind == "block":
            player.queue.append((grant.epoch, grant.block))
        return grant

    if not player.queue:
        grant = ask(ahead=False)
        if grant.kind == "wait":
            assert player.rank not in grant.holders and grant.holders
        if grant.kind == "end":
            player.epoch += 1
            player.finished = player.epoch == epochs
            if draw.random() < 0.3:
                manager.release(0, player.rank)
        if grant.kind != "block":
            return
    while len(player.queue) < player.depth and ask(ahead=True).kind == "block":
        pass
    epoch, number = player.queue.pop(0)
    if manager.begin(0, (epoch, 0), number, player.rank):
        assert (epoch, number) not in working, "two live workers compute one block"
        player.current = (epoch, number)
        working[player.current] = player.rank


def test_memory_stays_flat_over_ten_thousand_epochs() -> None:
    manager = LeaseManager()

    def size() -> int:
        known = manager._loaders[0]
        return len(known.open) + sum(len(list(ranges)) for ranges in known.closed.values())

    for epoch in range(10_000):
        said: list[tuple[int, int, int]] = []
        while (grant := manager.take(0, (epoch, 0), cut(3), 0, done=said, last=False)).kind == "block":
            said = [(grant.epoch, 0, grant.block)]
        if epoch > 10:
            assert size() <= 2
    assert manager.views()[0]["epoch"] == 9_999
    assert manager._loaders[0].blocks_done == 30_000


def test_memory_grows_with_leases_and_not_with_blocks() -> None:
    manager = LeaseManager()
    said: list[tuple[int, int, int]] = []
    for _ in range(1000):
        grant = manager.take(0, KEY, cut(10**9), 0, done=said)
        said = [(0, 0, grant.block)]
    ledger = manager._loaders[0].open[KEY]
    assert len(ledger.leases) == 1 and not ledger._returned
    assert manager.account(0)["open"][0]["done"] == [[0, 999]]


def test_ranges_are_sets_of_numbers() -> None:
    draw = random.Random(5)
    for _ in range(50):
        numbers = [draw.randrange(30) for _ in range(draw.randrange(25))]
        ranges = IntervalSet()
        for number in numbers:
            ranges.add(number)
        assert [n for start, end in ranges for n in range(start, end)] == sorted(set(numbers))
        assert [n for n in range(30) if n in ranges] == sorted(set(numbers))
        assert list(ranges) == list(IntervalSet((n, n + 1) for n in numbers)) and ranges.count() == len(set(numbers))


def test_the_views_are_readable() -> None:
    manager = LeaseManager()
    assert describe(manager.views()).startswith("no samples are leased")
    for rank in (0, 1, 0):
        manager.take(0, KEY, EpochCut(55, 10, 6), rank, done=[(0, 0, 0)] if rank == 0 else [], ahead=rank == 1)
    assert describe(manager.views()) == (
        "loader 0, epoch 0: 1 of 6 blocks done, 2 leased, 3 pending; 10 of 55 samples done\n"
        "  #10...\n"
        "  rank 0 has done 1 and holds block 2\n"
        "  rank 1 has done 0 and holds block 1 (not begun)"
    )
    for _ in range(40):
        manager.take(1, KEY, cut(2000), 3, ahead=True)
    assert max(len(line) for line in describe(manager.views()).splitlines()) <= 100


def test_views_name_what_earlier_epochs_still_owe() -> None:
    manager = LeaseManager()
    manager.take(0, KEY, cut(2), 0, last=False)
    manager.take(0, KEY, cut(2), 1, last=False)
    manager.take(0, KEY, cut(2), 1, done=[(0, 0, 1)], last=False)
    manager.take(0, (1, 0), cut(2), 1, last=False)
    assert "  epoch 0: 1 blocks still leased to rank 0, 0 pending of 2" in describe(manager.views())


def test_the_coordinator_gives_a_dead_workers_blocks_out_again_and_lends_to_workers_only() -> None:
    hub = InProcessCoordinator(1)
    connection, visitor = hub.connect(), hub.connect()
    connection.join(Member("worker", 0, "here", 1))
    request = {"loader": 0, "epoch": 0, "loop": 0, "cut": EpochCut(5, 5, 1)}
    assert connection.lease_request(TakeBlock(**request), BlockGrant).kind == "block"
    assert connection.lease_views()[0]["num_leased"] == 1
    assert connection.newest_epoch() == 0
    visitor.join(Member("visitor", 0, "here", 2))
    assert visitor.lease_views()[0]["num_leased"] == 1
    with pytest.raises(HoraError, match="leased to workers only"):
        visitor.lease_request(TakeBlock(**request), BlockGrant)
    hub.died(0, "killed")
    assert visitor.lease_views()[0]["num_pending"] == 1
    with pytest.raises(HoraError, match="has died and can lease no samples"):
        connection.lease_request(TakeBlock(**request), BlockGrant)
    with pytest.raises(HoraError, match="cannot be cut"):
        other = InProcessCoordinator(1).connect()
        other.join(Member("worker", 0, "here", 1))
        other.lease_request(TakeBlock(**{**request, "cut": EpochCut(5, 5, 9)}), BlockGrant)


def test_the_manager_needs_no_torch() -> None:
    code = "import sys, hora.coordinator.lease_manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
