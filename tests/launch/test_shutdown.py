"""The shutdown policy alone, without processes or clocks: who is the cause, who is signalled when, what goes on."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from hora.launch.process import Slot
from hora.launch.shutdown import (
    Action,
    Grace,
    Log,
    ReportExit,
    ReportFailure,
    ReportLoss,
    ReportPredictorFailure,
    SendSignal,
    ShutdownPolicy,
)
from hora.runs.exit_codes import SECONDARY_FAILURE

GRACE = Grace()
ZERO, ONE, TWO = WORKERS = [("worker", rank) for rank in range(3)]
SERVER, PREDICTOR = ("server", 0), ("predictor", 0)
KILLED = -signal.SIGKILL


@dataclasses.dataclass
class Facts:
    """The run as the policy sees it; a test changes it as it goes on."""

    can_lose_workers: bool = False
    training_ended: bool = False
    has_joined_workers: bool = False
    failures: list[Slot] = dataclasses.field(default_factory=list)

    def announced_failures(self) -> list[Slot]:
        return self.failures

    def holds_parameters(self, slot: Slot) -> bool:
        return slot[0] == "server"


def begun(*slots: Slot, facts: Facts | None = None, keep_predictor: bool = False) -> ShutdownPolicy:
    """A policy whose processes have all been started."""
    policy = ShutdownPolicy(slots, facts or Facts(), GRACE, keep_predictor=keep_predictor)
    for slot in slots:
        policy.started(slot)
    return policy


def signals(actions: list[Action]) -> dict[Slot, int]:
    return {action.slot: action.number for action in actions if isinstance(action, SendSignal)}


def logged(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Log)]


def others(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, SendSignal | Log)]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_rank_that_ends_well_is_reported_and_stops_no_other() -> None:
    policy = begun(*WORKERS)
    assert policy.exited({ONE: 0}, 5.0) == [ReportExit(ONE)]
    assert not policy.stopping and policy.next_deadline is None and policy.running() == [ZERO, TWO]


@pytest.mark.parametrize("code", [1, KILLED])
def test_the_first_failure_is_the_cause_and_the_others_get_sigterm_then_sigkill(code: int) -> None:
    policy = begun(*WORKERS)
    assert policy.exited({ONE: code}, 10.0) == [ReportFailure(ONE, is_cause=True)]
    assert policy.cause == ONE and policy.others_ran and policy.stopping
    assert policy.next_deadline == 10.0 + GRACE.react_s
    assert policy.tick(10.0 + GRACE.react_s - 0.01) == []
    assert policy.tick(10.0 + GRACE.react_s) == [SendSignal(slot, signal.SIGTERM, group=True) for slot in (ZERO, TWO)]
    assert policy.exited({ZERO: -signal.SIGTERM}, 11.5) == []
    assert signals(policy.tick(10.0 + GRACE.failed_kill_s)) == {TWO: signal.SIGKILL}
    assert policy.killed == [TWO] and policy.cause == ONE


def test_a_process_that_survives_sigkill_is_given_up() -> None:
    policy = begun(*WORKERS)
    policy.exited({ONE: 1}, 0.0)
    policy.tick(GRACE.failed_kill_s)
    assert not policy.gave_up
    assert policy.next_deadline == GRACE.failed_kill_s + GRACE.give_up_s
    assert policy.tick(GRACE.failed_kill_s + GRACE.give_up_s) == []
    assert policy.gave_up and policy.stopping and policy.running() == [ZERO, TWO]


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ({ZERO: 1, ONE: KILLED}, ONE),
        ({ZERO: SECONDARY_FAILURE, TWO: 1}, TWO),
        ({ZERO: KILLED, SERVER: KILLED}, SERVER),
        ({ONE: 1, TWO: 1}, ONE),
    ],
    ids=["killed before failed", "secondary last", "server before worker", "lowest rank"],
)
def test_of_those_that_ended_together_the_likeliest_is_the_cause(codes: dict[Slot, int], cause: Slot) -> None:
    policy = begun(*WORKERS, SERVER)
    assert policy.exited(codes, 0.0) == [ReportFailure(cause, is_cause=True)]
    assert policy.cause == cause


def test_ranks_that_ended_together_with_the_one_that_they_lost_were_stopped_by_it() -> None:
    policy = begun(ZERO, ONE)
    policy.exited({ZERO: SECONDARY_FAILURE, ONE: 1}, 5.0)
    assert policy.cause == ONE and policy.others_ran
    alone = begun(ONE)
    alone.exited({ONE: 1}, 5.0)
    assert alone.cause == ONE and not alone.others_ran


def test_a_secondary_failure_waits_for_the_rank_that_was_lost() -> None:
    policy = begun(*WORKERS)
    assert policy.exited({ZERO: SECONDARY_FAILURE}, 0.0) == []
    assert policy.cause is None and policy.next_deadline == GRACE.lost_s + GRACE.react_s
    assert policy.exited({TWO: KILLED}, 3.0) == [ReportFailure(TWO, is_cause=True)]
    assert policy.next_deadline == 3.0 + GRACE.react_s


def test_a_secondary_failure_is_the_cause_when_no_other_process_fails_in_time() -> None:
    policy = begun(*WORKERS)
    policy.exited({ZERO: SECONDARY_FAILURE}, 0.0)
    actions = policy.tick(GRACE.lost_s + GRACE.react_s)
    assert others(actions) == [ReportFailure(ZERO, is_cause=True)]
    assert signals(actions) == {ONE: signal.SIGTERM, TWO: signal.SIGTERM}


def test_a_secondary_failure_is_the_cause_when_no_process_is_left() -> None:
    policy = begun(*WORKERS)
    policy.exited({ZERO: SECONDARY_FAILURE}, 0.0)
    assert policy.exited({ONE: 0, TWO: 0}, 1.0) == [ReportFailure(ZERO, is_cause=True)]


def test_the_rank_that_announced_its_failure_first_is_the_cause_and_has_longer_to_end() -> None:
    facts = Facts(failures=[TWO])
    policy = begun(*WORKERS, facts=facts)
    assert policy.exited({ZERO: 1}, 0.0) == []
    assert policy.next_deadline == GRACE.cause_s + GRACE.react_s
    assert policy.exited({TWO: 5}, 20.0) == [ReportFailure(TWO, is_cause=True)]
    assert policy.cause == TWO


def test_a_rank_that_announced_its_failure_and_never_ends_is_blamed_all_the_same() -> None:
    policy = begun(*WORKERS, facts=Facts(failures=[TWO]))
    policy.exited({ZERO: SECONDARY_FAILURE}, 0.0)
    actions = policy.tick(GRACE.cause_s + GRACE.react_s)
    assert others(actions) == [ReportFailure(ZERO, is_cause=False)]
    assert policy.cause == TWO and signals(actions) == {ONE: signal.SIGTERM, TWO: signal.SIGTERM}


def test_settle_blames_a_secondary_failure_once() -> None:
    policy = begun(*WORKERS)
    policy.exited({ZERO: SECONDARY_FAILURE}, 0.0)
    assert policy.settle() == [ReportFailure(ZERO, is_cause=True)]
    assert policy.settle() == []


def test_a_process_that_cannot_be_started_ends_the_others_and_is_no_rival_cause() -> None:
    policy = ShutdownPolicy(WORKERS, Facts(), GRACE)
    policy.started(ZERO)
    policy.could_not_start(ONE, 7.0)
    assert policy.stopping and policy.next_deadline == 7.0
    assert signals(policy.tick(7.0)) == {ZERO: signal.SIGTERM}
    assert policy.exited({ZERO: -signal.SIGTERM}, 7.1) == []
    assert policy.cause is None


# -- a run that goes on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [KILLED, SECONDARY_FAILURE])
def test_an_elastic_run_goes_on_without_a_lost_worker(code: int) -> None:
    policy = begun(*WORKERS, facts=Facts(can_lose_workers=True))
    assert policy.exited({ONE: code}, 0.0) == [ReportLoss(ONE)]
    assert policy.lost == [ONE] and policy.cause is None and not policy.stopping


@pytest.mark.parametrize(
    ("slot", "code", "failures"),
    [(ONE, 1, []), (SERVER, KILLED, []), (ONE, KILLED, [TWO])],
    ids=["a script that fails", "a server", "after an announced failure"],
)
def test_an_elastic_run_ends_for_other_failures(slot: Slot, code: int, failures: list[Slot]) -> None:
    policy = begun(*WORKERS, SERVER, facts=Facts(can_lose_workers=True, failures=failures))
    policy.exited({slot: code}, 0.0)
    assert policy.lost == [] and policy.stopping


@pytest.mark.parametrize("has_joined", [True, False])
def test_the_last_worker_is_lost_only_if_workers_of_other_launchers_go_on(has_joined: bool) -> None:
    policy = begun(ZERO, facts=Facts(can_lose_workers=True, has_joined_workers=has_joined))
    policy.exited({ZERO: KILLED}, 0.0)
    assert policy.lost == ([ZERO] if has_joined else []) and policy.stopping == (not has_joined)


# -- the predictor and the servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_a_predictor_that_fails_is_reported_and_ends_nothing(training: bool) -> None:
    policy = begun(ZERO, PREDICTOR, keep_predictor=True)
    if not training:
        policy.exited({ZERO: 0}, 0.0)
    assert policy.exited({PREDICTOR: 1}, 1.0) == [ReportPredictorFailure(PREDICTOR, training=training)]
    assert not policy.stopping and policy.cause is None


def test_a_predictor_that_cannot_be_started_ends_nothing() -> None:
    policy = ShutdownPolicy([ZERO, PREDICTOR], Facts(), GRACE)
    policy.started(ZERO)
    policy.could_not_start(PREDICTOR, 0.0)
    assert not policy.stopping and not policy.start_failed


def test_servers_and_predictor_that_outlive_the_workers_are_ended_which_is_no_failure() -> None:
    policy = begun(ZERO, SERVER, PREDICTOR)
    policy.exited({ZERO: 0}, 0.0)
    assert policy.tick(0.0) == [] and policy.next_deadline == GRACE.server_term_s
    actions = policy.tick(GRACE.server_term_s)
    assert logged(actions) == [f"{name} did not end with the run and is ended" for name in ("server 0", "predictor")]
    assert signals(actions) == {SERVER: signal.SIGTERM, PREDICTOR: signal.SIGTERM}
    assert policy.exited({PREDICTOR: -signal.SIGTERM}, 10.5) == []
    actions = policy.tick(GRACE.server_kill_s)
    assert (logged(actions), signals(actions)) == ([], {SERVER: signal.SIGKILL})
    assert policy.exited({SERVER: KILLED}, 12.1) == [ReportExit(SERVER)]
    assert policy.cause is None and not policy.stopping


@pytest.mark.parametrize("facts", [Facts(), Facts(has_joined_workers=True)], ids=["keeps", "joined"])
def test_a_predictor_that_is_to_stay_and_servers_of_joined_workers_are_left_alone(facts: Facts) -> None:
    late = SERVER if facts.has_joined_workers else PREDICTOR
    policy = begun(ZERO, late, facts=facts, keep_predictor=True)
    policy.exited({ZERO: 0}, 0.0)
    assert policy.tick(1000.0) == [] and policy.next_deadline is None


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "sent", "text"),
    [
        (signal.SIGINT, signal.SIGINT, "interrupted; stopping 3 ranks and the server (Ctrl-C again: at once)"),
        (signal.SIGTERM, signal.SIGTERM, "got SIGTERM; stopping 3 ranks and the server"),
        (signal.SIGPIPE, signal.SIGTERM, "the reader of this output is gone; stopping 3 ranks and the server"),
    ],
)
def test_a_signal_goes_to_the_main_processes_first_then_to_their_groups(number: int, sent: int, text: str) -> None:
    policy = begun(*WORKERS, SERVER)
    actions = policy.stop_requested(number, 0.0)
    assert actions == [Log(text), *(SendSignal(slot, sent, group=False) for slot in (*WORKERS, SERVER))]
    assert policy.stop_signal == number
    assert policy.exited({ZERO: -sent, ONE: 1}, 0.1) == [], "who ends after the signal has not failed"
    assert policy.tick(GRACE.asked_term_s) == [SendSignal(slot, signal.SIGTERM, group=True) for slot in (TWO, SERVER)]
    assert signals(policy.tick(GRACE.asked_kill_s)) == {TWO: signal.SIGKILL, SERVER: signal.SIGKILL}
    assert policy.cause is None and policy.killed == [TWO, SERVER]


def test_a_second_signal_kills_at_once() -> None:
    policy = begun(*WORKERS)
    policy.stop_requested(signal.SIGINT, 0.0)
    assert policy.stop_requested(signal.SIGINT, 0.2) == []
    assert signals(policy.tick(0.2)) == dict.fromkeys(WORKERS, signal.SIGKILL)


def test_a_signal_while_the_cause_of_a_secondary_failure_is_awaited_is_the_first() -> None:
    policy = begun(*WORKERS)
    policy.exited({ZERO: SECONDARY_FAILURE}, 0.0)
    assert signals(policy.stop_requested(signal.SIGINT, 1.0)) == {ONE: signal.SIGINT, TWO: signal.SIGINT}
    assert policy.settle() == [] and policy.cause is None


def test_a_signal_before_any_start_says_so() -> None:
    policy = ShutdownPolicy(WORKERS, Facts(), GRACE)
    assert policy.stop_requested(signal.SIGTERM, 0.0) == [Log("got SIGTERM before any rank was started")]
    assert policy.stopping


def test_a_signal_after_all_have_ended_is_ignored() -> None:
    policy = begun(ZERO)
    policy.exited({ZERO: 0}, 0.0)
    assert policy.stop_requested(signal.SIGINT, 0.1) == [] and policy.stop_signal is None


def test_a_signal_that_ends_a_predictor_after_the_training_is_a_good_end() -> None:
    policy = begun(ZERO, PREDICTOR, keep_predictor=True)
    policy.exited({ZERO: 0}, 0.0)
    actions = policy.stop_requested(signal.SIGINT, 5.0)
    assert actions == [Log("the predictor closes; training had ended"), SendSignal(PREDICTOR, signal.SIGINT, False)]
    assert policy.stop_signal is None
    assert policy.exited({PREDICTOR: -signal.SIGINT}, 5.1) == []


def test_a_worker_that_has_left_the_run_is_not_waited_for_when_the_predictor_closes() -> None:
    policy = begun(ZERO, PREDICTOR, facts=Facts(training_ended=True), keep_predictor=True)
    actions = policy.stop_requested(signal.SIGTERM, 0.0)
    assert signals(actions) == {PREDICTOR: signal.SIGTERM} and policy.stop_signal is None


def test_with_workers_of_other_launchers_alone_the_run_can_still_be_stopped() -> None:
    policy = begun(ZERO, facts=Facts(has_joined_workers=True))
    policy.exited({ZERO: 0}, 0.0)
    assert logged(policy.stop_requested(signal.SIGINT, 1.0)) == [
        "interrupted; stopping the run, which other workers have joined (Ctrl-C again: at once)"
    ]
    assert policy.stop_signal == signal.SIGINT


def test_the_grace_periods_are_scaled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORA_GRACE", "0.5")
    assert Grace.from_environment() == Grace(
        **{field.name: getattr(GRACE, field.name) * 0.5 for field in dataclasses.fields(Grace)}
    )
    monkeypatch.setenv("HORA_GRACE", "soon")
    assert Grace.from_environment() == GRACE
