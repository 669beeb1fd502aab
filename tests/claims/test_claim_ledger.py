"""The claim about handing data over: each verdict from made-up rows; and a small real epoch, exact in its counts."""

from __future__ import annotations

import pytest

from hora_benchmarks.claims import ledger
from hora_benchmarks.claims.claim import MAX_TEXT, Row

pytestmark = pytest.mark.full

EVEN = {"even_ideal_s": 0.8, "even_s": [0.88, 0.96]}  # 110 and 120 % of the ideal: 115 % in the median


def row(way: str, took: float, exact: bool = True, slow: int = 5) -> Row:
    slow = 10 if ledger.WAYS[way][1] == "dealt" else slow
    found: Row = {
        "way": way, "data": ledger.WAYS[way][1], "num_samples": 40, "batch": 5, "pace_s": 0.02,
        "ideal_s": 1.0, "seconds": [took, took + 0.01, took - 0.01], "exactly_once": [True, exact, True],
        "samples": [[20 - slow, 10, 10, slow]] * 3, "taken_over": [0, 1, 0], "views": [], "held": [],
    }  # fmt: skip
    if way in ledger.DRAWN:
        found["views"] = [[0.01, 0, 4, 4], [0.2, 4, 4, 0]]
        found["held"] = [[[0.01, 0.1, 0.2, [rank]], [0.21, 0.3, 0.4, [rank + 4]]] for rank in range(4)]
    return found


def rows(dealt: float, *leased: float, exact: bool = True, slow: int = 5) -> list[Row]:
    """`slow` is the slow worker's samples where they are leased; dealt, it has 10 of the 40."""
    return [row(name, took, exact, slow) for name, took in zip(ledger.WAYS, (dealt, dealt, *leased), strict=True)]


def test_it_holds_if_leased_epochs_are_near_the_ideal_and_dealt_ones_are_not() -> None:
    verdict = ledger.judge(rows(3.2, 1.05, 1.05, 1.1, 1.12))
    assert verdict.word == "holds" and verdict.text == (
        "leased, the epoch takes at most 112 % (111 to 113) of the ideal (the bar is 115 %), dealt at least 320 % "
        "(319 to 321)"
    )
    assert "of an equal share of 10 samples the slow worker hands over 5 under ps:mode=async; 5 under" in verdict.more
    assert "equal workers" not in verdict.more  # there was no control


def test_only_if_names_the_strategies_under_which_leases_help() -> None:
    verdict = ledger.judge(rows(3.2, 1.05, 1.05, 1.1, 3.0))
    assert verdict.word == "only if" and len(verdict.text) <= MAX_TEXT
    assert "but, leased too, 300 % (299 to 301) under ps:mode=ssp,staleness=2; the bar is 115 %" in verdict.text


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (rows(3.2, 1.5, 1.5, 1.6, 3.0), "takes 150 % (149 to 151) of the ideal, and the bar is 115 %"),
        (rows(1.0, 1.05, 1.05, 1.1, 1.1), "and dealt it takes no longer (100 %)"),
        (rows(3.2, 1.05, 1.05, 1.1, 1.1, exact=False), "not every sample was computed exactly once"),
        (rows(3.2, 1.05, 1.05, 1.1, 1.1, slow=10), "and the slow worker hands nothing over"),
    ],
)
def test_it_fails_and_says_why(made: list[Row], why: str) -> None:
    verdict = ledger.judge(made)
    assert verdict.word == "fails" and why in verdict.text
    assert ("The hand-over itself works" in verdict.more) == ("the bar is" in why or "no longer" in why)


def test_the_control_tells_what_has_nothing_to_do_with_a_slow_worker() -> None:
    made = [each | (EVEN if each["data"] == "leased" else {}) for each in rows(3.2, 1.25, 1.5, 1.6, 3.0)]
    verdict = ledger.judge(made)
    assert verdict.word == "fails" and str(verdict) == str(ledger.judge(rows(3.2, 1.25, 1.5, 1.6, 3.0)))
    assert "With equal workers ps:mode=async takes 115 % (110 to 120) of their ideal: of the 25 points" in verdict.more
    assert "15 are there without a slow worker" in verdict.more and "and 10 come with it" in verdict.more
    table = ledger.table(made)
    at = table.headings.index("× its own even run")
    assert table.lines[0][at] == "–" and table.lines[2][at] == "1.09 (1.08 to 1.10)"
    assert table.lines[2][at - 1] == "115 (110 to 120)" and "2 of the control" in table.repeats


def test_the_samples_shown_are_those_of_one_repeat_and_add_up() -> None:
    odd = row(ledger.ASYNC, 1.2) | {"seconds": [1.3, 1.2, 1.1], "samples": [[9, 9, 9, 13], [15, 11, 9, 5], [10] * 4]}
    assert ledger.median_repeat(odd) == 1
    (line,) = ledger.table([odd]).lines
    assert "15 11 9 5" in line


def test_table_and_figure_show_every_row() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = rows(3.2, 1.05, 1.05, 1.1, 3.0)
    table = ledger.table(made)
    assert len(table.lines) == len(made) and all(len(line) == len(table.headings) for line in table.lines)
    ledger.draw(made, figures.Figure(layout="constrained"))
    ledger.draw([each | EVEN for each in made], figures.Figure(layout="constrained"))


@pytest.mark.full
@pytest.mark.timeout(180)
def test_leased_samples_are_computed_exactly_once_and_the_views_add_up() -> None:
    (found,) = ledger.epochs(200, 0.03, 1, [ledger.ASYNC])
    assert found["exactly_once"] == [True] and sum(found["samples"][0]) == 200
    assert found["even_ideal_s"] == pytest.approx(0.3) and len(found["even_s"]) == 1
    num_blocks = 200 // ledger.BATCH
    assert all(sum(counts) == num_blocks and 1 <= counts[1] <= ledger.WORKERS for _, *counts in found["views"])
    assert sorted(block for held in found["held"] for *_, blocks in held for block in blocks) == list(range(num_blocks))
