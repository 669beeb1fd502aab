from __future__ import annotations

import math
from typing import Any

import pytest

from hora.monitor.event_log import MAX_EVENTS
from hora.monitor.members import MAX_MEMBERS
from hora.monitor.messages import MAX_NAME_CHARS, MAX_NAMES, HistogramReport, Notice
from hora.monitor.run_state import MAX_BREAKDOWNS, RunState
from hora.strategies import parse
from reports import row, server, server_report, worker, worker_report


def run_state(strategy: str = "ring", size: int = 2) -> RunState:
    return RunState(run="r", size=size, strategy=strategy, synchronous=not strategy or parse(strategy).synchronous)


def train(
    run_state: RunState, ticks: int, workers: dict[int, dict[str, Any]], begin: int = 0, every_s: float = 0.25
) -> float:
    """Each worker reports one step per tick; returns the time."""
    now = begin * every_s
    for tick in range(begin, begin + ticks):
        now = (tick + 1) * every_s
        for rank, fields in workers.items():
            run_state.on_report(worker(rank), worker_report(tick + 1, **fields), now)
        run_state.tick(now)
    return now


# -- sums and rates ---------------------------------------------------------------------------------------------------


def test_samples_are_the_sum_of_all_workers_own() -> None:
    run = run_state()
    now = train(run, 20, {0: {"samples": 8}, 1: {"samples": 4}})
    shown = run.status(now)
    assert (shown.samples, shown.step, shown.state) == (240, 20, "running")
    assert shown.samples_per_s == pytest.approx(48)
    assert shown.steps_per_s == pytest.approx(4)
    assert [each.samples_per_s for each in shown.workers] == pytest.approx([32, 16])
    assert shown.bytes_per_step == 1000
    assert shown.hidden == pytest.approx(0.5)


def test_peers_are_told_in_bytes_per_second() -> None:
    run = run_state()
    now = train(run, 20, {0: {"peers": {1: 500}}, 1: {"peers": {0: 250}}})
    assert [each.peers for each in run.status(now).workers] == [{1: pytest.approx(2000)}, {0: pytest.approx(1000)}]


def test_waiting_is_what_a_worker_has_beyond_the_least_exposed() -> None:
    run = run_state()
    fast = {"seconds": 0.4, "exposed_s": 0.31, "computes": [0.09]}
    slow = {"seconds": 0.4, "exposed_s": 0.01, "computes": [0.39]}
    now = train(run, 8, {0: fast, 1: slow})
    quick, late = run.status(now).workers
    assert (quick.compute_s, quick.wait_s, quick.comm_s) == pytest.approx((0.09, 0.3, 0.01))
    assert (late.compute_s, late.wait_s, late.comm_s) == pytest.approx((0.39, 0.0, 0.01))
    assert run.curves["rank/0/wait"].points[-1].mean == pytest.approx(0.3)
    assert run.curves["rank/1/compute"].points[-1].mean == pytest.approx(0.39)


@pytest.mark.parametrize("strategy", ["ps:mode=async", "ps:mode=ssp,staleness=3", "local:every=4,via=ps,barrier=false"])
def test_where_nobody_waits_all_of_it_is_communication(strategy: str) -> None:
    run = run_state(strategy)
    now = train(run, 8, {0: {"seconds": 0.4, "exposed_s": 0.3}, 1: {"seconds": 0.4, "exposed_s": 0.01}})
    quick, late = run.status(now).workers
    assert (quick.wait_s, late.wait_s) == (0, 0)
    assert (quick.comm_s, late.comm_s) == pytest.approx((0.3, 0.01))


