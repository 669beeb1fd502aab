"""Curve: any number of values over the steps of a run, in a bounded number of points.

Each point covers `width` steps and holds their mean, lowest, highest and last value. When there would be more than
`limit` points, neighbours are merged and the width doubles:

    width 1     | 0 | 1 | 2 | 3 | 4 | 5 |
    width 2     | 0   1 | 2   3 | 4   5 |
"""

from __future__ import annotations

import bisect
import math

import msgspec

LIMIT = 1024  # points of a logged value and of the speed
MEMBER_LIMIT = 256  # points of a curve of one worker or server


class CurvePoint(msgspec.Struct, array_like=True, gc=False):
    """The values of `steps` steps from `start` on.

    `at` and `samples` are of the first value at the newest of these steps. `mean`, `low` and `high` are over the
    `count` finite values, NaN if there are none. `last` is the last value at the newest step, finite or not.
    """

    start: int
    steps: int
    at: float
    samples: int
    mean: float
    low: float
    high: float
    last: float
    count: int


class Curve:
    """At most `limit` points, ordered by step; `at` and `samples` never decrease from one to the next.

    A value may arrive late: it is added to the point of its step.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        assert limit >= 2
        self.limit = limit
        self.width = 1
        self.points: list[CurvePoint] = []
        self._whole = True
        self._changed: set[int] = set()

    def add(self, step: int, at: float, samples: int, value: float, count: int = 1) -> None:
        """A value at `step`, or the mean of `count` values of which the last was there."""
        start = step - step % self.width
        points = self.points
        if not points or start > points[-1].start:
            index = len(points)
        elif start == points[-1].start:
            index = len(points) - 1
        else:
            index = bisect.bisect_left(points, start, key=lambda point: point.start)
        if index == len(points) or points[index].start != start:
            if len(points) >= self.limit:
                self._widen()
                self.add(step, at, samples, value, count)
                return
            points.insert(index, CurvePoint(start, 0, at, samples, math.nan, math.nan, math.nan, value, 0))
        point = points[index]
        self._changed.add(start)
        if step - start >= point.steps:
            point.steps = step - start + 1
            self._set_position(index, at, samples)
        if step - start + 1 == point.steps:
            point.last = value
        if not -math.inf < value < math.inf:
            return
        if point.count:
            point.count += count
            share = count / point.count
            point.mean = point.mean * (1.0 - share) + value * share  # a difference of the two could overflow
            point.low, point.high = min(point.low, value), max(point.high, value)
        else:
            point.count = count
            point.mean = point.low = point.high = value

    def rewind(self, step: int) -> None:
        """The run is at `step` again: points that reach beyond it are removed."""
        kept = [point for point in self.points if point.start + point.steps - 1 <= step]
        if len(kept) < len(self.points):
            self.points, self._whole = kept, True

    def take_changes(self) -> tuple[bool, list[CurvePoint]]:
        """What changed since the last call: (True, all points) if the whole curve is to be replaced, else (False, the
        changed points)."""
        whole, changed = self._whole, self._changed
        self._whole, self._changed = False, set()
        if whole:
            return True, list(self.points)
        if len(changed) == 1 and self.points and self.points[-1].start in changed:
            return False, [self.points[-1]]
        return False, [point for point in self.points if point.start in changed]

    def _set_position(self, index: int, at: float, samples: int) -> None:
        """Between its neighbours: a step may be reported later than the next one."""
        if index:
            before = self.points[index - 1]
            at, samples = max(at, before.at), max(samples, before.samples)
        if index + 1 < len(self.points):
            after = self.points[index + 1]
            at, samples = min(at, after.at), min(samples, after.samples)
        self.points[index].at, self.points[index].samples = at, samples

    def _widen(self) -> None:
        while len(self.points) >= self.limit:
            self.width *= 2
            merged: list[CurvePoint] = []
            for point in self.points:
                start = point.start - point.start % self.width
                if merged and merged[-1].start == start:
                    merged[-1] = _merged(merged[-1], point)
                else:
                    point.steps += point.start - start
                    point.start = start
                    merged.append(point)
            self.points = merged
        self._whole = True


def _merged(one: CurvePoint, other: CurvePoint) -> CurvePoint:
    """Two neighbours as one point."""
    count = one.count + other.count
    if not one.count or not other.count:
        finite = one if one.count else other
        mean, low, high = finite.mean, finite.low, finite.high
    else:
        mean = one.mean * (one.count / count) + other.mean * (other.count / count)
        low, high = min(one.low, other.low), max(one.high, other.high)
    steps = other.start + other.steps - one.start
    return CurvePoint(one.start, steps, other.at, other.samples, mean, low, high, other.last, count)
