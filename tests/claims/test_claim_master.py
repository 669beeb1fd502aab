"""Claim `master`: what decides. What the kernel counts on real links is asked in test_claims_quick.py."""

from __future__ import annotations

import pytest

from hora_benchmarks.claims import master
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

HOSTS = (2, 4, 8, 16)


def rows(star: list[float], ring: list[float]) -> list[Row]:
    return [
        {
            "name": name, "hosts": hosts, "bytes": 1 << 20, "rate": "200mbit", "limit_s": 0.9 * seconds,
            "each_s": [0.9 * seconds, seconds, seconds], "median_s": seconds, "cpu_s": [0.01, 0.02],
            "wire_bytes": 1 << 20, "additions": master.additions(name, hosts),
        }
        for name, times in (("star", star), ("ring", ring))
        for hosts, seconds in zip(HOSTS, times, strict=True)
    ]  # fmt: skip


LINE = [1.0, 3.0, 7.0, 15.0]
LIMIT = [0.5, 0.75, 0.875, 0.9375]  # of a perfect ring


@pytest.mark.parametrize(
    ("star", "ring", "said"),
    [
        (
            LINE,
            [1.0, 1.1, 1.1, 1.2],
            "holds: the ring is flat (each doubling adds at most 25 %): its time grows by 10 %",
        ),
        (LINE, LIMIT, "only if the ring has 4 hosts or more"),
        (LINE, [1.0, 2.0, 4.0, 4.1], "only if the ring has 8 hosts or more"),
        (LINE, LINE, "fails: the ring is not flat"),
        ([1.0, 2.0, 2.5, 3.0], LIMIT, "fails: the star does not grow as it should"),  # not so much
        ([1.0, 1.0, 1.0, 15.0], LIMIT, "fails: the star does not grow as it should"),  # not along a line
    ],
)
def test_the_verdict_is_the_rules(star: list[float], ring: list[float], said: str) -> None:
    verdict = master.judge(rows(star, ring))
    assert str(verdict).startswith(said) and len(verdict.text) <= MAX_TEXT


def test_even_a_perfect_ring_is_told_to_grow() -> None:
    verdict = master.judge(rows(LINE, LIMIT))
    assert "a perfect ring is not so from 2 on either): its time grows by 50 % from 2 to 4, 17 %" in verdict.text
    assert "7 % from 8 to 16" in verdict.text and "rounds differ by up to 10.0 %" in verdict.text
    assert "A perfect ring would not make the sentence hold either" in verdict.more
    assert "Even a perfect ring grows" in master.CLAIM.rule


def test_a_ring_whose_links_are_flat_is_not_excused() -> None:
    flat = [row | {"limit_s": 0.4} for row in rows(LINE, LIMIT)]
    verdict = master.judge(flat)
    assert verdict.word == "only if" and "perfect" not in verdict.text + verdict.more


def test_the_root_of_the_star_adds_everybody_s_vector_and_a_rank_of_the_ring_less_than_one() -> None:
    assert [master.additions("star", hosts) for hosts in HOSTS] == [1, 3, 7, 15]
    assert [master.additions("ring", hosts) for hosts in HOSTS] == [1 / 2, 3 / 4, 7 / 8, 15 / 16]


def test_the_table_has_a_line_for_each_algorithm_and_number_of_hosts() -> None:
    told = master.table(rows(LINE, LIMIT))
    assert [line[0] for line in told.lines][:3] == ["2, star", "2, ring", "4, star"]
    assert {len(line) for line in told.lines} == {len(told.headings)}
    assert "1000 (900 to 1000)" in told.lines[0] and told.repeats.startswith("3 rounds, interleaved")
    assert "additions per element, by schedule" in told.headings


def test_the_figure_is_drawn_from_the_rows() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    drawn = figures.Figure()
    master.draw(rows(LINE, LIMIT), drawn)
    assert len(drawn.axes) == 3
    _, alone, adding = drawn.axes
    assert "by schedule" in adding.get_title()
    assert alone.get_ylim()[1] > 1.1 * 0.9 * LIMIT[-1] * 16 / 15  # 2·S/B lies below the frame