def test_in_rounds_the_wait_at_their_end_is_spread_over_their_steps() -> None:
    run = run_state("local:every=4")
    for tick in range(1, 41):
        at_end = tick % 4 == 0
        for rank in (0, 1):
            exposed_s = (0.3 if rank == 0 else 0.1) if at_end else 0.0
            told = worker_report(
                tick, seconds=0.1 + exposed_s, exposed_s=exposed_s, rounds=tick // 4, local_steps=tick % 4
            )
            run.on_report(worker(rank), told, tick * 0.25)
        run.tick(tick * 0.25)
    shown = run.status(10.0)
    assert [each.wait_s for each in shown.workers] == pytest.approx([0.05, 0.0])
    assert [each.comm_s for each in shown.workers] == pytest.approx([0.025, 0.025])
    assert shown.rounds == 10 and shown.workers[0].rounds == 10


def test_steps_of_a_minute_have_a_rate_and_silence_lowers_it() -> None:
    run = run_state()
    for step in range(1, 4):
        run.on_report(worker(0), worker_report(step, seconds=60.0, samples=600), step * 60.0)
    assert run.status(180.0).samples_per_s == pytest.approx(10)
    assert run.status(200.0).samples_per_s == pytest.approx(10)
    assert run.status(600.0).samples_per_s < 3


def test_eta_follows_the_recent_rate_of_progress() -> None:
    run = run_state()
    for tick in range(1, 401):
        slow = tick > 200
        progress = 0.4 + (tick - 200) * 0.0005 if slow else tick * 0.002
        run.on_report(worker(0), worker_report(tick, progress=progress), tick * 0.25)
        run.tick(tick * 0.25)
    shown = run.status(100.0)
    assert shown.progress == pytest.approx(0.5)
    assert shown.eta_s == pytest.approx(0.5 / 0.002, rel=0.05)
    assert run.status(100.5).eta_s == pytest.approx((shown.eta_s or 0) - 0.5, rel=0.01)
    later = run.status(300.0).eta_s
    assert later is not None and later > 2 * (shown.eta_s or 0)


def test_there_is_no_eta_without_progress() -> None:
    run = run_state()
    assert run.status(train(run, 20, {0: {}})).eta_s is None


def test_the_slowest_over_the_whole_run_is_named_if_notably_so() -> None:
    run = run_state()
    now = train(run, 20, {0: {}, 1: {"seconds": 0.105}, 2: {}})
    assert run.status(now).slowest == "rank 1 (host a, pid 101)"
    even = run_state()
    assert even.status(train(even, 20, {0: {}, 1: {"seconds": 0.1005}, 2: {}})).slowest == ""


def test_the_speed_is_a_curve_over_the_steps_of_the_run() -> None:
    run = run_state()
    train(run, 40, {0: {}, 1: {}})
    points = run.curves["speed"].points
    assert points[-1].start == 40 and points[-1].mean == pytest.approx(64)
    assert points[-1].samples == 640


def test_the_summary_has_the_whole_run() -> None:
    run = run_state()
    now = train(run, 20, {0: {"rows": [row(1, loss=2.0)]}, 1: {"seconds": 0.2}})
    run.on_event("end", "", "done", now)
    summary = run.status(run.updated_at).summary()
    assert summary["samples"] == 320 and summary["steps"] == 20 and summary["workers"] == 2
    assert summary["seconds"] == now and summary["slowest"] == "rank 1 (host a, pid 101)"
    assert summary["samples_per_s"] == pytest.approx(320 / (now - 0.05))
    assert summary["values"] == {"loss": 2.0}
    keys = "samples seconds samples_per_s steps from_step bytes_per_step hidden slowest checkpoints skipped rounds"
    assert list(summary) == [*keys.split(), "values", "workers"]


# -- what was logged --------------------------------------------------------------------------------------------------


def test_rows_are_placed_on_the_runs_clock_and_among_its_samples() -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(10, steps=10, samples=100), 5.0)
    run.on_report(
        worker(0), worker_report(20, steps=10, samples=100, rows=[row(15, 0.5, loss=2.0), row(20, loss=1.0)]), 6.0
    )
    first, last = run.curves["value/loss"].points
    assert (first.start, first.at, first.samples, first.mean) == (15, 5.5, 150, 2.0)
    assert (last.start, last.at, last.samples, last.mean) == (20, 6.0, 200, 1.0)
    assert [logged.step for logged in run.metrics.take_rows()] == [15, 20]
    assert run.metrics.take_rows() == []


