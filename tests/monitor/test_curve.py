from __future__ import annotations

import math
import random

import pytest

from hora.monitor.curve import Curve


def total(curve: Curve) -> float:
    return sum(point.mean * point.count for point in curve.points if point.count)


def test_each_step_is_a_point_while_there_is_room() -> None:
    curve = Curve(4)
    for step in range(4):
        curve.add(step, step * 0.5, step * 8, float(step))
    assert curve.width == 1
    assert [(point.start, point.steps, point.mean, point.samples) for point in curve.points] == [
        (0, 1, 0.0, 0), (1, 1, 1.0, 8), (2, 1, 2.0, 16), (3, 1, 3.0, 24),
    ]  # fmt: skip


def test_one_too_many_halves_the_points_and_keeps_mean_low_high_and_last() -> None:
    curve = Curve(4)
    for step, value in enumerate([5.0, 1.0, 2.0, 4.0, 7.0]):
        curve.add(step, float(step), step, value)
    assert curve.width == 2
    first, second, third = curve.points
    assert (first.start, first.steps, first.mean, first.low, first.high, first.last) == (0, 2, 3.0, 1.0, 5.0, 1.0)
    assert (second.start, second.mean, second.at, second.samples, second.count) == (2, 3.0, 3.0, 3, 2)
    assert (third.start, third.steps, third.mean) == (4, 1, 7.0)


def test_a_million_values_stay_bounded_and_none_is_lost() -> None:
    curve = Curve()
    add = curve.add
    for step in range(1_000_000):
        add(step, step * 0.001, step, float(step & 7))
    assert 512 <= len(curve.points) <= 1024
    assert curve.width == 1024
    assert sum(point.count for point in curve.points) == 1_000_000
    assert total(curve) == pytest.approx(3.5 * 1_000_000)
    assert {(point.low, point.high) for point in curve.points} == {(0.0, 7.0)}
    assert all(point.start % 1024 == 0 for point in curve.points)


def test_a_mean_of_several_weighs_as_many() -> None:
    curve = Curve()
    curve.add(0, 0.0, 0, 1.0, 3)
    curve.add(0, 0.0, 0, 5.0)
    assert (curve.points[0].mean, curve.points[0].count) == (2.0, 4)


def test_a_late_value_joins_the_point_of_its_step() -> None:
    curve = Curve()
    for step in (0, 1, 3):
        curve.add(step, float(step), step, 1.0)
    curve.add(1, 3.5, 3, 3.0)
    curve.add(2, 3.5, 3, 9.0)
    assert [(point.start, point.mean) for point in curve.points] == [(0, 1.0), (1, 2.0), (2, 9.0), (3, 1.0)]


def test_late_values_in_any_order_keep_the_limit_and_the_order() -> None:
    curve, steps = Curve(16), list(range(1000))
    random.Random(5).shuffle(steps)
    for step in steps:
        curve.add(step, 0.0, 0, float(step))
        assert len(curve.points) <= 16
    starts = [point.start for point in curve.points]
    assert starts == sorted(set(starts)) and all(start % curve.width == 0 for start in starts)
    assert total(curve) == pytest.approx(sum(range(1000)))


def test_a_rewound_curve_goes_on_from_there() -> None:
    curve = Curve()
    for step in range(10):
        curve.add(step, float(step), step, 1.0)
    curve.take_changes()
    curve.rewind(5)
    curve.add(6, 20.0, 6, 2.0)
    assert [point.start for point in curve.points] == [0, 1, 2, 3, 4, 5, 6]
    assert curve.points[-1].mean == 2.0
    whole, points = curve.take_changes()
    assert whole and len(points) == 7


def test_a_rewind_to_where_the_curve_ends_changes_nothing() -> None:
    curve = Curve()
    curve.add(3, 0.0, 0, 1.0)
    curve.take_changes()
    curve.rewind(3)
    assert curve.take_changes() == (False, [])


def test_what_is_not_finite_shows_as_last_and_nowhere_else() -> None:
    curve = Curve(2)
    curve.add(0, 0.0, 0, math.nan)
    assert math.isnan(curve.points[0].mean) and curve.points[0].count == 0
    curve.add(0, 1.0, 0, 2.0)
    curve.add(0, 2.0, 0, math.inf)
    point = curve.points[0]
    assert (point.mean, point.low, point.high, point.count, point.last) == (2.0, 2.0, 2.0, 1, math.inf)
    curve.add(1, 3.0, 0, math.nan)
    curve.add(2, 4.0, 0, 4.0)
    assert (curve.points[0].mean, curve.points[0].count) == (2.0, 1)


def test_values_near_the_end_of_floats_have_a_mean() -> None:
    curve = Curve(2)
    for step in range(6):
        curve.add(step, 0.0, 0, 1.7e308 if step % 2 else -1.7e308)
    assert all(math.isfinite(point.mean) for point in curve.points)


def test_changes_are_told_once_and_only_those() -> None:
    curve = Curve(8)
    curve.add(0, 0.0, 0, 1.0)
    assert curve.take_changes()[0] is True
    assert curve.take_changes() == (False, [])
    curve.add(1, 0.0, 0, 1.0)
    curve.add(2, 0.0, 0, 1.0)
    curve.add(0, 0.0, 0, 1.0)
    whole, points = curve.take_changes()
    assert not whole and [point.start for point in points] == [0, 1, 2]
    for step in range(3, 9):
        curve.add(step, 0.0, 0, 1.0)
    whole, points = curve.take_changes()
    assert whole and [point.start for point in points] == [0, 2, 4, 6, 8]


def test_a_far_step_costs_no_memory() -> None:
    curve = Curve(4)
    for step in (0, 1 << 52, 5, (1 << 52) + 1, 9, 11):
        curve.add(step, 0.0, 0, 1.0)
    assert len(curve.points) <= 4 and sum(point.count for point in curve.points) == 6


def test_time_and_samples_never_fall_though_workers_are_at_different_paces() -> None:
    curve = Curve(8)
    told = [(step, 0.1 * step, 8 * step, 1.0) for step in range(0, 40, 2)]
    told += [(step, 50.0 + step, 5000 + 8 * step, 3.0) for step in range(30)]  # another worker, much later
    told += [(step, 90.0 + step, 9000 + 8 * step, 5.0) for step in range(40, 50)]
    for each in told:
        curve.add(*each)
        ats, samples = [point.at for point in curve.points], [point.samples for point in curve.points]
        assert ats == sorted(ats) and samples == sorted(samples)
    assert curve.points[0].at < 2.0 and curve.points[-1].at > 90.0
    assert sum(point.count for point in curve.points) == len(told)
    assert total(curve) == pytest.approx(sum(value for *_, value in told))


def test_a_late_value_moves_neither_the_time_nor_the_last_of_a_later_step() -> None:
    curve = Curve(2)
    for step in range(4):
        curve.add(step, float(step), step, float(step))
    curve.add(0, 9.0, 9, 7.0)
    first = curve.points[0]
    assert (first.start, first.steps, first.at, first.samples, first.last, first.high) == (0, 2, 1.0, 1, 1.0, 7.0)
