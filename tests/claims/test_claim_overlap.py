"""The claim `overlap`: its verdict follows from the rows, and its traces show the order of things, not how long."""

from __future__ import annotations

from typing import Any

import pytest

from hora.parameters import allocator
from hora_benchmarks.bench import train
from hora_benchmarks.claims import overlap
from hora_benchmarks.claims.claim import MAX_TEXT, Row
from hora_benchmarks.claims.overlap_trace import rate_text

pytestmark = pytest.mark.full

LINKS, SLOW, HOST = "links of 1gbit", "links of 200mbit", overlap.CROWDED


def row(place: str, name: str, overlaps: bool, each_s: list[float], exposed_s: float | None = 0.2) -> Row:
    found = {
        "place": place, "workers": 2, "model": "mlp", "name": name, "overlap": overlaps, "each_s": each_s,
        "exposed_s": exposed_s, "sent_bytes": 80e6,
    }  # fmt: skip
    return found | ({"links": "kernel's"} if place.startswith("links") else {})


def pair(
    place: str, name: str, on: list[float], off: list[float], waits: tuple[float, float] = (0.05, 0.2)
) -> list[Row]:
    return [row(place, name, True, on, waits[0]), row(place, name, False, off, waits[1])]


def of(model: str, rows: list[Row]) -> list[Row]:
    return [one | {"model": model} for one in rows]


def trace(overlaps: bool, place: str = LINKS) -> Row:
    stages = [["forward", 0.0, 1.0], ["backward", 1.0, 3.0], ["waiting", 3.0, 4.0], ["step", 4.0, 4.5]]
    buckets = [[0, 1.5, 1.5, 2.0], [1, 2.0, 2.0, 4.0]]
    return {"timeline": True, "place": place, "workers": 2, "model": "gpt", "overlap": overlaps, "sent_bytes": 1.0,
            "step_s": 4.5, "training": stages, "buckets": buckets}  # fmt: skip


SAVES = pair(LINKS, "ring", [0.8, 0.85], [1.0, 1.1])
COSTS = pair(HOST, "shared", [1.2, 1.3], [1.0, 1.1])
UNCLEAR = pair(overlap.SPARE, "ring", [0.8, 1.05], [1.0, 1.1])
LONG = of("gpt", pair(SLOW, "ring", [2.3, 2.4], [3.0, 3.2], (1.1, 1.8)))  # two fifths of a step could be hidden
MADE_UP = pair(HOST, overlap.TCP, [1.2, 1.3], [1.0, 1.1])


def test_it_holds_where_every_setting_saves() -> None:
    verdict = overlap.judge(SAVES + LONG)
    assert str(verdict).startswith("holds: in 2 of 2 settings, the most for gpt over 200 Mbit/s, 2350 (2300 to 2400) ")
    assert "3100 (3000 to 3200) ms a step, 24 % shorter" in verdict.text
    assert "hidden where it saves: 39 % for gpt over 200 Mbit/s, 75 % for mlp over 1 Gbit/s." in verdict.more
    assert "Also shorter: mlp over 1 Gbit/s, 825 (800 to 850) against 1050 (1000 to 1100) ms a step, -21 %." in (
        verdict.more
    )


def test_a_setting_made_up_is_not_judged() -> None:
    assert overlap.judge(SAVES + MADE_UP) == overlap.judge(SAVES)
    assert overlap.judge(COSTS + pair(HOST, overlap.TCP, [0.8], [1.0])).word == "fails"


def test_it_fails_where_none_does() -> None:
    verdict = overlap.judge(COSTS + UNCLEAR)
    assert verdict.word == "fails"
    assert verdict.text.startswith("in none of 2 settings is every round with overlap shorter")
    assert "mlp by the ring on one host with a core to spare: 925 (800 to 1050) against" in verdict.text
    assert "Longer with overlap: mlp by shared memory on one host with no core to spare, 1250 (1200" in verdict.more


def test_it_holds_only_where_there_is_enough_to_hide_and_to_hide_it_behind() -> None:
    verdict = overlap.judge(COSTS + UNCLEAR + LONG)
    assert verdict.word == "only if"
    assert verdict.text.startswith("communication is long and computing gives it time, in 1 of 3 settings: gpt over 20")
    assert "in the settings that save 42 % of a step without it, in the others at most 19 %." in verdict.more


def test_where_that_does_not_tell_the_settings_apart_it_is_not_said() -> None:
    hidden = COSTS + of("gpt", pair(LINKS, "ring", [2.9, 3.1], [3.0, 3.2], (1.1, 1.5)))
    verdict = overlap.judge(hidden + LONG)
    assert verdict.word == "only if"
    assert verdict.text.startswith("the setting is right, as in 1 of 3 settings: gpt over 200 Mbit/s, ")
    assert "At most overlap can hide" not in verdict.more