def test_the_samples_of_a_row_are_those_of_its_step() -> None:
    run = run_state()
    for rank in (0, 1):  # the first reports come from workers that began together, 2 times 8 samples a step
        rows = [row(step, (10 - step) * 0.001, loss=1.0) for step in range(1, 11)]
        run.on_report(worker(rank), worker_report(10, steps=10, seconds=3.0, samples=80, rows=rows), 3.0 + rank * 0.01)
    logged_rows = run.metrics.take_rows()
    zero, one = logged_rows[:10], logged_rows[10:]
    assert [logged.samples for logged in zero] == [16, 32, 48, 64, 80, 80, 80, 80, 80, 80]  # no more was heard of
    assert [logged.samples for logged in one] == list(range(16, 161, 16))
    rows = [row(step, loss=1.0) for step in range(11, 15)]
    run.on_report(worker(0), worker_report(14, steps=4, samples=32, rows=rows), 3.25)
    assert [logged.samples for logged in run.metrics.take_rows()] == [176, 192, 192, 192]


def test_where_workers_go_their_own_pace_rows_share_what_came_since_the_last_report() -> None:
    run = run_state("ps:mode=async")
    run.on_report(worker(0), worker_report(10, steps=10, samples=80), 1.0)
    run.on_report(worker(1), worker_report(2, steps=2, samples=16), 1.1)
    rows = [row(step, loss=1.0) for step in (11, 15, 20)]
    run.on_report(worker(0), worker_report(20, steps=10, samples=80, rows=rows), 1.25)
    assert [logged.samples for logged in run.metrics.take_rows()] == [90, 128, 176]
    run.on_report(worker(1), worker_report(4, steps=2, samples=16, rows=[row(3, loss=1.0), row(4, loss=1.0)]), 1.3)
    assert [logged.samples for logged in run.metrics.take_rows()] == [144, 192]


def test_workers_values_of_one_step_are_one_point_and_the_newest_is_their_mean() -> None:
    run = run_state()
    for step in range(1, 4):
        run.on_report(worker(0), worker_report(step, rows=[row(step, loss=1.0)]), float(step))
    for step in range(1, 4):
        run.on_report(worker(1), worker_report(step, rows=[row(step, loss=3.0)]), 3.0 + step)
    points = run.curves["value/loss"].points
    assert [(point.start, point.mean, point.low, point.high, point.count) for point in points] == [
        (step, 2.0, 1.0, 3.0, 2) for step in (1, 2, 3)
    ]
    assert run.status(7.0).values == {"loss": 2.0}
    run.on_event("died", str(worker(1)), "killed", 7.0)
    assert run.status(7.0).values == {"loss": 1.0}


def test_a_value_that_is_nan_is_shown_as_such() -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(1, rows=[row(1, loss=math.nan, inf=math.inf)]), 1.0)
    shown = run.status(1.0)
    assert math.isnan(shown.values["loss"]) and shown.values["inf"] == math.inf
    assert run.curves["value/loss"].points[0].count == 0


def test_names_from_user_code_are_limited_in_length_and_number() -> None:
    run = run_state()
    long = "x" * 1000
    run.on_report(worker(0), worker_report(1, rows=[row(1, **{long: 1.0, "": 2.0, "ok": 3.0})]), 1.0)
    for number in range(1000):
        run.on_report(worker(0), worker_report(2 + number, rows=[row(2 + number, **{f"n{number}": 1.0})]), 2.0)
    names = [name for name in run.curves if name.startswith("value/")]
    assert len(names) == MAX_NAMES and "value/ok" in names and "value/" not in names
    assert max(map(len, names)) == len("value/") + MAX_NAME_CHARS
    assert len(run.status(3.0).values) == MAX_NAMES


