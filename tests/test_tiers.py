"""The selection of cases for `make test` leaves out no value, and with more than two parameters no pair."""

from __future__ import annotations

import itertools

import tiers


def test_of_two_parameters_every_value_occurs() -> None:
    rows = list(itertools.product("abcd", range(3)))
    chosen = [rows[number] for number in tiers.covering(rows)]
    assert {a for a, _ in chosen} == set("abcd") and {b for _, b in chosen} == set(range(3)) and len(chosen) == 4


def test_of_more_parameters_every_pair_occurs() -> None:
    rows = list(itertools.product("abc", range(3), (True, False), "xy"))
    chosen = [rows[number] for number in tiers.covering(rows)]
    assert len(chosen) <= 12 < len(rows)
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in chosen} == {(row[one], row[other]) for row in rows}


def test_parameters_that_change_together_count_as_one_and_a_single_one_is_kept_whole() -> None:
    assert tiers.covering([(1, "a"), (2, "b"), (3, "c")]) == {0, 1, 2}
    assert tiers.covering([(value,) for value in range(9)]) == set(range(9))
