"""Whether a generator was closed by `break` or by an exception: for each way out of a loop that a script may take."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from hora.data import unwinding

closed: list[bool] = []


def loader() -> Iterator[int]:
    try:
        yield from range(10)
    except GeneratorExit as closing:
        closed.append(unwinding.by_exception(closing))
        raise


def wrapped(inner: Iterable[int]) -> Iterator[int]:
    """As progress bars do."""
    for each in inner:  # noqa: UP028
        yield each


def guarded(inner: Iterable[int]) -> Iterator[int]:
    try:
        for each in inner:  # noqa: UP028
            yield each
    finally:
        pass


def fail(number: int) -> None:
    if number == 3:
        raise ValueError(number)


def breaks() -> None:
    for number in loader():
        if number == 3:
            break


def returns() -> int:
    for number in loader():
        if number == 3:
            return number
    return -1


def breaks_in_a_handler() -> None:
    for number in loader():
        try:
            fail(number)
        except ValueError:
            break


def breaks_after_an_exception_that_was_kept() -> None:
    kept: list[BaseException] = []
    for number in loader():
        try:
            fail(3)
        except ValueError as error:
            kept.append(error)
        if number == 3:
            break


def breaks_in_a_finally() -> None:
    for number in loader():
        try:
            fail(number)
        finally:
            if number == 3:
                break  # noqa: B012


def breaks_inside_wrappers() -> None:
    for _, number in enumerate(wrapped(guarded(loader()))):
        if number == 3:
            break


def breaks_inside_with() -> None:
    with contextlib.suppress(ValueError):
        for number in loader():
            if number == 3:
                break


def forgets_it() -> None:
    iterator = iter(loader())
    next(iterator)
    del iterator


def raises() -> None:
    for number in loader():
        if number == 3:
            raise ValueError


def raises_in_a_call() -> None:
    for number in loader():
        fail(number)


def raises_and_is_caught() -> None:
    try:
        for number in loader():
            fail(number)
    except ValueError:
        pass


def raises_inside_wrappers() -> None:
    for _, number in enumerate(wrapped(guarded(loader()))):
        fail(number)


def raises_in_a_zip() -> None:
    for number, _ in zip(loader(), range(100), strict=False):
        fail(number)


def raises_in_nested_loops() -> None:
    for _ in range(2):
        for number in loader():
            fail(number)


def raises_inside_with() -> None:
    with contextlib.suppress(ValueError):
        for number in loader():
            fail(number)


def exits() -> None:
    for number in loader():
        if number == 3:
            sys.exit(0)


def is_interrupted() -> None:
    for number in loader():
        if number == 3:
            raise KeyboardInterrupt


def closes_it_while_an_exception_passes() -> None:
    iterator = loader()
    try:
        for number in iterator:
            fail(number)
    finally:
        iterator.close()  # type: ignore[attr-defined]


BREAKS = (
    breaks, returns, breaks_in_a_handler, breaks_after_an_exception_that_was_kept, breaks_in_a_finally,
    breaks_inside_wrappers, breaks_inside_with, forgets_it,
)  # fmt: skip
RAISES = (
    raises, raises_in_a_call, raises_and_is_caught, raises_inside_wrappers, raises_in_a_zip, raises_in_nested_loops,
    raises_inside_with, exits, is_interrupted, closes_it_while_an_exception_passes,
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "wanted"), [*((each, False) for each in BREAKS), *((each, True) for each in RAISES)],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_the_way_out_of_a_loop_is_told(script: Callable[[], Any], wanted: bool) -> None:
    closed.clear()
    with contextlib.suppress(BaseException):
        script()
    assert closed == [wanted]