def test_histograms_are_the_lowest_live_ranks_and_the_newest() -> None:
    run = run_state()
    for step in range(1, 81):
        for rank in (1, 0):
            shown = HistogramReport("w", step, 1000.0, 0.0, 1.0 + rank, [rank, 2])
            run.on_report(worker(rank), worker_report(step, histograms=[shown]), step * 0.1)
    count, kept = run.metrics.histograms()
    assert len(kept) == 50 and kept[-1].step == 80 and {each.high for each in kept} == {1.0}
    assert run.metrics.histograms(count) == (count, [])
    run.on_event("left", str(worker(0)), "", 9.0)
    run.on_report(worker(1), worker_report(81, histograms=[HistogramReport("w", 81, 1000.0, 0.0, 2.0, [1])]), 9.1)
    assert [each.step for each in run.metrics.histograms(count)[1]] == [81]


# -- who comes and goes -----------------------------------------------------------------------------------------------


def test_one_who_died_is_shown_and_counts_in_no_rate() -> None:
    run = run_state()
    now = train(run, 20, {0: {}, 1: {"exposed_s": 0.0}})
    run.on_event("died", str(worker(1)), "killed by SIGKILL", now)
    shown = run.status(now)
    assert [each.state for each in shown.workers] == ["alive", "died"]
    assert shown.workers[1].samples_per_s == 0 and shown.samples_per_s == pytest.approx(32)
    assert shown.workers[0].wait_s == 0
    assert shown.samples == 320
    run.on_report(worker(1), worker_report(21), now)  # on its way when it died
    assert run.status(now).workers[1].state == "died" and run.status(now).samples == 328


def test_one_who_joins_later_has_a_rank_beyond_the_size() -> None:
    run = run_state("ps:mode=async")
    now = train(run, 4, {0: {}, 1: {}})
    run.on_event("joined", str(worker(7)), "", now)
    assert [each.rank for each in run.status(now).workers] == [0, 1, 7]
    train(run, 4, {0: {}, 1: {}, 7: {}}, begin=4)
    assert run.status(now).workers[2].name == "rank 7 (host a, pid 107)"
    assert run.status(run.updated_at).summary()["workers"] == 3 and "rank/7/compute" in run.curves


def test_the_steps_of_one_who_joined_are_the_runs() -> None:
    run = run_state("ps:mode=async")
    now = train(run, 40, {0: {}, 1: {}})
    assert run.status(now).samples == 640
    run.on_report(
        worker(2),
        worker_report(1, seconds=0.2, rows=[row(1, loss=5.0)], notices=[Notice(1, 1000.0, "skipped", "")]),
        now,
    )
    run.on_report(worker(2), worker_report(2, rows=[row(2, loss=4.0)]), now + 0.25)
    points = run.curves["value/loss"].points
    assert [(point.start, point.mean, point.samples) for point in points] == [(41, 5.0, 648), (42, 4.0, 656)]
    assert run.status(now).step == 42 and run.event_log.events[-1].step == 41


def test_another_process_of_the_same_rank_begins_anew() -> None:
    run = run_state()
    train(run, 4, {0: {}, 1: {}})
    run.on_event("died", str(worker(1)), "", 1.0)
    run.on_report(worker(1, pid=999), worker_report(5), 2.0)
    shown = run.status(2.0)
    assert [each.name for each in shown.workers][1] == "rank 1 (host a, pid 999)"
    assert shown.workers[1].state == "alive" and shown.samples == 72
    assert shown.bytes_per_step == 1000


def test_a_crowd_that_comes_and_goes_is_forgotten_but_not_its_samples() -> None:
    run = run_state("ps:mode=async")
    for rank in range(3 * MAX_MEMBERS):
        run.on_report(worker(rank), worker_report(rank), rank * 0.01)
        run.tick(rank * 0.01)
        run.on_event("left", str(worker(rank)), "", rank * 0.01)
    assert len(run.status(40.0).workers) == MAX_MEMBERS
    summary = run.status(run.updated_at).summary()
    assert summary["samples"] == 3 * MAX_MEMBERS * 8 and summary["workers"] == 3 * MAX_MEMBERS
    assert len([name for name in run.curves if name.startswith("rank/")]) <= 3 * MAX_BREAKDOWNS
    assert run.lost_reports == 0


