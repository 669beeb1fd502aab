"""The claim `overlap`: its verdict follows from the rows, and its traces show the order of things, not how long."""

from __future__ import annotations

from typing import Any

import pytest

from hora.claims import overlap
from hora.claims.claim import Row

LINKS, HOST = "links of 1gbit", overlap.CROWDED


def row(place: str, name: str, overlaps: bool, each_s: list[float], exposed_s: float | None = 0.2) -> Row:
    found = {
        "place": place, "workers": 2, "model": "mlp", "name": name, "overlap": overlaps, "each_s": each_s,
        "exposed_s": exposed_s, "sent_bytes": 80e6,
    }  # fmt: skip
    return found | ({"links": "kernel's"} if place == LINKS else {})


def pair(place: str, name: str, on: list[float], off: list[float]) -> list[Row]:
    return [row(place, name, True, on, 0.05), row(place, name, False, off)]


def trace(overlaps: bool) -> Row:
    stages = [["forward", 0.0, 1.0], ["backward", 1.0, 3.0], ["waiting", 3.0, 4.0], ["step", 4.0, 4.5]]
    buckets = [[0, 1.5, 1.5, 2.0], [1, 2.0, 2.0, 4.0]]
    return {"timeline": True, "place": LINKS, "workers": 2, "model": "gpt", "overlap": overlaps, "sent_bytes": 1.0,
            "step_s": 4.5, "training": stages, "buckets": buckets}  # fmt: skip


SAVES = pair(LINKS, "ring", [0.8, 0.85], [1.0, 1.1])
COSTS = pair(HOST, "shared", [1.2, 1.3], [1.0, 1.1])
UNCLEAR = pair(overlap.SPARE, "ring", [0.8, 1.05], [1.0, 1.1])
MADE_UP = pair(HOST, overlap.TCP, [1.2, 1.3], [1.0, 1.1])


def test_it_holds_where_every_setting_saves() -> None:
    verdict = overlap.judge(SAVES)
    assert verdict.word == "holds"
    assert "21% shorter, 75% of communication hidden" in verdict.text


def test_a_setting_made_up_is_not_judged() -> None:
    assert overlap.judge(SAVES + MADE_UP) == overlap.judge(SAVES)
    assert overlap.judge(COSTS + pair(HOST, overlap.TCP, [0.8], [1.0])).word == "fails"


def test_it_fails_where_none_does() -> None:
    verdict = overlap.judge(COSTS + UNCLEAR)
    assert verdict.word == "fails"
    assert "19% longer" in verdict.text and "no difference" in verdict.text


def test_it_holds_only_where_gradients_cross_the_links() -> None:
    verdict = overlap.judge(COSTS + SAVES)
    assert verdict.word == "only if"
    assert verdict.text.startswith("the gradients cross links of 1gbit (")


def test_a_place_of_which_not_all_save_is_told_by_its_settings() -> None:
    verdict = overlap.judge(COSTS + pair(HOST, "ring", [0.8], [1.0]))
    assert verdict.word == "only if"
    assert verdict.text.startswith(f"{HOST}: mlp, ring, 2 workers (")


def test_every_pair_and_ddp_are_in_the_table_and_the_figure_is_drawn() -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    ddp = row(HOST, "ddp/gloo", True, [1.0, 1.1], None)
    found = [*COSTS, *UNCLEAR, *SAVES, *MADE_UP, ddp, trace(True), trace(False)]
    told = overlap.table(found)
    assert [cells[4] for cells in told.lines] == ["costs", "cannot be told", "saves", "costs", ""]
    assert f"{overlap.TCP} (made up)" in told.lines[3][0] and f"{overlap.TCP} is made up" in told.note
    assert {len(cells) for cells in told.lines} == {len(told.headings)}
    kept = overlap.table([*found, ddp]).note, overlap.table([*SAVES, ddp | {"keeps_memory": True}]).note
    assert ["keeping freed memory" in note for note in kept] == [False, True]
    assert "2 interleaved rounds" in told.note and "kernel's" in told.note
    overlap.draw(found, figure)
    assert len(figure.axes) == 2


@pytest.mark.timeout(240)  # eight processes import torch, on whatever cores there are
def test_buckets_leave_during_backward_only_with_overlap_and_carry_the_same_bytes() -> None:
    strategy = "ring:bucket_bytes=262144"
    on = overlap.timeline(strategy, "cnn", "1gbit", steps=1)
    off = overlap.timeline(f"{strategy},{overlap.SERIAL}", "cnn", "1gbit", steps=1)
    assert (on["overlap"], off["overlap"]) == (True, False)
    assert on["sent_bytes"] == off["sent_bytes"] > 0
    assert [one[0] for one in on["buckets"]] == [one[0] for one in off["buckets"]] == list(range(len(on["buckets"])))
    assert len(on["buckets"]) > 2
    for timeline in (on, off):
        assert [stage[0] for stage in timeline["training"]] == ["forward", "backward", "waiting", "step"]
        assert all(launched <= begun <= arrived for _, launched, begun, arrived in timeline["buckets"])
    (_, begin, last_gradient), (_, first_launch, *_) = on["training"][1], on["buckets"][0]
    assert begin < first_launch < last_gradient
    assert off["training"][1][2] <= min(launched for _, launched, *_ in off["buckets"])
