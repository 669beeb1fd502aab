"""JoinState: in any order of messages no worker waits for one that has left, and all end after the same step."""

from __future__ import annotations

import random

import pytest

from hora.strategies.common.hooks import TrainingHooks
from hora.training.join import LOOP, MEETING, RUN, STEP, TRAINING, JoinState, LeaveNotice


def worker(num_exchanges: int = 0, loop: int = 1, **facts: object) -> tuple[TrainingHooks, JoinState]:
    hooks = TrainingHooks()
    hooks.num_exchanges, hooks.loop, hooks.step = num_exchanges, loop, num_exchanges
    for name, value in facts.items():
        setattr(hooks, name, value)
    state = JoinState(hooks)
    state.applied = num_exchanges
    for number in range(1, loop + 1):
        state.enter(number)
    return hooks, state


def test_a_worker_that_leaves_a_loop_ends_the_later_exchanges_of_those_in_it() -> None:
    (_, leaver), (hooks, other) = worker(3), worker(3)
    assert not leaver.leave(1, finished=False)
    (notice,) = leaver.due()
    assert notice == LeaveNotice((LOOP, 1), 3, 3)
    other.hear(1, notice)
    assert other.obstacle() is None and other.due() == []
    hooks.num_exchanges += 1
    assert other.obstacle() == (1, notice)


def test_a_worker_that_is_out_of_the_loop_too_ignores_the_notice_and_answers_once() -> None:
    hooks, other = worker(3)
    other.leave(1, finished=True)
    assert other.due() == []
    other.hear(1, LeaveNotice((LOOP, 1), 3, 3))
    other.hear(2, LeaveNotice((LOOP, 1), 3, 3))
    assert other.due() == [LeaveNotice((LOOP, 1), 3, 3)] and other.due() == []
    hooks.num_exchanges += 1
    assert other.obstacle() is None


def test_a_notice_of_a_loop_that_has_not_begun_here_waits_for_it() -> None:
    hooks, other = worker(3, loop=1)
    other.hear(1, LeaveNotice((LOOP, 2), 3, 3))
    hooks.num_exchanges += 1
    assert other.obstacle() is None and other.due() == []
    other.enter(2)
    assert other.obstacle() is not None


@pytest.mark.parametrize("place", [(RUN, 2), (MEETING, 1), (TRAINING, 0)])
def test_runs_meetings_and_the_training_are_places_as_loops_are(place: tuple[str, int]) -> None:
    hooks, other = worker(3, run=2)
    notice = LeaveNotice(place, 3, 3)
    other.hear(1, notice)
    assert other.obstacle() is None
    hooks.num_exchanges += 1
    assert other.obstacle() == (1, notice)
    hooks.run = 3
    other.meet()
    assert (other.obstacle() is None) == (place[0] != TRAINING)


def test_a_worker_that_follows_rank_0_waits_for_no_action_after_the_halt() -> None:
    _, other = worker(3)
    other.hear(0, LeaveNotice((TRAINING, 0), 3, 3))
    assert other.obstacle() is None
    other.following = True
    assert other.obstacle() is not None


@pytest.mark.parametrize("took", [True, False])
def test_a_worker_that_leaves_before_its_step_hears_whether_another_took_it(took: bool) -> None:
    (_, leaver), (hooks, other) = worker(3), worker(3)
    leaver.applied = other.applied = 2
    assert leaver.leave(1, finished=False)
    (question,) = leaver.due()
    assert not question.stepped
    other.hear(1, question)
    assert other.due() == []  # it may still take it
    if took:
        other.applied = 3
    else:
        hooks.halted = "another left"
    (answer,) = other.due()
    assert answer == LeaveNotice((STEP, 3), 3, 3, took)
    leaver.hear(0, answer)
    assert leaver.heard((STEP, 3)) == {0: answer}
    assert other.due() == []