def test_too_many_alive_are_not_taken() -> None:
    run = run_state("ps:mode=async")
    for rank in range(MAX_MEMBERS + 5):
        run.on_report(worker(rank), worker_report(1), 1.0)
    assert len(run.status(1.0).workers) == MAX_MEMBERS and run.lost_reports == 5


def test_whoever_is_still_there_at_the_end_has_stopped() -> None:
    run = run_state("ps:mode=async", size=3)
    workers: dict[int, dict[str, Any]] = {0: {"epoch": 3}, 1: {"epoch": 3, "computes": [0.5]}, 2: {"epoch": 3}}
    now = train(run, 10, workers, every_s=0.5)
    run.on_report(server(0), server_report(0), now)
    assert run.status(now).workers[1].slow > 0
    run.on_event("left", str(worker(2)), "", now)
    run.on_event("end", "", "done", now)
    run.on_report(worker(0), worker_report(11, epoch=3), now)  # on its way when the run ended
    run.on_report(worker(7), worker_report(1), now)
    shown = run.status(now)
    assert [each.state for each in shown.workers] == ["stopped", "stopped", "left", "stopped"]
    assert [each.state for each in shown.servers] == ["stopped"]
    assert shown.samples_per_s == shown.steps_per_s == shown.servers[0].updates_per_s == 0
    assert all(each.slow == each.samples_per_s == 0 for each in shown.workers)
    assert shown.epoch == 3 and shown.state == "ended"


def test_the_epoch_is_never_that_of_one_who_died_while_others_went_on() -> None:
    run = run_state("ps:mode=async", size=3)
    run.on_report(worker(0), worker_report(90, epoch=9, rows=[row(90, loss=9.0)]), 1.0)
    run.on_report(worker(1), worker_report(40, epoch=4, rows=[row(40, loss=4.0)]), 1.0)
    run.on_event("died", str(worker(0)), "", 1.0)
    assert run.status(1.0).epoch == 4
    run.on_report(worker(1), worker_report(50, epoch=5, rows=[row(50, loss=5.0)]), 2.0)
    run.on_event("left", str(worker(1)), "", 2.0)
    assert (run.status(2.0).epoch, run.status(2.0).values) == (5, {"loss": 5.0})
    run.on_event("end", "", "done", 2.0)
    assert run.status(2.0).epoch == 5 and run.status(run.updated_at).summary()["values"] == {"loss": 5.0}
    run.on_event("died", str(worker(1)), "", 2.0)
    assert run.status(2.0).epoch == 5  # all have died: of the one that was heard last


def test_servers_show_their_load_and_what_was_late() -> None:
    run = run_state("ps:mode=async")
    run.on_report(worker(0), worker_report(5), 0.5)
    for tick in range(1, 13):
        for number in (0, 1):
            run.on_report(
                server(number),
                server_report(number, seconds=0.25, busy_s=0.2, lags={0: 5 * tick, 2: tick}),
                tick * 0.25,
            )
    shown = run.status(3.0)
    first = shown.servers[0]
    assert first.updates == 120 and first.updates_per_s == pytest.approx(40) and first.busy == pytest.approx(0.8)
    assert (first.queue, first.load_bytes, first.bytes_in_per_s) == (3, 1 << 20, pytest.approx(16000))
    assert shown.lags == {0: 120, 2: 24}
    busy = run.curves["server/1/busy"].points[-1]
    assert (busy.start, busy.mean) == (5, pytest.approx(0.8))
    run.on_event("died", str(server(1)), "", 3.0)
    assert [each.state for each in run.status(3.0).servers] == ["alive", "died"]


