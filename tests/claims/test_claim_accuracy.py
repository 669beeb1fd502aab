"""Claim 5: the rule is what is computed, the same samples are seen in every mode, and a worker alone loses nothing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hora.bench.staleness import train
from hora.claims import accuracy, accuracy_runs
from hora.claims.accuracy import JUDGED
from hora.claims.accuracy_rank import Lesson, Plan
from hora.claims.accuracy_runs import ASYNC, EVERY, MOMENTA, SSP, STRATEGIES, SYNC
from hora.claims.claim import Row

SEEDS = [0, 1, 2]


def run(mode: str, momentum: float, end: float, seconds: float, workers: int = 4) -> Row:
    curve = [(seconds * part, int(800 * part), [end * part + 0.001 * seed for seed in SEEDS]) for part in (0.5, 1.0)]
    return {
        "kind": "run", "mode": mode, "momentum": momentum, "repeat": 0, "workers": workers, "seeds": SEEDS, "rate": 0.1,
        "tuning": [0.1, 0.2, 0.9, 0.3, 0.2, 0.1, 0.1, 0.1], "seconds": seconds, "samples": 800,
        "lag": 0.0 if mode == SYNC else 3.0, "curve": curve, "ends": curve[-1][2],
        "untuned_rate": 0.2, "untuned": [0.5] * len(SEEDS),
    }  # fmt: skip


def made_up(
    lost: dict[tuple[str, float], float], seconds: float = 5.0, falls: dict[float, int] | None = None
) -> list[Row]:
    """Sync takes 10 s and ends at 95 %; the others take `seconds` and lose so much. The sweep falls from a lag on."""
    rows = [
        run(mode, momentum, 0.95 - (lost.get((mode, momentum), 0.0) if mode != SYNC else 0.0),
            10.0 if mode == SYNC else seconds)
        for momentum in MOMENTA for mode in STRATEGIES
    ]  # fmt: skip
    for momentum in MOMENTA:
        for correct in accuracy_runs.CORRECTIONS:
            for lag in (0, 3, 7, 15):
                down = 0.3 if correct == "none" and lag >= (falls or {}).get(momentum, 99) else 0.0
                rows.append({"kind": "sweep", "momentum": momentum, "correct": correct, "lag": lag, "rate": 0.1,
                             "accuracies": [0.95 - down, 0.96 - down]})  # fmt: skip
    return rows


EVERYWHERE = {(mode, momentum): 0.05 for mode in JUDGED for momentum in MOMENTA}


def test_it_holds_where_both_are_faster_and_end_lower_with_and_without_momentum() -> None:
    verdict = accuracy.judge(made_up(EVERYWHERE))
    assert verdict.word == "holds"
    assert "over samples" in verdict.text and "over time" in verdict.text and "-5.0" in verdict.text


def test_it_names_those_that_trade() -> None:
    verdict = accuracy.judge(made_up({(ASYNC, 0.9): 0.05, (SSP, 0.9): 0.05}))
    assert str(verdict).startswith("only if momentum is 0.9: ")
    verdict = accuracy.judge(made_up({(ASYNC, 0.9): 0.05, (SSP, 0.0): 0.05}))
    assert str(verdict).startswith("only if it is async with momentum 0.9 or ssp with momentum 0: ")


def test_it_names_the_lag_where_only_the_sweep_falls() -> None:
    verdict = accuracy.judge(made_up({}, falls={0.9: 7}))
    assert str(verdict).startswith("only if gradients come late by 7 updates (momentum 0.9) or more ")
    assert (
        "mean lag 3.0" in verdict.text and "with momentum 0.9 from lag 7 on, at no lag (correct=scale)" in verdict.text
    )


def test_it_says_what_the_corrections_win_back() -> None:
    found = "at lag 15 with momentum 0.9: none 65.5 %, scale 95.5 %, dc 95.5 %; all at one rate"
    assert found in accuracy.judge(made_up({}, falls={0.9: 7})).text


@pytest.mark.parametrize("rows", [made_up({}), made_up(EVERYWHERE, 9.5, {0.9: 7})], ids=["nothing lost", "nothing won"])
def test_it_fails_where_nothing_is_given_up_or_nothing_won(rows: list[Row]) -> None:
    assert accuracy.judge(rows).word == "fails"


def test_what_the_mode_that_is_not_judged_loses_counts_for_nothing() -> None:
    assert accuracy.judge(made_up({(EVERY, 0.0): 0.5, (EVERY, 0.9): 0.5})).word == "fails"


def test_lower_is_by_half_a_point_and_beyond_what_the_seeds_scatter() -> None:
    assert accuracy.is_lower([-0.01, -0.011, -0.012])
    assert not accuracy.is_lower([-0.004, -0.0041, -0.0042])
    assert not accuracy.is_lower([-0.05, 0.04, -0.03])


def test_a_lag_that_is_borne_again_later_is_not_where_it_falls_from() -> None:
    rows = [
        {"kind": "sweep", "momentum": 0.0, "correct": "none", "lag": lag, "accuracies": [value, value]}
        for lag, value in ((0, 0.95), (1, 0.5), (3, 0.95), (7, 0.6), (15, 0.1))
    ]
    assert accuracy.falls_from(rows, 0.0) == 7


def test_where_a_run_stands_is_the_mean_over_the_last_fifth() -> None:
    curve = [(1.0, 10, [0.1, 0.2]), (7.0, 80, [0.5, 0.6]), (8.0, 90, [0.7, 0.8]), (10.0, 100, [0.9, 0.4])]
    assert accuracy_runs.standing(curve, 100) == pytest.approx([0.7, 0.6])
    assert accuracy_runs.standing(curve, 8.0, axis=0) == pytest.approx([0.6, 0.7])
    assert accuracy_runs.standing(curve, 5.0, axis=0) == [0.1, 0.2], "what was seen last, if nothing is nearer"


def test_in_time_compares_at_the_moment_when_the_first_was_through() -> None:
    found = accuracy.against_sync(made_up({}), ASYNC, 0.0)
    assert found.faster == pytest.approx(2.0)
    assert found.in_time == pytest.approx([0.475] * 3), "sync was half through"


def test_the_best_learning_rate_is_chosen_by_seeds_that_do_not_count() -> None:
    how = accuracy_runs.size(quick=True)
    each, rates = how.tuning_seeds + how.seeds, len(accuracy_runs.RATES)
    networks = [0.5] * (each * rates)
    networks[2 * each : 2 * each + how.tuning_seeds] = [0.9] * how.tuning_seeds  # best for those that choose
    networks[4 * each + how.tuning_seeds : 5 * each] = [1.0] * how.seeds  # best for those that count
    run = {"curve": [(1.0, 40, [networks] * 2)], "seconds": 1.0, "samples": 40, "lags": {"1": 3, "2": 1}}
    runs: dict[str, list[dict[str, Any]]] = {mode: [run] for mode in STRATEGIES}
    rows = accuracy_runs.rows_of(runs, how)
    assert {row["rate"] for row in rows} == {accuracy_runs.RATES[2] * (1 - momentum) for momentum in MOMENTA}
    assert all(row["curve"][-1][2] == row["ends"] == row["untuned"] == [0.5] * how.seeds for row in rows)
    assert all(row["lag"] == pytest.approx(1.25) for row in rows)


def test_table_and_figure_show_every_mode() -> None:
    from matplotlib.figure import Figure

    rows = made_up(EVERYWHERE, falls={0.0: 7, 0.9: 3})
    table = accuracy.table(rows)
    late = ["late", *(f"late, {correct}" for _ in range(3) for correct in accuracy_runs.CORRECTIONS)]
    assert [cells[0] for cells in table.lines] == [*accuracy.LABELS.values()] * 2 + late * 2
    assert table.lines[8 + 7][:7] == ["late, none", "0", "0.1", "15", "", "65.5 (65.0 to 66.0)", "-30.0 ± 0.0"]
    assert all(len(cells) == len(table.headings) for cells in table.lines)
    assert "No best learning rate was at the edge" in table.note
    accuracy.draw(rows, figure := Figure(figsize=accuracy.CLAIM.figure_size))
    assert len(figure.axes) == 6 and all(axis.lines for axis in figure.axes)


# -- what is exact -----------------------------------------------------------------------------------------------------


def small_plan(workers: int) -> dict[str, Any]:
    told = accuracy_runs.plan(accuracy_runs.size(quick=True), 0)
    return {**told, "samples": 10 * accuracy_runs.BATCH * workers, "pause_s": (0.0, 0.002), "looks": 5}


@functools.cache
def plain_losses() -> torch.Tensor:
    lesson = Lesson(Plan(**small_plan(1)))
    for numbers in lesson.numbers.split(accuracy_runs.BATCH):
        lesson.backward(numbers)
        lesson.optimizer.step()
        lesson.optimizer.zero_grad()
    return torch.tensor(lesson.losses())


def test_networks_side_by_side_learn_as_one_alone() -> None:
    plan = Plan(**small_plan(1))
    which, number = 1, 0  # a rate, a seed; with momentum
    rate, seed = plan.rates[1][which], plan.seeds[number]
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTA[1])
    lesson = Lesson(plan)
    train_x, train_y, test_x, test_y = lesson._x, lesson._y, lesson._test_x, lesson._test_y
    for numbers in lesson.numbers[:, number].split(accuracy_runs.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(train_x[numbers]), train_y[numbers]).backward()
        optimizer.step()
    loss = torch.nn.functional.cross_entropy(net(test_x), test_y)
    torch.testing.assert_close(plain_losses()[1][which * len(plan.seeds) + number], loss.detach())


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_one_worker_learns_as_plain_torch_does(mode: str) -> None:
    found = accuracy_runs.launch(mode, 1, small_plan(1))
    torch.testing.assert_close(torch.tensor(found["losses"]), plain_losses(), equal_nan=True)
    assert set(found["lags"]) == {"0"}


@pytest.mark.parametrize("mode", [SYNC, ASYNC, EVERY])
def test_two_workers_see_the_same_number_of_samples_in_every_mode(mode: str) -> None:
    plan = small_plan(2)
    found = accuracy_runs.launch(mode, 2, plan)
    assert found["samples"] == plan["samples"] == found["curve"][-1][1]
    seen = [samples for _, samples, _ in found["curve"]]
    assert seen == sorted(set(seen))
    if mode == SYNC:
        assert accuracy_runs.mean_lag(found["lags"]) == 0.0
        assert seen == list(range(4 * accuracy_runs.BATCH, plan["samples"] + 1, 4 * accuracy_runs.BATCH)), "whole steps"


def test_the_sweep_begins_with_plain_training_whatever_the_correction() -> None:
    assert len({train(0.9, correct, 0, 0, epochs=1) for correct in accuracy_runs.CORRECTIONS}) == 1
