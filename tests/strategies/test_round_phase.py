"""The bookkeeping of rounds (strategies/local/round.py): phases, samples, intervals and fragments, without ranks."""

from __future__ import annotations

import pytest

from hora.strategies.local.round import Phase, Round, adapt_interval, cut_fragments


def stepped(one: Round, samples: float = 1.0, shared: bool = False) -> Phase:
    """The phase after a step of the first optimizer."""
    one.add_samples(samples, fresh=True)
    one.reopen()
    one.count_step(shared)
    one.check_due(shared)
    return one.phase


def made(num_fragments: int = 1, warmup: int = 0, interval: int = 1) -> Round:
    one = Round(num_fragments, warmup)
    one.interval = interval
    return one


def test_a_round_is_closed_until_a_step_and_due_after_its_interval() -> None:
    one = made(interval=3)
    assert one.phase is Phase.CLOSED
    assert [stepped(one) for _ in range(3)] == [Phase.LOCAL_STEPS, Phase.LOCAL_STEPS, Phase.DUE]
    one.take_due()
    assert one.phase is Phase.LOCAL_STEPS and one.local_steps == 3
    one.count_exchange([0])
    assert one.local_steps == 0 and one.num_steps == 3
    assert [stepped(one) for _ in range(3)][-1] is Phase.DUE


def test_an_interval_of_one_step_is_due_after_each() -> None:
    one = made()
    for _ in range(3):
        assert stepped(one) is Phase.DUE
        one.take_due()
        one.count_exchange([0])


def test_fragments_are_due_one_after_the_other_and_the_last_ends_the_round() -> None:
    one, due = made(num_fragments=3, interval=7), []
    for step in range(1, 15):
        if stepped(one) is Phase.DUE:
            due.append((step, one.fragment))
            one.take_due()
            one.count_exchange([one.fragment])
    assert due == [(2, 0), (4, 1), (7, 2), (9, 0), (11, 1), (14, 2)]


def test_an_exchange_that_succeeds_leaves_the_phase_as_it_was() -> None:
    one = made(interval=2)
    for phase in (Phase.CLOSED, Phase.LOCAL_STEPS, Phase.DUE):
        one.phase = phase
        with one.exchanging():
            assert one.phase is Phase.EXCHANGING
        assert one.phase is phase


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exchange_that_is_broken_off_fails_the_round_and_the_next_one_mends_it(error: type[BaseException]) -> None:
    one = made()
    stepped(one)
    one.take_due()
    with pytest.raises(error), one.exchanging():
        raise error
    assert one.phase is Phase.FAILED
    one.reopen()
    one.take_due()
    assert one.phase is Phase.FAILED, "only an exchange, or one that is due, changes it"
    with one.exchanging():
        pass
    assert one.phase is Phase.LOCAL_STEPS


def test_after_a_failure_the_next_exchange_becomes_due_all_the_same() -> None:
    one = made(interval=2)
    one.phase = Phase.FAILED
    assert [stepped(one), stepped(one)] == [Phase.FAILED, Phase.DUE]


def test_with_overlap_steps_are_taken_while_exchanging() -> None:
    one = made(interval=3)
    assert [stepped(one) for _ in range(3)][-1] is Phase.DUE
    one.begin_overlapped()
    assert one.phase is Phase.EXCHANGING and one.local_steps == 0 and one.samples == [0.0]
    assert stepped(one) is Phase.EXCHANGING
    with one.exchanging():  # the wait for it
        assert one.phase is Phase.EXCHANGING
    assert one.phase is Phase.LOCAL_STEPS
    assert [stepped(one), stepped(one)] == [Phase.LOCAL_STEPS, Phase.DUE]


def test_an_exchange_may_be_due_before_the_one_in_flight_has_ended() -> None:
    one = made(interval=1)
    stepped(one)
    one.begin_overlapped()
    assert stepped(one) is Phase.DUE
    with one.exchanging():  # the wait for it
        assert one.phase is Phase.EXCHANGING
    assert one.phase is Phase.DUE


