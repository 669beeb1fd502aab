"""The claim `speedup`: its verdict follows from the rows. Nothing here looks at how long anything takes."""

from __future__ import annotations

from typing import Any

import pytest

from hora_benchmarks.bench.train_conductor import Contestant
from hora_benchmarks.claims import speedup
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full


def row(model: str, name: str, workers: int, share: float, cores: int = 16, lockstep: float | None = None) -> Row:
    one = [10.0, 12.0, 11.0]
    found = {
        "model": model, "name": name, "workers": workers, "cores": cores, "one": one, "rounds": 3, "steps": 2,
        "speeds": [share * workers * each for each in one], "exposed_s": 0.01 if name == "ring" else None,
    }  # fmt: skip
    return found | ({"lockstep": [lockstep * workers * each for each in one]} if lockstep else {})


def rows(shares: dict[str, dict[int, float]], cores: int = 16) -> list[Row]:
    """The ring has these shares of the ideal, DDP a little less, and who never talks more."""
    found = []
    for model, by_workers in shares.items():
        for workers, share in by_workers.items():
            found.append(row(model, "independent", workers, 0.98, cores, lockstep=0.96))
            found += [row(model, "ring", workers, share, cores), row(model, "ddp", workers, share - 0.1, cores)]
    return found


def test_it_holds_where_both_models_reach_all_cores() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.95, 16: 0.91}, "gpt": {2: 0.95, 16: 0.92}}))
    assert verdict.word == "holds"
    assert verdict.text == "of ideal, mlp has 91 % (91 to 91) with 16, gpt has 92 % (92 to 92) with 16"
    assert "The speed of gpt reaches 16 workers: of ideal the fastest has 95 % with 2 (ring), 92 %" in verdict.more


def test_it_holds_only_for_the_model_that_reaches_all_cores() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.95, 4: 0.85, 16: 0.5}, "gpt": {4: 0.95, 16: 0.92}}))
    assert verdict.word == "only if"
    assert verdict.text.startswith("there is much arithmetic for each parameter: ")
    assert "mlp has 95 % (95 to 95) with 2 and 85 % (85 to 85) with 4, gpt has 92 %" in verdict.text
    assert (
        "mlp bends at 4 workers: of ideal the fastest has 95 % with 2 (ring), 85 % with 4 (ring), 50 %" in verdict.more
    )
    assert "With 4 it lacks 15 points: 11 by communication, 2 by waiting" in verdict.more


def test_it_holds_only_for_few_workers() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.8, 16: 0.5}, "gpt": {4: 0.95, 16: 0.7}}))
    assert verdict.word == "only if"
    assert verdict.text.startswith("there are few workers, up to 4 with much arithmetic for each parameter: ")
    assert len(verdict.text) <= MAX_TEXT


def test_rounds_on_both_sides_of_the_bar_are_told() -> None:
    found = rows({"mlp": {2: 0.92, 4: 0.8}, "gpt": {2: 0.95, 4: 0.7}})
    assert "both sides" not in speedup.judge(found).text
    found[1]["speeds"][0] *= 0.9  # the ring of mlp with 2: 83 % in one round, 92 % in the others
    assert speedup.judge(found).text.endswith("; rounds of mlp at 2 are on both sides of 90 %")
    found[4]["speeds"][1] *= 1.2
    assert "rounds of mlp at 2 and 4 are on both" in speedup.judge(found).text


def test_who_bends_and_comes_back_above_the_bar_is_told_to_be_noise() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.89, 4: 0.94, 16: 0.5}, "gpt": {2: 0.95, 16: 0.5}}))
    assert "above the bar again with 4 shows how far rounds differ" in verdict.more
    assert verdict.more.count("above the bar again") == 1 and "favours luck" in verdict.more


def test_it_fails_where_the_fewest_are_too_many() -> None:
    assert speedup.judge(rows({"mlp": {2: 0.8, 16: 0.95}, "gpt": {4: 0.8, 16: 0.7}})).word == "fails"


def test_workers_beyond_the_cores_are_not_judged() -> None:
    assert speedup.judge(rows({"mlp": {2: 0.95, 4: 0.5}, "gpt": {2: 0.95, 4: 0.5}}, cores=2)).word == "holds"


def test_what_is_lost_adds_up() -> None:
    found = rows({"mlp": {4: 0.7}})
    lost = speedup.losses(found, found[1])
    assert lost == pytest.approx({"machine": 0.02, "slowest": 0.02, "communication": 0.26})
    assert sum(lost.values()) == pytest.approx(1 - speedup.share(found[1]))


def test_who_talks_is_as_fast_as_the_slowest_and_who_does_not_need_not_wait() -> None:
    turns = [[{"seconds": [1.0, 3.0], "exposed_s": 0.5}, {"seconds": [2.0, 1.0], "exposed_s": 1.5}]]
    ring = speedup.row_of(Contestant(name="ring", ranks=2, how="hora"), "mlp", 2, turns, 6, [6.0])
    assert ring["speeds"] == [2 * 6 * 2 / 5] and ring["exposed_s"] == 0.5
    silent = speedup.row_of(Contestant(name="independent", ranks=2), "mlp", 2, turns, 6, [6.0])
    assert silent["lockstep"] == ring["speeds"]
    assert silent["speeds"] == [6 * 2 / 4 + 6 * 2 / 3]


def test_there_are_as_many_workers_as_cores_and_beyond_where_these_are_few() -> None:
    assert speedup.sizes(2) == [2, 4]
    assert speedup.sizes(6) == [2, 4, 6]
    assert speedup.sizes(16) == [2, 4, 8, 16] == speedup.sizes(64)


def test_every_row_is_in_the_table_and_the_figure_is_drawn() -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    found = rows({"mlp": {2: 0.95, 4: 0.5}, "gpt": {2: 0.9, 4: 0.5}}, cores=2)
    told = speedup.table(found)
    assert len(told.lines) == len(found) + 4  # with the one worker of each group
    assert {len(cells) for cells in told.lines} == {len(told.headings)}
    assert told.lines[0][:3] == ["mlp, 1 worker, in the rounds of 2", "11.0 (10.0 to 12.0)", "1"]
    assert "mlp 3 × 2, gpt 3 × 2" in told.repeats and "2 cores" in told.note and "(so with" not in told.note
    speedup.draw(found, figure)
    assert len(figure.axes) == 2


def test_columns_whose_orders_differ_are_explained_by_an_example() -> None:
    found = rows({"gpt": {4: 0.9}})
    found[2]["speeds"] = [20.0, 41.0, 42.0]  # DDP: more samples/s in the median, but not over the one worker's
    found[1]["speeds"] = [38.0, 40.0, 39.0]
    assert "DDP on Gloo has 41.0 samples/s and 3.42, ring has 39.0 samples/s and 3.55" in speedup.table(found).note
