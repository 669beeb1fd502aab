"""Claim 2: what its rows are judged by, and that the runs behind them apply every gradient once."""

from __future__ import annotations

import pytest

from hora_benchmarks.bench import links
from hora_benchmarks.claims import paced, servers
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

COUNTS = (1, 2, 4, 8, 16)
FALLING = {1: (75, 60, 43, 27, 15), 2: (75, 70, 60, 43, 27), 4: (75, 74, 70, 60, 43)}
FLAT = (100, 95, 94, 94, 93)


def rows(
    one: tuple[int, ...] = FALLING[1], four: tuple[int, ...] = FALLING[4], ring: tuple[float, ...] = FLAT
) -> list[Row]:
    """As measured, of efficiencies in per cent at 1, 2, 4, 8 and 16 workers."""
    found = [row("alone", 1, 0, 100)]
    for number, workers in enumerate(COUNTS):
        found += [row("ps", workers, k, line[number]) for k, line in ((1, one), (2, FALLING[2]), (4, four))]
        found += [row("ring", workers, 0, ring[number]), row("ddp", workers, 0, FLAT[number])]
    return found


def row(name: str, workers: int, num_servers: int, percent: float) -> Row:
    step_s = 0.5 * 100 / percent
    return {
        "name": name, "workers": workers, "servers": num_servers, "rate": paced.RATE, "bytes": paced.NUM_BYTES,
        "compute_s": 0.5, "links_s": 0.1, "step_s": [step_s, step_s * 1.01, step_s * 0.99],
        "updates": [[5] * num_servers] * 3, "steps": 5, "busy": [0.3] * 3,
    }  # fmt: skip


def test_it_holds_when_one_server_chokes_more_relieve_it_and_the_ring_stays() -> None:
    verdict = servers.judge(rows())
    assert verdict.word == "holds"
    assert verdict.text == (
        "one server's efficiency falls from 60 (59 to 61) % with 2 to 15 (15 to 15) % with 16, and 2 and 4 servers "
        "bring 27 (27 to 27) % and 43 (43 to 43) %; the ring keeps 93.0 (92.1 to 93.9) % or more"
    )
    assert "undecided" not in verdict.more


def test_it_fails_when_one_server_is_not_slowed_or_others_do_not_help() -> None:
    verdict = servers.judge(rows(one=(75, 60, 58, 40, 20)))
    assert (
        verdict.word == "fails" and "every doubling of the workers (60, 58, 40, 20 % with 2, 4, 8, 16)" in verdict.text
    )
    verdict = servers.judge(rows(four=(75, 74, 70, 50, 30)))
    assert str(verdict) == "fails: more servers do not relieve it (15, 27, 30 % with 1, 2, 4 servers)"
    everything = servers.judge(rows(one=(75, 60, 58, 40, 20), four=(75, 74, 70, 50, 30), ring=(100, 75, 75, 75, 75)))
    assert everything.word == "fails" and len(everything.text) <= MAX_TEXT


def test_it_fails_when_the_ring_is_slow_with_few_workers() -> None:
    verdict = servers.judge(rows(ring=(100, 85, 75, 75, 75)))
    assert verdict.word == "fails" and "below 80 %" in verdict.text


def test_it_is_bound_to_a_number_of_workers_when_the_ring_gives_way_later() -> None:
    verdict = servers.judge(rows(ring=(100, 95, 90, 85, 70)))
    assert str(verdict).startswith(
        "only if there are at most 8 workers does the ring stay near ideal: 85.0 (84.2 to 85.9) %, but 70.0 (69.3 to "
        "70.7) % with 16 (asked: 80); one server's efficiency falls from 60 "
    )
    assert verdict.text.endswith("servers bring 27 (27 to 27) % and 43 (43 to 43) %, as said")
    assert len(verdict.text) <= MAX_TEXT


def test_a_ring_just_below_the_threshold_is_told_with_its_rounds() -> None:
    verdict = servers.judge(rows(ring=(100, 95, 90, 85, 79.56)))
    assert "but 79.6 (78.8 to 80.4) % with 16 (asked: 80)" in verdict.text
    assert "With 16 workers the ring's rounds lie on both sides of 80 %: undecided." in verdict.more


def test_what_is_not_separated_is_said() -> None:
    more = servers.judge(rows()).more
    assert "ps sends when it is over: that is why ps has 75 % of ideal with one worker already" in more
    assert "the links alone would allow the ring 83 %, measured are 93.0 %" in more
    assert "busy at most 30 % then: whether they or the ring itself took the rest is not separated." in more


def test_table_and_figure_show_every_line() -> None:
    table = servers.table(rows())
    assert [line[0] for line in table.lines] == [
        "ps, 1 server",
        "ps, 2 servers",
        "ps, 4 servers",
        "ring",
        "DDP on Gloo",
    ]
    assert table.lines[0][-1] == "15.0 (14.9 to 15.2) %"
    assert table.repeats == "median of 3 rounds (least to greatest), order rotated"
    assert "a step of a worker alone without communication, measured: 500 ms" in table.note
    assert "600 ms of compute a step (slept)" in table.note
    assert servers.OVERLAP in table.note
    canvas = pytest.importorskip("matplotlib.figure").Figure()
    servers.draw(rows(), canvas)
    assert servers.OVERLAP in canvas.axes[0].get_title()
    labels = [text.get_text() for text in canvas.axes[0].get_legend().get_texts()]
    assert labels == [*(line[0] for line in table.lines), "ideal", "limit of the links"]


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.skipif(bool(links.obstacle()), reason="no network namespaces here")
def test_every_server_applies_every_step_once_and_all_workers_have_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run fails if a worker's weights, which count updates, are not all as many as there were steps."""
    monkeypatch.setattr(paced, "PARAMS", 80_000)
    monkeypatch.setattr(paced, "COMPUTE_S", 0.01)
    runs = [
        paced.Run(how="ps", workers=2, servers=1),
        paced.Run(how="ps:mode=async", workers=1, servers=2),
        paced.Run(how="ps:mode=async", workers=2, servers=1, jitter=0.1, trail=1),
        paced.Run(how="ring:bucket_bytes=40000", workers=2),
        paced.Run(how="ddp", workers=2),
    ]
    found = paced.take("test", runs, 1)
    assert [[len(answer["each"]) for answer in answers] for (answers,) in found] == [[2, 2], [2], *[[2, 2]] * 3]
    assert found[0][0][0]["updates"] == [3]  # once for both workers
    assert found[1][0][0]["updates"] == [3, 3]  # each server has a part of every gradient
    assert found[2][0][0]["updates"] == [2 * 4]  # each worker's by itself
