"""Claim 4: what its rows are judged by."""

from __future__ import annotations

import pytest

from hora_benchmarks.claims import asynchronous, paced
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

COUNTS = (1, 2, 4, 8, 16)
ALONE_S = 0.6


def rows(reach: dict[int, int], waiting: float = 0.2, added: float = 0.3) -> list[Row]:
    """As measured: with k servers linear up to reach[k] workers, no faster beyond, where workers wait longer."""
    found = []
    for servers, most in reach.items():
        for workers in COUNTS:
            share = waiting + added * (workers > most)
            found.append(row("async", workers, servers, min(workers, most) / ALONE_S, share))
            if servers in asynchronous.SYNC_SERVERS:
                found.append(row("sync", workers, servers, workers**0.5 / ALONE_S, share))
    for momentum in (0.0, 0.9):
        for workers in COUNTS:
            values = [0.9 - momentum * workers / 50, 0.91 - momentum * workers / 50]
            found.append({"part": "progress", "momentum": momentum, "workers": workers, "accuracies": values})
    return found


def row(mode: str, workers: int, servers: int, per_s: float, waiting: float) -> Row:
    return {
        "part": "speed", "mode": mode, "workers": workers, "servers": servers, "rate": paced.RATE,
        "bytes": paced.NUM_BYTES, "compute_s": 0.48, "limit_per_s": 8.3 * servers, "per_s": [per_s, 1.02 * per_s],
        "waiting": [waiting, waiting], "lag": [workers - 1.0, workers - 1.0], "steps": 6,
        "updates": [[6 * workers]] * 2, "busy": [0.3, 0.3],
    }  # fmt: skip


def test_it_holds_when_every_line_is_linear_and_nobody_waits() -> None:
    """Over links that cost nothing, which those of the measurement are not."""
    verdict = asynchronous.judge(rows({1: 16, 2: 16, 4: 16}, waiting=0.03))
    assert verdict.word == "holds" and "impossible" not in verdict.more


def test_the_rule_says_that_over_these_links_nobody_can_never_wait() -> None:
    assert "a worker alone already waits 20% of its time for its own push and pull" in asynchronous.RULE


def test_linear_but_waiting_is_no_more_than_a_condition() -> None:
    verdict = asynchronous.judge(rows({1: 16, 2: 16, 4: 16}))
    assert verdict.word == "only if" and verdict.text.endswith("of their time, a worker alone 20 %")
    assert "so “holds” is impossible over these links (see the rule)" in verdict.more


def test_it_is_bound_to_the_room_on_the_servers_links() -> None:
    verdict = asynchronous.judge(rows({1: 4, 2: 8, 4: 16}))
    assert str(verdict) == (
        "only if the servers' links have room, with 1, 2, 4 servers up to 4, 8, 16 workers; 16 workers reach 25 (25 to "
        "25), 50 (50 to 50), 100 (99 to 101) % of linear speed and wait 50, 50, 20 % of their time, a worker alone 20 %"
    )
    assert "The servers' links are full at 4.9 workers with 1, at 9.9 workers with 2, at 19.7 workers" in verdict.more
    assert "accuracy is 90.5 (90.0 to 91.0) % with momentum 0, 61.7 (61.2 to 62.2) % with momentum 0.9" in verdict.more


def test_it_fails_when_no_number_of_servers_carries_four_workers() -> None:
    assert asynchronous.judge(rows({1: 1, 2: 2, 4: 2})).word == "fails"


def test_waiting_for_others_ends_the_reach_as_well_as_lost_speed() -> None:
    those = rows({1: 16, 2: 16, 4: 16})
    for each in those:
        if each["part"] == "speed" and each["workers"] >= 4:
            each["waiting"] = [0.26, 0.26]
    assert asynchronous.judge(those).word == "fails"


def test_rounds_on_both_sides_of_the_condition_are_told() -> None:
    those = rows({1: 2, 2: 8, 4: 16})
    (four,) = (row for row in those if row.get("mode") == "async" and (row["servers"], row["workers"]) == (1, 4))
    four |= {"per_s": [4 / ALONE_S, 3 / ALONE_S], "waiting": [0.22, 0.35]}
    verdict = asynchronous.judge(those)
    assert "up to 2, 8, 16 workers (undecided, rounds on both sides: 4 workers on 1); 16" in verdict.text
    assert "With 1 server and 4 workers the rounds lie on both sides of the rule's condition: 87 (74 to 99) %" in (
        verdict.more
    )
    assert len(verdict.text) <= MAX_TEXT


def test_table_and_figure_show_speed_waiting_lag_and_accuracy() -> None:
    those = rows({1: 4, 2: 8, 4: 16})
    table = asynchronous.table(those)
    cells = {line[0]: line[1:] for line in table.lines}
    assert cells["of linear, async, 1 server"] == ["100 %", "100 %", "100 %", "50 %", "25 %"]
    assert cells["lag, async, 4 servers"][-1] == "15.0 (15.0 to 15.0)"
    assert cells["accuracy at lag n − 1, momentum 0.9"][-1] == "61.7 (61.2 to 62.2) %"
    assert table.repeats == "mean of 2 rounds (least to greatest); accuracy: 2 seeds"
    assert "600 ms of compute a step (slept, varied by 10 %)" in table.note
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    asynchronous.draw(those, canvas)
    assert canvas.axes[0].get_title() == "Gradients applied per second"
    assert all(axis.get_xscale() == "log" and axis.get_legend() for axis in canvas.axes)


def test_the_middle_of_two_rounds_is_called_a_mean_and_that_of_three_a_median() -> None:
    those = rows({1: 4, 2: 8, 4: 16})
    for each in those:
        for key in ("per_s", "waiting", "lag", "busy"):
            if key in each:
                each[key] = [*each[key], each[key][0]]
    assert asynchronous.table(those).repeats.startswith("median of 3 rounds")


def test_accuracy_at_a_lag_is_the_mean_of_the_seeds_as_in_the_claim_accuracy() -> None:
    those = rows({1: 4, 2: 8, 4: 16})
    those[-1]["accuracies"] = [0.2, 0.8, 0.8]
    assert asynchronous.table(those).lines[-1][-1] == "60.0 (20.0 to 80.0) %"
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    asynchronous.draw(those, canvas)
    drawn = next(line for line in canvas.axes[2].lines if line.get_label() == "momentum 0.9")
    assert drawn.get_ydata()[-1] == pytest.approx(60.0)