def test_where_all_take_a_step_together_none_takes_it_after_one_has_left_before_it() -> None:
    _, other = worker(3)
    other.applied, other.stepping = 2, True
    other.hear(1, LeaveNotice((LOOP, 1), 3, 2, stepped=True))
    assert other.obstacle() is None
    other.hear(2, LeaveNotice((LOOP, 1), 3, 2, stepped=False))
    assert other.obstacle() is not None


def test_two_that_leave_before_the_same_step_answer_each_other_by_leaving() -> None:
    (_, one), (_, other) = worker(3), worker(3)
    one.applied = other.applied = 2
    one.leave(1, finished=False)
    other.leave(1, finished=False)
    (notice,) = other.due()
    one.hear(1, notice)
    (question,) = one.due()
    assert question.place == (LOOP, 1)
    assert not one.heard((STEP, 3))[1].stepped and 1 in one.heard((LOOP, 1))


class Simulated:
    """A worker of three: each batch is an exchange of all and a step of its own. It leaves where it is told to."""

    def __init__(self, rank: int, exits: tuple[int, str] | None) -> None:
        self.rank, self.exits = rank, exits
        self.hooks, self.state = worker(0)
        self.phase = "batch"
        self.num_read = 0

    def leave(self, finished: bool) -> None:
        asks = self.state.leave(1, finished)
        self.phase = "asks" if asks else "out"

    def advance(self, others: list[Simulated]) -> None:
        hooks, state = self.hooks, self.state
        if self.phase == "batch" and self.exits == (hooks.num_exchanges, "before"):
            self.leave(finished=False)
        elif self.phase == "batch" and (hooks.num_exchanges == 6 or hooks.halted):
            self.leave(finished=True)
        elif self.phase == "batch":
            hooks.num_exchanges += 1
            hooks.exchanging = True
            self.phase = "exchange"
        elif self.phase == "exchange" and state.obstacle() is not None:
            hooks.halted, hooks.exchanging, self.phase = "another left", False, "batch"
            state.tell((TRAINING, 0), hooks.num_exchanges - 1)
        elif self.phase == "exchange" and all(each.hooks.num_exchanges >= hooks.num_exchanges for each in others):
            hooks.exchanging, self.phase = False, "step"
        elif self.phase == "step" and self.exits == (hooks.num_exchanges - 1, "between"):
            self.leave(finished=False)
        elif self.phase == "step":
            state.applied, self.phase = hooks.num_exchanges, "batch"
            hooks.step += 1
        elif self.phase == "asks" and len(answers := state.heard((STEP, hooks.num_exchanges))) == len(others):
            self.phase = "out"
            if any(answer.stepped for answer in answers.values()):
                state.applied = hooks.num_exchanges
                hooks.step += 1


@pytest.mark.parametrize("seed", range(300))
def test_in_any_order_all_end_after_the_same_step_and_know_that_the_others_are_out(seed: int) -> None:
    dice = random.Random(seed)
    exits = [(dice.randrange(6), dice.choice(["before", "between"])) if dice.random() < 0.6 else None for _ in range(3)]
    everyone = [Simulated(rank, exits[rank]) for rank in range(3)]
    log: list[tuple[int, LeaveNotice]] = []  # all workers get all notices in the order of the coordinator
    for _ in range(3000):
        one = dice.choice(everyone)
        if one.num_read < len(log) and dice.random() < 0.4:
            sender, notice = log[one.num_read]
            one.num_read += 1
            if sender != one.rank:
                one.state.hear(sender, notice)
        else:
            one.advance([each for each in everyone if each is not one])
        log += [(one.rank, notice) for notice in one.state.due()]
    assert [one.phase for one in everyone] == ["out"] * 3, exits
    assert len({one.hooks.step for one in everyone}) == 1, exits
    if any(notice.place == (LOOP, 1) for _, notice in log):
        assert all(len(one.state.heard((LOOP, 1))) == 2 for one in everyone), exits
    assert len(log) == len({(rank, notice.place) for rank, notice in log}), "each is sent once"