def test_a_server_within_a_worker_goes_with_it() -> None:
    run = run_state("ps")
    run.on_report(worker(1), server_report(0), 1.0)
    run.on_event("died", str(worker(1)), "", 1.0)
    assert run.status(1.0).servers[0].state == "died"


# -- events -----------------------------------------------------------------------------------------------------------


def test_a_straggler_is_named_in_an_event_and_so_is_its_end() -> None:
    run = run_state()
    quick = {"seconds": 0.412, "exposed_s": 0.311, "computes": [0.101]}
    slow = {"seconds": 0.412, "exposed_s": 0.0, "computes": [0.412]}
    now = train(run, 10, {0: quick, 1: slow}, every_s=0.4)
    [event] = run.event_log.take()
    assert event.kind == "slow" and event.who == "rank 1 (host a, pid 101)" and event.step <= 10
    assert event.text == "rank 1 (host a, pid 101) is slow: 412 ms of compute per step, the others 101 ms"
    assert run.status(now).workers[1].slow == pytest.approx(412 / 101) and run.status(now).workers[0].slow == 0
    train(run, 10, {0: quick, 1: quick}, begin=10, every_s=0.4)
    [event] = run.event_log.take()
    assert event.kind == "even" and "keeps up again: 101 ms" in event.text


def test_a_straggler_that_died_is_slow_no_more() -> None:
    run = run_state()
    now = train(run, 10, {0: {}, 1: {"computes": [0.5]}}, every_s=0.5)
    assert run.status(now).workers[1].slow > 0
    run.on_event("died", str(worker(1)), "", now)
    assert run.status(now).workers[1].slow == 0


def test_what_all_workers_tell_of_one_step_is_one_event() -> None:
    run = run_state()
    for rank in range(4):
        notices = [Notice(10, 999.5, "checkpoint", "step-10"), Notice(11, 1000.0, "skipped", "inf in w")]
        run.on_report(worker(rank), worker_report(11, notices=notices), 5.0)
    shown = run.status(5.0)
    assert (shown.checkpoints, shown.skipped) == (1, 1)
    assert [(event.kind, event.step, event.at) for event in run.event_log.events] == [
        ("checkpoint", 10, 4.5),
        ("skipped", 11, 5.0),
    ]


def test_each_asynchronous_worker_skips_for_itself() -> None:
    run = run_state("ps:mode=async")
    for rank in range(4):
        run.on_report(worker(rank), worker_report(11, notices=[Notice(11, 1000.0, "skipped", "inf")]), 5.0)
    assert run.status(5.0).skipped == 4


def test_events_are_numbered_bounded_and_cut() -> None:
    run = run_state()
    for number in range(2 * MAX_EVENTS):
        run.on_event("joined", "somebody", "x" * 10_000 + str(number), 1.0)
    run.on_event("told", "rank 0", "of no interest here", 1.0)
    assert len(run.event_log.events) == MAX_EVENTS and run.event_log.events[-1].number == 2 * MAX_EVENTS
    assert len(run.event_log.events[-1].text) == 500
    assert len(run.event_log.take()) == MAX_EVENTS and run.event_log.take() == []


def test_text_that_utf8_cannot_say_can_be_kept() -> None:
    run = run_state()
    run.on_event("stop", "bad \udc80 name", "bad \udcff text", 1.0)
    assert run.event_log.events[-1].text.encode() and run.event_log.events[-1].who.encode()


def test_what_is_settled_later_changes_what_waiting_is() -> None:
    run = run_state("")
    run.update(strategy="ps:mode=async", synchronous=False, algorithm="ring", serving="http://127.0.0.1:8000")
    run.update(strategy="", algorithm="", serving="")
    shown = run.status(0.0)
    assert (shown.strategy, shown.algorithm, shown.serving, shown.state) == ("ps:mode=async", "ring", "", "starting")
    now = train(run, 8, {0: {"exposed_s": 0.09}, 1: {"exposed_s": 0.01}})
    assert run.status(now).workers[0].wait_s == 0