def test_the_warm_up_is_over_after_a_step_that_all_workers_shared() -> None:
    one = made(warmup=2, interval=4)
    assert stepped(one, shared=True) is Phase.LOCAL_STEPS
    assert stepped(one, shared=False) is Phase.LOCAL_STEPS, "a worker took no part: parameters may differ"
    assert stepped(one, shared=True) is Phase.DUE and one.warming_up
    one.take_due()
    one.end_warmup()
    assert (one.warming_up, one.local_steps, one.num_steps) == (False, 0, 3)
    assert [stepped(one) for _ in range(4)][-1] is Phase.DUE


def test_samples_of_shared_steps_do_not_count_for_the_next_exchange() -> None:
    one = made(num_fragments=2, warmup=3)
    stepped(one, 5.0, shared=False)
    assert one.samples == [5.0, 5.0]
    stepped(one, 5.0, shared=True)
    assert one.samples == [0.0, 0.0]


def test_samples_are_counted_since_each_fragment_was_exchanged() -> None:
    one = made(num_fragments=2, interval=4)
    stepped(one, 2.0)
    stepped(one, 3.0)
    one.count_exchange([0])
    stepped(one, 4.0)
    assert one.samples == [4.0, 9.0] and one.fragment == 1
    one.count_exchange([0, 1])
    assert one.samples == [0.0, 0.0] and one.fragment == 0


def test_samples_of_accumulated_backward_passes_add_up() -> None:
    one = made(interval=9)
    one.add_samples(2.0, fresh=True)
    one.add_samples(3.0, fresh=False)
    one.count_step()
    assert one.samples == [5.0] and one.pending_samples == 0.0
    one.add_samples(7.0, fresh=True)
    one.add_samples(1.0, fresh=True)  # the user has cleared the gradients
    one.count_step()
    assert one.samples == [6.0]


def test_the_other_optimizers_count_only_where_the_first_has_not_stepped() -> None:
    one = made(interval=9)
    one.count_other_step(4.0)
    assert one.samples == [4.0]
    stepped(one, 3.0)
    assert one.samples == [3.0]
    one.count_exchange([0])
    assert one.samples == [0.0]


def test_a_round_is_closed_when_all_workers_have_left_the_loop() -> None:
    one = made(interval=9)
    stepped(one)
    one.close(4, everywhere=False)
    assert one.phase is Phase.LOCAL_STEPS and one.closed_loop == 4
    one.close(5, everywhere=True)
    assert one.phase is Phase.CLOSED and one.closed_loop == 5
    one.reopen()
    assert one.phase is Phase.LOCAL_STEPS


def test_a_restart_begins_a_closed_round_in_or_after_the_warm_up() -> None:
    one = made(num_fragments=2, warmup=6, interval=4)
    stepped(one, 3.0)
    one.count_exchange([0])
    one.num_completed = 2
    one.restart(5)
    assert (one.phase, one.warming_up, one.num_steps, one.local_steps) == (Phase.CLOSED, True, 5, 0)
    assert (one.fragment, one.samples, one.num_completed) == (0, [0.0, 0.0], 2)
    one.restart(6)
    assert not one.warming_up


def test_the_time_of_a_step_is_that_of_this_round() -> None:
    one = made(interval=2)
    one.add_work(5.0)
    assert one.step_s == 0.0, "no step yet"
    stepped(one)
    stepped(one)
    one.add_work(1.0)
    assert one.step_s == 3.0
    one.count_exchange([0])
    stepped(one)
    one.add_work(2.0)
    assert one.step_s == 2.0


def test_intervals_by_time_follow_the_slowest_worker() -> None:
    assert [adapt_interval(rank, 6, [1.0, 2.0], 1) for rank in range(2)] == [8, 4]
    assert [adapt_interval(rank, 1, [1.0, 100.0], 1) for rank in range(2)] == [3, 1], "at most twice as long"


def test_fragments_are_of_about_the_same_size_and_in_order() -> None:
    assert cut_fragments([0, 1, 2, 3], [5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    assert cut_fragments([0, 2], [9, 9, 1], 3) == [[0], [], [2]]
    assert cut_fragments([], [], 2) == [[], []]
