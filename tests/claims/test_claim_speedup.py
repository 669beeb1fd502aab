"""The claim `speedup`: its verdict follows from the rows. Nothing here looks at how long anything takes."""

from __future__ import annotations

from typing import Any

import pytest

from hora.bench.train_conductor import Contestant
from hora.claims import speedup
from hora.claims.claim import Row


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
    assert "gpt reaches 16 workers, with 92% of ideal at best (ring)" in verdict.text


def test_it_holds_only_for_the_model_that_reaches_all_cores() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.95, 4: 0.85, 16: 0.5}, "gpt": {4: 0.95, 16: 0.92}}))
    assert verdict.word == "only if"
    assert verdict.text.startswith("there is much arithmetic for each parameter: ")
    assert "mlp bends at 4 workers, with 85% of ideal at best (ring) and 50% at 16" in verdict.text


def test_it_holds_only_for_few_workers() -> None:
    verdict = speedup.judge(rows({"mlp": {2: 0.8, 16: 0.5}, "gpt": {4: 0.95, 16: 0.7}}))
    assert verdict.word == "only if"
    assert verdict.text.startswith("there are few workers, up to 4 with much arithmetic for each parameter: ")


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
    assert speedup.sizes("mlp", 2) == speedup.sizes("gpt", 2) == [2, 4]
    assert speedup.sizes("mlp", 6) == [2, 4, 6]
    assert speedup.sizes("mlp", 16) == [2, 4, 8, 12, 16] == speedup.sizes("mlp", 64)


def test_every_row_is_in_the_table_and_the_figure_is_drawn() -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    found = rows({"mlp": {2: 0.95, 4: 0.5}, "gpt": {2: 0.9, 4: 0.5}}, cores=2)
    told = speedup.table(found)
    assert len(told.lines) == len(found)
    assert {len(cells) for cells in told.lines} == {len(told.headings)}
    assert "3 rounds of 2" in told.note and "2 cores" in told.note
    speedup.draw(found, figure)
    assert len(figure.axes) == 2