# -- a restored run ---------------------------------------------------------------------------------------------------


def losses(run: RunState) -> list[tuple[int, float, int]]:
    return [(point.start, point.mean, point.count) for point in run.curves["value/loss"].points]


def test_a_restored_run_goes_on_from_its_step() -> None:
    run = run_state()
    for step in range(1, 11):
        for rank in (0, 1):
            run.on_report(
                worker(rank), worker_report(step, rows=[row(step, loss=9.0)], progress=step / 20), float(step)
            )
        run.tick(float(step))
    run.on_report(
        worker(0), worker_report(5, rows=[row(5, loss=1.0)], notices=[Notice(4, 1000.0, "restore", "step-4")]), 11.0
    )
    run.on_report(worker(1), worker_report(11, rows=[row(11, loss=9.0)]), 11.1)  # on its way when the other went back
    run.on_report(
        worker(1), worker_report(5, rows=[row(5, loss=1.0)], notices=[Notice(4, 1000.0, "restore", "step-4")]), 11.2
    )
    run.tick(11.2)
    for rank in (0, 1):
        run.on_report(worker(rank), worker_report(6, rows=[row(6, loss=1.0)]), 12.0)
    assert losses(run) == [(1, 9.0, 2), (2, 9.0, 2), (3, 9.0, 2), (4, 9.0, 2), (5, 1.0, 2), (6, 1.0, 2)]
    shown = run.status(12.0)
    assert shown.step == 6 and shown.samples == 8 * 25
    assert [event.kind for event in run.event_log.events] == ["restore"]
    assert max(point.start for point in run.curves["speed"].points) <= 6


def test_a_run_restored_twice_goes_back_twice() -> None:
    run = run_state()
    for steps in ([1, 2, 3, 4], [2, 3, 4, 5], [2, 3]):
        for step in steps:
            run.on_report(worker(0), worker_report(step, rows=[row(step, loss=float(len(steps)))]), 1.0)
    assert losses(run) == [(1, 4.0, 1), (2, 2.0, 1), (3, 2.0, 1)]


def test_a_restore_within_one_report_is_seen() -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(9, rows=[row(8, loss=9.0), row(9, loss=9.0)]), 1.0)
    run.on_report(
        worker(0), worker_report(7, rows=[row(10, 0.2, loss=9.0), row(6, 0.1, loss=1.0), row(7, loss=1.0)]), 1.3
    )
    assert losses(run) == [(6, 1.0, 1), (7, 1.0, 1)]


def test_a_run_that_begins_at_a_saved_step_has_nothing_to_forget() -> None:
    run = run_state()
    for rank in (0, 1):
        told = worker_report(5001, rows=[row(5001, loss=1.0)], notices=[Notice(5000, 999.9, "restore", "step-5000")])
        run.on_report(worker(rank), told, 1.0)
    assert losses(run) == [(5001, 1.0, 2)] and run.status(1.0).step == 5001


# -- hostile reports --------------------------------------------------------------------------------------------------

ABSURD: list[dict[str, Any]] = [
    {"step": -1}, {"step": 1 << 60}, {"steps": -5}, {"seconds": math.nan}, {"seconds": -1.0}, {"seconds": math.inf},
    {"exposed_s": math.nan}, {"comm_s": -1e9}, {"sent_bytes": -1}, {"samples": 1 << 62}, {"samples": -8},
    {"computes": [math.nan]}, {"computes": [-1.0]}, {"computes": [0.1] * 1000}, {"sent_at": math.nan},
    {"peers": {-1: 5}}, {"peers": {1: -5}}, {"peers": dict.fromkeys(range(5000), 1)}, {"epoch": -1},
    {"rounds": 1 << 62}, {"local_steps": -3}, {"rows": [row(1, loss=1.0)] * 1000},
]  # fmt: skip