def test_a_setting_whose_ranges_just_overlap_is_told_from_one_without_a_difference() -> None:
    near = of("gpt", pair(LINKS, "ring", [1.3, 1.41, 1.53], [1.52, 1.6, 1.65], (0.1, 0.4)))
    none = pair(LINKS, "ring", [0.85, 0.9], [0.84, 0.9])
    more = overlap.judge(none + near + LONG).more
    assert (
        "Not shown, within the spread of the repeats: gpt over 1 Gbit/s (-12 %, 75 % of communication hidden, ranges "
        "just overlap, by 10 ms); mlp over 1 Gbit/s (+1 %)." in more
    )


def test_it_says_where_only_one_model_was_measured() -> None:
    assert overlap.judge(COSTS + LONG).more.endswith("Over 200 Mbit/s only gpt was measured.")
    both = overlap.judge(COSTS + LONG + pair(SLOW, "ring", [3.4], [3.4], (3.2, 3.2)))
    assert both.word == "only if" and "was measured" not in both.more
    assert {model for model, rate in overlap.LINKS if rate == "200mbit"} == set(overlap.MODELS)


def test_a_verdict_fits_into_a_row_however_many_settings_there_are() -> None:
    every = [
        one
        for model in overlap.MODELS
        for place in (overlap.SPARE, HOST)
        for name in ("ring", "shared")
        for one in of(model, pair(place, name, [0.8, 0.85], [1.0, 1.1]))
    ]
    for rows in (every, every + COSTS, every + LONG + COSTS, COSTS + UNCLEAR):
        assert len(overlap.judge(rows).text) <= MAX_TEXT


def test_waiting_longer_with_overlap_is_explained() -> None:
    worse = of("gpt", pair(HOST, "shared", [0.97, 1.0], [0.96, 1.0], (0.033, 0.018)))
    assert "(33 against 18 ms for gpt by shared memory on one host with no core to spare, in a step of 980)." in (
        overlap.table(worse).note
    )
    assert "below 0" not in overlap.table(SAVES).note


def test_ddp_runs_with_the_memory_settings_of_hora(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(those: Any, *_: Any, **__: Any) -> Any:
        assert {one.name: one.env for one in those}[overlap.DDP] == allocator.ENV
        answer = {"seconds": [1.0], "exposed_s": 0.1, "sent_bytes": 1.0}
        return {one.name: [[answer, answer]] for one in those}, 1, []

    monkeypatch.setattr(train, "take", take)
    rows = overlap.on_one_host(HOST, "mlp", 2, 1)
    assert [row["keeps_memory"] for row in rows if row["name"] == overlap.DDP] == [True]


@pytest.mark.parametrize("place", ["links of 200mbit", "one host, transport limited to 200mbit"])
def test_the_timeline_says_what_it_shows(place: str) -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    overlap.draw([*SAVES, trace(True, place), trace(False, place)], figure)
    title = figure.axes[0].get_title().replace("\n", " ")
    assert "traced run on one host, transport limited to 200 Mbit/s; not one of the timed rounds" in title
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert "buckets, dark and pale in turn" in labels
    assert [rate_text("links of 1gbit"), rate_text("2.5gbit")] == ["1 Gbit/s", "2.5 Gbit/s"]


def test_every_pair_and_ddp_are_in_the_table_and_the_figure_is_drawn() -> None:
    figure: Any = pytest.importorskip("matplotlib.figure").Figure()
    ddp = row(HOST, "ddp/gloo", True, [1.0, 1.1], None)
    found = [*COSTS, *UNCLEAR, *SAVES, *MADE_UP, ddp, trace(True), trace(False)]
    told = overlap.table(found)
    assert [cells[4] for cells in told.lines] == ["costs", "cannot be told", "saves", "costs", ""]
    assert told.lines[2][0].startswith("links of 1 Gbit/s: mlp")
    assert f"{overlap.TCP} (made up)" in told.lines[3][0] and f"{overlap.TCP} is made up" in told.note
    assert {len(cells) for cells in told.lines} == {len(told.headings)}
    kept = overlap.table([*found, ddp]).note, overlap.table([*SAVES, ddp | {"keeps_memory": True}]).note
    assert ["with the memory settings of Hora" in note for note in kept] == [False, True]
    assert ["without the memory settings that Hora has" in note for note in kept] == [True, False]
    assert told.repeats == "2 rounds, interleaved; median (least to greatest)" and "kernel's" in told.note
    overlap.draw(found, figure)
    assert len(figure.axes) == 2


@pytest.mark.full
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
