"""IntervalSet: a set of whole numbers as sorted ranges."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Range = tuple[int, int]  # from, to


class IntervalSet:
    """Ranges are disjoint and do not touch, so memory grows with the gaps."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(ranges):
            if start >= end:
                continue
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, number: int) -> bool:
        return self.end(number) > number

    def end(self, number: int) -> int:
        """The end of the range that holds `number`; `number` itself if none does."""
        index = bisect.bisect_right(self._starts, number) - 1
        return max(number, self._ends[index]) if index >= 0 else number

    def count(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, number: int) -> None:
        if number in self:
            return
        index = bisect.bisect_right(self._starts, number)
        joins_left = index > 0 and self._ends[index - 1] == number
        joins_right = index < len(self._starts) and self._starts[index] == number + 1
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_left:
            self._ends[index - 1] = number + 1
        elif joins_right:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._ends.insert(index, number + 1)