@pytest.mark.parametrize("fields", ABSURD, ids=lambda fields: str(fields)[:30])
def test_a_report_that_cannot_be_is_dropped_and_counted(fields: dict[str, Any]) -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(**{"step": 1, **fields}), 1.0)
    shown = run.status(1.0)
    assert run.lost_reports == shown.lost_reports == 1 and shown.workers == [] and shown.samples == 0 and not run.curves


@pytest.mark.parametrize(
    "fields",
    [{"rows": [row(-1, loss=1.0)]}, {"rows": [row(1, count=0, loss=1.0)]}, {"rows": [row(1, math.nan, loss=1.0)]},
     {"histograms": [HistogramReport("h", 1, 1.0, math.nan, 1.0, [1])]},
     {"histograms": [HistogramReport("h", 1, 1.0, 0.0, 1.0, [])]},
     {"histograms": [HistogramReport("h", 1, 1.0, 0.0, 1.0, [1] * 99)]},
     {"histograms": [HistogramReport("h", 1, 1.0, 0.0, 1.0, [-1])]},
     {"notices": [Notice(-1, 1.0, "stop", "")]}, {"notices": [Notice(1, 1.0, "died", "")]}],
    ids=str,
)  # fmt: skip
def test_a_part_that_cannot_be_is_dropped_without_the_rest(fields: dict[str, Any]) -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(1, **fields), 1.0)
    assert run.lost_reports == 1 and run.status(1.0).samples == 8
    assert not run.event_log.events and run.metrics.histograms() == (0, []) and "value/loss" not in run.curves


def test_a_server_of_absurd_numbers_and_a_stranger_are_dropped() -> None:
    run = run_state()
    for fields in ({"busy_s": math.nan}, {"updates": -1}, {"lags": {-1: 1}}, {"lags": {0: -1}}, {"queue": 1 << 62}):
        run.on_report(server(0), server_report(0, **fields), 1.0)
    run.on_report(server(0), server_report(-1), 1.0)
    run.on_report(server(0), worker_report(1), 1.0)
    assert run.lost_reports == 7 and run.status(1.0).servers == [] and run.status(1.0).workers == []


def test_lags_of_any_number_are_bounded() -> None:
    run = run_state("ps:mode=async")
    run.on_report(server(0), server_report(0, lags=dict.fromkeys(range(100_000), 1)), 1.0)
    lags = run.status(1.0).lags
    assert len(lags) == 256 and sum(lags.values()) == 100_000


def test_progress_and_lag_that_cannot_be_are_left_out() -> None:
    run = run_state()
    run.on_report(worker(0), worker_report(1, progress=math.nan, notes={"lag": math.inf}), 1.0)
    run.tick(1.0)
    assert run.status(1.0).progress is None and run.status(1.0).workers[0].lag is None and run.lost_reports == 0


# -- a long run -------------------------------------------------------------------------------------------------------


def test_two_hundred_thousand_records_stay_bounded() -> None:
    run = run_state()
    for tick in range(4000):
        step = 50 * tick
        rows = [row(step + k, 0.25 - k / 200, loss=float(k)) for k in range(50)]
        run.on_report(worker(0), worker_report(step + 49, steps=50, seconds=0.25, samples=400, rows=rows), tick * 0.25)
        run.tick(tick * 0.25)
    curve = run.curves["value/loss"]
    assert len(curve.points) <= 1024 and curve.width == 256
    assert sum(point.count for point in curve.points) == 200_000
    assert sum(point.mean * point.count for point in curve.points) == pytest.approx(200_000 * 24.5)
    assert len(run.curves["rank/0/compute"].points) <= 256
    assert run.status(1000.0).samples == 4000 * 400


def test_rows_that_nobody_takes_are_bounded() -> None:
    run = run_state()
    for tick in range(1000):
        run.on_report(
            worker(0), worker_report(50 * tick + 49, rows=[row(50 * tick + k, loss=1.0) for k in range(50)]), 1.0
        )
    assert len(run.metrics.take_rows()) == 20_000
