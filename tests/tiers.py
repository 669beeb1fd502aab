"""Tiers: which tests `make test` runs, which only `make test-all`, and which run one at a time.

- `full` is set on tests that take long or prove again what a quicker one proves; `make test` leaves them out.
- Of a test with several parameters, the cases outside of a covering selection are `full`: with two parameters every
  value occurs in the selection, with more every pair of values does. `@pytest.mark.product` keeps all cases,
  `@pytest.mark.cases(n)` n of the selection, spread evenly over it.
- `process` is set on tests that start processes, by the fixtures that they use. Under pytest-xdist they run in two
  groups, so that at most two of them run at the same time, and one of those that make network namespaces.
"""

from __future__ import annotations

import itertools
import types
from collections import defaultdict
from collections.abc import Sequence

import pytest

PROCESS_FIXTURES = {"launcher", "started", "machines", "forkserver"}
NUM_GROUPS = 2
LEAST_CASES = 4


def assign(items: Sequence[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Function]] = defaultdict(list)
    files: dict[str, int] = {}  # those with tests that start processes
    for item in items:
        if isinstance(item, pytest.Function):
            functions[item.nodeid.partition("[")[0]].append(item)
            if PROCESS_FIXTURES & set(item.fixturenames) or _makes_namespaces(item):
                item.add_marker(pytest.mark.process)
        if item.get_closest_marker("process") is not None:
            number = files.setdefault(item.nodeid.partition("::")[0], len(files))
            group = 0 if _makes_namespaces(item) else number % NUM_GROUPS
            item.add_marker(pytest.mark.xdist_group(f"process-{group}"))
    for cases in functions.values():
        few = cases[0].get_closest_marker("cases")
        chosen = set(range(len(cases)))
        if len(cases) >= LEAST_CASES and cases[0].get_closest_marker("product") is None:
            chosen = covering([list(case.callspec.params.values()) for case in cases if hasattr(case, "callspec")])
        if few is not None:
            chosen = spread(chosen, few.args[0])
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.full)


def spread(chosen: set[int], count: int) -> set[int]:
    """`count` of these numbers, from the first to the last."""
    ordered = sorted(chosen)
    if count >= len(ordered):
        return chosen
    return {ordered[number * (len(ordered) - 1) // max(1, count - 1)] for number in range(count)}


def _makes_namespaces(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    return "machines" in item.fixturenames or isinstance(getattr(item.module, "links", None), types.ModuleType)


def covering(rows: Sequence[Sequence[object]]) -> set[int]:
    """Of the rows, a few that contain every pair of values of different columns; of two columns, every value."""
    columns = _independent(list(zip(*([repr(value) for value in row] for row in rows), strict=True)))
    if len(columns) < 2:
        return set(range(len(rows)))
    width = 1 if len(columns) == 2 else 2
    parts = [
        {tuple((column, columns[column][row]) for column in those) for those in _choose(len(columns), width)}
        for row in range(len(rows))
    ]
    missing: set[object] = set().union(*parts)
    chosen: set[int] = set()
    while missing:
        best = max(
            (row for row in range(len(rows)) if row not in chosen), key=lambda row: (len(parts[row] & missing), -row)
        )
        chosen.add(best)
        missing -= parts[best]
    return chosen


def _choose(count: int, width: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(count), width))


def _independent(columns: Sequence[Sequence[str]]) -> list[tuple[int, ...]]:
    """Each column's values as numbers; of columns that always change together, one."""
    found: dict[tuple[int, ...], None] = {}
    for column in columns:
        numbers: dict[str, int] = {}
        found[tuple(numbers.setdefault(value, len(numbers)) for value in column)] = None
    return [column for column in found if len(set(column)) > 1]
