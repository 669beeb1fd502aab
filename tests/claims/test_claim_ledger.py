"""The claim about handing data over: each verdict from made-up rows; and a small real epoch, exact in its counts."""

from __future__ import annotations

import pytest

from hora.claims import ledger
from hora.claims.claim import Row


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
    assert verdict.word == "holds" and "320% (ring), 320% (local:every=8) of the ideal" in verdict.text
    assert "of an equal share of 10 samples the slow worker hands over 5 (ps:mode=async), 5 (" in verdict.text


def test_only_if_names_the_strategies_under_which_leases_help() -> None:
    verdict = ledger.judge(rows(3.2, 1.05, 1.05, 1.1, 3.0))
    assert verdict.word == "only if" and "but 300% (ps:mode=ssp,staleness=2) although" in verdict.text


@pytest.mark.parametrize(
    "made",
    [
        rows(3.2, 1.5, 1.5, 1.6, 3.0),
        rows(1.0, 1.05, 1.05, 1.1, 1.1),
        rows(3.2, 1.05, 1.05, 1.1, 1.1, exact=False),
        rows(3.2, 1.05, 1.05, 1.1, 1.1, slow=10),
    ],
)
def test_it_fails_if_leases_do_not_help_or_a_sample_counts_twice_or_none_is_handed_over(made: list[Row]) -> None:
    assert ledger.judge(made).word == "fails"


def test_table_and_figure_show_every_row() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    made = rows(3.2, 1.05, 1.05, 1.1, 3.0)
    table = ledger.table(made)
    assert len(table.lines) == len(made) and all(len(line) == len(table.headings) for line in table.lines)
    ledger.draw(made, figures.Figure(layout="constrained"))


@pytest.mark.timeout(120)
def test_leased_samples_are_computed_exactly_once_and_the_views_add_up() -> None:
    (found,) = ledger.epochs(200, 0.03, 1, [ledger.ASYNC])
    assert found["exactly_once"] == [True] and sum(found["samples"][0]) == 200
    num_blocks = 200 // ledger.BATCH
    assert all(sum(counts) == num_blocks and 1 <= counts[1] <= ledger.WORKERS for _, *counts in found["views"])
    assert sorted(block for held in found["held"] for *_, blocks in held for block in blocks) == list(range(num_blocks))
